"""Llama 4: layers whose tokens attend inside chunks, and layers without RoPE whose queries are scaled by their places."""

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import chunked_causal_mask_function

import hf_ring_attention as ra
from hf_ring_attention.hf.layer.masks import ring_dilated_mask, tokens_of
from hf_ring_attention.hf.model.config import warn_once
from hf_ring_attention.hf.model.wrappers import cache_argument
from hf_ring_attention.hf.rows.documents import documents_from_mask
from tests.hf.alike import refused
from tests.hf.test_generation import generate, prompt, same
from tests.support.neighbours import check
from tests.support.probe import TOKENS, batch, logits_and_gradients, over_ring
from tests.support.ranks import on_ranks
from tests.support.tiny_models import tiny_model

#: Temperatures change every 3 tokens.
TUNED = {"floor_scale": 3}


def llama4(implementation="eager", **changes):
    return tiny_model("llama4_text", implementation, **changes)


def test_temperatures_are_those_of_eager_attention():
    """A model that only names the implementation is patched by its call."""
    models = llama4("ring_dilated", **TUNED), llama4(**TUNED)
    check(*(logits_and_gradients(model, *batch("left")) for model in models))


@pytest.mark.parametrize(
    ("rows", "world_size", "layout"),
    [(batch("packed"), 3, "zigzag"), (batch("right"), 2, "documents")],
    ids=["packed", "right"],
)
def test_temperatures_follow_the_positions_in_the_whole_row_over_a_ring(rows, world_size, layout):
    """In a packed row, and if batch rows have other pieces too; without temperatures tests/hf/test_pairs.py has them."""
    expected = logits_and_gradients(ra.patch_model(llama4(**TUNED)), *rows)

    def work(ring, model):
        if layout == "documents":
            documents = documents_from_mask(rows[0]["attention_mask"] > 0)
            pieces = ring.layout_for(TOKENS, ra.Pattern.exact(), documents)
            assert pieces.kind == "documents" and pieces.rows[0] != pieces.rows[1]
        return over_ring(model, ring, *rows)

    for found in on_ranks(work, lambda: llama4(**TUNED), world_size, layout=layout):
        check(found, expected)


def greedy(model, ids, mask, **ways):
    return generate(model, ids, mask, do_sample=False, **ways)


def test_generation_is_that_of_eager():
    """Its caches keep the keys of a chunk alone, of rows that are padded by other numbers of tokens.

    Greedy and prefilled tokens are in tests/hf/test_pairs.py.
    """
    models = llama4(**TUNED), llama4("ring_dilated", **TUNED)
    assert same(*(greedy(model, *prompt(), num_beams=3, prefill_chunk_size=4) for model in models))


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


def test_a_copied_mask_still_says_what_the_cache_has_dropped():
    def mask_of_step(rows, attention_mask):
        """Of a token behind 13, of which the cache has dropped 8."""
        inside = chunked_causal_mask_function(6, torch.zeros(rows, dtype=torch.int64))
        settings = {"mask_function": inside, "attention_mask": attention_mask}
        config = tiny_model("llama4_text", "ring_dilated").config
        return ring_dilated_mask(rows, 1, 6, 13, 8, config=config, **settings)

    attention_mask = torch.ones(3, 14, dtype=torch.int64)
    attention_mask[1, :3], attention_mask[2, :10] = 0, 0
    mask, whole = mask_of_step(3, attention_mask), mask_of_step(2, None)
    tokens = tokens_of(mask.clone())
    assert (tokens.own, tokens.before, tokens.missing) == ((ra.Segment, 6), 8, (8, 5, 0))
    assert tokens.documents == (((0, 6),), ((0, 6),), ((2, 6),))
    assert tokens_of(whole).missing == (8, 8)


@torch.no_grad()
def test_packed_rows_with_temperatures_are_told(caplog):
    """They follow the positions in the row, so a packed document gets other logits than the same document by itself."""
    warn_once.cache_clear()
    inputs, _ = batch("packed")
    for floor in (21, 12):
        assert not caplog.records
        ra.patch_model(llama4(floor_scale=floor))(**inputs, use_cache=False)
    assert "their places in the row of 20 tokens" in caplog.text and "fewer than 12 tokens" in caplog.text
