"""The demo starts the command line and the recipes with words that they take; no model is loaded."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import common
import demo
import pytest
import torch

from hf_ring_attention.cli.main import command_parser


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """The demo; what it would start only parses its words, and adds the arguments to `parts.parsed`."""
    made = demo.Demo(SimpleNamespace(output=tmp_path, tokens=2048, layer_tokens=4096, steps=4, seq_len=256))
    made.parsed = []

    def run(program, *words, processes=1):
        made.parsed.append(importlib.import_module(Path(program).stem).parse_args([*words, "--json", "figures.json"]))
        return {"figures": [{"perplexity": 10.0}], "rows": []}

    monkeypatch.setattr(common, "obstacle", lambda: None)
    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(demo, "command", lambda *words, **_: made.parsed.append(command_parser().parse_args(words)))
    return made


def test_the_calibration_is_parsed(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "installed_model", lambda: tmp_path / "model")
    parts.calibration()
    (args,) = parts.parsed
    assert args.prog == "hf-ring-attention calibrate" and args.seq_len == 1024 and args.budget == demo.BUDGET
    assert (tmp_path / "text.txt").stat().st_size > 10**5


def test_the_plot_of_perplexities_is_parsed(parts, tmp_path, monkeypatch):
    figures = {"perplexity": 10.0, "flop_share": 1.0, "seconds": 1.0}
    config = SimpleNamespace(num_attention_heads=9, num_key_value_heads=3)
    monkeypatch.setattr(common, "load_tokenizer", lambda: None)
    monkeypatch.setattr(common, "load_model", lambda: SimpleNamespace(config=config))
    monkeypatch.setattr(common, "tokenize", lambda tokenizer, text, tokens: torch.zeros(1, tokens))
    monkeypatch.setattr(
        demo.perplexity,
        "measure",
        lambda model, ids, patterns: [{**figures, "pattern": x, "token_nll": [1.0] * ids.shape[1]} for x in patterns],
    )
    parts.perplexities()
    of_two, plotted = parts.parsed
    assert of_two.tokens == plotted.tokens == 2048 and plotted.prog == "hf-ring-attention plot pattern"
    assert (plotted.heads, plotted.kv_heads, len(plotted.patterns)) == (9, 3, 4)
    assert {path.name for path in tmp_path.iterdir()} == {"quality.png", "losses.png"}


def test_the_words_for_recipes_are_parsed(parts):
    parts.layer()
    parts.pass_keys()
    parts.fine_tuning()
    assert len(parts.parsed) == 5 and parts.parsed[-1].ring_size == 2
