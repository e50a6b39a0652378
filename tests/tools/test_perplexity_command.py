"""The perplexity command, on a tiny model."""

import json
import math
import re

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ring_attention as ra
from hf_ring_attention.tools import cli
from tests.support.checkpoints import save_calibration, save_checkpoint_of_words
from tests.support.remote_code import save_with_code


@pytest.fixture
def model(tmp_path):
    """The folder of a tiny model with a tokenizer of words."""
    return save_checkpoint_of_words(tmp_path)


def run(words, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words.split())
    assert not end.value.code
    return capsys.readouterr().out


def test_figures_are_those_of_the_library(model, capsys):
    words = f"perplexity {model / 'model'} {model / 'fox.txt'} {model / 'dog.txt'} --tokens 300 --pattern exact"
    rows = json.loads(run(f"{words} --pattern window:4+1 --device cpu --json", capsys))["rows"]
    fox, dog = str(model / "fox.txt"), str(model / "dog.txt")
    assert [(row["text"], row["pattern"]) for row in rows] == [
        (text, pattern) for text in (fox, dog, "all") for pattern in ("exact", "window:4+1")
    ]
    checkpoint = AutoModelForCausalLM.from_pretrained(model / "model")
    tokenizer = AutoTokenizer.from_pretrained(model / "model")
    by_pattern = {}
    for row in rows[:4]:
        with open(row["text"]) as text:
            ids = tokenizer(text.read(), return_tensors="pt").input_ids[:, :300]
        report = ra.perplexity(ra.patch_model(checkpoint, row["pattern"]), ids)
        assert (row["nll"], row["tokens"]) == (pytest.approx(report.nll), ids.shape[1] - 1)
        assert row["perplexity"] == pytest.approx(report.perplexity)
        nll, tokens = by_pattern.get(row["pattern"], (0, 0))
        by_pattern[row["pattern"]] = nll + report.nll, tokens + report.tokens
    for row in rows[4:]:
        nll, tokens = by_pattern[row["pattern"]]
        assert row["perplexity"] == pytest.approx(math.exp(nll / tokens))
    assert rows[0]["perplexity"] != rows[1]["perplexity"]
    assert rows[1]["share_of_exact_flops"] < rows[0]["share_of_exact_flops"] == 1


def test_a_change_is_shown_from_the_first_of_several_patterns(model, capsys):
    words = f"perplexity {model / 'model'} {model / 'fox.txt'} --tokens 90 --device cpu --pattern exact"
    printed = run(words, capsys)
    assert "perplexity" in printed and not re.search(r"\bchange\b", printed) and "+0.0%" not in printed
    several = run(f"{words} --pattern window:4", capsys)
    assert re.search(r"\bchange\b", several) and several.count("%") == printed.count("%") + 3


def test_a_misspelt_model_is_not_answered_with_options_that_there_are_not(model, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for words in (
        f"perplexity tyni {model / 'fox.txt'}",
        "estimate --model tyni --seq-len 64",
        f"evaluate --model tyni --tasks perplexity --output {model}",
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(words.split())
        error = capsys.readouterr().err
        assert end.value.code == 2 and "there is no folder 'tyni'" in error and "--heads" not in error
    with pytest.raises(SystemExit):
        cli.main("explain --tokens 64 --ranks 2 --model tyni".split())
    assert "or, for attention alone, give --heads, --kv-heads and --head-dim" in capsys.readouterr().err


def test_what_fails_inside_is_not_answered_with_the_help(model, capsys, monkeypatch):
    def fails(*_):
        raise ValueError("layer 1 is broken")

    monkeypatch.setattr("hf_ring_attention.evaluation.perplexity.perplexity", fails)
    with pytest.raises(SystemExit) as end:
        cli.main(f"perplexity {model / 'model'} {model / 'fox.txt'} --tokens 90 --device cpu".split())
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith("hf-ring-attention perplexity: layer 1 is broken\n")


def test_a_pattern_replaces_those_that_layers_were_saved_with(model, capsys):
    """That of a calibration, by its file, too."""
    loaded, tokenizer = (kind.from_pretrained(model / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    file = save_calibration(model / "chosen.json", {0: "window:4+1", 1: "window:2"})
    ra.patch_model(loaded, ra.Calibration.load(file)).save_pretrained(model / "calibrated")
    tokenizer.save_pretrained(model / "calibrated")
    rows = {}
    for name in ("model", "calibrated"):
        words = f"perplexity {model / name} {model / 'fox.txt'} --tokens 300 --pattern exact --pattern {file}"
        rows[name] = [{**row, "seconds": 0} for row in json.loads(run(f"{words} --device cpu --json", capsys))["rows"]]
    assert rows["model"] == rows["calibrated"]
    assert rows["model"][0]["nll"] != rows["model"][1]["nll"]
    share = ra.Calibration.load(file).share("flops", 300)
    assert [row["share_of_exact_flops"] for row in rows["model"]] == [1, pytest.approx(share)]


def test_texts_open_as_the_tokenizer_writes_them(model, capsys):
    tokenizer = AutoTokenizer.from_pretrained(model / "model")
    template = TemplateProcessing(single="fox $A", special_tokens=[("fox", tokenizer("fox").input_ids[0])])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(model / "model")
    words = f"perplexity {model / 'model'} {model / 'dog.txt'} --tokens 90 --pattern exact --device cpu --json"
    (row,) = json.loads(run(words, capsys))["rows"]
    ids = tokenizer((model / "dog.txt").read_text(), return_tensors="pt").input_ids
    assert ids[0, 0] == tokenizer("fox", add_special_tokens=False).input_ids[0]
    report = ra.perplexity(AutoModelForCausalLM.from_pretrained(model / "model"), ids[:, :90])
    assert (row["nll"], row["tokens"]) == (pytest.approx(report.nll), 89)


def test_the_table_has_the_change_from_the_first_pattern(model, capsys):
    words = (
        f"perplexity {model / 'model'} {model / 'dog.txt'} --pattern exact --pattern window:2 --tokens 1k --device cpu"
    )
    printed = run(words, capsys)
    assert "+0.0%" in printed and "window:2" in printed and "all" not in printed.split()


def test_a_picture_of_perplexity_against_flops(model, capsys):
    pytest.importorskip("matplotlib")
    words = f"perplexity {model / 'model'} {model / 'dog.txt'} {model / 'fox.txt'} --tokens 64 --device cpu"
    printed = run(f"{words} --pattern exact --pattern window:2 --plot {model / 'quality.png'}", capsys)
    assert "quality.png" in printed.replace("\n", "")
    assert (model / "quality.png").stat().st_size > 5000


def test_rows_beyond_the_positions_and_several_processes_are_refused(model, capsys, monkeypatch):
    config = model / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 100}))
    words = ["perplexity", str(model / "model"), str(model / "dog.txt"), "--device", "cpu"]

    def refused(*more):
        with pytest.raises(SystemExit) as end:
            cli.main([*words, *more])
        assert end.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert "'--tokens': the model has positions for 100 tokens, and rows have 240: ask for 100 at most" in refused()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "reads a text on one process, and 2 were started: to shard texts" in refused("--tokens", "100")


def test_patterns_of_other_models_are_refused_before_anything_is_measured(model, capsys, monkeypatch):
    monkeypatch.setattr("hf_ring_attention.evaluation.perplexity.perplexity", None)
    of_three = save_calibration(model / "three.json", {0: "exact", 1: "exact", 2: "exact"})
    for wrong, message in (
        ("kv0-4=window:4;kv5=exact", "is for 6 key/value heads"),
        (of_three, "is of a model of 3 layers"),
    ):
        words = ["--device", "cpu", "--pattern", "exact", "--pattern", str(wrong)]
        with pytest.raises(SystemExit) as end:
            cli.main(["perplexity", str(model / "model"), str(model / "dog.txt"), *words])
        error = capsys.readouterr().err.splitlines()[-1]
        assert end.value.code == 2 and "'--pattern': " in error and message in error


def test_what_cannot_be_read_is_one_line(model, capsys):
    (model / "short.txt").write_text("fox")
    (model / "bytes.txt").write_bytes(b"caf\xe9 au lait")
    for name, message in (
        ("short.txt", "has 1 token(s), 2 or more are needed"),
        ("bytes.txt", "is not a text in UTF-8: "),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["perplexity", str(model / "model"), str(model / name), "--device", "cpu"])
        error = capsys.readouterr().err
        assert end.value.code == 2
        assert message in error.splitlines()[-1]


def test_code_that_a_model_brings_runs_only_when_it_is_trusted(tmp_path, monkeypatch, capsys):
    """And nobody is asked on standard input, which a job does not have."""
    monkeypatch.setattr("builtins.input", None)
    ran = save_with_code(tmp_path, monkeypatch)
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 9)
    words = ["perplexity", str(tmp_path / "model"), str(tmp_path / "text.txt"), "--pattern", "window:8", "--json"]
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    told = capsys.readouterr().err
    assert end.value.code == 2 and "--trust-remote-code" in told and not ran.exists()
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--trust-remote-code"])
    assert not end.value.code and ran.exists()
    assert json.loads(capsys.readouterr().out)["rows"][0]["perplexity"] > 1
