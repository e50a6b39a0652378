"""The plot command: text and pictures, which show all that is measured or planned, and patterns as they are defined."""

import itertools
import re
from unittest.mock import patch

import numpy as np
import pytest
from transformers import Gemma3TextConfig, LlamaConfig

import hf_ring_attention as ra
from hf_ring_attention.cli.pictures import DARK, SINK, pattern_lines, visible_pairs
from hf_ring_attention.compute.reference import multiplicity_matrix
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
    printed = command("plot pattern --pattern window:512+4 --pattern exact --tokens 8k")
    assert "window:512+4, 8k tokens: one head sees 12.2% of the pairs, 8 heads 12.2%" in printed
    assert "exact, 8k tokens: one head sees 100.0%" in printed and "┃ sinks" in printed
    printed = command("plot pattern --pattern longnet:128/1,all/1 --tokens 256")
    assert "one head sees 100.0% of the pairs" in printed, "pairs of two branches are counted once"
    printed = command("plot pattern --pattern pyramid:512,3 --tokens 8k --head 3")
    share = re.search(r"head 3 sees ([\d.]+)% of the pairs", printed)
    assert float(share[1]) / 100 == pytest.approx(Pattern.parse("pyramid:512,3").flop_share(8192), rel=0.01)


def test_the_patterns_of_a_models_layers(tmp_path, command, refusal):
    """Also one that was patched in, and with the model's own heads."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    config = Gemma3TextConfig(num_hidden_layers=4, **heads, sliding_window=512, layer_types=kinds)
    ra.patch_config(config, "pyramid:512,3")
    config.save_pretrained(tmp_path)
    printed = command(f"plot pattern --pattern exact --model {tmp_path} --tokens 8k")
    names = re.findall(r"^(.*), 8k tokens: one head sees \S+ of the pairs, 6 heads ", printed, re.MULTILINE)
    assert names == ["exact", "window:512, layers 0-1, 3", "pyramid:512,3, layers 2"]
    assert "--heads: --model has it already" in refusal(f"plot pattern --model {tmp_path} --heads 4")


def test_the_patterns_of_a_calibrated_models_heads(tmp_path, command):
    """Each pattern once, with the layers in which a head has it; of one head those that it has."""
    config = LlamaConfig(hidden_size=96, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2)
    layers = [["exact", "window:64+4"], ["window:64+4"] * 2, ["window:8", "exact"], ["exact"] * 2]
    ra.patch_config(config, [ra.Pattern.by_kv_head(heads) for heads in layers])
    config.save_pretrained(tmp_path)
    every = ["exact, layers 0, 2-3", "window:64+4, layers 0-1", "window:8, layers 2"]
    last = ["window:64+4, layers 0-1", "exact, layers 2-3"]
    for words, expected in (("", every), ("--head 5", last)):
        printed = command(f"plot pattern --model {tmp_path} --tokens 1k {words}")
        assert re.findall(r"^(.*), 1k tokens: ", printed, re.MULTILINE) == expected


def test_layouts_as_text(command):
    printed = command("plot layout --tokens 4k --ranks 4")
    assert printed.startswith("zigzag: with contiguous pieces the busiest rank does")
    assert "rank   0 " + "█" * 8 + "·" * 48 + "█" * 8 + " work 1.00 of the mean" in printed
    printed = command("plot layout --tokens 4k --ranks 4 --layout contiguous")
    assert re.findall(r"work (\S+) of", printed) == ["0.25", "0.75", "1.25", "1.75"]
    assert "rank   1 " + "·" * 16 + "█" * 16 + "·" * 32 in printed


def test_a_ring(tmp_path, command, plots):
    printed = command(f"{RING} --plot {tmp_path / 'a.png'}")
    assert len(np.unique(pixels(tmp_path / "a.png").reshape(-1, 3), axis=0)) > 20
    assert "exact over 8k tokens, 4 ranks, zigzag, 10 TFLOP/s, 100 Gbit/s: one layer forward" in printed
    milliseconds, computing = re.search(r"^([\d.]+) ms in all: ranks compute for (\d+)% of it", printed, re.M).groups()
    # The busiest rank's FLOPs over its speed, and no less.
    least = 2 * 2 * 64 * 8 * 8192 * 8193 / 2 / 4 / 10e12
    assert float(milliseconds) / 1e3 == pytest.approx(least / (int(computing) / 100), rel=0.02)
    assert printed.endswith(f"wrote {tmp_path / 'a.png'}\n")


@patch("hf_ring_attention.cli.plots.SQUARES", 64)
def test_pictures_show_sinks_whatever_the_length(tmp_path, command, plots):
    file = tmp_path / "pattern.png"
    command(f"plot pattern --pattern window:512+4 --tokens 1M --plot {file}")
    picture = pixels(file)
    height = max(np.unique(np.argwhere(abs(picture - [25, 211, 243]).max(-1) <= 2)[:, 0], return_counts=True)[1].shape)
    assert count(picture, plots.SINKS) >= height, "a column of them"
    assert height > 150
    assert count(picture, plots.UNSEEN) > 10000 and count(picture, plots.FUTURE) > 10000
    command(f"plot pattern --pattern exact --tokens 1M --plot {file}")
    assert count(pixels(file), plots.SINKS) == 0


@patch("hf_ring_attention.cli.plots.SQUARES", 64)
def test_what_is_seen_more_is_brighter_and_the_legend_is_in_the_picture(tmp_path, saved_figures, plots):
    sparse = [f"branches:sink=4,window=16,segment=all/{dilation}:all" for dilation in (64, 8)]
    for texts in (sparse[:1], [*sparse, "exact"]):
        patterns = {text: Pattern.parse(text) for text in texts}
        plots.plot_patterns(patterns, 4096, tmp_path / "a.png", head=None, num_heads=1, num_kv_heads=1)
        box = saved_figures[-1].legends[0].get_window_extent()
        assert 0 <= box.x0 < box.x1 <= saved_figures[-1].bbox.width
    images = [axis.images[0] for axis in saved_figures[-1].axes[:3]]
    luminance = [image.to_rgba(image.get_array())[50:, 5:12, :3].mean() for image in images]  # far below the diagonal
    assert luminance[0] < luminance[1] < luminance[2]


PATTERNS = ["exact", "window:5+2", "pyramid:4,3,2,1", "longnet:8/1,16/2,all/4"]
PATTERNS += ["longnet:8/1,12/2,all/3"]  # 2 does not divide 3: branches are added up
PATTERNS += [
    f"branches:{text}"
    for text in (
        "sink=3,segment=8,window=16/2:dilated,segment=all/4:all",
        "segment=6,window=12/2:dilated,window=24/4",
        "window=4,segment=12/3,sink=1@count",
        "window=6,window=12/2:dilated,window=24/4@count",
    )
]


@pytest.mark.parametrize("text", PATTERNS)
def test_squares_of_one_pair_are_the_definition(text):
    """Whether any of the heads sees a key."""
    pattern = Pattern.parse(text)
    for length, (num_heads, num_kv_heads) in itertools.product((1, 7, 37), ((1, 1), (4, 2), (5, 5))):
        of_heads = multiplicity_matrix(pattern, length, num_heads, num_kv_heads, True).numpy() > 0
        for head in (None, *range(num_heads)):
            seen = visible_pairs(pattern, length, 64, head=head, num_heads=num_heads, num_kv_heads=num_kv_heads)
            shown = seen.share.copy()
            for query in range(length):
                shown[query, : min(seen.sinks, query + 1)] = 1
            expected = of_heads.any(0) if head is None else of_heads[head]
            assert np.array_equal(shown, expected), (length, num_heads, head)
            assert np.array_equal(seen.possible, np.tri(length))


@pytest.mark.parametrize("text", ["exact", "window:512+4", "pyramid:512,3", "longnet:512/1,2048/4,all/16@once"])
def test_large_squares_hold_as_many_pairs_as_the_plan(text):
    pattern = Pattern.parse(text)
    seen = visible_pairs(pattern, 16384, 128, head=0)
    assert seen.share_of_causal == pytest.approx(pattern.flop_share(16384), rel=0.01)


def test_text_shows_sinks_the_future_and_what_is_not_seen():
    seen = visible_pairs(Pattern.parse("window:128+4"), 8192, 64, num_heads=2, num_kv_heads=2)
    lines = pattern_lines(seen)
    assert len(lines) == 32
    assert all(line[0] == SINK for line in lines), "4 tokens of 8192 are seen"
    assert lines[-1][1:60] == DARK * 59
    assert [len(line) for line in lines] == list(range(2, 65, 2)), "the future is blank"
    assert not {SINK, DARK} & {*"".join(pattern_lines(visible_pairs(Pattern.exact(), 8192, 64)))}
