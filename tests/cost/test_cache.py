"""The bytes of a cache are those that `PatternCache` and a cache with every row hold, and what fits beside the weights."""

import pytest
import torch
from transformers import DynamicCache

import hf_ring_attention as ra
from hf_ring_attention.cost.cache import sum_of_caches
from hf_ring_attention.cost.models import attention_of_model
from hf_ring_attention.cost.questions import most_cached_tokens
from hf_ring_attention.hf.model.wrappers import cache_argument
from tests.support.measured_once import measured_once
from tests.support.tiny_models import tiny_config, tiny_model

PATTERNS = ("exact", "window:32+4", "pyramid:16,2", "longnet:32/1,128/4", "branches:window=16,segment=64/2@count")
TOKENS = 171


def bytes_held(model, cache, tokens):
    """The most bytes of a cache while a text is read: blocks of a pattern are left behind at their ends."""
    ids, sizes, steps = torch.arange(tokens)[None] % 90 + 3, [], 51 * isinstance(cache, ra.PatternCache)
    with torch.no_grad():
        for part in ids.split([tokens - steps] + [1] * steps, 1):
            model(part, **cache_argument(cache))
            every = (
                [x for layer in cache.layers for x in (layer.keys, layer.values) if x is not None] if not steps else []
            )
            sizes.append(cache.nbytes if steps else sum(x.numel() * x.element_size() for x in every))
    return max(sizes)


#: Their attention is estimated, and not their shapes.
ATTENTION_ALONE = ("gemma3n_text", "diffllama", "jetmoe", "moshi")


@pytest.mark.parametrize(
    ("model_type", "pattern"),
    [
        *(("llama", pattern) for pattern in PATTERNS),
        *(
            (kind, "window:32+4")
            for kind in ("deepseek_v3", "gemma3_text", "llama4_text", "gpt_bigcode", *ATTENTION_ALONE)
        ),
    ],
)
def test_an_estimate_is_within_5_percent_of_the_cache(model_type, pattern):
    """Grouped heads, latent attention, windows, chunks, keys that layers or experts share; room to grow is the difference."""
    model = ra.patch_model(tiny_model(model_type, "ring_dilated", max_position_embeddings=1024), pattern)
    if model_type in ATTENTION_ALONE:
        caches = attention_of_model(model.config, "", None).caches(TOKENS, 1, 4)
        assert sum(len(layers) for layers, _ in caches.values()) == 2  # of 4 layers of Gemma 3n
        said = sum_of_caches(size for _, size in caches.values())
    else:
        said = ra.estimate(model, TOKENS, dtype="float32", master_dtype="float32").cache
    kept = DynamicCache() if model_type == "diffllama" else ra.PatternCache(model)  # which refuses DiffLlama
    assert bytes_held(model, kept, TOKENS) == pytest.approx(said.kept, rel=0.05)
    assert bytes_held(model, DynamicCache(), TOKENS) == said.whole


@measured_once
@pytest.mark.parametrize("layers", [("window:32+4", "exact"), ("kv0=exact;kv1=window:64+4", "window:64")])
def test_layers_and_heads_that_differ_are_counted_apart(layers):
    model = ra.patch_model(tiny_model("llama", "ring_dilated", num_key_value_heads=2), list(layers))
    answer = ra.estimate(model, TOKENS, batch_size=1, dtype="float32")
    assert [numbers for numbers, _ in answer.caches.values()] == [[0], [1]]
    assert sum(size.kept for _, size in answer.caches.values()) == answer.cache.kept < answer.cache.whole
    assert bytes_held(model, ra.PatternCache(model), TOKENS) == pytest.approx(answer.cache.kept, rel=0.05)
    three = ra.estimate(model, TOKENS, batch_size=3, dtype="bfloat16")
    assert (three.cache.kept, three.cache.whole) == (answer.cache.kept * 3 // 2, answer.cache.whole * 3 // 2)


def test_explain_has_the_cache_of_a_layer():
    heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "value_dim": 8}
    call = ra.explain("window:32+4", seq_len=256, ring_size=2, **heads, dtype="float32", batch_size=3)
    assert (call.cache.kept, call.cache.whole) == (3 * 2 * 36 * 24 * 4, 3 * 2 * 256 * 24 * 4)
    assert "\ncache      0.0 MiB by ra.PatternCache, 0.1 whole\n" in str(call)
    bidirectional = ra.explain("window:32", seq_len=256, ring_size=2, **heads, causal=False)
    packed = ra.explain("window:32", seq_len=256, ring_size=2, **heads, documents=[[(0, 9), (9, 200)]])
    padded = ra.explain("window:32", seq_len=256, ring_size=2, **heads, documents=[[(9, 200)]])
    assert bidirectional.cache is None and packed.cache is None and padded.cache is not None
    assert "cache" not in str(packed)


@measured_once
def test_the_most_tokens_fit_and_a_token_more_does_not():
    config = tiny_config("llama")
    weights = ra.estimate(config, 8).shape.parameters * 2
    for pattern, bounded in (("exact", False), ("window:32+4", True), ("longnet:32/1,all/4", False)):
        most = {}
        for room in (10**5, 10**6):
            answer = ra.estimate(config, 8, pattern=pattern, memory=weights + room)
            most[room] = most_cached_tokens(answer)
            for kind, tokens in most[room].items():
                if tokens is not None:
                    sizes = (ra.estimate(config, tokens + more, pattern=pattern).cache for more in (0, 1))
                    fitting, larger = (getattr(size, kind) for size in sizes)
                    assert fitting <= room < larger
        assert (most[10**6]["kept"] is None) == bounded
        assert most[10**6]["whole"] == pytest.approx(10 * most[10**5]["whole"], rel=0.01)
    assert most_cached_tokens(ra.estimate(config, 8, memory=weights)) == {"whole": 0, "kept": 0}
