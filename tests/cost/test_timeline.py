"""The Gantt chart of a ring: its work is the work of the plan, and nobody computes with keys that have not arrived."""

import itertools

import pytest

from hf_ring_attention.cost.timeline import ring_timeline
from hf_ring_attention.plan.layouts import SequenceLayout
from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.plan.plans import plan_rank
from hf_ring_attention.plan.problem import Problem
from hf_ring_attention.plan.traffic import RowBytes, ring_traffic


def problem_of(text, layout, ranks, length=4096, heads=4, kv_heads=2):
    whole = SequenceLayout(layout, length, ranks)
    return Problem(Pattern.parse(text), whole, (((0, length),),), num_heads=heads, num_kv_heads=kv_heads)


CASES = [
    ("exact", "zigzag", 4),
    ("exact", "contiguous", 3),
    ("window:300+4", "contiguous", 4),
    ("window:300", "zigzag", 4),  # rows travel both ways
    ("pyramid:64,3", "contiguous", 5),
    ("longnet:256/1,1024/4,all/16", "zigzag", 3),
]


@pytest.mark.parametrize(("text", "layout", "ranks"), CASES)
def test_work_and_bytes_are_those_of_the_plan_and_keys_arrive_in_time(text, layout, ranks):
    problem = problem_of(text, layout, ranks)
    timeline = ring_timeline(problem, pair_flops=3, row_bytes=7, flops=2.0, bandwidth=5.0)
    for rank in range(ranks):
        spent = dict.fromkeys(("compute", "send", "wait"), 0.0)
        for span in timeline.spans:
            spent[span.kind] += (span.stop - span.start) * (span.rank == rank)
        assert spent["compute"] == pytest.approx(plan_rank(problem, rank).pairs * 3 / 2)
        assert spent["send"] == pytest.approx(ring_traffic(problem, rank, RowBytes(7, 0)).forward.sent / 5)
    arrivals = {(span.step, span.source): span.stop for span in timeline.spans if span.kind == "send"}
    remote = [span for span in timeline.spans if span.kind == "compute" and span.source != span.rank]
    assert remote and all(arrivals[span.step, span.source] <= span.start for span in remote)
    for rank in range(ranks):
        mine = sorted((s.start, s.stop) for s in timeline.spans if s.rank == rank and s.kind != "send")
        assert all(after[0] >= before[1] - 1e-9 for before, after in itertools.pairwise(mine))


def test_a_slow_link_is_waited_for_and_a_fast_one_is_not():
    problem = problem_of("exact", "zigzag", 4)
    fast = ring_timeline(problem, pair_flops=256, row_bytes=256, flops=1e9, bandwidth=1e12)
    slow = ring_timeline(problem, pair_flops=256, row_bytes=256, flops=1e12, bandwidth=1e6)
    assert fast.share("wait") == 0 and fast.share("compute") > 0.99
    assert slow.share("wait") > 0.9 and slow.share("compute") < 0.1
    assert fast.seconds == pytest.approx(plan_rank(problem, 0).pairs * 256 / 1e9)
