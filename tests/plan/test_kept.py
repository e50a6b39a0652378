"""The keys that a cache keeps, against the definition of patterns."""

from functools import cache

import pytest

import hf_ring_attention as ra
from hf_ring_attention.compute.reference import multiplicity_matrix
from hf_ring_attention.plan.kept import cache_rows, count_kept, heads_of_patterns, keeps_all, most_rows, sees_all_kept
from tests.support.cases import random_pattern_of

#: Later queries than these see no other keys of the short documents here.
LATER = 200


@cache
def last_query(pattern, key, kv_head, num_heads, num_kv_heads):
    """The last query, with any later tokens still to come, that sees a key with any head of a group; -1 without one."""
    group, heads = num_heads // num_kv_heads, {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    members = range(kv_head * group, (kv_head + 1) * group)
    seen = (
        query
        for query in reversed(range(key, LATER))
        if any(pattern.multiplicity(query, key, head=head, **heads) for head in members)
    )
    return next(seen, -1)


def kept_by_definition(pattern, kv_head, heads, length):
    """The keys below `length` that a query from `length` on sees."""
    return [key for key in range(length) if last_query(pattern, key, kv_head, *heads) >= length]


def test_counts_are_those_of_the_definition(rng):
    for _ in range(30):
        kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2])
        heads, pattern, length = (kv_heads * group, kv_heads), random_pattern_of(rng, kv_heads), rng.randint(1, 40)
        rows = 0
        for own, members, phases in heads_of_patterns(pattern, kv_heads):
            counts = [count_kept(own, x, length) for x in phases]
            assert counts == [len(kept_by_definition(pattern, head, heads, length)) for head in members], pattern
            before = [max(count_kept(own, x, n) for n in range(length)) + 1 for x in phases]
            most = [most_rows(own, x, length) for x in phases]
            assert most == before, pattern
            rows += len(members) * max(most)
        assert cache_rows(pattern, kv_heads, length) == rows


def test_dilated_windows_keep_more_and_fewer_rows_in_turn():
    pattern = ra.Pattern.parse("pyramid:2,3,3,2")
    for phase in range(9):
        assert most_rows(pattern, phase, 29) == max(count_kept(pattern, phase, n) for n in range(29)) + 1 == 8


def test_queries_that_see_all_that_is_kept(rng):
    """If `sees_all_kept` says so, the next query sees every kept key exactly once."""
    found = set()
    for _ in range(60):
        pattern = random_pattern_of(rng, 1)
        [(own, _, _)] = heads_of_patterns(pattern, 1)
        found.add(says := sees_all_kept(own))
        for length in range(1, 30 if says else 1):
            counts = multiplicity_matrix(pattern, length + 1, 2, 1, True)[:, length]
            assert (counts[:, kept_by_definition(pattern, 0, (2, 1), length)] == 1).all(), pattern
    assert found == {True, False}


@pytest.mark.parametrize(
    ("text", "everything", "rows"),
    [
        ("exact", True, 32768),
        ("window:512+4", False, 516),
        ("pyramid:512,3", False, 4 + 512 + 384 + 384),
        ("longnet:512/1,2048/4,all/8", False, 512 + 384 + 32768 // 8 - 2048 // 8),  # just before the last block ends
        ("branches:window=1", False, 1),
    ],
)
def test_rows_of_patterns(text, everything, rows):
    pattern = ra.Pattern.parse(text)
    assert keeps_all(pattern) is everything
    assert abs(cache_rows(pattern, 1, 32768) / rows - 1) < 0.03
    assert keeps_all(ra.Pattern.by_kv_head([pattern, "exact"])) is everything
