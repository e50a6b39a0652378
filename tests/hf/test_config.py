"""Patterns in a config: saved, shared and loaded with the model, never passed over without a word; and models without one."""

import copy
import json
import logging
import os
import pickle
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, LlamaConfig, T5Config

import hf_ring_attention as ra
from hf_ring_attention.hf.model.config import warn_once
from tests.hf.alike import logits, refused
from tests.hf.test_images import seeing
from tests.support.ranks import TIMEOUT
from tests.support.tiny_models import VOCAB, tiny_model

PATTERN = ra.Pattern.pyramid(4, levels=2, ratio=2, sinks=1)
TEXT = str(PATTERN)
LOGGER = "hf_ring_attention.hf.model.config"


def tokens():
    return torch.randint(3, VOCAB, (2, 40))


def implementation_of(model):
    return model.config.get_text_config()._attn_implementation


def written(config):
    return config.to_dict().get("attn_implementation")


def loaded(folder, **settings):
    return AutoModelForCausalLM.from_pretrained(folder, **settings).eval()


@pytest.fixture
def saved(tmp_path):
    """A model with a pattern, and the folder where it is saved."""
    model = ra.patch_model(tiny_model("llama", "sdpa"), PATTERN)
    model.save_pretrained(tmp_path / "first")
    return model.eval(), tmp_path


def test_a_saved_pattern_is_computed_by_the_model_that_is_loaded(saved, caplog):
    """Also if it was loaded and saved without a forward pass in between."""
    model, folder = saved
    ids, again = tokens(), loaded(folder / "first")
    assert implementation_of(again) == "ring_dilated"
    assert again.state_dict().keys() == tiny_model("llama", "sdpa").state_dict().keys()
    loaded(folder / "first").save_pretrained(folder / "second")
    for one in (again, loaded(folder / "second")):
        assert torch.equal(logits(one, ids), logits(model, ids))
    assert not [record for record in caplog.records if record.name == LOGGER]


def test_a_model_is_saved_as_what_it_computes(saved):
    """Its config follows the current implementation, not an earlier one."""
    model, folder = saved
    ids = tokens()
    for implementation, key in (("sdpa", None), ("ring_dilated", "ring_dilated"), ("eager", None)):
        for changed in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            changed.set_attn_implementation(implementation)
            changed.save_pretrained(folder / implementation)
            kept = json.loads((folder / implementation / "config.json").read_text())
            assert kept.get("attn_implementation") == key and kept["ring_dilated"]
            again = loaded(folder / implementation)
            assert torch.equal(logits(again, ids), logits(changed, ids)) == (implementation != "eager")
            assert (implementation_of(again) == "ring_dilated") == (implementation == "ring_dilated")
    del model.config.ring_dilated
    model.save_pretrained(folder / "exact")
    assert json.loads((folder / "exact" / "config.json").read_text()).get("attn_implementation") is None


def test_configs_with_a_pattern_are_compared_copied_and_written_as_others_are():
    config = ra.patch_config(tiny_model("llama", "sdpa").config, PATTERN)
    assert config == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))
    assert written(config) == "ring_dilated" and "ring_dilated" in repr(config)
    other = ra.patch_config(copy.deepcopy(config), ra.Pattern.exact())
    assert other.ring_dilated != config.ring_dilated, "a copy is changed by itself"


def test_another_implementation_that_is_asked_for_is_used_and_said(saved, caplog):
    model, folder = saved
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, LOGGER):
        exact = loaded(folder / "first", attn_implementation="eager")
    assert caplog.text.count("computes attention by 'eager', where the pattern has no effect") == 1
    ids = tokens()
    assert not torch.allclose(logits(exact, ids), logits(model, ids), rtol=1e-2)


def test_patch_config_refuses_models_that_it_cannot_make_compute_a_pattern():
    for config in (BloomConfig(), T5Config()):
        before = config.to_dict()
        said = r"(Bloom|T5)Model (does not call|attends from)"
        refused(said, ra.patch_config, config, PATTERN, error=(ValueError, NotImplementedError))
        assert config.to_dict() == before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"branches": []}, r"'pattern' or 'layers', got keys \['branches'\]"),
        ({"layers": {0: TEXT}}, "layer number, written as text"),
        ({"layers": [TEXT]}, "'layers' must be a dict"),
        ({"pattern": {"branches": []}}, "pattern must be a Pattern, or its text such as .*, got {'branches'"),
        ({"pattern": "windw:4"}, "pattern 'windw:4' is not known: did you mean 'window:4'"),
        ({"pattern": TEXT, "layers": {"0": None}}, "pattern must be a Pattern, or its text such as .*, got None"),
        ({"layers": {"²": TEXT}}, "layer number, written as text"),
        ({"layers": {"1" * 5000: TEXT}}, "layer number, written as text"),
        ({"pattern": f"window:{2**63}"}, "length must be at most"),
        ({"hint": "import hf_ring_attention"}, r"got keys \[\]"),
        ([TEXT], "a dict with 'pattern' or 'layers'"),
    ],
    ids=str,
)
def test_a_setting_that_is_not_understood_is_refused(settings, said, tmp_path):
    said = rf"config\.ring_dilated must be as ra\.patch_config writes it.*{said}"
    model = tiny_model("llama", "ring_dilated")
    model.config.ring_dilated = settings
    refused(said, logits, model, tokens())
    refused(said, ra.patch_model, model)
    refused(said, ra.patch_config, model.config, PATTERN)
    # It is refused when the model is made, whatever its implementation; JSON lacks integer keys.
    if settings != {"layers": {0: TEXT}}:
        model.config.save_pretrained(tmp_path)
        for implementation in ("ring_dilated", "sdpa"):
            config = AutoConfig.from_pretrained(tmp_path)
            refused(said, AutoModelForCausalLM.from_config, config, attn_implementation=implementation)


def test_settings_are_read_again_when_they_change():
    """A pattern that is set on a loaded model is computed, without `patch_model`."""
    ids, model = tokens(), tiny_model("llama", "ring_dilated")
    exact = logits(model, ids)
    ra.patch_config(model.config, PATTERN)
    dilated = logits(model, ids)
    assert torch.equal(dilated, logits(ra.patch_model(tiny_model("llama", "sdpa"), PATTERN), ids))
    model.config.ring_dilated["layers"] = {"0": "exact"}
    mixed = logits(model, ids)
    second = type(model)(model.config).eval()  # made from a config that the first one's pattern is in
    second.load_state_dict(model.state_dict())
    assert torch.equal(logits(ra.patch_model(second), ids), mixed)
    del model.config.ring_dilated
    assert torch.equal(logits(model, ids), exact)
    assert not torch.allclose(dilated, exact, rtol=1e-2)
    assert not torch.equal(mixed, dilated) and not torch.equal(mixed, exact)


IDS = torch.arange(3, 43)[None] % VOCAB
#: Loads folders, and prints the implementation of each model and the sum of its logits' squares: first where any import of the
#: package fails, with the error for a folder that does not load, and then the first folder with the package.
LOAD = """
import sys, torch
sys.modules["hf_ring_attention"] = None
from transformers import AutoModelForCausalLM

def show(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.arange(3, 43)[None] % int(sys.argv[1]), use_cache=False).logits
    print(model.config._attn_implementation, logits.double().square().sum().item())

for folder in sys.argv[2:]:
    try:
        show(folder)
    except ValueError as error:
        print(" ".join(str(error).split()))
del sys.modules["hf_ring_attention"]
import hf_ring_attention
show(sys.argv[2])
"""


def test_a_saved_model_in_another_program(tmp_path):
    """Exact attention loads without the package, and a pattern does not; its config names the package that loads it."""
    models = {pattern: ra.patch_model(tiny_model("llama", "sdpa"), pattern) for pattern in ("window:4+2", "exact")}
    for number, model in enumerate(models.values()):
        model.save_pretrained(tmp_path / str(number))
    program = [sys.executable, "-c", LOAD, str(VOCAB), str(tmp_path / "0"), str(tmp_path / "1")]
    settings = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT, env=settings, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, exact, window = done.stdout.splitlines()
    assert 'attn_implementation="ring_dilated"` is not supported' in refused
    hint = json.loads((tmp_path / "0" / "config.json").read_text())["ring_dilated"]["hint"]
    assert hint.startswith("patterns of attention: `import hf_ring_attention` before from_pre")
    for line, pattern, implementation in ((exact, "exact", "sdpa"), (window, "window:4+2", "ring_dilated")):
        found, squares = line.split()
        expected = logits(models[pattern], IDS).double().square().sum().item()
        assert found == implementation and float(squares) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "patch",
    [
        lambda model: ra.patch_model(model, "exact"),
        lambda model: ra.patch_model(model, ra.Pattern.by_kv_head(["exact"] * 2)),
        lambda model: (ra.patch_config(model.config, "window:4"), ra.patch_model(model, "exact"))[1],
        lambda model: (ra.patch_model(model, "exact"), ra.patch_config(model.config, "exact", layers=[1]))[0],
    ],
    ids=["exact", "by head", "exact after a window", "layer by layer"],
)
def test_exact_attention_in_all_layers_is_saved_as_any_other_model(patch, tmp_path, caplog):
    model = patch(tiny_model("llama", "sdpa")).eval()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()).get("attn_implementation") is None
    with caplog.at_level(logging.WARNING, LOGGER):
        assert implementation_of(loaded(tmp_path)) == "sdpa"
    assert not caplog.records


def test_layers_whose_own_windows_were_replaced_are_no_ordinary_attention():
    config = tiny_model("gemma3_text", "sdpa").config
    windows = [number for number, kind in enumerate(config.layer_types) if kind == "sliding_attention"]
    exact = ra.patch_config(copy.deepcopy(config), "exact")
    assert written(exact) is None, "the model's windows stay"
    assert written(ra.patch_config(exact, "exact", layers=windows[:1])) == "ring_dilated"
    mistral = ra.patch_config(tiny_model("mistral", "sdpa", sliding_window=8).config, "exact", layers=[0])
    assert written(mistral) == "ring_dilated"
    text = ra.patch_model(seeing("llava", "sdpa"), "exact").config
    assert written(text) is None
    assert written(ra.patch_config(text, "window:4")) == {"text_config": "ring_dilated"}


# ---- no pattern


@pytest.fixture
def warnings_of(caplog):
    """Runs a model and returns its warnings, even those that come once in a process."""

    def run(model):
        caplog.clear()
        warn_once.cache_clear()
        with caplog.at_level(logging.WARNING, LOGGER):
            model(IDS)
            model(IDS)
        return caplog.messages

    yield run
    warn_once.cache_clear()


def test_a_model_without_a_pattern_says_once_that_it_attends_exactly(warnings_of, tmp_path):
    tiny_model("llama", "sdpa").save_pretrained(tmp_path)
    (message,) = warnings_of(loaded(tmp_path, attn_implementation="ring_dilated"))
    assert message.startswith("a model with attn_implementation='ring_dilated' has no pattern, so it computes exact")
    model = loaded(tmp_path, config=ra.patch_config(AutoConfig.from_pretrained(tmp_path), "window:4+2"))
    assert implementation_of(model) == "ring_dilated" and not warnings_of(model)
    assert model.config.ring_dilated["pattern"] == "window:4+2"
    for pattern in (None, "exact", "window:8"):
        assert not warnings_of(ra.patch_model(tiny_model("llama", "ring_dilated"), pattern))


def test_other_ranks_are_silent(warnings_of, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for rank, count in ((0, 1), (1, 0)):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        assert len(warnings_of(tiny_model("llama", "ring_dilated"))) == count


def test_a_list_has_a_pattern_for_each_layer():
    listed, one_by_one = (LlamaConfig(num_hidden_layers=3) for _ in range(2))
    ra.patch_config(listed, ["exact", ra.Pattern.window(64), "window:64+4"])
    for number, text in enumerate(("exact", "window:64", "window:64+4")):
        ra.patch_config(one_by_one, text, layers=[number])
    assert listed.ring_dilated == one_by_one.ring_dilated
    refused("one pattern for each of 3 layers, got 2", ra.patch_config, listed, ["exact", "exact"])
    refused("leave layers= out", ra.patch_config, listed, ["exact"] * 3, layers=[0, 1, 2])


def test_a_pattern_of_layers_leaves_the_others_exact_if_fewer_layers_run():
    """Patterns of layers that do not run do not stand for layers that do."""
    config = LlamaConfig(num_hidden_layers=4)
    ra.patch_config(config, "window:64", layers=[2, 3])
    config.num_hidden_layers = 2
    ra.patch_config(config, "window:32", layers=[0])
    assert config.ring_dilated["pattern"] == "exact" and {*config.ring_dilated["layers"]} == {"0", "2", "3"}
