"""`prefill` over a ring keeps the rows that later tokens can still see: the tokens and logits of one process."""

import copy

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.hf.model.wrappers import cache_argument
from hf_ring_attention.plan.kept import count_kept
from tests.hf.alike import refused
from tests.support.probe import distance
from tests.support.ranks import on_ranks
from tests.support.tiny_models import VOCAB, tiny_model
from tests.support.tolerance import EXACT

DOCUMENT, QUESTION, LONG = 83, 4, 70  # tokens; from 64 on, the queries of a call are planned
#: What `patch_config` gets, one after the other, as (pattern, layers).
PATTERNS = {
    "window and sinks": [("window:16+4", None)],
    "dilated": [("branches:window=16,window=64/4,sink=2", None)],
    "pyramid": [("pyramid:8,3,2", None)],
    "longnet": [("longnet:16/1,64/4,all/8", None)],
    "layers and heads": [("kv0=window:8;kv1=pyramid:4,3,2", None), ("window:12+1", [1])],
    "exact heads": [("kv0=exact;kv1=window:16", None)],
}
FORCED = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
NEW = 14  # tokens, with which windows leave the document


def ids_of(length, batch=2, seed=1):
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def text(question=QUESTION, padded=False):
    """A document with a question behind it, and their mask."""
    ids = torch.cat([ids_of(DOCUMENT), ids_of(question, seed=2)], 1)
    mask = torch.ones_like(ids)
    mask[0, : 7 * padded] = 0
    return ids, mask


def patched(patterns, model_type="llama"):
    model = tiny_model(model_type, "eager")
    for pattern, layers in patterns:
        ra.patch_config(model.config, pattern, layers)
    return ra.patch_model(model)


def on_models(work, patterns, world_size, model_type="llama", **settings):
    """[work(ring, model) on each simulated rank]."""
    return on_ranks(work, lambda: patched(patterns, model_type), world_size, **settings)


def generate(model, ids, mask, new=NEW, **options):
    ways = {**FORCED, "min_new_tokens": new, "max_new_tokens": new, **options}
    output = model.generate(ids, attention_mask=mask, **ways)
    return output.sequences, torch.stack(output.logits)


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert distance(found[1], expected[1]) <= EXACT


def read_and_answer(model, padded, question, times=2, **ways):
    """The answers to a question about a document, which is asked again and again."""
    ids, mask = text(question, padded)
    cache = ra.prefill(model, ids[:, :DOCUMENT], mask[:, :DOCUMENT] if padded else None)
    assert isinstance(cache, ra.PatternCache) and cache.get_seq_length() == DOCUMENT
    if (beams := ways.get("num_beams", 1)) > 1:
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(beams)
    for _ in range(times):
        yield generate(model, ids, mask, **cache_argument(cache), **ways)
        cache.crop(DOCUMENT - cache.get_seq_length())


def in_a_process(rank, name):
    model = ra.patch_model(patched(PATTERNS[name]), ring=ra.Ring())
    return next(read_and_answer(model, True, QUESTION, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pyramid", "exact heads"])
def test_processes(ranks, name):
    """tests/hf/test_generation.py has sharded keys of processes in each run."""
    expected = generate(patched(PATTERNS[name]), *text(QUESTION, True), cache_implementation="dynamic")
    for found in ranks.run(in_a_process, 2, name):
        assert_same(found, expected)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("model_type", "patterns", "question", "ways"),
    [
        *(("llama", patterns, (QUESTION, LONG)[number % 2], {}) for number, patterns in enumerate(PATTERNS.values())),
        ("deepseek_v3", [("pyramid:8,3,2", None)], LONG, {}),  # heads see other rows of one latent row
        ("gemma3n_text", [("window:9+2", None), ("window:5", [1]), ("pyramid:4,3,2", [3])], LONG, {}),  # readers
        ("diffllama", [("window:8+2", None)], QUESTION, {}),  # layers that attend twice, to halves of the values
        ("lfm2", [("window:8+2", None)], QUESTION, {"prefill_chunk_size": 3}),  # a hybrid
        ("jamba", [("window:8+2", None)], QUESTION, {}),
        ("minimax", [("window:8+2", None)], QUESTION, {"num_beams": 3}),  # states in a cache of another class
    ],
)
def test_tokens_of_one_process(model_type, patterns, question, ways):
    """Random cases of caches (tests/hf/test_pattern_cache.py) have others, also with beams and in pieces, on 1 to 4 ranks."""
    padded, ways = "num_beams" not in ways, {"new": 8, **ways}
    whole = {name: x for name, x in ways.items() if name != "prefill_chunk_size"}
    expected = generate(patched(patterns, model_type), *text(question, padded), use_cache=False, **whole)

    def work(ring, model):
        return [*read_and_answer(model, padded, question, 1 if "num_beams" in ways else 2, **ways)]

    for answers in on_models(work, patterns, 2, model_type, layout="zigzag"):
        for found in answers:
            assert_same(found, expected)


# ---- rows and bytes


@torch.no_grad()
@pytest.mark.drawn
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_the_rows_that_can_be_seen(world_size, name):
    """Together they hold each row once, and a step moves the results of the heads, as with every row."""

    def work(ring, model):
        rows = []
        for options in ({}, {"cache_implementation": "dynamic"}):
            cache = ra.prefill(model, ids_of(DOCUMENT), **options)
            ring.reset_traffic()
            if not options:
                tables = [rows.table for layer in cache.layers for rows in layer.rows]
                kept = [(x.pattern, x.phases.tolist(), (x.positions >= 0).sum(-1)[0].tolist()) for x in tables]
            model(ids_of(1), **cache_argument(cache))
            traffic = ring.traffic()
            rows.append((traffic.sent_bytes, traffic.received_bytes, traffic.hops))
        return kept, rows, model.config

    found = on_models(work, PATTERNS[name], world_size)
    for (pattern, phases, _), *counts in zip(found[0][0], *(kept for kept, *_ in found)):
        together = [sum(heads) for heads in zip(*(rows for *_, rows in counts))]
        assert together == [count_kept(pattern, phase, DOCUMENT) for (phase,) in phases]
    config = found[0][2]
    moved = config.num_hidden_layers * 2 * config.num_attention_heads * (config.head_dim + 1) * 8 * (world_size - 1)
    assert all(now == whole == (moved, moved, config.num_hidden_layers) for _, (now, whole), _ in found)


@torch.no_grad()
def test_memory_is_flat_over_many_tokens():
    """A rank keeps the rows of the document that a question sees, and later rows as long as they are seen."""

    def work(ring, model):
        cache, sizes = ra.prefill(model, ids_of(40, 1)), []
        for n in range(50):
            model.model(ids_of(1, 1), position_ids=torch.tensor([[40 + n]]), use_cache=True, **cache_argument(cache))
            sizes.append(cache.nbytes)
        return cache.num_rows, sizes

    (first, sizes), (last, more) = on_models(work, [("window:8+2", None)], 2)
    # The sinks; a window of the document, without the next token, and the last window.
    assert (first, last) == (2, 2 * 8 - 1)
    assert len({*sizes}) == 1 and len({*more[20:]}) == 1


# ---- lengths, and refusals


@torch.no_grad()
def test_what_is_refused_on_every_rank():
    ids, mask = text()

    def work(ring, model):
        cache = ra.prefill(model, ids[:, :DOCUMENT])
        refused(r"make another one with ra\.prefill", cache.reset)
        for way, said in (
            ("static", "cache_implementation must be None or 'dynamic', got 'static'"),
            ([None, "dynamic"][ring.rank], "disagree on cache_implementation"),
        ):
            refused(said, ra.prefill, model, ids, cache_implementation=way)
        for rows, hidden, said in (
            (ids[:, DOCUMENT:] + ring.rank, None, "disagree on input_ids"),
            (ids[: 1 + ring.rank, DOCUMENT:], None, "(holds 2 batch rows,|refused the call: .*) and 1 came"),
            (ids[:, DOCUMENT:], DOCUMENT - 1, "hides other tokens than before"),
            (ids[:, DOCUMENT:], DOCUMENT + 1, "padding inside a document"),
        ):
            masked = mask.clone()
            masked[0, slice(None, 0) if hidden is None else hidden] = 0
            refused(said, model, rows, attention_mask=masked[: len(rows)], use_cache=True, **cache_argument(cache))
            assert cache.get_seq_length() == DOCUMENT, said
        found = model(ids[:, DOCUMENT:], use_cache=True, **cache_argument(cache)).logits
        assert distance(found, model(ids, use_cache=False).logits[:, DOCUMENT:]) <= EXACT
        ra.patch_model(model)
        said = "2 ranks share the PatternCache, and the model's ring has 1"
        refused(said, model, ids[:, -1:], use_cache=True, **cache_argument(cache))

    on_models(work, PATTERNS["window and sinks"], 2)


@torch.no_grad()
def test_an_error_of_one_rank_ends_the_call_on_all():
    def work(ring, model):
        cache = ra.prefill(model, ids_of(DOCUMENT))
        if ring.rank == 1:
            cache.layers[0].rows[0].views = []
        said, error = "list index out of range", (IndexError, ValueError)
        refused(said, model, ids_of(1), use_cache=True, error=error, **cache_argument(cache))

    on_models(work, PATTERNS["window and sinks"], 2, timeout=60)


@torch.no_grad()
@pytest.mark.parametrize(("pattern", "every"), [("exact", None), ("window:8+2", "dynamic")])
def test_every_row_goes_back_into_the_document(pattern, every):
    """If no row is dropped: the logits behind another length of the document, as often as one likes."""
    ids = ids_of(60)

    def work(ring, model):
        cache = ra.prefill(model, ids[:, :40], cache_implementation=every)
        whole = model(ids, use_cache=False).logits
        for length in (40, 31, 31, 9):
            cache.crop(length - cache.get_seq_length())
            for start, stop in ((length, length + 1), (length + 1, length + 4)):
                logits = model(ids[:, start:stop], use_cache=True, **cache_argument(cache)).logits
                assert distance(logits, whole[:, start:stop]) <= EXACT, (length, start)

    on_models(work, [(pattern, None)], 2)
