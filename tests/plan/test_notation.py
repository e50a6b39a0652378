"""Texts of patterns: any pattern is read back from its text, and errors name the part that cannot be read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ring_attention.compute.reference import multiplicity_matrix
from hf_ring_attention.plan.branches import Segment, Sink, Window
from hf_ring_attention.plan.patterns import Pattern, as_pattern
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("exact", Pattern.exact()),
        ("window:64", Pattern((Window(64),))),
        ("window:64+4", Pattern((Sink(4), Window(64)))),
        ("pyramid:64,3", Pattern.pyramid(64, 3)),
        ("pyramid:64,3,2", Pattern.pyramid(64, 3, 2)),
        ("pyramid:64,3,4,0", Pattern.pyramid(64, 3, sinks=0)),
        ("longnet:64/1,256/4,all/8", Pattern.longnet([64, 256, None], [1, 4, 8])),
        ("longnet:all/1", Pattern((Segment(),), "count")),
        ("branches:segment=64,segment=256/4", Pattern((Segment(64), Segment(256, 4)))),
        ("branches:window=8,window=16/4:dilated", Pattern((Window(8), Window(16, 4, "dilated")))),
        ("branches:window=8,sink=2", Pattern((Window(8), Sink(2)))),
        ("branches:segment=8,segment=all/4:all@count", Pattern((Segment(8), Segment(None, 4, "all")), "count")),
    ],
)
def test_texts_and_their_patterns(text, pattern):
    assert Pattern.parse(text) == Pattern.parse(f" {text} ") == pattern
    assert str(pattern) == f"{pattern}" == text


def test_numbers_may_end_in_k_or_m():
    """As numbers of tokens do in commands."""
    assert str(Pattern.parse("window:1k+4")) == "window:1024+4"
    assert Pattern.parse("longnet:2K/1,1m/8") == Pattern.longnet([2048, 1024**2], [1, 8])


def test_a_setting_may_be_written_that_a_shorter_text_implies():
    assert str(Pattern.parse("longnet:64/1,256/4@once")) == "branches:segment=64,segment=256/4"


dilated = st.builds(
    lambda kind, times, dilation, queries: kind(times * dilation, dilation, queries),
    st.sampled_from([Segment, Window]),
    st.integers(1, 99),
    st.integers(1, 9),
    st.sampled_from(["dilated", "all"]),
)
branches = st.lists(dilated | st.builds(Sink, st.integers(1, 9)) | st.just(Segment()), min_size=1, max_size=5)


@st.composite
def patterns(draw):
    made = draw(branches)
    try:
        return Pattern(tuple(made), draw(st.sampled_from(["count", "once"])))
    except ValueError:  # it leaves queries without a key, or does not nest
        return Pattern((Segment(), *made), "count")


@given(patterns())
def test_what_is_written_is_read_back(pattern):
    assert Pattern.parse(str(pattern)) == pattern
    assert Pattern.from_dict(json.loads(json.dumps(pattern.to_dict()))) == pattern
    assert as_pattern(str(pattern), "x") == as_pattern(pattern, "x") == pattern


@given(st.lists(patterns(), min_size=1, max_size=5))
def test_the_patterns_of_heads_are_read_back(of_heads):
    pattern = Pattern((), kv_heads=tuple(of_heads))
    assert Pattern.parse(str(pattern)) == pattern == Pattern.by_kv_head(of_heads)
    assert Pattern.from_dict(pattern.to_dict()) == pattern


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("typo", "pattern 'typo' is not known. A pattern is one of: exact"),
        ("", "pattern '' is not known"),
        ("windw:512+4", "pattern 'windw:512+4' is not known: did you mean 'window:512+4'?"),
        ("window512+4", "pattern 'window512+4' is not known: did you mean 'window:512+4'?"),
        ("Exact@count", "pattern 'Exact@count' is not known: did you mean 'exact@count'?"),
        ("exact:4", "'exact' takes nothing after it, got '4'"),
        ("window:512+", "a number was expected, got ''"),
        ("window:-4", "a number was expected, got '-4'"),
        ("window:0", "length must be an integer of at least 1, got 0"),
        ("pyramid:512", "a pyramid has 2 to 4 numbers, got 1"),
        ("longnet:512", "a number was expected, got ''"),
        ("longnet:512/2", "no branch of dilation 1"),
        ("branches:sink=4/2", "sink has a number of tokens and nothing else"),
        ("branches:sink=4:all,window=4", "sink has a number of tokens and nothing else"),
        ("branches:sink=all,window=4", "Sink: tokens must be an integer of at least 1, got None"),
        ("branches:window=all", "Window: length must be an integer of at least 1, got None"),
        ("branches:segment=8/0", "Segment: dilation must be an integer of at least 1, got 0"),
        ("window:4+0", "Sink: tokens must be an integer of at least 1, got 0"),
        ("exact:", "'exact' takes nothing after it, got ''"),
        ("branches:windows=4", "such as sink=4, window=512 or segment=2048/4 was expected, got 'windows=4'"),
        ("exact@often", "behind @ stands count or once, got 'often'"),
        ("exact@count@once", "@count and @once set the same thing: write one of them"),
        ("branches:window=8,last=64", "'last' went with version 0.3: give some heads or layers 'exact'"),
        ("longnet:8/1,16/2@query_head", "'@query_head' went with version 0.3: leave it out"),
        ("exact@kv_head", "'@kv_head' went with version 0.3: leave it out"),
    ],
)
def test_what_is_no_pattern_is_said(text, message):
    assert repr(text) in refused(message, Pattern.parse, text)


def test_whoever_takes_a_pattern_says_what_came():
    refused("patch_config: pattern must be a Pattern, or its text such as .*, got 512", as_pattern, 512, "patch_config")


@pytest.mark.parametrize("causal", [True, False])
def test_flop_share_counts_pairs_by_the_definition(causal):
    for text in ("exact", "window:16+2", "pyramid:4,3,2", "longnet:8/1,all/4", "branches:window=16,sink=2"):
        pattern, size = Pattern.parse(text), (33, 4, 2, causal)
        pairs, exact = (multiplicity_matrix(made, *size).sum() for made in (pattern, Pattern.exact()))
        share = pattern.flop_share(33, num_heads=4, num_kv_heads=2, causal=causal)
        assert share == pytest.approx(float(pairs / exact), rel=1e-12), text
