"""The keys that a cache keeps, against the definition of patterns."""

import pytest

import hf_ring_attention as ra
from hf_ring_attention.plan.kept import cache_rows, count_kept, heads_of_patterns, keeps_all, most_rows, sees_all_kept
from tests.support.cases import random_pattern_of

#: Later queries than these see no other keys of the short documents here.
LATER = 160


def kept_by_definition(pattern, kv_head, heads, length, at_least=1):
    """The keys below `length` that a query from `length` on sees as often as this."""
    group = heads["num_heads"] // heads["num_kv_heads"]
    members = range(kv_head * group, (kv_head + 1) * group)
    return [
        key
        for key in range(length)
        if any(
            pattern.multiplicity(query, key, head=head, document_length=query + 1, **heads) >= at_least
            for head in members
            for query in range(length, length + LATER)
        )
    ]


def test_counts_are_those_of_the_definition(rng):
    for _ in range(30):
        kv_heads = rng.choice([1, 2, 3])
        heads = {"num_heads": kv_heads * rng.choice([1, 2]), "num_kv_heads": kv_heads}
        pattern, length = random_pattern_of(rng, kv_heads), rng.randint(1, 40)
        rows = 0
        for own, members, phases in heads_of_patterns(pattern, heads["num_heads"] // kv_heads, kv_heads):
            counts = [count_kept(own, x, length) for x in phases]
            assert counts == [len(kept_by_definition(pattern, head, heads, length)) for head in members], pattern
            before = [max(count_kept(own, x, n) for n in range(length)) + 1 for x in phases]
            most = [most_rows(own, x, length) for x in phases]
            assert all(y - 2 <= x <= y for x, y in zip(most, before)), pattern
            rows += len(members) * max(most)
        assert cache_rows(pattern, *heads.values(), length) == rows


def test_queries_that_see_all_that_is_kept(rng):
    """Where `sees_all_kept` says so, and only there, the next query sees every kept key exactly once."""
    found = set()
    for _ in range(60):
        pattern = random_pattern_of(rng, 1)
        heads = {"num_heads": 2, "num_kv_heads": 1}
        [(own, _, _)] = heads_of_patterns(pattern, 2, 1)
        says = sees_all_kept(own)
        for length in range(1, 30):
            kept = kept_by_definition(pattern, 0, heads, length)
            counts = [
                pattern.multiplicity(length, key, head=head, document_length=length + 1, **heads)
                for head in range(2)
                for key in kept
            ]
            if says:
                assert set(counts) <= {1}, pattern
        found.add(says)
    assert found == {True, False}


@pytest.mark.parametrize(
    ("text", "everything", "rows"),
    [
        ("exact", True, 32768),
        ("window:512+4", False, 516),
        ("pyramid:512,3", False, 4 + 512 + 384 + 384),
        ("longnet:512/1,2048/4,all/8", False, 512 + 384 + 32768 // 8 - 512),
        ("branches:window=4,last=2", True, 32768),
        ("branches:window=1", False, 1),
    ],
)
def test_rows_of_patterns(text, everything, rows):
    pattern = ra.Pattern.parse(text)
    assert keeps_all(pattern) is everything
    assert abs(cache_rows(pattern, 1, 1, 32768) / rows - 1) < 0.03
    assert keeps_all(ra.Pattern.by_kv_head([pattern, "exact"])) is everything
