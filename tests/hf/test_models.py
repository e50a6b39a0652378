"""Tiny models of several families compute what their patterns say, layer by layer, on the CPU and on CUDA."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_ring_attention as ra
from hf_ring_attention.compute.reference import reference_attention
from tests.support.neighbours import LONGNET, PYRAMID, check
from tests.support.probe import TOKENS, batch, logits_and_gradients
from tests.support.tiny_models import tiny_config, tiny_model

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
def test_layers_compute_the_definition(monkeypatch, model_type, own):
    """Against a model whose attention is the dense oracle, each layer with the pattern it should have."""
    patterns = {0: PYRAMID, 1: PYRAMID} | WINDOWS.get(model_type, {})
    model = make(model_type)
    ra.patch_config(model.config, PYRAMID)
    if own:
        patterns[1] = BY_HEAD if model_type == "llama" else LONGNET
        ra.patch_config(model.config, patterns[1], layers=[1])
    documents, seen = [[(0, TOKENS)], [(7, TOKENS)]], []

    def oracle(module, query, key, value, attention_mask, scaling=None, **kwargs):
        seen.append(module.layer_idx)
        pattern = patterns[module.layer_idx]
        pattern = ra.Pattern.parse(pattern) if isinstance(pattern, str) else pattern
        out, _ = reference_attention(query, key, value, pattern=pattern, documents=documents, scale=scaling)
        return out.to(query.dtype).transpose(1, 2).contiguous(), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "oracle", oracle)
    inputs, labels = batch("left")
    found = logits_and_gradients(model, inputs, labels)
    del inputs["attention_mask"]  # the oracle knows the documents
    check(found, logits_and_gradients(make(model_type, "oracle"), inputs, labels))
    assert seen == [0, 1]


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
    """A pattern of layers leaves those of others, and one for all layers leaves none."""
    config = ra.patch_config(tiny_config("llama"), LONGNET)
    ra.patch_config(config, LONGNET, layers=[0])
    ra.patch_config(config, PYRAMID, layers=[1])
    want = {"pattern": LONGNET.to_dict(), "layers": {"0": LONGNET.to_dict(), "1": PYRAMID.to_dict()}}
    hint = {"hint": config.ring_dilated["hint"]}
    assert config.ring_dilated == want | hint
    ra.patch_config(config, PYRAMID)
    assert config.ring_dilated == {"pattern": PYRAMID.to_dict()} | hint
