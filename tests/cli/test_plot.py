"""The plot command: text and pictures, which show all that is measured or planned."""

import re

import numpy as np
import pytest
from transformers import Gemma3TextConfig

import hf_ring_attention as ra
from hf_ring_attention.plan.patterns import Pattern

RING = "plot ring --tokens 8k --ranks 4 --heads 8 --kv-heads 2 --head-dim 64 --tflops 10 --gbps 100"


@pytest.fixture
def plots():
    """The module that draws, which needs matplotlib."""
    pytest.importorskip("matplotlib")
    from hf_ring_attention.cli import plots

    return plots


def pixels(path):
    """[height, width, 3] of a picture, 0 to 255."""
    image = pytest.importorskip("matplotlib.image").imread(path)
    return (image[..., :3] * 255).round().astype(int)


def count(picture, colour):
    """How many pixels are of a colour, as #rrggbb."""
    rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((abs(picture - rgb).max(-1) <= 2).sum())


def test_patterns_as_text(command):
    printed = command("plot pattern window:512+4 exact --tokens 8k")
    assert "window:512+4, 8k tokens: one head sees 12.2% of the pairs, 8 heads 12.2%" in printed
    assert "exact, 8k tokens: one head sees 100.0%" in printed and "┃ sinks" in printed
    printed = command("plot pattern longnet:128/1,all/1 --tokens 256")
    assert "one head sees 100.0% of the pairs" in printed, "pairs of two branches are counted once"
    share = re.search(r"head 3 sees ([\d.]+)% of the pairs", command("plot pattern pyramid:512,3 --tokens 8k --head 3"))
    assert float(share[1]) / 100 == pytest.approx(Pattern.parse("pyramid:512,3").flop_share(8192), rel=0.01)


def test_the_patterns_of_a_models_layers(tmp_path, command, refusal):
    """Also one that was patched in, and with the model's own heads."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, sliding_window=512, layer_types=kinds
    )
    ra.patch_config(config, "pyramid:512,3")
    config.save_pretrained(tmp_path)
    printed = command(f"plot pattern exact --model {tmp_path} --tokens 8k")
    names = re.findall(r"^(.*), 8k tokens: one head sees \S+ of the pairs, 6 heads ", printed, re.MULTILINE)
    assert names == ["exact", "window:512, layers 0-1, 3", "pyramid:512,3, layers 2"]
    assert "--heads: --model has it already" in refusal(f"plot pattern --model {tmp_path} --heads 4")


def test_layouts_as_text(command):
    printed = command("plot layout --tokens 4k --ranks 4")
    assert printed.startswith("zigzag: with contiguous pieces the busiest rank does")
    assert "rank   0 " + "█" * 8 + "·" * 48 + "█" * 8 + " work 1.00 of the mean" in printed
    printed = command("plot layout --tokens 4k --ranks 4 --layout contiguous")
    assert re.findall(r"work (\S+) of", printed) == ["0.25", "0.75", "1.25", "1.75"]
    assert "rank   1 " + "·" * 16 + "█" * 16 + "·" * 32 in printed


def test_a_ring(tmp_path, command, plots):
    printed = command(f"{RING} --output {tmp_path / 'a.png'}")
    assert len(np.unique(pixels(tmp_path / "a.png").reshape(-1, 3), axis=0)) > 20
    assert "exact over 8k tokens, 4 ranks, zigzag, 10 TFLOP/s, 100 Gbit/s: one layer forward" in printed
    milliseconds, computing = re.search(r"^([\d.]+) ms in all: ranks compute for (\d+)% of it", printed, re.M).groups()
    # The busiest rank's FLOPs over its speed, and no less.
    least = 2 * 2 * 64 * 8 * 8192 * 8193 / 2 / 4 / 10e12
    assert float(milliseconds) / 1e3 == pytest.approx(least / (int(computing) / 100), rel=0.02)
    assert printed.endswith(f"wrote {tmp_path / 'a.png'}\n")


def test_pictures_show_sinks_whatever_the_length(tmp_path, command, plots, monkeypatch):
    monkeypatch.setattr(plots, "SQUARES", 64)
    file = tmp_path / "pattern.png"
    command(f"plot pattern window:512+4 --tokens 1M --output {file}")
    picture = pixels(file)
    height = max(np.unique(np.argwhere(abs(picture - [25, 211, 243]).max(-1) <= 2)[:, 0], return_counts=True)[1].shape)
    assert count(picture, plots.SINKS) >= height, "a column of them"
    assert height > 300
    assert count(picture, plots.UNSEEN) > 10000 and count(picture, plots.FUTURE) > 10000
    command(f"plot pattern exact --tokens 1M --output {file}")
    assert count(pixels(file), plots.SINKS) == 0


def test_what_is_seen_more_is_brighter_and_the_legend_is_in_the_picture(tmp_path, saved_figures, plots, monkeypatch):
    monkeypatch.setattr(plots, "SQUARES", 64)
    sparse = [f"branches:sink=4,window=16,segment=all/{dilation}:all" for dilation in (64, 8)]
    for texts in (sparse[:1], [*sparse, "exact"]):
        patterns = {text: Pattern.parse(text) for text in texts}
        plots.plot_patterns(patterns, 4096, tmp_path / "a.png", head=None, num_heads=1, num_kv_heads=1)
        box = saved_figures[-1].legends[0].get_window_extent()
        assert 0 <= box.x0 < box.x1 <= saved_figures[-1].bbox.width
    images = [axis.images[0] for axis in saved_figures[-1].axes[:3]]
    luminance = [image.to_rgba(image.get_array())[50:, 5:12, :3].mean() for image in images]  # far below the diagonal
    assert luminance[0] < luminance[1] < luminance[2]
