"""Layers compute their patterns, on the CPU and on CUDA; also if heads differ."""

import pytest
import torch

import hf_ring_attention as ra
from tests.hf.alike import refused
from tests.support.dense import DENSE
from tests.support.neighbours import LONGNET, PYRAMID, check
from tests.support.probe import batch, logits_and_gradients
from tests.support.tiny_models import tiny_config, tiny_model


def test_a_pattern_for_other_heads_is_refused_by_the_function():
    """Models refuse it in tests/hf/test_refusals.py."""
    q, k = torch.zeros(1, 4, 8, 8), torch.zeros(1, 2, 8, 8)
    ra.ring_attention(q, k, k, pattern="window:4")  # An equal pattern is planned already.
    refused("is for 1 key/value heads, and (k|the attention) has 2", ra.ring_attention, q, k, k, pattern="kv0=window:4")


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


@pytest.mark.parametrize(("model_type", "own"), [("qwen2", False), ("gpt2", False), ("llama", True), ("mistral", True)])
def test_layers_compute_the_definition(model_type, own):
    """Against a model whose attention is the dense oracle, each layer with the pattern it should have."""
    patterns = {0: PYRAMID, 1: PYRAMID} | WINDOWS.get(model_type, {})
    model, oracle = make(model_type), make(model_type, DENSE)
    ra.patch_config(model.config, PYRAMID)
    if own:
        patterns[1] = BY_HEAD if model_type == "llama" else LONGNET
        ra.patch_config(model.config, patterns[1], layers=[1])
    setattr(oracle.config, DENSE, {layer: ra.Pattern.parse(str(pattern)) for layer, pattern in patterns.items()})
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
