"""`explain` foretells a call: bytes to the byte, work, balance, choices, a bound on buffers, times, the timeline of a ring."""

import itertools
import threading

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.cli.explain import compared
from hf_ring_attention.cli.output import short_number
from hf_ring_attention.cost.explain import BACKWARD, time_of_layer
from hf_ring_attention.cost.timeline import ring_timeline
from hf_ring_attention.plan.plans import plan_rank
from hf_ring_attention.plan.traffic import RowBytes, ring_traffic
from hf_ring_attention.transport import row_sets
from tests.support.cases import problem_of
from tests.support.refusals import refused

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
    call = {"seq_len": TOKENS * p - 1, "ring_size": p, "num_heads": HEADS, "num_kv_heads": KV_HEADS}
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
        problem = problem_of(pattern, said.layout, heads=(HEADS, KV_HEADS))
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
    said = ra.explain(pattern, seq_len=131072, ring_size=8, num_heads=32, num_kv_heads=8, head_dim=128)
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
        ({"ring_size": 0}, "ring_size must be an integer of at least 1, got 0"),
        ({"num_heads": 3, "num_kv_heads": 2}, "multiple of the number of key/value heads, got 3 and 2"),
        ({"pattern": "kv0-3=exact"}, "is for 4 key/value heads, and explain has 2"),
        ({"num_kv_heads": 0}, "num_kv_heads must be an integer of at least 1, got 0"),
        ({"layout": "striped"}, "layout must be"),
        ({"transport": "local"}, "serves 1 rank, got 4"),
        ({"documents": [[(0, 65)]]}, "within the sequence of 64 tokens"),
    ],
    ids=str,
)
def test_calls_that_are_refused(changes, message):
    call = {"pattern": "exact", "seq_len": 64, "ring_size": 4, "num_heads": 2, "head_dim": 8} | changes
    refused(message, ra.explain, call.pop("pattern"), **call)


def test_logged_once(caplog):
    """A choice is logged once a ring, and not in each call."""
    with caplog.at_level("INFO", "hf_ring_attention"):

        def run(ring):
            layout = ring.layout_for(64, CASES["exact"])
            for _ in range(3):
                attention(ring, CASES["exact"], layout, torch.float32)

        ra.run_simulated(run, 2)
    lines = [record.getMessage() for record in caplog.records if "transport" in record.getMessage()]
    assert len(lines) == 1
    assert "ring of 2: transport collective, because the busiest of 2 ranks needs" in lines[0]


@pytest.mark.parametrize("ring_size", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_formulas_of_bytes(layout, ring_size):
    """Those of recipes/guide/clusters.md: G key/value and H query heads of D numbers of 2 bytes, n tokens, p ranks."""
    n, h, g, d, p = 48 * 96, 48, 16, 64, ring_size
    sizes = {"seq_len": n, "ring_size": p, "num_heads": h, "num_kv_heads": g, "head_dim": d}
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


def of_ranks(text, layout, ranks, length=4096):
    return problem_of(text, (layout, length, ranks), heads=(4, 2))


TIMELINES = [("exact", "contiguous", 3), ("window:300+4", "contiguous", 4), ("pyramid:64,3", "contiguous", 5)]
TIMELINES += [("exact", "zigzag", 4), ("longnet:256/1,1024/4,all/16", "zigzag", 3)]
TIMELINES += [("window:300", "zigzag", 4)]  # rows travel both ways


@pytest.mark.parametrize(("text", "layout", "ranks"), TIMELINES)
def test_work_and_bytes_are_those_of_the_plan_and_keys_arrive_in_time(text, layout, ranks):
    """Nobody computes with keys that have not arrived."""
    problem = of_ranks(text, layout, ranks)
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
    problem = of_ranks("exact", "zigzag", 4)
    fast = ring_timeline(problem, pair_flops=256, row_bytes=256, flops=1e9, bandwidth=1e12)
    slow = ring_timeline(problem, pair_flops=256, row_bytes=256, flops=1e12, bandwidth=1e6)
    assert fast.share("wait") == 0 and fast.share("compute") > 0.99
    assert slow.share("wait") > 0.9 and slow.share("compute") < 0.1
    assert fast.seconds == pytest.approx(plan_rank(problem, 0).pairs * 256 / 1e9)


# The times of a layer by each transport, from its plan and two speeds.

CALL = {"seq_len": 4096, "ring_size": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
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
        problem = problem_of(call.pattern, call.layout, heads=(8, 4))
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
    assert times("exact", 1e12, ring_size=2, seq_len=1 << 16)[1]["heads"].hidden > 0
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
