"""The tiles of a document cover each (head, query, key) as often as the definition does: by exhaustion."""

import itertools
from collections import Counter

import pytest

from hf_ring_attention.compute.reference import multiplicity_matrix
from hf_ring_attention.plan import tiles
from hf_ring_attention.plan.branches import Segment, Sink, Window
from hf_ring_attention.plan.intervals import Run
from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.plan.tiles import branches_of, tile_document


def seen_keys(tile, number):
    """The keys of a tile that its query number `number` sees."""
    if tile.shape == "full":
        return tile.keys
    if tile.shape == "causal":
        return tile.keys[: number + 1]
    return tile.keys[number : number + 1 + len(tile.keys) - len(tile.queries)]


def covered(tiles, num_heads, num_kv_heads):
    """Counter of (query head, query row, key row), and the check that a part never repeats a query row of a head."""
    pairs = Counter()
    rows_of_part = Counter()
    group = num_heads // num_kv_heads
    for tile in tiles:
        heads = [kv * group + i for kv in tile.heads for i in range(group)]
        assert len(tile.queries) > 0
        assert len(tile.keys) > 0
        assert tile.fold_size > 0
        if tile.shape == "causal":
            assert len(tile.queries) == len(tile.keys)
            assert tile.queries.step * tile.keys.step > 0
        for head, fold in itertools.product(heads, range(tile.fold_size)):
            for i, query in enumerate(tile.queries):
                pairs.update((head, query + fold, key) for key in seen_keys(tile, i))
                kind = (tile.branch, tile.part, tile.shape, tile.queries.step > 0, head, query + fold)
                rows_of_part[kind] += 1
    assert max(rows_of_part.values(), default=1) == 1, "a part shares a query row between tiles of one shape"
    return pairs


BRANCHES = [
    Segment(), Segment(4), Segment(6, 2), Segment(6, 3, "all"), Segment(None, 4), Segment(None, 2, "all"),
    Window(1), Window(5), Window(8, 2), Window(12, 4), Window(6, 2, "dilated"), Window(24, 8),
    Sink(3),
]  # fmt: skip


def patterns():
    for branch in BRANCHES:
        yield Pattern((Window(1), branch), overlap="count")
        yield Pattern((Window(4), branch), overlap="once")
        yield Pattern((Segment(5), branch), overlap="once")


@pytest.mark.drawn
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", list(patterns()), ids=str)
def test_whole_document(pattern, causal):
    """Rows that are sharded over ranks, beside other documents, are in test_plans.py."""
    for length, heads in itertools.product((1, 2, 5, 13, 24, 40), ((4, 2), (3, 3))):
        runs = [Run(0, 0, length)]
        found = tile_document(branches_of(pattern, heads[1], causal=causal), length, runs, runs)
        counts = multiplicity_matrix(pattern, length, *heads, causal).int()
        want = {pair: int(counts[pair]) for pair in map(tuple, counts.nonzero().tolist())}
        assert covered(found, *heads) == want, f"{pattern}, {length} tokens, heads {heads}, causal {causal}"


def test_the_example_of_the_module_is_what_is_computed():
    """Each letter of the picture is a tile, in their order."""
    lines = [line.split() for line in tiles.__doc__.splitlines() if line.strip().startswith("query ")]
    picture = {(row, column): letter for row, words in enumerate(lines) for column, letter in enumerate(words[2:8])}
    runs = [Run(0, 0, 6)]
    found = tile_document(branches_of(Pattern((Window(3),)), 1, causal=True), 6, runs, runs)
    pairs = {
        (query, key): letter
        for letter, tile in zip("ab", found, strict=True)
        for number, query in enumerate(tile.queries)
        for key in seen_keys(tile, number)
    }
    assert pairs == {pair: letter for pair, letter in picture.items() if letter != "."}
