"""Choices and their reasons: the layout by balance, the transport by the rows that a rank needs of others."""

import re
from dataclasses import replace

import pytest

from hf_ring_attention.plan.branches import Segment, Sink, Window
from hf_ring_attention.plan.choices import choose_layout, choose_transport, decide_call, imbalance
from hf_ring_attention.plan.layouts import SequenceLayout
from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.plan.problem import Problem
from hf_ring_attention.plan.traffic import RowBytes

SIZES = RowBytes(512, 1024)  # a key and a value of 128 numbers in 16 bits


def problem(pattern, seq_len, world_size, kind="contiguous", heads=(32, 8), batch=1):
    layout = SequenceLayout(kind, seq_len, world_size)
    return Problem(pattern, layout, (((0, seq_len),),) * batch, num_heads=heads[0], num_kv_heads=heads[1])


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        (Pattern.exact(), "zigzag"),
        (Pattern((Sink(4), Window(60_000))), "zigzag"),
        (Pattern((Window(512),)), "contiguous"),
        (Pattern((Sink(4), Window(512))), "contiguous"),
        (Pattern((Segment(1024),)), "contiguous"),
        (Pattern.longnet([2048, 16384, 131072], [1, 8, 64]), "contiguous"),
    ],
    ids=str,
)
def test_layout(pattern, kind):
    decision = choose_layout(131072, 8, pattern)
    assert decision.choice == kind
    contiguous, zigzag = (imbalance(problem(pattern, 131072, 8, k, (1, 1))) for k in ("contiguous", "zigzag"))
    assert f"{contiguous:.2f} times the mean work" in decision.reason
    if kind == "zigzag":
        assert f"in zigzag {zigzag:.2f}" in decision.reason
        assert zigzag < contiguous
    else:
        assert contiguous <= 1.05


@pytest.mark.parametrize(
    ("name", "case", "choice", "reason"),
    [
        ("one rank", problem(Pattern.exact(), 131072, 1), "local", "one rank"),
        ("no row crosses", problem(Pattern((Segment(1024),)), 8192, 8), "local", "no rank needs a key of another"),
        # The last of 8 ranks needs 7 x 1024 rows of 8 heads: 28 MiB; of 8 x 128 tokens, 3.5 MiB.
        (
            "much",
            problem(Pattern.exact(), 8192, 8, "zigzag"),
            "ring",
            r"8 ranks needs 28\.0 MiB .*, 7\.00 times its own 4\.0 MiB",
        ),
        ("little", problem(Pattern.exact(), 1024, 8), "collective", r"3\.5 MiB .*at most 8\.0 MiB"),
        # 4095 of 16384 rows.
        (
            "a neighbour's rows",
            problem(Pattern((Window(4096),)), 131072, 8),
            "collective",
            r"16\.0 MiB .*, 0\.25 times its own 64\.0 MiB",
        ),
        ("many rows of a neighbour", problem(Pattern((Window(8192),)), 131072, 8), "ring", r"0\.50 times its own"),
        ("a batch", problem(Pattern.exact(), 1024, 8, batch=4), "ring", r"14\.0 MiB"),
    ],
    ids=lambda x: x if isinstance(x, str) and x.isidentifier() else None,
)
def test_transport(name, case, choice, reason):
    decision = choose_transport(case, SIZES)
    assert decision.choice == choice, name
    assert re.search(reason, decision.reason), decision


def test_heads_are_exchanged_where_others_would_wait():
    """Contiguous pieces of a causal row: the last of 8 ranks does 1.87 times the mean work."""
    decision = choose_transport(problem(Pattern.exact(), 131072, 8), SIZES)
    assert (decision.choice, decision.heads) == ("heads", None)
    assert "the busiest of 8 ranks does 1.87 times the mean work in contiguous pieces" in decision.reason
    # Few keys of a query, or even work, are not worth it; nor can 3 ranks divide 32 heads.
    for case in (
        problem(Pattern.exact(), 1024, 8),
        problem(Pattern.exact(), 131072, 8, "zigzag"),
        problem(Pattern.exact(), 131072, 3),
        replace(problem(Pattern.exact(), 131072, 8), causal=False),
    ):
        assert choose_transport(case, SIZES).choice != "heads"


def test_neighbours_exchange_heads_where_there_are_few():
    """16 ranks cannot divide 8 heads; 8 neighbours can, and the rings between two groups wait less."""
    case = problem(Pattern.exact(), 1 << 20, 16, heads=(8, 8))
    decision = choose_transport(case, SIZES)
    assert (decision.choice, decision.heads) == ("heads", 8)
    assert "8 neighbours exchange heads 1.50 times" in decision.reason
    decided, again = decide_call("auto", case, SIZES)
    assert (decided.settings.heads, again) == (8, decision)


def test_heads_are_not_exchanged_where_their_patterns_leave_them_as_uneven():
    """All far keys belong to two of four heads: exchanging heads gives them to two ranks."""
    documents = (((0, 8192), *((start, start + 64) for start in range(8192, 16384, 64))),)
    layout, heads = SequenceLayout("contiguous", 16384, 4), {"num_heads": 4, "num_kv_heads": 4}
    alike = Problem(Pattern.exact(), layout, documents, **heads)
    assert choose_transport(alike, SIZES).choice == "heads"
    differing = Pattern.by_kv_head(["exact", "window:8"] * 2)
    assert choose_transport(Problem(differing, layout, documents, **heads), SIZES).choice != "heads"
