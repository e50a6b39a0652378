"""Patterns that differ by key/value head: their definition, texts and dicts, work, and refusals."""

import hf_ring_attention as ra
from hf_ring_attention.plan.plans import plan_rank
from tests.support.cases import problem_of, random_pattern, random_pattern_of
from tests.support.refusals import refused

FEW = ["exact" if head in (0, 3, 4) else "window:8+2" for head in range(6)]


def test_each_head_has_the_keys_of_its_pattern(rng):
    patterns = [random_pattern(rng) for _ in range(3)]
    pattern = ra.Pattern.by_kv_head(patterns)
    for _ in range(300):
        query, key, head = rng.randrange(40), rng.randrange(40), rng.randrange(6)
        heads = {"head": head, "num_heads": 6, "num_kv_heads": 3, "document_length": 40}
        assert pattern.multiplicity(query, key, **heads) == patterns[head // 2].multiplicity(query, key, **heads)


def test_texts_and_dicts_are_read_back(rng):
    assert str(ra.Pattern.by_kv_head(FEW)) == "kv0,3-4=exact;kv1-2,5=window:8+2"
    for _ in range(100):
        pattern = random_pattern_of(rng, rng.randint(1, 9))
        assert ra.Pattern.parse(str(pattern)) == pattern == ra.Pattern.from_dict(pattern.to_dict())


def test_heads_that_are_the_same_have_a_pattern_without_heads():
    assert ra.Pattern.by_kv_head(["window:8+2"] * 4) == ra.Pattern.parse("window:8+2")
    assert ra.Pattern.parse("kv0-3=exact").num_kv_heads is None
    same = ra.Pattern((), kv_heads=[ra.Pattern.longnet([8, None], [1, 4])] * 2)
    assert ra.Pattern.parse(str(same)) == same == ra.Pattern.longnet([8, None], [1, 4])


def test_heads_of_one_shape_share_a_kernel_call():
    """There are as many batches of tiles as the two patterns have shapes, however the heads alternate."""
    apart = {
        (batch.visit, batch.shape, batch.num_queries, batch.num_keys, batch.fold_size)
        for text in {*FEW}
        for batch in plan_rank(problem_of(text, 300, heads=(12, 6)), 0).own
    }
    plan = plan_rank(problem_of(ra.Pattern.by_kv_head(FEW), 300, heads=(12, 6)), 0)
    assert len(plan.own) == len(apart)


def test_refusals():
    for text, said in {
        "kv0=exact;kv2=window:4": "leaves out the key/value heads [1]",
        "kv0-1=exact;kv1=window:4": "names key/value head 1 twice",
        "kv1-0=exact": "ends before it begins",
        "kv0=exact;window:4": "kvNUMBERS=PATTERN was expected, got 'window:4'",
        "kv=exact": "kvNUMBERS=PATTERN was expected",
        "kv0=exact;kv1=windw:4": "'windw:4' is not known",
        "kv0=exact;kv1=kv0=window:4": "kvNUMBERS=PATTERN was expected",
    }.items():
        refused(said, ra.Pattern.parse, text)
    pattern = ra.Pattern.by_kv_head(FEW)
    refused("is for 6 key/value heads, and the attention has 8", problem_of, pattern, 300, heads=(8, 8))
    said = "is for 6 key/value heads, and Pattern.flop_share has 4"
    refused(said, pattern.flop_share, 100, num_heads=4, num_kv_heads=4)
    said = "a pattern for each key/value head was expected, got none"
    refused(f"Pattern.by_kv_head: {said}", ra.Pattern.by_kv_head, [])
    refused(said, ra.Pattern.from_dict, {"kv_heads": []})
    said = "with kv_heads, each head's pattern has the branches"
    refused(said, ra.Pattern, (ra.Window(4),), kv_heads=(ra.Pattern.exact(),))
    refused("must be patterns with branches", ra.Pattern.by_kv_head, [pattern, "exact"])
