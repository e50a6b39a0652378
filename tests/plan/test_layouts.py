"""Layouts divide the padded row among the ranks: every index once, equal shares, whole pieces."""

import itertools

import pytest

from hf_ring_attention.plan.layouts import SequenceLayout
from tests.support.refusals import refused

KINDS = ["contiguous", "zigzag"]
SIZES = list(itertools.product([*range(1, 20), 63, 64, 65], range(1, 8)))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_partition_the_padded_row(kind):
    for seq_len, world_size in SIZES:
        layout = SequenceLayout(kind, seq_len, world_size)
        positions = [layout.positions(rank) for rank in range(world_size)]
        assert sorted(itertools.chain(*positions)) == list(range(layout.padded_len)), layout
        assert {len(part) for part in positions} == {layout.local_len}, layout
        assert [list(itertools.chain(*layout.pieces(rank))) for rank in range(world_size)] == positions
        unit = world_size if kind == "contiguous" else 2 * world_size
        assert layout.num_pieces == unit and layout.padded_len == layout.piece_len * unit
        assert seq_len <= layout.padded_len < seq_len + unit, "the least padding that divides"


def test_refused_kinds_sizes_and_ranks():
    for kind in ("auto", None):
        message = f"SequenceLayout: kind must be one of 'contiguous', 'zigzag', 'documents', got {kind!r}"
        refused(message, SequenceLayout, kind, 8, 2)
    for value in (0, -1, True, 8.0, "8", None):
        ending = f"must be an integer of at least 1, got {value!r}"
        refused(f"SequenceLayout: seq_len {ending}", SequenceLayout, "zigzag", value, 2)
        refused(f"SequenceLayout: world_size {ending}", SequenceLayout, "contiguous", 8, value)
    for kind, rank in itertools.product(KINDS, (-1, 3)):
        layout = SequenceLayout(kind, 10, 3)
        for ask in (layout.pieces, layout.positions):
            refused(f"SequenceLayout: rank must be in 0..2, got {rank}", ask, rank)


def test_pieces_of_documents():
    rows = (((range(0, 2), range(5, 6)), (range(2, 5),)), ((range(3, 6),), (range(0, 3),)))
    layout = SequenceLayout("documents", 5, 2, rows)
    assert (layout.padded_len, layout.local_len) == (6, 3)
    assert [layout.positions(rank, row) for row in (0, 1) for rank in (0, 1)] == [
        [0, 1, 5], [2, 3, 4], [3, 4, 5], [0, 1, 2],
    ]  # fmt: skip
    assert layout.pieces(0) == rows[0][0]
    assert layout == SequenceLayout("documents", 5, 2, rows) != SequenceLayout("documents", 5, 2, rows[:1])
    assert str(layout) == "SequenceLayout(kind='documents', seq_len=5, world_size=2)"


def test_refused_pieces():
    for row in (
        ((range(0, 3),), (range(3, 5),)),  # too few on the second rank
        ((range(0, 3),), (range(2, 5),)),  # one twice
        ((range(0, 2), range(3, 5)), (range(2, 3), range(5, 6))),  # other numbers
        ((range(0, 6),),),  # one rank
    ):
        message = "must cover its 6 tokens, 3 on each of 2 ranks, got"
        refused(message, SequenceLayout, "documents", 5, 2, (row,))
    refused("'documents' needs pieces of rows", SequenceLayout, "documents", 5, 2)
    refused("'zigzag' has no pieces of rows", SequenceLayout, "zigzag", 4, 2, (((range(0, 2),), (range(2, 4),)),))
