"""What pictures of patterns show, against the definition of a pattern."""

import itertools

import numpy as np
import pytest

from hf_ring_attention.cli.pictures import DARK, SINK, pattern_lines, visible_pairs
from hf_ring_attention.plan.patterns import Pattern

LAST = "branches:sink=4,window=512,last=300"

PATTERNS = [
    "exact",
    "window:5+2",
    "pyramid:4,3,2,1",
    "longnet:8/1,16/2,all/4",
    "longnet:8/1,12/2,all/3",  # 2 does not divide 3: branches are added up
    "branches:sink=3,segment=8,window=16/2:dilated,segment=all/4:all",
    "branches:segment=6,window=12/2:dilated,window=24/4",
    "branches:window=4,segment=12/3@query_head",
    "branches:sink=2,window=5,last=3",
    "branches:last=20,window=4,segment=12/3,sink=1,last=4@count",
    "branches:window=6,window=12/2:dilated,window=24/4@count",
]


def seen_by(pattern, length, heads, num_heads, num_kv_heads):
    """[n, n]: whether any of the heads sees a key, by the definition."""
    shown = np.zeros((length, length))
    for query, key in itertools.product(range(length), repeat=2):
        shown[query, key] = any(
            pattern.multiplicity(
                query, key, head=head, num_heads=num_heads, num_kv_heads=num_kv_heads, document_length=length
            )
            for head in heads
        )
    return shown


@pytest.mark.parametrize("text", PATTERNS)
def test_squares_of_one_pair_are_the_definition(text):
    pattern = Pattern.parse(text)
    for length, (num_heads, num_kv_heads) in itertools.product((1, 7, 37), ((1, 1), (4, 2), (5, 5))):
        for head in (None, *range(num_heads)):
            seen = visible_pairs(pattern, length, 64, head=head, num_heads=num_heads, num_kv_heads=num_kv_heads)
            shown = seen.share.copy()
            for query in range(length):
                shown[query, : min(seen.sinks, query + 1)] = 1
            heads = range(num_heads) if head is None else [head]
            expected = seen_by(pattern, length, heads, num_heads, num_kv_heads)
            assert np.array_equal(shown, expected), (length, num_heads, head)
            assert np.array_equal(seen.possible, np.tri(length))


@pytest.mark.parametrize("text", ["exact", "window:512+4", "pyramid:512,3", "longnet:512/1,2048/4,all/16@once", LAST])
def test_large_squares_hold_as_many_pairs_as_the_plan(text):
    pattern = Pattern.parse(text)
    seen = visible_pairs(pattern, 16384, 128, head=0)
    assert seen.share_of_causal == pytest.approx(pattern.flop_share(16384), rel=0.01)


def test_text_shows_sinks_the_future_and_what_is_not_seen():
    seen = visible_pairs(Pattern.parse("window:128+4"), 8192, 64, num_heads=2, num_kv_heads=2)
    lines = pattern_lines(seen)
    assert len(lines) == 32
    assert all(line[0] == SINK for line in lines), "4 tokens of 8192 are seen"
    assert lines[-1][1:60] == DARK * 59
    assert [len(line) for line in lines] == list(range(2, 65, 2)), "the future is blank"
    assert not {SINK, DARK} & {*"".join(pattern_lines(visible_pairs(Pattern.exact(), 8192, 64)))}
