"""Patterns whose last queries see every key: their parts, work, dependence on the length, and refusals."""

import itertools
from dataclasses import replace

import pytest

import hf_ring_attention as ra
from hf_ring_attention.plan.parts import parts_of
from hf_ring_attention.plan.plans import pairs_of_row, plan_rank, tiles_from
from hf_ring_attention.plan.problem import HeldKeys
from hf_ring_attention.plan.work import work_under
from tests.support.cases import problem_of, random_pattern
from tests.support.refusals import refused

ONE_HEAD = {"head": 0, "num_heads": 1, "num_kv_heads": 1}
TRIANGLE = ra.Pattern([ra.Sink(1), ra.Window(2), ra.Last(3)])


def seen(pattern, query, length, **options):
    keys = range(length)
    return [key for key in keys if pattern.multiplicity(query, key, **ONE_HEAD, document_length=length, **options)]


def test_the_layer_of_trianglemix_by_hand():
    assert [seen(TRIANGLE, query, 8) for query in range(8)] == [
        [0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7],
    ]  # fmt: skip
    assert seen(TRIANGLE, 5, 9) == [0, 4, 5], "the same query in a longer document is not among the last"
    assert seen(TRIANGLE, 1, 2) == [0, 1], "all queries of a short document are its last"


def test_parts_add_up_to_the_pattern(rng):
    """A key counts as often as the parts of its query show it, in documents of any length."""
    for _ in range(60):
        pattern = random_pattern(rng)
        last = ra.Last(rng.randint(1, 9))
        pattern = replace(pattern, branches=(*pattern.branches, last))
        heads = {"head": rng.randrange(4), "num_heads": 4, "num_kv_heads": 2, "causal": rng.random() < 0.5}
        length = rng.randint(1, 24)
        heads |= {"document_length": length}
        for query, key in itertools.product(range(length), repeat=2):
            shown = [part.pattern for part in parts_of(pattern) if query in part.queries.of_document(length)]
            seen = sum(own.multiplicity(query, key, **heads) for own in shown)
            assert seen == pattern.multiplicity(query, key, **heads), (pattern, query, key, heads)


def test_work_of_tokens_is_that_of_the_tiles(rng):
    """Also in documents that are longer than those tokens, and with heads of which some have no last queries."""
    for text in (
        "branches:sink=4,window=64,last=32", "branches:last=40,window=16,last=9@count",
        "kv0=exact;kv1=branches:window=9,last=50",
    ):  # fmt: skip
        pattern, work = ra.Pattern.parse(text), work_under(ra.Pattern.parse(text), 1024)
        heads, length, cut = pattern.num_kv_heads or 1, rng.randint(300, 900), rng.randint(1, 299)
        whole = work.of_document(length)
        assert whole == pytest.approx(pairs_of_row(pattern, length, heads, heads, True) / heads, rel=0.01)
        assert work.of_tokens(0, cut, length) + work.of_tokens(cut, length, length) == pytest.approx(whole)
        last = sum(
            pattern.multiplicity(query, key, head=head, num_heads=heads, num_kv_heads=heads, document_length=length)
            for head in range(heads)
            for query in range(length - 20, length)
            for key in range(length)
        )
        assert work.of_tokens(length - 20, length, length) == pytest.approx(last / heads, rel=0.01)


def test_a_step_of_generation_sees_every_key():
    """The document is as long as it has grown."""
    for text in ("branches:window=4,last=1", "branches:sink=2,window=4,last=3"):
        problem = problem_of(text, 100)
        assert plan_rank(problem, 0).pairs < 100 * 50
        held = HeldKeys.whole(100, 1, 100)
        assert sum(batch.pairs(1) for batch in tiles_from(replace(problem, held=held), 0, 0)) == 100


def test_pieces_that_are_longer_than_the_last_queries_are_refused():
    pattern = ra.Pattern.by_kv_head(["branches:window=4,last=3", "branches:window=4,last=7"])

    def call(row_len, new):
        held = HeldKeys.whole(row_len, new, row_len)
        return problem_of(pattern, held.layout, heads=(2, 2), held=held)

    for row_len, new in ((20, 1), (20, 3), (20, 20), (4, 4)):
        call(row_len, new)
    said = "to the last 3 queries of a document, got 4 behind 16 tokens: .* or at most 3 tokens"
    refused(said, call, 20, 4)


def test_the_length_is_asked_for():
    said = "Last(tokens=3): the last queries depend on the length of the document: pass document_length"
    refused(said, TRIANGLE.multiplicity, 2, 1, **ONE_HEAD)
    said = "expected positions below document_length=4, got query 4 and key 1"
    refused(said, TRIANGLE.multiplicity, 4, 1, **ONE_HEAD, document_length=4)
