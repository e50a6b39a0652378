"""Recipes take the file of a calibration as their pattern, and a run goes on under the patterns that it began with alone."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import hf_ring_attention as ra
from tests.support.recipe_runs import launch, run, save_inputs

PATTERN, OTHER = "pyramid:32,3,2", "window:16+2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, a text, and two calibrations of it."""
    folder = save_inputs(tmp_path_factory.mktemp("calibrated"), width=64)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="ring_dilated")
    ids = torch.arange(3, 131)
    for name, menu in {"one": (PATTERN, OTHER), "other": (OTHER, "window:8+2")}.items():
        chosen = ra.calibrate(model, [ids], 0.9, menu, refinements=0, progress=False)
        chosen.save(folder / f"{name}.json")
        assert {str(one) for heads in chosen.of_heads().values() for one in heads} == {menu[0]}
    return folder


def test_perplexity_under_a_calibration_is_that_of_its_patterns(folder, tmp_path):
    options = ["--model", folder / "model", "--text", folder / "text.txt", "--tokens", 600]
    # What follows a calibration must not keep its layers.
    patterns = ["--patterns", folder / "one.json", OTHER, PATTERN, folder / "other.json"]
    run("perplexity.py", *options, *patterns, "--json", tmp_path / "figures.json")
    one, other, uniform, uniform_other = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert one["nll"] == uniform["nll"] != other["nll"] == uniform_other["nll"]
    assert one["flop_share"] == pytest.approx(uniform["flop_share"], rel=0.02)


def test_fine_tuning_keeps_the_calibrated_patterns(folder, tmp_path):
    options = ["--model", folder / "model", "--text", folder / "text.txt", "--seq-len", 250, "--output", tmp_path]
    options += ["--steps", 1, "--save-every", 1]
    run("finetune.py", *options, "--pattern", folder / "one.json")
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    chosen = ra.Calibration.load(folder / "one.json")
    assert config.ring_dilated["layers"] == chosen.texts_of_layers
    done = launch("finetune.py", *options, "--resume", "--pattern", folder / "other.json")
    assert done.returncode and "settings (pattern {" in done.stderr


def test_patterns_of_another_model_are_refused_in_one_line(folder, tmp_path):
    options = ["--text", folder / "text.txt", "--seq-len", 250, "--output", tmp_path / "run", "--model"]
    config = GPT2Config(n_layer=1, n_head=4, n_embd=32, vocab_size=256, n_positions=128)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(tmp_path)
    by_head, of_five = "kv0-3=window:16+2;kv4=exact", "the pattern kv0-3=window:16+2;kv4=exact is for 5 key/value heads"
    of_two = "the calibration is of a model of 2 layers, and GPT2LMHeadModel has 1"
    for pattern, model, message in ((by_head, folder / "model", of_five), (folder / "one.json", tmp_path, of_two)):
        done = launch("finetune.py", *options, model, "--pattern", pattern)
        assert done.returncode and message in done.stderr and "Traceback" not in done.stderr
