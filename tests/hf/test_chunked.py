"""Llama 4: layers whose tokens attend inside chunks, and layers without RoPE whose queries are scaled by their places."""

import inspect

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import chunked_causal_mask_function, create_chunked_causal_mask

import hf_ring_attention as ra
from hf_ring_attention.hf.layer.masks import ring_dilated_mask, tokens_of
from hf_ring_attention.hf.model.config import warn_once
from hf_ring_attention.hf.model.wrappers import cache_argument
from hf_ring_attention.hf.rows.documents import documents_from_mask
from tests.hf.alike import assert_on_ranks, refused
from tests.hf.test_generation import generate, prompt, same
from tests.support.neighbours import check
from tests.support.probe import TOKENS, alone, batch, logits_and_gradients, over_ring
from tests.support.ranks import on_ranks
from tests.support.tiny_models import VOCAB, tiny_config, tiny_model

#: Temperatures change every 3 tokens.
TUNED = {"floor_scale": 3}
UNTUNED = {"attn_temperature_tuning": False}


def llama4(implementation="eager", **changes):
    return tiny_model("llama4_text", implementation, **changes)


def packed(*lengths):
    """Inputs and labels of one row of documents."""
    inputs, labels = batch("plain")
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    assert positions.shape[1] == TOKENS
    return {"input_ids": inputs["input_ids"][:1], "position_ids": positions}, labels[:1].masked_fill(
        positions == 0, -100
    )


def rows(kind):
    """A batch, or a row of documents of these lengths."""
    return batch(kind) if isinstance(kind, str) else packed(*kind)


@pytest.mark.parametrize(
    ("kind", "changes", "expected_of"),
    [
        *(
            (kind, {**TUNED, "attention_chunk_size": chunk}, logits_and_gradients)
            for kind, chunks in {"plain": (1, 7), "left": (4, 40), "right": (1, 7)}.items()
            for chunk in chunks
        ),
        # Transformers counts the chunks of packed rows from the row's first token: here these are of 6.
        *(((6, 12, 2), changes, logits_and_gradients) for changes in (TUNED, UNTUNED)),
        ((7, 9, 4), UNTUNED, alone),
    ],
)
def test_one_device_equals_eager(kind, changes, expected_of):
    """Chunks of a packed document begin with it; a model that only names the implementation is patched by its call."""
    inputs, labels = rows(kind)
    expected = expected_of(llama4(**changes), inputs, labels)
    for model in (llama4("ring_dilated", **changes), ra.patch_model(llama4(**changes))):
        check(logits_and_gradients(model, inputs, labels), expected)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "documents"])
@pytest.mark.parametrize("kind", ["plain", "left", "right", (7, 9, 4)])
def test_a_ring_equals_one_device(kind, layout):
    """Temperatures follow the positions in the whole row, in a packed row and if batch rows have other pieces too."""
    inputs, labels = rows(kind)
    expected = logits_and_gradients(ra.patch_model(llama4(**TUNED)), inputs, labels)

    def work(ring, model):
        if layout == "documents" and kind == "right":
            documents = documents_from_mask(inputs["attention_mask"] > 0)
            pieces = ring.layout_for(TOKENS, ra.Pattern.exact(), documents)
            assert pieces.kind == "documents" and pieces.rows[0] != pieces.rows[1]
        return over_ring(model, ring, inputs, labels)

    world_size = 2 if (kind in ("left", (7, 9, 4))) == (layout == "zigzag") or layout == "documents" else 3
    for found in on_ranks(work, lambda: llama4(**TUNED), world_size, layout=layout):
        check(found, expected)


WAYS = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "pieces": {"prefill_chunk_size": 4},
    "candidates": {"prompt_lookup_num_tokens": 3},
}


def greedy(model, ids, mask, **ways):
    return generate(model, ids, mask, do_sample=False, **ways)


@pytest.mark.drawn
@pytest.mark.parametrize("chunk", [2, 6, 17])
@pytest.mark.parametrize("way", WAYS)
def test_generation_is_that_of_eager(way, chunk):
    """Its caches keep the keys of a chunk alone, of rows that are padded by other numbers of tokens."""
    if way == "static" and "block_sequence_ids" not in inspect.signature(create_chunked_causal_mask).parameters:
        pytest.skip(
            "this release of Transformers fails to make chunked masks for static caches, whatever the implementation"
        )
    changes = {**TUNED, "attention_chunk_size": chunk}
    ids, mask = (x[:1] if way == "candidates" else x for x in prompt())
    expected = greedy(llama4(**changes), ids, mask, **WAYS[way])
    assert same(greedy(llama4("ring_dilated", **changes), ids, mask, **WAYS[way]), expected)


def test_a_sharded_cache_has_all_keys_of_a_chunk():
    ids = prompt()[0][:1]
    row = torch.cat([ids, torch.randint(3, VOCAB, (1, 3))], 1)
    expected = greedy(llama4(**TUNED), row, torch.ones_like(row))

    def work(ring, model):
        return greedy(model, row, torch.ones_like(row), **cache_argument(ra.prefill(model, ids)))

    assert_on_ranks(work, lambda: llama4(**TUNED), expected)


def test_a_pattern_of_the_layer_itself():
    """One that reaches no further than the chunk is computed with the cache that keeps a chunk; others are refused."""
    ids, mask = prompt()
    for text in ("window:5", "branches:segment=6,window=6/2@count"):
        model = ra.patch_model(llama4(**TUNED))
        ra.patch_config(model.config, text, layers=[0])
        caches = DynamicCache(), DynamicCache(config=model.config)
        kept, dropped = (greedy(model, ids, mask, **cache_argument(cache)) for cache in caches)
        assert same(dropped, kept), text
    ra.patch_config(model.config, "window:5+1", layers=[0])
    said = r"layer 0 has the pattern window:5\+1, and its cache keeps only .* 6 tokens"
    refused(said, greedy, model, ids, mask, **cache_argument(DynamicCache(config=model.config)))
    whole = greedy(model, ids, mask, **cache_argument(DynamicCache()))
    assert same(greedy(model, ids, mask), whole)  # with a PatternCache


def mask_of_step(attention_mask, kv_offset, kv_length, batch_size=2):
    config = tiny_config("llama4_text")
    config._attn_implementation = "ring_dilated"

    return ring_dilated_mask(
        batch_size,
        1,
        kv_length,
        kv_offset + kv_length - 1,
        kv_offset,
        mask_function=chunked_causal_mask_function(6, torch.zeros(batch_size, dtype=torch.int64)),
        attention_mask=attention_mask,
        config=config,
    )


def test_a_copied_mask_still_says_what_the_cache_has_dropped():
    attention_mask = torch.ones(3, 14, dtype=torch.int64)
    attention_mask[1, :3], attention_mask[2, :10] = 0, 0
    mask = mask_of_step(attention_mask, 8, 6, 3)
    tokens = tokens_of(mask.clone())
    assert (tokens.own, tokens.before) == ((ra.Segment, 6), 8)
    assert tokens.missing == (8, 5, 0)
    assert tokens.documents == (((0, 6),), ((0, 6),), ((2, 6),))
    whole = mask_of_step(None, 8, 6)
    assert tokens_of(whole).missing == (8, 8)


@torch.no_grad()
def test_packed_rows_with_temperatures_are_told(caplog):
    """They follow the positions in the row, so a packed document gets other logits than the same document by itself."""
    warn_once.cache_clear()
    inputs, _ = packed(7, 9, 4)
    for floor in (21, 12):
        assert not caplog.records
        ra.patch_model(llama4(floor_scale=floor))(**inputs, use_cache=False)
    assert "their places in the row of 20 tokens" in caplog.text and "fewer than 12 tokens" in caplog.text
