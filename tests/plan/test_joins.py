"""Tiles share calls if that costs less than another call, and only tiles that may."""

import itertools
from collections import Counter

import pytest

import hf_ring_attention as ra
from hf_ring_attention.plan.joins import PADDED, joined
from hf_ring_attention.plan.plans import freshness, most_tiles_of_a_row, plan_rank
from tests.plan.strategies import query_rows
from tests.support.cases import problem_of, random_case

TOKENS, RANKS, DOCUMENTS = 131072, 8, 126


def packed_documents(rng):
    cuts = sorted(rng.sample(range(1, TOKENS), DOCUMENTS - 1))
    return tuple(itertools.pairwise([0, *cuts, TOKENS]))


def rows_of(batches, problem):
    """(batch row, query head, row) of every query of some batches."""
    return [query[:3] for batch in batches for query in query_rows(batch, problem.group)]


def calls_of_ranks(problem, joining):
    """The number of calls on all ranks, if tiles of a rank's own keys are views if they can be."""
    count = 0
    for rank in range(problem.layout.world_size):
        plan = plan_rank(problem, rank)
        own = joined(plan.own, problem.group, joining, lambda batch: batch.as_one(1, range(8)) is not None)
        count += len(list(own)) + len(list(joined(plan.remote, problem.group, joining, lambda batch: False)))
    return count


def test_packed_documents_in_few_calls(rng):
    problem = problem_of("pyramid:512,4", ("contiguous", TOKENS, RANKS), [packed_documents(rng)], (32, 8))
    assert calls_of_ranks(problem, PADDED) < calls_of_ranks(problem, None)


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


@pytest.mark.parametrize(
    ("pattern", "causal", "most"),
    [
        ("window:5", True, 1),
        ("window:5+2", True, 2),
        ("window:5", False, 2),
        ("pyramid:4,2", True, 3),
        ("exact", True, 1),
    ],
)
def test_how_many_tiles_share_a_query_row(pattern, causal, most):
    assert most_tiles_of_a_row(plan_rank(problem_of(pattern, 40, causal=causal), 0).own) == most
