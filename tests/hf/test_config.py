"""Patterns in a config: saved and loaded with the model, and never passed over without a word."""

import copy
import json
import logging
import pickle

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, LlamaConfig, LlamaForCausalLM, T5Config

import hf_ring_attention as ra
from hf_ring_attention.hf.config import warn_once
from tests.support.tiny_models import VOCAB, tiny_model

PATTERN = ra.Pattern.pyramid(4, levels=2, ratio=2, sinks=1)
LOGGER = "hf_ring_attention.hf.config"


def tokens():
    return torch.randint(3, VOCAB, (2, 40))


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.fixture
def saved(tmp_path):
    """A model with a pattern, and the folder where it is saved."""
    model = ra.patch_model(tiny_model("llama", "sdpa"), PATTERN)
    model.save_pretrained(tmp_path / "first")
    return model.eval(), tmp_path


def test_a_saved_pattern_is_computed_by_the_model_that_is_loaded(saved, caplog):
    model, folder = saved
    ids = tokens()
    again = AutoModelForCausalLM.from_pretrained(folder / "first").eval()
    assert again.config._attn_implementation == "ring_dilated"
    assert again.state_dict().keys() == tiny_model("llama", "sdpa").state_dict().keys()
    assert torch.equal(logits(again, ids), logits(model, ids))
    # What was loaded and saved without a forward pass in between is the same.
    AutoModelForCausalLM.from_pretrained(folder / "first").save_pretrained(folder / "second")
    third = AutoModelForCausalLM.from_pretrained(folder / "second").eval()
    assert torch.equal(logits(third, ids), logits(model, ids))
    assert not [record for record in caplog.records if record.name == LOGGER]


def test_a_model_is_saved_as_what_it_computes(saved):
    """And not as what it computed once."""
    model, folder = saved
    ids = tokens()
    for number, (implementation, key) in enumerate([("sdpa", None), ("ring_dilated", "ring_dilated"), ("eager", None)]):
        for changed in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            changed.set_attn_implementation(implementation)
            changed.save_pretrained(folder / str(number))
            written = json.loads((folder / str(number) / "config.json").read_text())
            assert written.get("attn_implementation") == key and written["ring_dilated"]
            again = AutoModelForCausalLM.from_pretrained(folder / str(number)).eval()
            assert torch.equal(logits(again, ids), logits(changed, ids)) == (implementation != "eager")
            assert (again.config._attn_implementation == "ring_dilated") == (implementation == "ring_dilated")
    del model.config.ring_dilated
    model.save_pretrained(folder / "exact")
    assert json.loads((folder / "exact" / "config.json").read_text()).get("attn_implementation") is None


def test_configs_with_a_pattern_are_compared_copied_and_written_as_others_are():
    config = ra.patch_config(tiny_model("llama", "sdpa").config, PATTERN)
    assert config == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))
    assert config.to_dict()["attn_implementation"] == "ring_dilated" and "ring_dilated" in repr(config)
    other = ra.patch_config(copy.deepcopy(config), ra.Pattern.exact())
    assert other.ring_dilated != config.ring_dilated, "a copy is changed by itself"


def test_another_implementation_that_is_asked_for_is_used_and_said(saved, caplog):
    model, folder = saved
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, LOGGER):
        exact = AutoModelForCausalLM.from_pretrained(folder / "first", attn_implementation="eager").eval()
    assert caplog.text.count("computes attention by 'eager', where the pattern has no effect") == 1
    ids = tokens()
    assert not torch.allclose(logits(exact, ids), logits(model, ids), rtol=1e-2)


def test_a_pattern_set_on_a_loaded_model_is_computed():
    model, want, ids = tiny_model("llama", "sdpa"), ra.patch_model(tiny_model("llama", "sdpa"), PATTERN), tokens()
    exact = logits(model, ids)
    ra.patch_config(model.config, PATTERN)
    assert torch.equal(logits(model, ids), logits(want, ids))
    assert not torch.allclose(logits(model, ids), exact, rtol=1e-2)


def test_patch_config_refuses_models_that_it_cannot_make_compute_a_pattern():
    for config in (BloomConfig(), T5Config()):
        before = config.to_dict()
        with pytest.raises((ValueError, NotImplementedError), match=r"(Bloom|T5)Model (does not call|attends from)"):
            ra.patch_config(config, PATTERN)
        assert config.to_dict() == before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (PATTERN.to_dict(), r"'pattern' or 'layers', got keys \['branches', 'overlap', 'phase_by'\]"),
        ({"layers": {0: PATTERN.to_dict()}}, "layer number, written as text"),
        ({"layers": {"2": PATTERN.to_dict()}}, r"a config with 2 layers, got \['2'\]"),
        ({"layers": [PATTERN.to_dict()]}, "'layers' must be a dict"),
        ({"pattern": {}}, r"missing keys \['branches'\]"),
        ({"pattern": None}, "expected a dict, got None"),
        ({"layers": {"²": PATTERN.to_dict()}}, "layer number, written as text"),
        ({"layers": {"1" * 5000: PATTERN.to_dict()}}, "layer number, written as text"),
        ({"pattern": {"branches": [{"type": "window", "length": 2**63}]}}, "length must be at most"),
        ({"pattern": PATTERN.to_dict(), "layer": {}}, r"got keys \['layer', 'pattern'\]"),
        ({"hint": "import hf_ring_attention"}, r"got keys \[\]"),
        ({}, r"got keys \[\]"),
        ([PATTERN.to_dict()], "a dict with 'pattern' or 'layers'"),
        ("pyramid:4,2", "a dict with 'pattern' or 'layers'"),
    ],
    ids=str,
)
def test_a_setting_that_is_not_understood_is_refused(settings, said, tmp_path):
    said = rf"config\.ring_dilated must be as ra\.patch_config writes it.*{said}"
    model = tiny_model("llama", "ring_dilated")
    model.config.ring_dilated = settings
    with pytest.raises(ValueError, match=said):
        logits(model, tokens())
    with pytest.raises(ValueError, match=said):
        ra.patch_model(model)
    with pytest.raises(ValueError, match=said):
        ra.patch_config(model.config, PATTERN)
    # It is refused when the model is made, whatever its implementation; JSON has no integer keys.
    if settings != {"layers": {0: PATTERN.to_dict()}}:
        model.config.save_pretrained(tmp_path)
        for implementation in ("ring_dilated", "sdpa"):
            with pytest.raises(ValueError, match=said):
                AutoModelForCausalLM.from_config(
                    AutoConfig.from_pretrained(tmp_path), attn_implementation=implementation
                )


def test_settings_are_read_again_when_they_change():
    ids = tokens()
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                                         num_attention_heads=2, attn_implementation="ring_dilated")).eval()  # fmt: skip
    exact = logits(model, ids)
    ra.patch_config(model.config, PATTERN)
    dilated = logits(model, ids)
    model.config.ring_dilated["layers"] = {"0": ra.Pattern.exact().to_dict()}
    mixed = logits(model, ids)
    del model.config.ring_dilated
    assert torch.equal(logits(model, ids), exact)
    assert not torch.equal(dilated, exact) and not torch.equal(mixed, dilated) and not torch.equal(mixed, exact)
