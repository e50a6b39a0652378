"""Layers compute their patterns, on the CPU and on CUDA; also if heads differ, or last queries see every key."""

import pytest
import torch
from transformers import DynamicCache

import hf_ring_attention as ra
from hf_ring_attention.hf.model.wrappers import cache_argument, cache_in
from tests.hf.alike import assert_alike, assert_on_ranks, logits, refused
from tests.hf.test_generation import generate, same
from tests.support.dense import DENSE
from tests.support.neighbours import LONGNET, PYRAMID, check
from tests.support.probe import batch, logits_and_gradients
from tests.support.ranks import on_ranks
from tests.support.tiny_models import VOCAB, tiny_config, tiny_model


def drawn_ids(tokens, rows=1):
    return torch.randint(3, VOCAB, (rows, tokens))


@pytest.mark.parametrize(
    ("text", "heads"), [("kv0-1=exact;kv2=window:4", 3), ("kv0=window:4", 1), ("kv0-3=window:4", 4)]
)
def test_a_pattern_for_other_heads_is_refused(text, heads):
    said = rf"is for {heads} key/value heads, and LlamaModel has 2: give one pattern for each"
    refused(said, ra.patch_model, tiny_model("llama", "ring_dilated"), text)
    patched = ra.patch_model(tiny_model("llama", "sdpa"), "kv0-1=window:4")
    assert patched.config.ring_dilated["pattern"] == "kv0-1=window:4"
    q, k = torch.zeros(1, 4, 8, 8), torch.zeros(1, 2, 8, 8)
    ra.ring_attention(q, k, k, pattern="window:4")  # An equal pattern is planned already.
    refused(f"is for {heads} key/value heads, and (k|the attention) has 2", ra.ring_attention, q, k, k, pattern=text)


# ---- last queries that see every key


#: The layer of TriangleMix, and one whose heads differ.
LAST = 4
LAYERS = ("branches:sink=1,window=3,last=4", "kv0=exact;kv1=branches:window=2,last=5")


def with_last():
    model = ra.patch_model(tiny_model("llama", "eager"))
    for layer, text in enumerate(LAYERS):
        ra.patch_config(model.config, text, layers=[layer])
    return model


def as_pattern(pattern):
    return ra.Pattern.parse(pattern) if isinstance(pattern, str) else pattern


def dense():
    """The same weights, and attention by the definition with matrices."""
    model = tiny_model("llama", DENSE)
    setattr(model.config, DENSE, {layer: as_pattern(text) for layer, text in enumerate(LAYERS)})
    return model


def test_a_row_is_what_the_definition_says():
    ids = drawn_ids(21, rows=2)
    assert_alike(logits(with_last(), ids), logits(dense(), ids))
    window = ra.patch_model(tiny_model("llama", "eager"), "branches:sink=1,window=3")
    differs = float((logits(window, ids) - logits(with_last(), ids)).abs().max()) > 1e-3
    assert differs, "the last queries see no more than a window"


@pytest.mark.parametrize("before", [5, 0])
def test_padding_beside_a_document_does_not_change_which_queries_are_its_last(before):
    ids, sides = drawn_ids(15), (before, 5 - before)
    row, mask = (torch.nn.functional.pad(x, sides) for x in (ids, torch.ones_like(ids)))
    found = logits(with_last(), row, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0))
    assert_alike(found[mask.bool()][None], logits(with_last(), ids))


@pytest.mark.parametrize("ranks", [1, 3])
def test_packed_documents_each_have_their_last_queries(ranks):
    documents = [drawn_ids(length) for length in (9, 3, 14)]
    expected = torch.cat([logits(dense(), ids) for ids in documents], 1)
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in documents])[None]

    def work(ring, model):
        return logits(model, torch.cat(documents, 1), position_ids=positions)

    assert_on_ranks(work, with_last, expected, ranks)


def greedy(model, ids, **kwargs):
    return generate(model, ids, torch.ones_like(ids), do_sample=False, **kwargs)


@pytest.mark.parametrize("cache", [None, "static"])
def test_each_new_token_sees_every_key(cache):
    """The definition, with the row as long as it has grown; its cache holds what earlier steps computed."""
    ids = drawn_ids(17, rows=2)
    found = greedy(with_last(), ids, **({} if cache is None else {"cache_implementation": cache}))
    assert same(found, greedy(dense(), ids))


def test_a_question_behind_a_sharded_document_sees_all_of_it():
    """As on one device, whose cache was filled by the document alone too."""
    row = drawn_ids(23)
    document = row[:, : 23 - LAST]

    def filled(model):
        with torch.no_grad():
            return cache_in(model(document, use_cache=True))

    one = dense()
    expected = greedy(one, row, **cache_argument(filled(one)))

    def work(ring, model):
        return greedy(model, row, **cache_argument(ra.prefill(model, document)))

    assert_on_ranks(work, with_last, expected)


@pytest.mark.parametrize(("chunk", "cache"), [(1, None), (LAST, "static"), (19, None)])
def test_a_prompt_in_pieces_is_refused(chunk, cache):
    """Each piece's last queries would see every key, and the prompt's were computed before its end is known."""
    row, options = drawn_ids(20), {} if cache is None else {"cache_implementation": cache}
    said = "shows every key to a document's last queries, and prefill_chunk_size cuts the prompt before them: leave it out, or"
    refused(said, greedy, with_last(), row, prefill_chunk_size=chunk, **options)
    assert same(greedy(with_last(), row, prefill_chunk_size=20, **options), greedy(dense(), row))


def test_longer_pieces_behind_a_cache_are_refused():
    row, said = drawn_ids(20), r"shows every key to the last 4 queries of a document, got 6 behind"

    def work(ring, model):
        refused(said, greedy, model, row, **cache_argument(ra.prefill(model, row[:, :14])))

    on_ranks(work, with_last)


def test_a_cache_that_drops_keys_is_refused():
    model = ra.patch_model(tiny_model("mistral", "eager"))
    ra.patch_config(model.config, LAYERS[0], layers=[0])
    said = r"layer 0 has the pattern branches:sink=1,window=3,last=4, and its cache drops keys"
    row = drawn_ids(12)
    refused(said, greedy, model, row, **cache_argument(DynamicCache(config=model.config)))
    assert same(greedy(model, row), greedy(model, row, **cache_argument(DynamicCache())))


# ---- layer by layer

#: Changes of tiny configs, and the window that some layers have then.
CHANGES = {
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
}
WINDOWS = {"mistral": {0: "window:5", 1: "window:5"}, "qwen2": {1: "window:4"}}
#: A pattern whose heads differ.
BY_HEAD = ra.Pattern.by_kv_head(["window:3+1", "exact"])


def make(model_type, implementation="ring_dilated"):
    return tiny_model(model_type, implementation, **CHANGES.get(model_type, {}))


@pytest.mark.parametrize(
    ("model_type", "own"),
    [
        *((model_type, False) for model_type in ("mistral", "qwen2", "gpt2")),
        *((model_type, True) for model_type in ("llama", "mistral", "gpt_neox", "opt")),
    ],
)
def test_layers_compute_the_definition(model_type, own):
    """Against a model whose attention is the dense oracle, each layer with the pattern it should have."""
    patterns = {0: PYRAMID, 1: PYRAMID} | WINDOWS.get(model_type, {})
    model, oracle = make(model_type), make(model_type, DENSE)
    ra.patch_config(model.config, PYRAMID)
    if own:
        patterns[1] = BY_HEAD if model_type == "llama" else LONGNET
        ra.patch_config(model.config, patterns[1], layers=[1])
    setattr(oracle.config, DENSE, {layer: as_pattern(pattern) for layer, pattern in patterns.items()})
    check(*(logits_and_gradients(each, *batch("plain")) for each in (model, oracle)))


@pytest.mark.own_dtypes
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pattern", [None, PYRAMID], ids=["exact", "pyramid"])
@pytest.mark.parametrize("padding", ["plain", "left", "right"])
def test_a_model_on_cuda_computes_what_it_does_on_the_cpu(padding, pattern):
    inputs, labels = batch(padding)
    expected = logits_and_gradients(ra.patch_model(make("llama", "eager"), pattern), inputs, labels)
    model = ra.patch_model(make("llama", "eager"), pattern).cuda()
    found = logits_and_gradients(model, {name: x.cuda() for name, x in inputs.items()}, labels.cuda())
    found = found.logits.cpu(), {name: gradient.cpu() for name, gradient in found.gradients.items()}
    check(found, expected, bounds=(1e-4, 1e-3))


def test_patch_config_replaces_what_was_set():
    """Patterns of some layers leave the patterns of the others; a pattern for all layers replaces them all."""
    config = ra.patch_config(tiny_config("llama"), LONGNET)
    ra.patch_config(config, LONGNET, layers=[0])
    ra.patch_config(config, PYRAMID, layers=[1])
    want = {"pattern": str(LONGNET), "layers": {"0": str(LONGNET), "1": str(PYRAMID)}}
    hint = {"hint": config.ring_dilated["hint"]}
    assert config.ring_dilated == want | hint
    ra.patch_config(config, PYRAMID)
    assert config.ring_dilated == PYRAMID.to_dict() | hint
