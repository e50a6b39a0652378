"""Layouts that know the documents: equal tokens, even work and few bytes for packed rows of all kinds."""

import collections
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ring_attention.plan.balance import balanced_layout, estimated_imbalance
from hf_ring_attention.plan.choices import decide_layout, imbalance
from hf_ring_attention.plan.layouts import SequenceLayout
from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.plan.plans import pairs_of_row
from hf_ring_attention.plan.traffic import RowBytes, collective_traffic, ring_traffic
from hf_ring_attention.plan.work import work_under
from tests.plan.strategies import rngs
from tests.support.cases import problem_of, random_documents, random_pattern

PATTERNS = [Pattern.parse(text) for text in ("exact", "window:4096", "window:512+4", "pyramid:512,4")]


def random_packing(rng, tokens, median=None, spread=None):
    """Documents of log-normal lengths that fill a row; at the end of some rows is padding, in less than half of the row.

    Of few tokens for many ranks, a single one may be more than a tenth of a rank's work.
    """
    median = rng.uniform(50, 8000) if median is None else median
    spread = rng.uniform(0.3, 2.0) if spread is None else spread
    documents, end = [], 0
    while end < tokens:
        length = max(1, min(tokens - end, round(median * rng.lognormvariate(0, spread))))
        documents.append((end, end + length))
        end += length
    start, _ = documents[-1]
    return tuple(documents[:-1]) if start > tokens / 2 and rng.random() < 0.3 else tuple(documents)


@settings(max_examples=100)
@given(
    st.randoms(use_true_random=True),
    st.sampled_from([*[2, 3, 4, 5, 6, 8] * 3, 12, 16, 24, 32, 64]),  # Many ranks take their time.
    st.sampled_from(PATTERNS),
)
def test_random_packings_are_even(rng, world_size, pattern):
    """By estimates, which `test_estimates_are_the_plans` compares with plans."""
    tokens = rng.randint(16384, 131072)
    documents = (random_packing(rng, tokens),)
    layout = balanced_layout(tokens, world_size, pattern, documents)
    assert estimated_imbalance(layout, pattern, documents) <= 1.1, (tokens, documents)


def test_estimates_are_the_plans(rng):
    for _ in range(12):
        tokens, world_size, pattern = rng.randint(16384, 65536), rng.choice([2, 3, 8, 16]), rng.choice(PATTERNS)
        documents = (random_packing(rng, tokens),)
        for layout in (
            balanced_layout(tokens, world_size, pattern, documents),
            SequenceLayout("zigzag", tokens, world_size),
            SequenceLayout("contiguous", tokens, world_size),
        ):
            estimated = estimated_imbalance(layout, pattern, documents)
            assert estimated == pytest.approx(imbalance(problem_of(pattern, layout, documents)), rel=0.02)


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_bytes_are_about_those_of_a_zigzag(pattern, world_size):
    """Of all packings together: a zigzag of documents that end by chance where its pieces do moves next to nothing.

    The packings are always the same ones: the figure scatters with them, and the promise is of their mean.
    """
    sizes, moved, rng = RowBytes(1, 1), collections.Counter(), random.Random(2)
    for _ in range(10):
        tokens = rng.randint(16384, 131072)
        documents = (random_packing(rng, tokens),)
        zigzag = SequenceLayout("zigzag", tokens, world_size)
        for layout in (balanced_layout(tokens, world_size, pattern, documents), zigzag):
            problem = problem_of(pattern, layout, documents)
            for traffic in (ring_traffic, collective_traffic):
                received = sum(traffic(problem, rank, sizes).forward.received for rank in range(world_size))
                moved[layout.kind, traffic] += received
    for traffic in (ring_traffic, collective_traffic):
        assert moved["documents", traffic] <= 1.35 * moved["zigzag", traffic], moved


def test_rows_of_a_batch_are_balanced_together(rng):
    """A row of few tokens cannot be even by itself: the others make up for it."""
    pattern, tokens = Pattern.exact(), 8192
    rows = [random_packing(rng, tokens) for _ in range(4)] + [((0, 3),), ()]
    rng.shuffle(rows)
    layout = balanced_layout(tokens, 4, pattern, tuple(rows))
    assert imbalance(problem_of(pattern, layout, rows)) <= 1.1


@settings(max_examples=60)
@given(rngs)
def test_all_tokens_are_held_once(rng):
    """Any pattern, documents with gaps, rows shorter than the ring."""
    batch, tokens, world_size = rng.randint(1, 3), rng.randint(1, 60), rng.randint(1, 8)
    documents = random_documents(rng, batch, tokens) or [[(0, tokens)]] * batch
    layout = balanced_layout(tokens, world_size, random_pattern(rng), tuple(map(tuple, documents)))
    for row in range(batch):
        held = [layout.positions(rank, row) for rank in range(world_size)]
        assert sorted(itertools.chain(*held)) == list(range(layout.padded_len))
        assert all(own == sorted(own) for own in held)


def test_short_documents_are_not_cut_where_they_fit():
    documents = tuple((start, start + 64) for start in range(0, 1024, 64))
    layout = balanced_layout(1024, 4, Pattern.exact(), (documents,))
    starts = {start for start, _ in documents}
    assert all(piece.start in starts for rank in range(4) for piece in layout.pieces(rank))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_work_is_that_of_the_tiles(pattern, rng):
    work = work_under(pattern, 20000)
    for tokens in [*range(1, 40), *(rng.randint(40, 20000) for _ in range(40))]:
        assert work.of_document(tokens) == pytest.approx(pairs_of_row(pattern, tokens, 1, 1, True), rel=0.01)
    assert work.of_tokens(0, 0) == work.of_document(0) == 0


#: A row of one long document and short ones, which contiguous pieces and a zigzag leave uneven; and a row of short ones.
LONG, SHORT = (0, 8192), tuple((start, start + 64) for start in range(0, 16384, 64))
UNEVEN, WHOLE = ((LONG, *SHORT[128:]),), (((0, 16384),),)


@pytest.mark.parametrize(
    ("asked", "documents", "kind"),
    [
        ("auto", UNEVEN, "documents"),
        *(("auto", documents, "zigzag") for documents in (None, WHOLE, (SHORT,))),
        ("documents", WHOLE, "documents"),
        ("documents", None, "zigzag"),  # as by "auto"
        ("contiguous", WHOLE, "contiguous"),
    ],
)
def test_layouts_that_are_chosen_or_asked_for(asked, documents, kind):
    layout, decision = decide_layout(asked, 16384, 4, Pattern.exact(), documents)
    assert layout.kind == kind
    assert asked != "auto" or decision.choice == kind
    if documents == UNEVEN:
        assert decision.reason.startswith("with these documents the busiest rank does 1.")
        layout, decision = decide_layout(asked, 16384, 4, Pattern.exact(), documents, transport="heads")
        assert layout.kind == decision.choice == "zigzag", "all ranks of a head group have all of its tokens"


@pytest.mark.parametrize("asked", ["zigzag", "documents", "contiguous"])
def test_one_rank_holds_rows_as_they_are(asked):
    """Two pieces of one length would need padding."""
    assert decide_layout(asked, 43, 1, Pattern.exact())[0].padded_len == 43


def test_auto_keeps_its_pieces_where_no_others_are_more_even():
    layout, decision = decide_layout("auto", 4, 4, Pattern.exact(), (((0, 2),),))
    assert layout.kind == decision.choice == "zigzag"
    assert "2.67 times the mean work in zigzag pieces, and 2.67 in pieces made for them" in decision.reason
