"""The heads transport: the definition's outputs and gradients, the plan's bytes, and refusals with their arithmetic."""

import random
import re
from dataclasses import replace

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.plan import choices
from hf_ring_attention.plan.traffic import RowBytes
from hf_ring_attention.transport.heads import HeadsTransport
from tests.support.cases import check_cases, check_simulated, fitting_heads, random_case
from tests.support.ranks import run_simulated
from tests.support.refusals import refused

LAYOUTS = ("contiguous", "zigzag", "documents")
#: Every kind of pattern; the number of a head, among all heads, decides which keys its dilated branches keep.
PATTERNS = (
    "exact", "window:7", "window:7+3", "pyramid:3,3,2,2", "longnet:6/1,12/2,all/4@once",
    "branches:window=5,segment=16/4,sink=2@count",
)  # fmt: skip
#: Ranks, and how many of them exchange heads.
RANKS = [(2, 2), (3, 3), (4, 4), (8, 8), (4, 2), (8, 4), (8, 2)]


@pytest.mark.drawn
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("world_size", "heads"), RANKS)
def test_every_pattern_packed_padded_and_uneven(world_size, heads, layout, rng):
    """Half of the patterns, each with a kind of rows in turn, and with more or with fewer key/value heads than ranks.

    All cases have uneven lengths, grouped heads, softcap, sinks, and values narrower than keys.
    """
    turn = RANKS.index((world_size, heads)) + LAYOUTS.index(layout)
    more_and_fewer = (2 * heads, 1, heads, heads // 2 if heads % 2 == 0 else 1)
    cases = []
    for number, pattern in [*enumerate(PATTERNS, turn)][1 - turn % 2 :: 2]:
        kv_heads, n = more_and_fewer[number % 4], 2 * rng.randint(13, 18) + 1
        first, second = rng.randint(3, 9), rng.randint(12, 16)
        packed = [[(0, first), (first, second), (second, n)], [(0, second), (second, n)]]
        rows = (None, packed, [[(first, n)], [(0, second)]])[number % 3]
        sizes = {"batch": 2, "seq_len": n, "head_dim": 8, "value_dim": 5, "softcap": 1.5, "sinks": True}
        options = {"pattern": ra.Pattern.parse(pattern), "documents": rows, **sizes}
        cases.append(random_case(rng, heads=(2 * max(heads, kv_heads), kv_heads), **options))
    settings = {"rows_of_a_head_group": 1}
    check_simulated(cases, world_size, settings, layout=layout, transport="heads", heads=heads)


def checked_in_a_process(rank, heads, seed):
    rng = random.Random(seed)
    cases = [random_case(rng, heads=fitting_heads(rng, heads)) for _ in range(3)]
    for layout in LAYOUTS:
        ring = ra.Ring(layout=layout, transport="heads", heads=heads)
        ring.settings = replace(ring.settings, rows_of_a_head_group=1)
        check_cases(ring, cases)


@pytest.mark.parametrize(("world_size", "heads"), [(3, 3), (4, 4), (6, 3)])
def test_processes(world_size, heads, ranks, rng):
    ranks.run(checked_in_a_process, world_size, heads, rng.random())


def test_reference_case():
    """131072 tokens over 8 ranks, 32/8 heads x 128 in bfloat16: MiB of a rank and layer; a ring moves 448 and 1312."""
    call = {"seq_len": 131072, "world_size": 8, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    said = ra.explain("exact", **call, transport="heads")
    assert [share.heads.forward.received / 2**20 for share in said.ranks] == [280.0] * 8
    assert [share.heads.backward.sent / 2**20 for share in said.ranks] == [280.0] * 8
    assert said.imbalance == 1.0
    assert said.decision.choice == "heads"
    # In groups of 4 each rank has 8 query and 2 key/value heads of 65536 tokens, and needs these keys of the other group.
    groups = ra.explain("exact", **call, transport="heads", heads=4, layout="zigzag")
    assert groups.ranks[0].heads.forward.received / 2**20 == 16384 * 3 * (8 + 2) * 512 / 2**20 + 65536 * 2 * 512 / 2**20


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world_size", "groups_of", "said"),
    [
        (6, 6, 4, None, "equal query heads on 4 ranks, got 6 / 4 = 1.50"),
        (8, 2, 3, None, "equal query heads on 3 ranks, got 8 / 3 = 2.67"),
        (12, 6, 4, None, "6 key/value heads and 4 ranks divide neither way"),
        (6, 3, 8, 4, "equal query heads on 4 ranks, got 6 / 4 = 1.50"),
        (12, 3, 4, 2, "3 key/value heads and 2 ranks divide neither way"),
    ],
)
def test_heads_that_do_not_divide_are_refused_on_every_rank(heads, kv_heads, world_size, groups_of, said):
    def call(ring):
        q, k = torch.randn(1, heads, 4, 8), torch.randn(1, kv_heads, 4, 8)
        refused(said, ra.ring_attention, q, k, k, pattern="exact", ring=ring)
        return ring.traffic().hops

    assert run_simulated(call, world_size, transport="heads", heads=groups_of) == [0] * world_size
    call = {"seq_len": 64, "world_size": world_size, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 8}
    refused(said, ra.explain, "exact", **call, transport="heads", heads=groups_of)
    if groups_of is None:  # Other transports show no groups.
        said_of_others = ra.explain("exact", **call)
        assert {share.heads for share in said_of_others.ranks} == {None}
        assert "heads" not in said_of_others.balance


def test_errors_of_groups_name_ranks_by_their_number_in_the_ring(monkeypatch):
    """Of two groups of two, ranks 1 and 3 have the same heads; rank 3 ends before keys go between them."""
    of_piece = HeadsTransport.of_piece

    def ending(transport, piece):
        if transport.link.communicator.rank == 3:
            raise KeyError("of this rank")
        return of_piece(transport, piece)

    monkeypatch.setattr(HeadsTransport, "of_piece", ending)

    def attend(ring):
        x = torch.randn(1, 2, 4, 8)
        with pytest.raises((KeyError, RuntimeError)) as error:
            ra.ring_attention(x, x, x, pattern="exact", causal=False, ring=ring)
        return str(error.value)

    said = run_simulated(attend, 4, transport="heads", heads=2)
    assert re.match(r"ring attention, forward pass, .*, on rank 1: receiving from rank 3 did not end", said[1])
    assert re.match(r"attention by heads, outputs, on rank 2: receiving from rank 3 did not end", said[2])


def test_groups_that_do_not_divide_are_refused():
    for heads in (3, 0, "2"):
        refused(f"a divisor of the ring's 4 ranks, got {heads!r}", ra.simulate, 4, transport="heads", heads=heads)
    refused("heads=2 needs transport='heads', got 'ring'", ra.simulate, 4, transport="ring", heads=2)


@pytest.mark.parametrize(("world_size", "heads"), [(4, 2), (4, 4)])
def test_auto_exchanges_heads_where_the_choice_says_so(world_size, heads, rng, monkeypatch):
    """The results are the definition's, whichever ranks exchange."""
    monkeypatch.setattr(choices, "HEADS_AS_KEYS", 0)
    monkeypatch.setattr(choices, "WORTH_AN_EXCHANGE", 0.9)
    choices.choose_transport.cache_clear()
    # Only groups of this size can divide the heads.
    cases = [random_case(rng, heads=(heads, heads), causal=True) for _ in range(5)]
    check_simulated(cases, world_size, layout="contiguous")
    problems = [case.problem(ra.SequenceLayout("contiguous", case.seq_len, world_size)) for case in cases]
    chosen = [choices.choose_transport(problem, RowBytes(1, 1)) for problem in problems]
    choices.choose_transport.cache_clear()
    assert all(decision.heads is None or heads % decision.heads == 0 for decision in chosen)
    assert any(decision.choice == "heads" for decision in chosen)
