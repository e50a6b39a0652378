"""Patterns: refusals, the table of the definition written again, JSON, and the presets."""

import dataclasses
import itertools
import pickle

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.plan.branches import Segment, Sink, Window
from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.plan.plans import plan_rank
from tests.support.cases import problem_of, random_pattern, random_pattern_of
from tests.support.refusals import refused

# The table of the definition, from the fields only: the keys that a branch shows, and how often a key counts.


def shown(branch, query, key, phase):
    if type(branch) is Sink:
        return key < branch.tokens
    w, r = branch.length, branch.dilation
    if type(branch) is Segment:
        near = True if w is None else query // w == key // w
    else:
        near = abs(query - key) < w
    taking_part = branch.queries == "all" or query % r == phase % r
    return near and key % r == phase % r and taking_part


def times(pattern, query, key, head, num_heads, num_kv_heads, causal):
    if causal and not key <= query:
        return 0
    kv_head = head // (num_heads // num_kv_heads)
    pattern = pattern.kv_heads[kv_head] if pattern.kv_heads else pattern
    count = sum(shown(branch, query, key, kv_head) for branch in pattern.branches)
    return min(count, 1) if pattern.overlap == "once" else count


def test_multiplicity_is_the_table(rng):
    seen = set()
    for _ in range(400):
        num_kv_heads, causal = rng.randint(1, 4), rng.random() < 0.5
        pattern = random_pattern_of(rng, num_kv_heads)
        num_heads = num_kv_heads * rng.randint(1, 3)
        head, length = rng.randrange(num_heads), rng.randint(1, 30)
        for query, key in itertools.product(range(length), repeat=2):
            heads = {"head": head, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
            got = pattern.multiplicity(query, key, **heads, causal=causal)
            want = times(pattern, query, key, head, num_heads, num_kv_heads, causal)
            assert got == want, (pattern, query, key, head, num_heads, num_kv_heads, causal)
            assert type(got) is int
            seen.add(got)
        # No pattern that is accepted leaves a query without a key.
        for query in range(length):
            assert times(pattern, query, query, head, num_heads, num_kv_heads, True)
    assert seen >= {0, 1, 2, 3}


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", 2**63, pytest.param(10**5000, id="10**5000")])
def test_numbers_are_counts_of_64_bits(value):
    """Tokens are counted with 64 bits; larger numbers come from files and command lines, and would take memory and time."""
    large = value in (2**63, 10**5000)
    said = r"must be at most \d+, got" if large else f"must be an integer of at least 1, got {value!r}"
    for owner, name, make in [
        ("Segment", "dilation", lambda value: Segment(8, value)),
        ("Segment", "dilation", lambda value: Segment(None, value)),
        ("Segment", "length", Segment),
        ("Window", "dilation", lambda value: Window(8, value)),
        ("Window", "length", Window),
        ("Sink", "tokens", Sink),
        ("Pattern.pyramid", "window", lambda value: Pattern.pyramid(value, 2)),
        ("Pattern.pyramid", "levels", lambda value: Pattern.pyramid(8, value)),
        ("Pattern.pyramid", "ratio", lambda value: Pattern.pyramid(8, 2, value)),
    ]:
        refused(f"{owner}: {name} {said}", make, value)
    if value != 0:  # A pyramid may have no sinks.
        refused("must be at most" if large else "must be an integer of at least", Pattern.pyramid, 8, 2, sinks=value)


NO_BRANCH = "no branch of dilation 1 covers the query itself"
NOT_A_BRANCH = "Pattern: a branch must be one of Segment, Window, Sink, got"


def test_refused_branches():
    for kind in (Segment, Window):
        refused("length must be a multiple of dilation, got 10 = 2 * 4 + 2; use length=8", kind, 10, 4)
        refused("got 3 = 0 * 4 + 3; use length=4", kind, 3, 4)
        refused("must be an integer of at least", kind, 8, None)
        for value in ("some", None, ["all"]):
            refused(f"{kind.__name__}: queries must be one of 'dilated', 'all', got {value!r}", kind, 8, 2, value)
    refused("must be an integer of at least", Window, None)
    refused("got 1 for 2: [1] and [8, 32]", Pattern.longnet, [8, 32], [1])
    refused("Pattern.longnet: as many dilation_rates as segment_lengths are needed", Pattern.longnet, [8], [1, 2])
    refused(NO_BRANCH, Pattern.longnet, [], [])
    refused(NO_BRANCH, Pattern.longnet, [8, 16], [2, 4])
    refused("length must be a multiple of dilation", Pattern.longnet, [8, 15], [1, 2])


def test_refused_patterns():
    for value in ("twice", None, ["once"]):
        refused(f"Pattern: overlap must be one of 'count', 'once', got {value!r}", Pattern, (Segment(),), value)
    for overlap in ("once", "count"):
        refused("Pattern: branches must be a sequence of Segment, Window, Sink, got 3", Pattern, 3, overlap)
        refused(f"{NOT_A_BRANCH} 'e'", Pattern, "exact", overlap)
        refused(f"{NOT_A_BRANCH} 512", Pattern, (Segment(), 512), overlap)
        refused(f"{NOT_A_BRANCH} <class", Pattern, (Segment(), Segment), overlap)
        refused(f"Pattern: {NO_BRANCH}, so some queries would see no key; got []", Pattern, (), overlap)
        refused(NO_BRANCH, Pattern, (Segment(8, 2), Sink(4)), overlap)
        refused(NO_BRANCH, Pattern, (Sink(4),), overlap)
        refused("add a Window or Segment with dilation 1", Pattern, (Segment(8, 2), Window(16, 4)), overlap)


def test_branches_are_taken_as_they_are_documented():
    assert Pattern(branch for branch in (Window(4), Sink(2))) == Pattern((Window(4), Sink(2)))
    assert Pattern(Window(4)) == Pattern((Window(4),))
    assert Pattern.longnet([8, 32, None], [1, 4, 8]).branches == (Segment(8, 1), Segment(32, 4), Segment(None, 8))


@pytest.mark.parametrize("dilations", [(2, 1), (1, 2, 3), (1, 4, 2), (1, 2, 6, 4), (4, 1, 4)], ids=str)
def test_once_asks_for_nested_dilations(dilations):
    branches = [Segment(dilation * 12, dilation) for dilation in dilations]
    earlier, later = next((a, b) for a, b in itertools.pairwise(dilations) if b % a)
    refused(f"each dilation to divide the next, got {earlier} before {later}: ", Pattern, branches, "once")
    # Sinks between do not hide it.
    refused("or use overlap='count'", Pattern, [branches[0], Sink(2), *branches[1:]], "once")
    assert Pattern(branches, "count").branches == tuple(branches)


def test_frozen_hashable_and_a_key_by_value(rng):
    for _ in range(100):
        pattern = random_pattern(rng)
        again = Pattern(list(pattern.branches), pattern.overlap)
        other = dataclasses.replace(pattern, branches=(*pattern.branches, Sink(99)))
        assert again == pattern != other
        assert hash(again) == hash(pattern)
        assert {pattern: 1, other: 2}[again] == 1
        assert pickle.loads(pickle.dumps(pattern)) == pattern
    for thing, name in ((pattern, "overlap"), (Segment(4), "length"), (Window(4), "length"), (Sink(4), "tokens")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            thing.__setattr__(name, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "expected {'pattern': TEXT}, got None: read a text by Pattern.parse"),
        ("exact", "expected {'pattern': TEXT}, got 'exact': read a text by Pattern.parse"),
        ({"pattern": None}, "pattern must be a Pattern, or its text such as 'window:512+4', got None"),
        ({"pattern": "windw:4"}, "pattern 'windw:4' is not known: did you mean 'window:4'?"),
        ({"pattern": "exact", "layers": {}}, "expected {'pattern': TEXT}, got keys ['layers', 'pattern']"),
        ({"branches": [{"type": "segment"}], 7: 1}, "got keys ['7', 'branches']: "),
        ({"branches": [{"type": "segment"}]}, "write branches of version 0.2 as text"),
    ],
    ids=str,
)
def test_refused_dicts(data, message):
    refused(message, Pattern.from_dict, data)


def test_longnet_mixes_branches_by_their_softmax_denominators(rng):
    """Each branch's own softmax, weighted by its share of all denominators; gradients flow through the weights too."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    for causal, num_heads, num_kv_heads in [(True, 4, 2), (False, 4, 2), (True, 3, 3)]:
        lengths, rates = [4, 12, None], [1, 2, 3]
        n, width, group = rng.randint(15, 30), 8, num_heads // num_kv_heads
        q, k, v = (
            torch.randn(1, heads, n, width, generator=generator, dtype=torch.float64, requires_grad=True)
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        scores = q @ k.repeat_interleave(group, 1).mT * width**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        position, phase = torch.arange(n), torch.arange(num_heads)[:, None] // group
        outs, denominators = [], []
        for length, rate in zip(lengths, rates, strict=True):
            segment = position // (length or n)
            kept = position % rate == phase % rate  # [H, n]: queries and keys of the head's residue
            visible = (segment[:, None] == segment) & kept[:, :, None] & kept[:, None, :]
            weights = torch.where(visible, scores.exp(), 0.0)
            denominator = weights.sum(-1, keepdim=True)
            denominators.append(denominator)
            outs.append(weights / torch.where(denominator > 0, denominator, 1.0) @ v.repeat_interleave(group, 1))
        share = torch.stack(denominators) / sum(denominators)
        want = (share * torch.stack(outs)).sum(0)
        dout = torch.randn(want.shape, generator=generator, dtype=torch.float64)
        want_grads = torch.autograd.grad(want, (q, k, v), dout)
        pattern = Pattern.longnet(lengths, rates)
        got, lse = ra.ring_attention(q, k, v, pattern=pattern, ring=ra.Ring(), causal=causal, return_lse=True)
        grads = torch.autograd.grad(got, (q, k, v), dout)
        wanted = (want, sum(denominators).log().squeeze(-1), *want_grads)
        torch.testing.assert_close((got, lse, *grads), wanted, rtol=1e-12, atol=1e-12)


# ---- patterns that differ by key/value head

FEW = ["exact" if head in (0, 3, 4) else "window:8+2" for head in range(6)]


def test_heads_that_are_the_same_have_one_pattern_for_this_number_of_heads():
    assert str(Pattern.by_kv_head(FEW)) == "kv0,3-4=exact;kv1-2,5=window:8+2"
    assert Pattern.by_kv_head(["window:8+2"] * 4) == Pattern.parse("window:8+2")
    assert Pattern.parse("kv0-3=exact").num_kv_heads == 4
    same = Pattern((), kv_heads=[Pattern.longnet([8, None], [1, 4])] * 2)
    assert Pattern.parse(str(same)) == same == Pattern.longnet([8, None], [1, 4])
    assert str(same) == "kv0-1=longnet:8/1,all/4" and str(same.of_kv_head(1)) == "longnet:8/1,all/4"
    refused("is for 2 key/value heads, and the attention has 4", problem_of, same, 300, heads=(8, 4))


def test_heads_of_one_shape_share_a_kernel_call():
    """There are as many batches of tiles as the two patterns have shapes, however the heads alternate."""
    apart = {
        (batch.visit, batch.shape, batch.num_queries, batch.num_keys, batch.fold_size)
        for text in {*FEW}
        for batch in plan_rank(problem_of(text, 300, heads=(12, 6)), 0).own
    }
    plan = plan_rank(problem_of(Pattern.by_kv_head(FEW), 300, heads=(12, 6)), 0)
    assert len(plan.own) == len(apart)


def test_refused_patterns_by_head():
    for text, said in {
        "kv0=exact;kv2=window:4": "leaves out the key/value heads [1]",
        "kv0-1=exact;kv1=window:4": "names key/value head 1 twice",
        "kv1-0=exact": "ends before it begins",
        "kv0=exact;window:4": "kvNUMBERS=PATTERN was expected, got 'window:4'",
        "kv=exact": "kvNUMBERS=PATTERN was expected",
        "kv0=exact;kv1=windw:4": "'windw:4' is not known",
        "kv0=exact;kv1=kv0=window:4": "kvNUMBERS=PATTERN was expected",
    }.items():
        refused(said, Pattern.parse, text)
    pattern = Pattern.by_kv_head(FEW)
    refused("is for 6 key/value heads, and the attention has 8", problem_of, pattern, 300, heads=(8, 8))
    said = "is for 6 key/value heads, and Pattern.flop_share has 4"
    refused(said, pattern.flop_share, 100, num_heads=4, num_kv_heads=4)
    said = "a pattern for each key/value head was expected, got none"
    refused(f"Pattern.by_kv_head: {said}", Pattern.by_kv_head, [])
    said = "with kv_heads, each head's pattern has the branches"
    refused(said, Pattern, (Window(4),), kv_heads=(Pattern.exact(),))
    for nested in (pattern, "kv0-1=exact"):
        refused("was expected, got one for [26] heads itself", Pattern.by_kv_head, [nested, "exact"])
    refused("must be patterns with branches", Pattern, (), kv_heads=(pattern, Pattern.exact()))
