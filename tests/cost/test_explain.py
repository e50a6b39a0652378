"""`explain` foretells a call: bytes to the byte, work, balance, choices, a bound on buffers, and the timeline of a ring."""

import itertools
import threading

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.cost.timeline import ring_timeline
from hf_ring_attention.plan.plans import plan_rank
from hf_ring_attention.plan.problem import Problem
from hf_ring_attention.plan.traffic import RowBytes, ring_traffic
from hf_ring_attention.transport import row_sets

CASES = {
    "exact": ra.Pattern.exact(),
    "window": ra.Pattern((ra.Sink(2), ra.Window(50))),
    "longnet": ra.Pattern.longnet([32, 128, None], [1, 4, 8]),
    "pyramid": ra.Pattern.pyramid(16, 3),
}
TOKENS, HEADS, KV_HEADS, WIDTH = 61, 4, 2, 8  # a rank


def attention(ring, pattern, layout, dtype):
    heads = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(1, h, layout.local_len, WIDTH).to(dtype).requires_grad_() for h in heads)
    return ra.ring_attention(q, k, v, pattern=pattern, ring=ring, layout=layout)


@pytest.mark.drawn
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["auto", "contiguous", "zigzag"])
@pytest.mark.parametrize("transport", ["ring", "collective"])
def test_what_it_says_happens(name, kind, transport, monkeypatch):
    pattern, p, dtype = CASES[name], 4, torch.bfloat16
    call = {"seq_len": TOKENS * p - 1, "world_size": p, "num_heads": HEADS, "num_kv_heads": KV_HEADS}
    said = ra.explain(pattern, **call, head_dim=WIDTH, dtype=dtype, layout=kind, transport=transport)
    assert said.decision.choice == transport
    held = threading.local()
    take = row_sets.MessagePool.take

    def counted(pool, *shapes):
        free = len(pool.free)
        rows = take(pool, *shapes)
        if not free and rows[0].buffer is not None:
            held.bytes += rows[0].buffer.nbytes
        return rows

    monkeypatch.setattr(row_sets.MessagePool, "take", counted)

    def run(ring):
        layout = ring.layout_for(TOKENS * p - 1, pattern)
        assert layout == said.layout
        held.bytes = 0
        out = attention(ring, pattern, layout, dtype)
        forward = (ring.traffic().sent_bytes, ring.traffic().received_bytes)
        ring.reset_traffic()
        held.bytes = 0
        out.sum().backward()
        return forward, (ring.traffic().sent_bytes, ring.traffic().received_bytes), held.bytes

    for rank, (forward, backward, buffers) in enumerate(ra.run_simulated(run, p, layout=kind, transport=transport)):
        share = said.ranks[rank]
        traffic = getattr(share, transport)
        assert (forward, backward) == (traffic.forward, traffic.backward), f"rank {rank}"
        if transport == "ring":
            assert buffers <= traffic.buffers
        problem = Problem(pattern, said.layout, (((0, TOKENS * p - 1),),), num_heads=HEADS, num_kv_heads=KV_HEADS)
        assert share.forward_flops == 4 * WIDTH * plan_rank(problem, rank).pairs
    flops = [share.forward_flops for share in said.ranks]
    assert said.imbalance == pytest.approx(max(flops) * p / sum(flops))


@pytest.mark.parametrize(
    ("pattern", "received", "kind", "transport"),
    [
        ("exact", 448.0, "zigzag", "ring"),
        ("longnet:2048/1,16384/8,131072/64", 7.0, "contiguous", "collective"),
        ("window:4096", 4095 * 8 * 512 / 2**20, "contiguous", "collective"),
    ],
)
def test_reference_case(pattern, received, kind, transport):
    """8 key/value heads of 128 in bfloat16, 131072 tokens over 8 ranks: MiB that arrive at a rank in forward, at most."""
    said = ra.explain(pattern, seq_len=131072, world_size=8, num_heads=32, num_kv_heads=8, head_dim=128)
    assert (said.layout.kind, said.decision.choice) == (kind, transport)
    for name in ("ring", "collective"):
        most = max(getattr(share, name).forward.received for share in said.ranks) / 2**20
        assert 0.99 * received <= most <= received
    lines = str(said).splitlines()
    assert f"transport  {transport}: {said.decision.reason}" in lines
    assert f"layout     {kind}: {said.layout_decision.reason}" in lines
    assert any(line.startswith(f"| ring | {received:.1f} |") for line in lines)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": 512}, "pattern must be a Pattern, or its text such as .*, got 512"),
        ({"seq_len": 0}, "seq_len must be an integer of at least 1, got 0"),
        ({"world_size": 0}, "world_size must be an integer of at least 1, got 0"),
        ({"num_heads": 3, "num_kv_heads": 2}, "multiple of the number of key/value heads, got 3 and 2"),
        ({"pattern": "kv0-3=exact"}, "is for 4 key/value heads, and explain has 2"),
        ({"num_kv_heads": 0}, "num_kv_heads must be an integer of at least 1, got 0"),
        ({"layout": "striped"}, "layout must be"),
        ({"transport": "local"}, "serves 1 rank, got 4"),
        ({"documents": [[(0, 65)]]}, "within the sequence of 64 tokens"),
    ],
    ids=str,
)
def test_refused(changes, message):
    call = {"pattern": ra.Pattern.exact(), "seq_len": 64, "world_size": 4, "num_heads": 2, "head_dim": 8}
    call |= changes
    with pytest.raises(ValueError, match=message):
        ra.explain(call.pop("pattern"), **call)


def test_logged_once(caplog):
    """A choice is logged once a ring, whatever the number of calls."""
    with caplog.at_level("INFO", "hf_ring_attention"):

        def run(ring):
            layout = ring.layout_for(64, CASES["exact"])
            for _ in range(3):
                attention(ring, CASES["exact"], layout, torch.float32)

        ra.run_simulated(run, 2)
    lines = [record.getMessage() for record in caplog.records if "transport" in record.getMessage()]
    assert len(lines) == 1
    assert "ring of 2: transport collective, because the busiest of 2 ranks needs" in lines[0]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_formulas_of_bytes(layout, world_size):
    """Those of recipes/guide/clusters.md: G key/value and H query heads of D numbers of 2 bytes, n tokens, p ranks."""
    n, h, g, d, p = 48 * 96, 48, 16, 64, world_size
    sizes = {"seq_len": n, "world_size": p, "num_heads": h, "num_kv_heads": g, "head_dim": d}
    call = ra.explain("exact", **sizes, layout=layout, transport="ring")
    for way in ("ring", "collective"):
        shares = [getattr(share, way) for share in call.ranks]
        assert max(share.forward.received for share in shares) == 4 * g * d * n * (p - 1) // p
        assert max(share.backward.received for share in shares) <= 3 * 4 * g * d * n * (p - 1) // p
    if h % p == 0 and g % p == 0:
        heads = {way.received for share in call.ranks for way in (share.heads.forward, share.heads.backward)}
        assert heads == {4 * (h + g) * d * n * (p - 1) // p**2}
    flops = sum(share.forward_flops for share in call.ranks)
    assert flops == pytest.approx(2 * h * d * n * n, rel=0.01)


def problem_of(text, layout, ranks, length=4096, heads=4, kv_heads=2):
    whole = ra.SequenceLayout(layout, length, ranks)
    return Problem(ra.Pattern.parse(text), whole, (((0, length),),), num_heads=heads, num_kv_heads=kv_heads)


TIMELINES = [
    ("exact", "zigzag", 4),
    ("exact", "contiguous", 3),
    ("window:300+4", "contiguous", 4),
    ("window:300", "zigzag", 4),  # rows travel both ways
    ("pyramid:64,3", "contiguous", 5),
    ("longnet:256/1,1024/4,all/16", "zigzag", 3),
]


@pytest.mark.parametrize(("text", "layout", "ranks"), TIMELINES)
def test_work_and_bytes_are_those_of_the_plan_and_keys_arrive_in_time(text, layout, ranks):
    """Nobody computes with keys that have not arrived."""
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
