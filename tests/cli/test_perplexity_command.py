"""The perplexity command, on a tiny model."""

import itertools
import json
import math
import re
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ring_attention as ra
from hf_ring_attention.evaluation import texts
from hf_ring_attention.evaluation.lengths import figures_by_length
from hf_ring_attention.evaluation.texts import tokenized_text
from tests.support.checkpoints import save_calibration, save_checkpoint_of_words
from tests.support.remote_code import save_with_code


@pytest.fixture
def model(tmp_path):
    """The folder of a tiny model with a tokenizer of words."""
    return save_checkpoint_of_words(tmp_path)


def loaded(model):
    return [kind.from_pretrained(model / "model") for kind in (AutoModelForCausalLM, AutoTokenizer)]


def test_figures_are_those_of_the_library(model, command):
    words = f"perplexity {model / 'model'} {model / 'fox.txt'} {model / 'dog.txt'} --tokens 300 --pattern exact"
    rows = json.loads(command(f"{words} --pattern window:4+1 --json"))["rows"]
    fox, dog = str(model / "fox.txt"), str(model / "dog.txt")
    kinds = [*itertools.product((fox, dog, "all"), ("exact", "window:4+1"))]
    assert [(row["text"], row["pattern"]) for row in rows] == kinds
    checkpoint, tokenizer = loaded(model)
    sums = {"exact": [0, 0], "window:4+1": [0, 0]}
    for row in rows[:4]:
        with open(row["text"]) as text:
            ids = tokenizer(text.read(), return_tensors="pt").input_ids[:, :300]
        report = ra.perplexity(ra.patch_model(checkpoint, row["pattern"]), ids)
        assert (row["nll"], row["tokens"]) == (pytest.approx(report.nll), ids.shape[1] - 1)
        assert row["perplexity"] == pytest.approx(report.perplexity)
        sums[row["pattern"]] = [x + y for x, y in zip(sums[row["pattern"]], (report.nll, report.tokens))]
    for row, (nll, tokens) in zip(rows[4:], sums.values(), strict=True):
        assert row["perplexity"] == pytest.approx(math.exp(nll / tokens))
    assert rows[0]["perplexity"] != rows[1]["perplexity"]
    assert rows[1]["share_of_exact_flops"] < rows[0]["share_of_exact_flops"] == 1


def test_a_change_is_shown_from_the_first_of_several_patterns(model, command):
    words = f"perplexity {model / 'model'} {model / 'fox.txt'} --tokens 90 --pattern exact"
    printed = command(words)
    assert "perplexity" in printed and not re.search(r"\bchange\b", printed) and "+0.0%" not in printed
    several = command(f"{words} --pattern window:4")
    assert re.search(r"\bchange\b", several) and several.count("%") == printed.count("%") + 3


@patch("huggingface_hub.constants.HF_HUB_OFFLINE", True)
def test_a_misspelt_model_is_not_answered_with_options_that_there_are_not(model, refusal):
    for words in ("perplexity tyni {}", "estimate --model tyni --tokens 64", "calibrate --model tyni --text {}"):
        error = refusal(words.format(model / "fox.txt"))
        assert "there is no folder 'tyni'" in error and "--heads" not in error
    attention = "or, for attention alone, give --heads, --kv-heads and --head-dim"
    assert attention in refusal("explain --tokens 64 --ranks 2 --model tyni")


def test_patterns_replace_the_one_that_a_model_was_saved_with_which_is_own(model, command):
    """A pattern for each layer, by the file of its calibration."""
    checkpoint, tokenizer = loaded(model)
    file = save_calibration(model / "chosen.json", {0: "window:4+1", 1: "window:2"})
    ra.patch_model(checkpoint, ra.Calibration.load(file)).save_pretrained(model / "calibrated")
    tokenizer.save_pretrained(model / "calibrated")
    rows = {}
    for name, more in (("model", ""), ("calibrated", "--pattern own")):
        words = f"perplexity {model / name} {model / 'fox.txt'} --tokens 300 --pattern exact --pattern {file} {more}"
        rows[name] = [{**row, "seconds": 0} for row in json.loads(command(f"{words} --json"))["rows"]]
    *replaced, own = rows["calibrated"]
    assert rows["model"] == replaced
    assert own == {**replaced[1], "pattern": "own"}
    assert own["nll"] != replaced[0]["nll"]
    share = ra.Calibration.load(file).share("flops", 300)
    assert [row["share_of_exact_flops"] for row in rows["model"]] == [1, pytest.approx(share)]


def test_the_picture_has_the_perplexity_of_each_length(model, command, saved_figures):
    words = f"perplexity {model / 'model'} {model / 'fox.txt'} --tokens 128,64 --pattern exact --pattern window:4+1"
    rows = json.loads(command(f"{words} --json --plot {model / 'a.png'}"))["rows"]
    lines = {line.get_label(): dict(line.get_xydata()) for line in saved_figures[0].axes[0].get_lines()}
    assert lines.keys() == {"exact", "window:4+1"} and (model / "a.png").stat().st_size > 5000
    assert all(lines[row["pattern"]][row["length"]] == row["perplexity"] for row in rows) and len(rows) == 4


def test_what_cannot_be_measured_is_refused_before_anything_is(model, refusal, monkeypatch):
    """And what fails inside is not answered with the help."""

    def fails(*_, **__):
        raise ValueError("layer 1 is broken")

    monkeypatch.setattr("hf_ring_attention.evaluation.lengths.perplexity", fails)
    words = ["perplexity", model / "model", model / "dog.txt"]
    assert refusal(words) == "hf-ring-attention perplexity: layer 1 is broken"
    of_three = save_calibration(model / "three.json", {0: "exact", 1: "exact", 2: "exact"})
    stride = "argument --stride: it needs --tokens, and may be at most the shortest of them"
    for options, message in (
        ("--stride 9", stride),
        ("--tokens 8,64 --stride 9", stride),
        ("--pattern own", "argument --pattern: own: the model's config has no pattern"),
        ("--pattern exact --pattern kv0-4=window:4;kv5=exact", "is for 6 key/value heads"),
        (f"--pattern exact --pattern {of_three}", "is of a model of 3 layers"),
        ("--tokens 64 --plot a.png", "argument --plot: it needs two or more lengths of --tokens"),
    ):
        assert message in refusal([*words, *options.split()])
    config = model / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 100}))
    remedy = "argument --tokens: the model has positions for 100 tokens, and rows have {}: take 100 tokens at most"
    for options, length in (([], 240), (["--tokens", "64,128"], 128)):
        assert remedy.format(length) in refusal([*words, *options])
    for text, opening, message in (("fox", None, "2 tokens or more are needed, got 1"), ("", [3, 4], "3 .* got 2")):
        (model / "short.txt").write_text(text)
        opening_tokens = patch.object(texts, "opening_tokens", lambda tokenizer, ids=opening: torch.tensor(ids))
        with opening_tokens if opening else nullcontext():
            assert re.search(message, refusal(["perplexity", model / "model", model / "short.txt"]))


def test_lengths_have_rows_of_their_own(model, command):
    """Over the first --text-tokens of each text, by default as many as the greatest length."""
    checkpoint, tokenizer = loaded(model)
    file, names = str(model / "dog.txt"), ("exact", "window:4+1")
    words = f"perplexity {model / 'model'} {file} --pattern exact window:4+1"
    patterns = {name: ra.Pattern.parse(name) for name in names}
    strided = "--tokens 16,50 --stride 10 --text-tokens 93"
    for options, tokens, stride in (("--tokens 16 50", 50, None), (strided, 93, 10)):
        rows = json.loads(command(f"{words} {options} --json"))["rows"]
        texts = {file: tokenized_text((model / "dog.txt").read_text(), tokenizer, tokens)}
        figures = figures_by_length(checkpoint, texts, patterns, [16, 50], stride)
        found = {(row["length"], row["pattern"]): (row["nll"], row["tokens"], row["bits_per_byte"]) for row in rows}
        assert list(found) == [(length, name) for length in (16, 50) for name in names]
        for one in figures:
            expected = one.nll, one.tokens, one.bits_per_byte
            assert found[one.length, one.pattern] == pytest.approx(expected, rel=1e-6)
        assert len({row["share_of_exact_flops"] for row in rows}) == 3
    printed = command(f"{words} --tokens 16,50")
    assert re.search(r"^ *text +length +pattern", printed, re.MULTILINE) and printed.count("+0.0%") == 2


def test_a_row_has_the_length_that_was_scored(model, command):
    """A text that is shorter than several lengths is one row of all its tokens."""
    words = f"perplexity {model / 'model'} {model / 'fox.txt'} {model / 'dog.txt'} --pattern exact --tokens"
    fox, dog = (
        len(AutoTokenizer.from_pretrained(model / "model")((model / name).read_text()).input_ids)
        for name in ("fox.txt", "dog.txt")
    )
    assert dog < fox
    rows = json.loads(command(f"{words} 64,{fox},4k,8k --json"))["rows"]
    lengths = [("fox.txt", 64), ("fox.txt", fox), ("dog.txt", 64), ("dog.txt", dog), ("all", 64), ("all", fox)]
    assert [(row["text"].rpartition("/")[2], row["length"]) for row in rows] == lengths
    assert [row["tokens"] for row in rows[1::2]] == [fox - 1, dog - 1, fox + dog - 2]
    assert re.search(rf"all +{fox} +exact", command(f"{words} 4k"))


def test_code_that_a_model_brings_runs_only_when_it_is_trusted(tmp_path, monkeypatch, command, refusal):
    """And nobody is asked on standard input, which a job does not have."""
    monkeypatch.setattr("builtins.input", None)
    ran = save_with_code(tmp_path, monkeypatch)
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 9)
    words = ["perplexity", tmp_path / "model", tmp_path / "text.txt", "--pattern", "window:8", "--json"]
    assert "--trust-remote-code" in refusal(words) and not ran.exists()
    rows = json.loads(command([*words, "--trust-remote-code"]))["rows"]
    assert ran.exists() and rows[0]["perplexity"] > 1
