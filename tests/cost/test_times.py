"""The times of a layer by each transport, from its plan and two speeds."""

import pytest

import hf_ring_attention as ra
from hf_ring_attention.cli.explain import compared
from hf_ring_attention.cli.output import short_number
from hf_ring_attention.cost.explain import BACKWARD, time_of_layer
from hf_ring_attention.cost.timeline import ring_timeline
from hf_ring_attention.plan.problem import Problem

CALL = {"seq_len": 4096, "world_size": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
FLOPS = 1e12


def times(pattern, bandwidth, **changes):
    call = ra.explain(pattern, **{**CALL, **changes})
    return call, {x: time_of_layer(call, x, flops=FLOPS, bandwidth=bandwidth) for x in call.balance}


@pytest.mark.parametrize("pattern", ["exact", "window:512+4", "pyramid:64,3"])
def test_fast_links_leave_the_time_of_computing(pattern):
    call, by_transport = times(pattern, 1e18)
    of_all = sum(share.forward_flops for share in call.ranks) * (1 + BACKWARD) / FLOPS
    for name, time in by_transport.items():
        assert time.total == pytest.approx(of_all / 4 * call.balance[name], rel=1e-6)


def test_the_ring_takes_as_long_as_its_timeline():
    """Forward, in a zigzag, if all ranks compute alike: over slow links the hops decide, over fast ones the devices."""
    for bandwidth in (1e18, 1e7):
        call, by_transport = times("exact", bandwidth)
        problem = Problem(call.pattern, call.layout, (((0, 4096),),), num_heads=8, num_kv_heads=4)
        forward = ring_timeline(problem, pair_flops=256, row_bytes=256, flops=FLOPS, bandwidth=bandwidth).seconds
        moved = max(call.busiest("ring").forward) / bandwidth
        assert forward == pytest.approx(max(moved, by_transport["ring"].computing / (1 + BACKWARD)), rel=0.35)


def test_what_is_hidden_is_part_of_computing_and_of_moving():
    for bandwidth in (1e8, 1e10, 1e12):
        for pattern in ("exact", "window:512+4"):
            for time in times(pattern, bandwidth)[1].values():
                assert 0 <= time.hidden <= min(time.moving, time.computing)
    collective = times("window:64", 1e12)[1]["collective"]
    assert 0 < collective.hidden < collective.moving  # gradients travel after computing
    # Two heads of keys for each of two ranks arrive in two pieces, and one head for each of four at once.
    assert times("exact", 1e12, world_size=2, seq_len=1 << 16)[1]["heads"].hidden > 0
    assert times("exact", 1e12)[1]["heads"].hidden == 0


@pytest.mark.parametrize("bandwidth", [1e7, 1e14])
def test_a_sentence_compares_all_transports_and_names_a_faster_one(bandwidth):
    call, by_transport = times("exact", bandwidth)
    sentence = compared(call, by_transport, "these links")
    assert sentence.startswith(f"a layer over these links: {call.decision.choice} ")
    assert all(f"{name} {short_number(1e3 * time.total)} ms" in sentence for name, time in by_transport.items())
    fastest = min(by_transport, key=lambda name: by_transport[name].total)
    ratio = by_transport[call.decision.choice].total / by_transport[fastest].total
    told = f"--transport {fastest} is {ratio:.1f} times as fast"
    assert sentence.endswith(told) if bandwidth == 1e7 else "--transport" not in sentence
