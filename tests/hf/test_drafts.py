"""Layers that draft tokens (`use_mtp`), and models that run another number of layers than they were patched with."""

import pytest
import torch
from transformers import AutoModelForCausalLM, cache_utils, modeling_layers

import hf_ring_attention as ra
from hf_ring_attention.hf.model.config import warn_once
from tests.hf.alike import assert_alike, logits, refused
from tests.support.tiny_models import VOCAB, tiny_model, with_large_weights
from tests.support.tolerance import EXACT, distance

PATTERN = "pyramid:3,2,2,2"

needs_drafts = pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="this Transformers lacks use_mtp")


def ids(length=12):
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(5))


def greedy(model, **ways):
    return model.generate(ids(), max_new_tokens=14, do_sample=False, pad_token_id=0, **ways)


# ---- layers that draft tokens


def drafting(main, *_, **__):
    """The layers that draft tokens for a model, with large weights; head and embedding are the model's."""
    drafts = modeling_layers.MtpModel(main, main.config.num_mtp_layers)
    with_large_weights(drafts.layers)
    return drafts.eval()


def drafted(main):
    """The logits of two calls of the layers that draft tokens, of the tokens of a prompt and of two more."""
    drafts, cache = drafting(main), cache_utils.MtpCache(config=main.config.get_mtp_config())
    generator, found = torch.Generator().manual_seed(7), []
    for first, last in ((0, 12), (12, 14)):
        hidden = torch.randn(1, last - first, main.config.hidden_size, generator=generator, dtype=main.dtype)
        positions, mask = torch.arange(first + 1, last + 1)[None], torch.ones(1, last - first, dtype=torch.int64)
        with torch.no_grad():
            found.append(drafts(ids(14)[:, first:last], hidden, mask, positions, mtp_cache=cache)[1])
    return torch.cat(found)


#: Latent attention; grouped heads; and a window, in one of two layers that draft tokens.
DRAFTING = {
    "deepseek_v3": {"num_mtp_layers": 2},
    "glm4_moe": {"num_mtp_layers": 2},
    "mistral": {"num_mtp_layers": 2, "sliding_window": 5, "layer_types": ["full_attention"] * 2,
                "mtp_layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


@needs_drafts
@pytest.mark.parametrize(("model_type", "pattern"), [("deepseek_v3", PATTERN), ("mistral", "exact")])
def test_drafts_change_no_token(model_type, pattern, monkeypatch):
    monkeypatch.setattr(modeling_layers.MtpModel, "from_pretrained", drafting)
    model = ra.patch_model(tiny_model(model_type, "eager", **DRAFTING[model_type]), pattern)
    assert torch.equal(greedy(model, use_mtp=True), greedy(model))


@needs_drafts
@pytest.mark.parametrize("model_type", DRAFTING)
def test_drafts_are_those_of_eager_attention(model_type, caplog):
    """Drafting layers are also numbered from 0, but the patterns of the model's layers do not apply to them."""
    eager, patched, by_layer, sparse = (tiny_model(model_type, "eager", **DRAFTING[model_type]) for _ in range(4))
    expected = drafted(eager)
    warn_once.cache_clear()
    assert distance(drafted(ra.patch_model(patched)), expected) <= EXACT
    assert not [record for record in caplog.records if record.name.startswith("hf_ring_attention")]
    assert distance(drafted(ra.patch_model(by_layer, [PATTERN] * 2)), expected) <= EXACT
    assert distance(drafted(ra.patch_model(sparse, PATTERN)), expected) > 1e-3


# ---- another number of layers


def patched():
    model = tiny_model("llama", "eager", num_hidden_layers=4)
    return ra.patch_model(model, [PATTERN, "exact", "window:4+1", "window:3"])


def test_early_exit():
    """The first layers of a model draft tokens, each by its pattern; the model has all its layers afterwards."""
    model = patched()
    assert torch.equal(greedy(model, assistant_early_exit=2), greedy(model))
    assert model.config.num_hidden_layers == 4


def test_fewer_layers_keep_their_patterns(tmp_path):
    model = patched()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=2).eval().to(model.dtype)
    assert ra.patch_model(loaded).config.num_hidden_layers == 2
    expected = ra.patch_model(tiny_model("llama", "eager", num_hidden_layers=4), PATTERN)
    ra.patch_config(expected.config, "exact", layers=[1])
    for one in (model, expected):
        one.model.layers = one.model.layers[:2]
        one.config.num_hidden_layers = 2
    for one in (loaded, model):
        assert_alike(logits(one, ids(40)), logits(expected, ids(40)))


def test_a_layer_without_a_pattern_is_refused():
    """Of a list, which has a pattern for each layer; `layers=` leaves the others as they are."""
    model = ra.patch_model(tiny_model("llama", "eager", num_hidden_layers=3), PATTERN)
    model.config.ring_dilated = patched().config.ring_dilated
    del model.config.ring_dilated["layers"]["2"]
    refused(r"expected a pattern for layer 2, found patterns for layers \[0, 1, 3\] only", model, ids())
    one = tiny_model("llama", "eager", num_hidden_layers=3)
    ra.patch_config(one.config, "window:3", layers=[0])
    rest = ra.patch_model(tiny_model("llama", "eager", num_hidden_layers=3), ["window:3", "exact", "exact"])
    assert torch.equal(logits(ra.patch_model(one), ids(40)), logits(rest, ids(40)))


def test_patterns_by_layer_of_layers_without_numbers_are_refused():
    """The layers of zamba share one attention, which took the pattern of all layers."""
    model = ra.patch_model(tiny_model("zamba", "eager"))
    ra.patch_config(model.config, "window:3", layers=[1, 3])
    refused("ZambaAttention: expected one pattern for all layers, got patterns by layer", model, ids())
