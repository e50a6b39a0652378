"""Models whose key/value heads have patterns of their own, in single passes, generating, and prefilled over rings."""

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.compute.reference import reference_attention
from hf_ring_attention.hf.cache import cache_argument
from hf_ring_attention.ring.attention import CheckedCall
from tests.support.ranks import run_simulated
from tests.support.tiny_models import VOCAB, tiny_model
from tests.support.tolerance import EXACT, assert_exact


def model_by_head(model_type="llama"):
    model = tiny_model(model_type, "ring_dilated")
    heads = model.config.get_text_config().num_key_value_heads
    texts = ["exact" if head % 2 else "window:3+1" for head in range(heads)]
    ra.patch_model(model, ra.Pattern.by_kv_head(texts))
    return model


def drawn_ids(tokens=24, rows=2):
    return torch.randint(3, VOCAB, (rows, tokens))


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def test_a_layer_computes_what_the_oracle_says(monkeypatch):
    """Of each call, the oracle gets the same queries, keys and values."""
    model, calls, compute = model_by_head(), [], CheckedCall.attend

    def noted(self, q, k, v, sinks, with_lse=False):
        out, lse = compute(self, q, k, v, sinks, with_lse)
        calls.append((q, k, v, self, out))
        return out, lse

    monkeypatch.setattr(CheckedCall, "attend", noted)
    logits(model, drawn_ids())
    assert len(calls) == model.config.num_hidden_layers
    for q, k, v, call, out in calls:
        assert call.problem.pattern.num_kv_heads == k.shape[1] > 1
        right, _ = reference_attention(q, k, v, pattern=call.problem.pattern, scale=call.execution.scale)
        assert float((out - right).abs().max()) <= EXACT


def test_tokens_of_a_cache_are_those_of_whole_passes():
    model, ids = model_by_head(), drawn_ids(rows=1)
    with torch.no_grad():
        tokens = model.generate(ids, max_new_tokens=5, do_sample=False)
        for place in range(ids.shape[1], tokens.shape[1]):
            assert logits(model, tokens[:, :place])[0, -1].argmax() == tokens[0, place]


def test_keys_of_a_prefilled_cache_are_those_of_each_head():
    model, ids = model_by_head(), drawn_ids(tokens=21, rows=1)
    right = logits(model, ids)[:, -1]

    def run(ring):
        own = model_by_head()
        own.load_state_dict(model.state_dict())
        cache = ra.prefill(ra.patch_model(own, ring=ring), ids[:, :-1])
        with torch.no_grad():
            return own(ids[:, -1:], **cache_argument(cache)).logits[:, -1]

    for found in run_simulated(run, 2):
        assert_exact(found, right, "logits behind a prefilled cache")


def test_a_pattern_for_other_heads_is_refused():
    model = tiny_model("llama", "ring_dilated")
    with pytest.raises(ValueError, match=r"is for 3 key/value heads, and LlamaModel has 2: give one pattern for each"):
        ra.patch_model(model, "kv0-1=exact;kv2=window:4")
