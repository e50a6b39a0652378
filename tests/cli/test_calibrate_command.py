"""The calibrate command, on a tiny model: it writes the library's files, and refuses wrong options in one line."""

import json
import re
from unittest.mock import patch

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_ring_attention as ra
from hf_ring_attention.cli.calibrate import rows_of
from hf_ring_attention.evaluation import progress
from tests.support.checkpoints import save_checkpoint_of_words, save_tiny_checkpoint
from tests.support.tiny_models import with_large_weights

MENU = ["window:4+1", "window:16+1", "exact"]


@pytest.fixture
def folder(tmp_path):
    """A folder with a tiny model and two texts."""
    return save_checkpoint_of_words(tmp_path, with_large_weights, num_key_value_heads=2)


def words_of(folder, *more):
    model = f"calibrate --model {folder / 'model'} --text {folder / 'fox.txt'} --tokens 80 --budget 0.5"
    return [*model.split(), *(word for pattern in MENU for word in ("--menu", pattern)), *map(str, more)]


@patch.object(progress, "SECONDS_BETWEEN_LINES", 1e-6)
def test_files_and_figures_are_those_of_the_library(folder, ended):
    pytest.importorskip("matplotlib")
    output = folder / "chosen"
    words = words_of(folder, "--rows", 2, "--output", output, "--plot", folder / "layers.png")
    status, printed, told = ended(words)
    assert not status and "fox.txt" in printed and "window:16+1" in printed
    assert "calibrate: " in told and " tokens/s" in told  # stderr is a file here, which hears how far it is.

    chosen = ra.Calibration.load(output / "calibration.json")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = tokenizer((folder / "fox.txt").read_text(), return_tensors="pt").input_ids[0]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert chosen == ra.calibrate(model, [ids[:80], ids[-80:]], budget=0.5, menu=MENU)
    assert chosen.flop_share <= 0.5
    # The config that is written makes the checkpoint compute these patterns.
    config = LlamaConfig.from_pretrained(output)
    written = LlamaForCausalLM.from_pretrained(folder / "model", config=config, attn_implementation="ring_dilated")
    row = ids[None, :80]
    assert torch.equal(written(row).logits, ra.patch_model(model, chosen)(row).logits)

    report = (output / "report.txt").read_text()
    assert report in printed and f"{chosen.flop_share:.2%}" in report and "row 2" in " ".join(report.split())
    assert (folder / "layers.png").stat().st_size > 5000
    assert len(list((output / "measurements").glob("*.pt"))) > 1


def test_a_budget_of_bytes(folder, command, refusal):
    printed = command(words_of(folder, "--budget-of", "bytes", "--ranks", 2, "--refinements", 0))
    assert "of the bytes of a ring of 2" in " ".join(printed.split())
    error = refusal(words_of(folder, "--budget-of", "bytes"))
    assert "argument --ranks: one process moves no bytes: name the ranks of the ring, 2 or more" in error


def test_an_impossible_budget_is_refused_before_weights_are_loaded(folder, refusal):
    (folder / "model" / "model.safetensors").unlink()
    error = refusal(words_of(folder, "--budget", 0.01))
    assert "budget=0.01 is below the cheapest pattern of the menu, window:4+1" in error
    assert "cannot be loaded" in refusal(words_of(folder))


def test_windows_that_cover_a_row_are_left_out(folder, command, refusal):
    """They equal exact attention, which is listed."""
    words = [*words_of(folder, "--refinements", 0, "--retrieval", 0), "--menu", "window:80", "window:76+4"]
    rows = [line.split() for line in command(words).splitlines() if re.match("pattern|window|exact", line)]
    assert rows[0] == ["pattern", "FLOPs", "cache", "groups", "share", "in", "layers"]
    assert [row[0] for row in rows[1:]] == MENU
    alone = words_of(folder)[:-6]
    assert "got 1 that differ in rows of 80 tokens" in refusal([*alone, "--menu", "exact", "window:512"])


class Layer(GradientCheckpointingLayer):
    def forward(self, x):
        return self.part(x)


@pytest.mark.filterwarnings("error")
def test_a_bar_ends_at_its_total(monkeypatch):
    """tqdm warns of a bar that passes it, were it by 2e-13 tokens, as 9 parts of 512 tokens once did."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    layers = torch.nn.Sequential(*(Layer() for _ in range(9)))
    for layer in layers:
        layer.part = torch.nn.Identity()
    with progress.progress_bar("reading", 2 * 512) as bar:
        for _ in range(2):
            with progress.moved_by_layers(bar, layers, 512):
                layers(torch.ones(1))
        assert bar.n == 2 * 512
        bar.refresh()


def test_a_budget_of_the_cache(folder, command):
    output = folder / "chosen"
    words = words_of(folder, "--budget-of", "cache", "--output", output, "--refinements", 0)
    printed = " ".join(command(words).split())
    figures = json.loads(command([*words, "--json"]))
    chosen = ra.Calibration.load(output / "calibration.json")
    assert chosen.budget_of == "cache" and chosen.share("cache") <= 0.5
    assert f"{chosen.share('cache'):.2%} of its cache (ra.PatternCache)" in printed
    assert ra.Calibration.from_dict(figures) == chosen and figures["shares"]["cache"] == chosen.share("cache")
    assert "the budget was 50.00% of the cache" in printed
    assert f"window:16+1 {chosen.share_of(ra.Pattern.parse('window:16+1')):.1%} 21.2%" in printed  # 17 of 80 rows


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--text", "{folder}/bytes.txt"], "--text: {folder}/bytes.txt is not a text in UTF-8: "),
        (["--model", "{folder}/bare"], "'{folder}/bare' cannot be loaded: "),
        (["--output", "{folder}/fox.txt/new"], "--output: a folder was expected, but '{folder}/fox.txt' is a file"),
        (["--budget", 2], "--budget: a number above 0 and at most 1 was expected, got '2'"),
        (["--tokens", 2048], "fox.txt has 360 tokens, and 2048 (--rows 1 of 2048) are needed"),
        (["--menu", "exact"], "menu has exact twice"),
    ],
)
def test_wrong_options_are_refused_in_one_line(folder, more, message, refusal):
    (folder / "bytes.txt").write_bytes(b"caf\xe9 au lait")
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_bytes((folder / "model" / "config.json").read_bytes())
    error = refusal(words_of(folder, *(str(word).format(folder=folder) for word in more)))
    assert message.format(folder=folder) in error


def test_rows_open_as_the_tokenizer_writes_texts_and_fit_the_positions(folder, refusal):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    template = TemplateProcessing(single="fox $A", special_tokens=[("fox", tokenizer("fox").input_ids[0])])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(folder / "model")
    rows = rows_of(tokenizer, "dog", "lazy dog over the quick " * 40, 50, 3)
    plain = tokenizer("lazy dog over the quick " * 40, add_special_tokens=False, return_tensors="pt").input_ids[0]
    for row, start in zip(rows, (0, (200 - 49) // 2, 200 - 49), strict=True):
        assert row[0] == tokenizer("fox", add_special_tokens=False).input_ids[0]
        assert torch.equal(row[1:], plain[start : start + 49])
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 70}))
    assert "argument --tokens: the model has positions for 70 tokens, and rows have 80" in refusal(words_of(folder))


def test_rows_reach_the_end_of_a_text_whose_letters_are_several_tokens(tmp_path):
    """A thousand letters of three bytes, with a tokenizer of bytes."""
    save_tiny_checkpoint(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(chr(0x905 + number % 50) for number in range(1000))
    whole = tokenizer(text, return_tensors="pt").input_ids[0]
    rows = rows_of(tokenizer, "hindi.txt", text, 400, 6)
    assert len(whole) == 3000 and torch.equal(torch.stack(rows), whole.unfold(0, 400, 520))
