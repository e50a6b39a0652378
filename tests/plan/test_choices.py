"""Choices and their reasons: the layout by balance, the transport by the rows that a rank needs of others."""

import re

import pytest

from hf_ring_attention.plan.choices import choose_layout, choose_transport, decide_call, imbalance
from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.plan.traffic import RowBytes
from tests.support.cases import problem_of

SIZES = RowBytes(512, 1024)  # a key and a value of 128 numbers in 16 bits


def problem(pattern, seq_len, world_size, kind="contiguous", heads=(32, 8), batch=1, **more):
    return problem_of(pattern, (kind, seq_len, world_size), [[(0, seq_len)]] * batch, heads, **more)


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        ("exact", "zigzag"),
        ("window:60000+4", "zigzag"),
        ("window:512", "contiguous"),
        ("window:512+4", "contiguous"),
        ("branches:segment=1024", "contiguous"),
        ("longnet:2048/1,16384/8,131072/64", "contiguous"),
    ],
)
def test_layout(pattern, kind):
    decision = choose_layout(131072, 8, Pattern.parse(pattern))
    assert decision.choice == kind
    contiguous, zigzag = (imbalance(problem(pattern, 131072, 8, k, (1, 1))) for k in ("contiguous", "zigzag"))
    assert f"{contiguous:.2f} times the mean work" in decision.reason
    if kind == "zigzag":
        assert f"in zigzag {zigzag:.2f}" in decision.reason
        assert zigzag < contiguous
    else:
        assert contiguous <= 1.05


@pytest.mark.parametrize(
    ("case", "choice", "reason"),
    [
        (problem("exact", 131072, 1), "local", "one rank"),
        (problem("branches:segment=1024", 8192, 8), "local", "no rank needs a key of another"),
        # The last of 8 ranks needs 7 x 1024 rows of 8 heads: 28 MiB; of 8 x 128 tokens, 3.5 MiB.
        (problem("exact", 8192, 8, "zigzag"), "ring", r"8 ranks needs 28\.0 MiB .*, 7\.00 times its own 4\.0 MiB"),
        (problem("exact", 1024, 8), "collective", r"3\.5 MiB .*at most 8\.0 MiB"),
        (problem("exact", 1024, 8, batch=4), "ring", r"14\.0 MiB"),
        # 4095 of 16384 rows of a neighbour, and 8191.
        (problem("window:4096", 131072, 8), "collective", r"16\.0 MiB .*, 0\.25 times its own 64\.0 MiB"),
        (problem("window:8192", 131072, 8), "ring", r"0\.50 times its own"),
        # Contiguous pieces of a causal row: the last of 8 ranks does 1.87 times the mean work.
        (problem("exact", 131072, 8), "heads", "of 8 ranks does 1.87 times the mean work in contiguous pieces"),
        # Few keys of a query, or even work, are not worth it; nor can 3 ranks divide 32 heads.
        *(
            (case, "ring", "")
            for case in (
                problem("exact", 131072, 8, "zigzag"),
                problem("exact", 131072, 3),
                problem("exact", 131072, 8, causal=False),
            )
        ),
    ],
)
def test_transport(case, choice, reason):
    decision = choose_transport(case, SIZES)
    assert (decision.choice, decision.heads) == (choice, None)
    assert re.search(reason, decision.reason), decision


def test_neighbours_exchange_heads_where_there_are_few():
    """16 ranks cannot divide 8 heads; 8 neighbours can, and the rings between two groups wait less."""
    case = problem("exact", 1 << 20, 16, heads=(8, 8))
    decision = choose_transport(case, SIZES)
    assert (decision.choice, decision.heads) == ("heads", 8)
    assert "8 neighbours exchange heads 1.50 times" in decision.reason
    decided, again = decide_call("auto", case, SIZES)
    assert (decided.settings.heads, again) == (8, decision)


def test_heads_are_not_exchanged_where_their_patterns_leave_them_as_uneven():
    """All far keys belong to two of four heads: exchanging heads gives them to two ranks."""
    documents = (((0, 8192), *((start, start + 64) for start in range(8192, 16384, 64))),)
    for pattern, exchanged in (("exact", True), ("kv0,2=exact;kv1,3=window:8", False)):
        case = problem_of(pattern, ("contiguous", 16384, 4), documents, (4, 4))
        assert (choose_transport(case, SIZES).choice == "heads") == exchanged
