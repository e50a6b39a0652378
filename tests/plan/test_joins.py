"""Tiles share calls if that costs less than another call, and only tiles that may."""

import itertools
from collections import Counter

import pytest

import hf_ring_attention as ra
from hf_ring_attention.plan.joins import PADDED, joined
from hf_ring_attention.plan.plans import freshness, most_tiles_of_a_row, plan_rank
from tests.plan.strategies import query_rows
from tests.support.cases import problem_of, random_case


def rows_of(batches, problem):
    """(batch row, query head, row) of every query of some batches."""
    return [query[:3] for batch in batches for query in query_rows(batch, problem.group)]


def test_calls_hold_each_batch_once_and_no_query_row_twice(rng):
    for _ in range(60):
        case = random_case(rng, max_len=80)
        problem = case.problem(ra.SequenceLayout("contiguous", case.seq_len, 1))
        batches = plan_rank(problem, 0).own
        for joining in (PADDED, PADDED._replace(most_rows=50)):
            calls = list(joined(batches, problem.group, joining, lambda batch: False))
            assert sorted(map(hash, itertools.chain(*calls))) == sorted(map(hash, batches))
            for call in calls:
                assert len({batch.shape for batch in call}) == 1
                longest = call[0]
                assert all(b.num_keys <= longest.num_keys and b.num_queries <= longest.num_queries for b in call)
                assert len(call) == 1 or sum(batch.rows(problem.group) for batch in call) <= joining.most_rows
                rows = rows_of(call, problem)
                assert len(set(rows)) == len(rows)


def test_padding_and_copies_are_weighed_against_a_call(rng):
    """Tiles that differ by few rows share a call, those that differ by many do not, and views stay views."""
    lengths = (4000, 4001, 6000)
    cuts = (0, *itertools.accumulate(lengths))
    batches = plan_rank(problem_of("exact", cuts[-1], [itertools.pairwise(cuts)]), 0).own
    assert sorted(batch.num_queries for batch in batches) == list(lengths)

    def calls(joining, is_view):
        return sorted(sorted(b.num_queries for b in call) for call in joined(batches, 1, joining, lambda _: is_view))

    assert calls(PADDED, False) == [[4000, 4001], [6000]]
    # Together they are more rows than are copied at once.
    assert calls(PADDED._replace(most_rows=10**4), False) == [[4000], [4001], [6000]]
    assert calls(PADDED, True) == [[4000], [4001], [6000]]
    assert calls(None, False) == [[4000], [4001], [6000]]


def test_fresh_tiles_share_no_query_row(rng):
    """Fresh tiles of the same branch, without the rectangles that may lie beside triangles."""
    found = 0
    for _ in range(100):
        case = random_case(rng, max_len=60)
        world_size = rng.choice([1, 1, 2])
        problem = case.problem(ra.SequenceLayout(rng.choice(["contiguous", "zigzag"]), case.seq_len, world_size))
        batches = plan_rank(problem, rng.randrange(world_size)).own
        is_fresh = freshness(batches)
        fresh = [batch for batch in batches if is_fresh(batch)]
        assert bool(fresh) == bool(batches)
        rows = rows_of(fresh, problem)
        assert len(set(rows)) == len(rows)
        found += len(fresh) > 1
        per_row = Counter(rows_of(batches, problem))
        assert max(per_row.values(), default=0) <= most_tiles_of_a_row(batches)
    assert found


MOST_TILES = [("window:5", True, 1), ("window:5+2", True, 2), ("window:5", False, 2), ("pyramid:4,2", True, 3)]


@pytest.mark.parametrize(("pattern", "causal", "most"), [*MOST_TILES, ("exact", True, 1)])
def test_how_many_tiles_share_a_query_row(pattern, causal, most):
    assert most_tiles_of_a_row(plan_rank(problem_of(pattern, 40, causal=causal), 0).own) == most
