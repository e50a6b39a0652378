"""Models that are saved, sent to others and loaded again, and models that are loaded without a pattern."""

import copy
import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_ring_attention as ra
from hf_ring_attention.hf.config import warn_once
from tests.hf.test_images import seeing
from tests.support.ranks import TIMEOUT
from tests.support.tiny_models import VOCAB, tiny_model

LOGGER = "hf_ring_attention.hf.config"
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
    """Exact attention loads without the package, and a pattern does not; its config says what loads it."""
    models = {pattern: ra.patch_model(tiny_model("llama", "sdpa"), pattern) for pattern in ("window:4+2", "exact")}
    for number, model in enumerate(models.values()):
        model.save_pretrained(tmp_path / str(number))
    program = [sys.executable, "-c", LOAD, str(VOCAB), str(tmp_path / "0"), str(tmp_path / "1")]
    settings = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT, env=settings, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, exact, window = done.stdout.splitlines()
    assert 'attn_implementation="ring_dilated"` is not supported' in refused
    written = json.loads((tmp_path / "0" / "config.json").read_text())
    assert written["ring_dilated"]["hint"].startswith(
        "patterns of attention: `import hf_ring_attention` before from_pre"
    )
    for line, pattern, implementation in ((exact, "exact", "sdpa"), (window, "window:4+2", "ring_dilated")):
        found, squares = line.split()
        with torch.no_grad():
            expected = models[pattern](IDS, use_cache=False).logits.double().square().sum().item()
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
    assert "attn_implementation" not in {
        key: value for key, value in json.loads((tmp_path / "config.json").read_text()).items() if value is not None
    }
    with caplog.at_level(logging.WARNING, LOGGER):
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not caplog.records and again.config._attn_implementation == "sdpa"


def written_implementation(config):
    return config.to_dict().get("attn_implementation")


def test_layers_whose_own_windows_were_replaced_are_no_ordinary_attention():
    config = tiny_model("gemma3_text", "sdpa").config
    windows = [number for number, kind in enumerate(config.layer_types) if kind == "sliding_attention"]
    exact = ra.patch_config(copy.deepcopy(config), "exact")
    assert written_implementation(exact) is None, "its own windows stay"
    assert written_implementation(ra.patch_config(exact, "exact", layers=windows[:1])) == "ring_dilated"
    mistral = ra.patch_config(tiny_model("mistral", "sdpa", sliding_window=8).config, "exact", layers=[0])
    assert written_implementation(mistral) == "ring_dilated"
    text = ra.patch_model(seeing("llava", "sdpa"), "exact").config
    assert written_implementation(text) is None
    assert written_implementation(ra.patch_config(text, "window:4")) == {"text_config": "ring_dilated"}


# ---- no pattern


@pytest.fixture
def warnings_of(caplog):
    """Returns what a run logs; the warning comes once in a process."""

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
    (message,) = warnings_of(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="ring_dilated"))
    assert message.startswith("a model with attn_implementation='ring_dilated' has no pattern, so it computes exact")
    config = ra.patch_config(AutoConfig.from_pretrained(tmp_path), "window:4+2")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert model.config._attn_implementation == "ring_dilated" and not warnings_of(model)
    assert str(ra.Pattern.from_dict(model.config.ring_dilated["pattern"])) == "window:4+2"


@pytest.mark.parametrize("pattern", [None, "exact", "window:8"])
def test_a_patched_model_logs_nothing(pattern, warnings_of):
    assert not warnings_of(ra.patch_model(tiny_model("llama", "ring_dilated"), pattern))


def test_other_ranks_are_silent(warnings_of, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for rank, count in ((0, 1), (1, 0)):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        assert len(warnings_of(tiny_model("llama", "ring_dilated"))) == count
