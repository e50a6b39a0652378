"""What long rows need of other ranks, in closed form: rows, bytes and laps of exact attention, LongNet and windows."""

import itertools

import pytest

from hf_ring_attention.plan.routes import needed, ring_laps
from hf_ring_attention.plan.traffic import RowBytes, collective_traffic, ring_traffic
from tests.support.cases import problem_of

TOKENS, RANKS, KV_HEADS = 131072, 8, 8
LOCAL = TOKENS // RANKS
#: Head size 128: a key and a value in bf16, their gradients in fp32.
SIZES = RowBytes(2 * 128 * 2, 2 * 128 * 4)
MIB = 2**20


def long_problem(pattern, kind, causal=True):
    return problem_of(pattern, (kind, TOKENS, RANKS), heads=(32, KV_HEADS), causal=causal)


def received(problem, traffic_of):
    """Bytes that come to each rank in forward."""
    return [traffic_of(problem, rank, SIZES).forward.received for rank in range(RANKS)]


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [True, False])
def test_exact_attention(kind, causal):
    problem = long_problem("exact", kind, causal)
    ring, collective = (received(problem, traffic_of) for traffic_of in (ring_traffic, collective_traffic))
    shard = LOCAL * KV_HEADS * SIZES.row_bytes
    assert (RANKS - 1) * shard == 448 * MIB
    assert max(ring + collective) <= 448 * MIB
    if not causal:
        assert ring == collective == [448 * MIB] * RANKS
    elif kind == "contiguous":
        assert ring == collective == [rank * shard for rank in range(RANKS)]
    else:
        # Of ranks before, the early piece; of ranks after, both.
        assert collective == [rank * shard // 2 + (RANKS - 1 - rank) * shard for rank in range(RANKS)]
    assert len(ring_laps(problem)) > 1, "payloads as large as these go by groups of heads"


def test_longnet():
    problem = long_problem("longnet:2048/1,16384/8,131072/64", "contiguous")
    # Only the last branch looks beyond a rank: 1 token in 64 of every rank before.
    shard = LOCAL // 64 * KV_HEADS * SIZES.row_bytes
    assert (RANKS - 1) * shard == 7 * MIB
    for traffic_of in (ring_traffic, collective_traffic):
        assert received(problem, traffic_of) == [rank * shard for rank in range(RANKS)]


@pytest.mark.parametrize("causal", [True, False])
def test_window(causal):
    problem = long_problem("window:4096", "contiguous", causal)
    rows = KV_HEADS * 4095
    for rank, source in itertools.product(range(RANKS), repeat=2):
        near = source == rank - 1 or (source == rank + 1 and not causal)
        assert len(needed(problem, rank, source)) == (rows if near else 0)
    before = [0] + [rows] * (RANKS - 1)
    after = [0] * RANKS if causal else before[::-1]
    expected_bytes = [(a + b) * SIZES.row_bytes for a, b in zip(before, after)]
    for traffic_of in (ring_traffic, collective_traffic):
        assert received(problem, traffic_of) == expected_bytes
    laps = ring_laps(problem)
    assert [(lap.direction, lap.steps, lap.with_own) for lap in laps] == (
        [(1, 1, True)] if causal else [(1, 1, True), (-1, 1, False)]
    )
    # The nearest rows of the neighbour before are its last, of the one after its first.
    for rank in range(1, RANKS):
        assert laps[0].hop(rank, 1).rows.sets == (((1 << 4095) - 1) << LOCAL - 4095,) * KV_HEADS
    if not causal:
        assert all(laps[1].hop(rank, 1).rows.sets == ((1 << 4095) - 1,) * KV_HEADS for rank in range(RANKS - 1))
