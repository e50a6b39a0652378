"""Expected times: the pairs that kernels compute, and the bytes that are exchanged."""

import pytest

from hf_ring_attention.plan.heads import heads_traffic
from hf_ring_attention.plan.layouts import SequenceLayout
from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.plan.plans import plan_rank
from hf_ring_attention.plan.problem import Problem
from hf_ring_attention.plan.times import Speeds, computed_pairs, expected_seconds
from hf_ring_attention.plan.traffic import RowBytes, collective_traffic, ring_traffic
from tests.support.cases import random_pattern

EXACT, SIZES = Pattern.exact(), RowBytes(4, 8)


def problem_of(tokens, documents=None, pattern=EXACT, world_size=1, kind="contiguous", heads=4, kv_heads=2):
    layout = SequenceLayout(kind, tokens, world_size)
    return Problem(pattern, layout, (documents or ((0, tokens),),), num_heads=heads, num_kv_heads=kv_heads)


def computed(problem, keys_at_once, rank=0):
    plan = plan_rank(problem, rank)
    return computed_pairs(plan.own + plan.remote, problem.group, keys_at_once)


def test_whole_blocks_are_computed():
    """Documents within a block: all keys for each query. Long ones: half a block beside what each query sees, on average."""
    documents = tuple((start, start + 100) for start in range(0, 1000, 100))
    assert computed(problem_of(1000, documents), 512) == 4 * 10 * (100 * 100 + 50)
    blocks = sum(-(-(query + 1) // 512) * 512 for query in range(8192))
    assert computed(problem_of(8192), 512) == pytest.approx(4 * blocks, rel=1e-3)


def test_without_blocks_they_are_the_pairs(rng):
    for _ in range(20):
        problem = problem_of(200, pattern=random_pattern(rng), world_size=2)
        plan = plan_rank(problem, 1)
        batches = [batch for batch in plan.own + plan.remote if batch.shape != "band"]
        assert computed_pairs(batches, problem.group, 0) == sum(batch.pairs(problem.group) for batch in batches)


@pytest.mark.parametrize("transport", ["ring", "collective", "heads"])
def test_the_busiest_rank_counts(transport):
    problem = problem_of(4096, ((0, 3000), (3000, 4096)), world_size=2)
    moved = {"ring": ring_traffic, "collective": collective_traffic, "heads": heads_traffic}[transport]
    traffic = [moved(problem, rank, SIZES) for rank in range(2)]
    received = max(rank.forward.received + rank.backward.received for rank in traffic)
    assert expected_seconds(problem, transport, SIZES, Speeds(0.0, 1.0, 512)) == received
    whole = computed(problem_of(4096, ((0, 3000), (3000, 4096))), 512)
    busiest = expected_seconds(problem, transport, SIZES, Speeds(1.0, 0.0, 512))
    if transport == "heads":
        assert busiest == whole / 2
    else:
        assert busiest == max(computed(problem, 512, rank) for rank in range(2)) > 0.55 * whole


def test_a_rank_alone_is_faster_where_ranks_share_something():
    """The busiest of two computes its rest at the speed of one alone; of three, the last two at a speed between."""
    speeds = Speeds(1.0, 0.0, 0, 0.5)
    for world_size, shares in ((2, (1, 0.5)), (3, (1, 0.75, 0.5))):
        problem = problem_of(6000, ((0, 5000), (5000, 6000)), world_size=world_size)
        ends = sorted(computed(problem, 0, rank) for rank in range(world_size))
        parts = [end - before for before, end in zip([0, *ends], ends)]
        assert expected_seconds(problem, "ring", SIZES, speeds) == pytest.approx(
            sum(part * share for part, share in zip(parts, shares))
        )
        assert expected_seconds(problem, "ring", SIZES, speeds._replace(alone=1.0)) == pytest.approx(ends[-1])
