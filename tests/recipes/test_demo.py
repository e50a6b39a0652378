"""The demo starts the command line and the recipes with words that they take; no model is loaded."""

import importlib
import shlex
from pathlib import Path
from types import SimpleNamespace

import common
import demo
import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.cli.main import command_parser


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """The demo; what it would start only parses its words, and adds the arguments to `parts.parsed`.

    Perplexities are 10 with exact attention, 11 with a pattern, and 12 with a calibration.
    """
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    made = demo.Demo(SimpleNamespace(output=tmp_path, tokens=2048, layer_tokens=4096, steps=4, seq_len=256))
    made.parsed = []

    def run(program, *words, processes=1):
        made.parsed.append(importlib.import_module(Path(program).stem).parse_args([*words, "--json", "figures.json"]))
        of_layer = {name: {"seconds": 2.0, "bytes": 100.0} for name in ("sdpa", demo.WINDOW)}
        if program == "layer.py":
            return [{"attention": name, "processes": processes, **row} for name, row in of_layer.items()]
        held_out = 10.0 if "exact" in words else 12.5
        trained = {"perplexity_before": held_out, "perplexity_after": 10 + (held_out - 10) / 2}
        return {"figures": [{"perplexity": 10.0}], "rows": []} | trained

    def measure(model, ids, patterns):
        for name in patterns:
            more = 0 if name == "exact" else 2 if name.endswith(".json") else 1
            figures = {"perplexity": 10.0 + more, "flop_share": 1.0, "seconds": 1.0}
            yield {**figures, "pattern": name, "token_nll": [1.0] * ids.shape[1]}

    config = SimpleNamespace(num_attention_heads=9, num_key_value_heads=3)
    monkeypatch.setattr(common, "obstacle", lambda: None)
    monkeypatch.setattr(common, "installed_model", lambda: tmp_path / "model")
    monkeypatch.setattr(common, "load_tokenizer", lambda: None)
    monkeypatch.setattr(common, "load_model", lambda: SimpleNamespace(config=config))
    monkeypatch.setattr(common, "tokenize", lambda tokenizer, text, tokens: torch.zeros(1, tokens))
    monkeypatch.setattr(demo.perplexity, "measure", measure)
    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(demo, "command", lambda *words, **_: made.parsed.append(command_parser().parse_args(words)))
    return made


def test_the_calibration_is_parsed_and_compared_with_a_window_at_its_cost(parts, tmp_path, capsys):
    parts.calibration()
    (args,) = parts.parsed
    assert args.prog == "hf-ring-attention calibrate" and args.seq_len == 1024 and args.budget == demo.BUDGET
    assert (tmp_path / "text.txt").stat().st_size > 10**5
    last = capsys.readouterr().out.splitlines()[-1]
    chosen = tmp_path / "calibrated" / "calibration.json"
    assert last == f"perplexity against exact: {demo.RIVAL} +10.0%, {chosen} +20.0%"
    assert 0.9 * demo.BUDGET < ra.Pattern.parse(demo.RIVAL).flop_share(1024) < demo.BUDGET
    assert [row["pattern"] for row in parts.figures["calibration"]] == ["exact", demo.RIVAL, str(chosen)]


def test_the_plot_of_perplexities_is_parsed(parts, tmp_path):
    parts.perplexities()
    of_two, plotted = parts.parsed
    assert of_two.tokens == plotted.tokens == 2048 and plotted.prog == "hf-ring-attention plot pattern"
    assert (plotted.heads, plotted.kv_heads, len(plotted.patterns)) == (9, 3, 4)
    assert {path.name for path in tmp_path.iterdir()} == {"quality.png", "losses.png", "text.txt", "model"}


def test_the_words_for_recipes_are_parsed_and_what_was_trained_is_compared(parts, capsys):
    parts.layer()
    parts.pass_keys()
    parts.fine_tuning()
    assert len(parts.parsed) == 5 and parts.parsed[-1].ring_size == 2
    told = [f"{when} the steps, held-out perplexity against exact: {demo.LEARNED}" for when in ("before", "after")]
    assert capsys.readouterr().out.splitlines()[-2:] == [f"{told[0]} +25.0%", f"{told[1]} +12.5%"]


def test_the_demo_closes_with_its_figures_and_a_command_that_runs(parts, tmp_path, capsys):
    parts.layer()
    parts.perplexities()
    capsys.readouterr()
    parts.closing()
    *text, _, shown = capsys.readouterr().out.splitlines()
    assert "was 1.0 times as fast as sdpa" in " ".join(text) and "raised perplexity by 10.0%" in " ".join(text)
    python, *words = shlex.split(shown)
    assert Path(python).is_file() and words[:2] == ["-m", "hf_ring_attention"]
    args = command_parser().parse_args(words[2:])  # It reads the text.
    assert args.model == str(tmp_path / "model") and args.pattern == ["exact", demo.WINDOW]
