"""The pictures of the command line show the figures of their commands."""

from collections import Counter
from dataclasses import replace

import pytest

import hf_ring_attention as ra
from hf_ring_attention.cost.estimate import parts_by_bound
from hf_ring_attention.plan.patterns import Pattern
from tests.support.measured_once import measured_once

plots = pytest.importorskip("hf_ring_attention.cli.plots", exc_type=ImportError)

RING = "plot ring --tokens 8k --ranks 4 --heads 4 --kv-heads 1 --head-dim 64 --tflops 10"
CONFIG = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}


def widths(axis, kind):
    """The spans of a kind in one panel of a ring, as seconds."""
    colours = {"send": [plots.SEND], "wait": ["white"], "compute": plots.COMPUTE}
    wanted = {tuple(plots.Patch(color=colour).get_facecolor()) for colour in colours[kind]}
    bars = [bars for bars in axis.collections if tuple(bars.get_facecolor()[0]) in wanted]
    return [path.get_extents().width for bar in bars for path in bar.get_paths()]


def test_slow_links_are_drawn_beside_fast_ones(tmp_path, command, saved_figures):
    printed = command(f"{RING} --gbps 400 1 --plot {tmp_path / 'a.png'}")
    assert printed.count(" in all: ranks compute for ") == 2 and "at 1 Gbit/s" in printed
    fast, slow = saved_figures[0].axes
    assert fast.get_title().startswith("400 Gbit/s: ") and slow.get_title().startswith("1 Gbit/s: ")
    assert sum(widths(fast, "compute")) == pytest.approx(sum(widths(slow, "compute"))), "the work is the same"
    assert sum(widths(slow, "send")) == pytest.approx(400 * sum(widths(fast, "send")))
    assert sum(widths(fast, "wait")) == 0 < sum(widths(slow, "wait"))
    # One round: each rank computes with the keys of every rank once, its own first.
    for axis in (fast, slow):
        lanes = [[], [], [], []]
        for text in axis.texts:
            lanes[round(text.get_position()[1] + 0.17)].append(int(text.get_text()))
        assert lanes == [[(rank - step) % 4 for step in range(4)] for rank in range(4)]


@pytest.mark.parametrize("memory", [None, 2**29])
@measured_once
def test_the_bars_of_an_estimate_are_all_parts_in_six_groups(tmp_path, saved_figures, memory):
    answer = ra.estimate(CONFIG, 8192, devices=4, memory=memory)
    plots.plot_estimate(answer, tmp_path / "a.png")
    (axis,) = saved_figures[0].axes
    lengths = [8192 * 2**power // 8 for power in range(6)]
    for number, length in enumerate(lengths):
        expected = Counter()
        for part in parts_by_bound(answer.shape, replace(answer.setting, seq_len=length)):
            expected[plots.group_of_part(part.name)] += part.bytes
        bars = {bars.get_label(): bars.patches[number].get_height() * 2**30 for bars in axis.containers}
        assert {name: size for name, size in bars.items() if size} == pytest.approx({**+expected})
        assert float(axis.texts[number].get_text()) == pytest.approx(expected.total() / 2**30, rel=5e-3)
    hatches = [bars.patches[0].get_hatch() for bars in axis.containers]
    assert len({*hatches}) == len(hatches), "without colour, groups differ by their hatches"
    told = [text.get_text() for text in axis.texts[len(lengths) :]]
    assert told == ([] if memory is None else ["512.0 MiB of a device"])
    assert [line.get_ydata()[0] for line in axis.get_lines()] == ([] if memory is None else [0.5])


def test_parts_of_an_estimate_are_in_the_group_that_names_them():
    groups = {
        "parameters": ["parameters", "weights cast for the forward pass", "gathered parameters"],
        "gradients": ["gradients", "gradient buckets"],
        "optimizer": ["optimizer state", "optimizer step"],
        "saved for backward": ["saved activations", "pieces of heads"],
        "exchange buffers": ["exchange buffers"],
        "working set": ["workspace of attention", "sums of attention", "working set of a layer", "logits"],
    }
    assert {group: [*map(plots.group_of_part, names)] for group, names in groups.items()} == {
        group: [group] * len(names) for group, names in groups.items()
    }
    assert groups.keys() == {*plots.GROUPS}


def test_perplexities_are_lines_by_length_of_all_texts(tmp_path, saved_figures):
    measured = [("exact", 1024, 12.0), ("exact", 512, 14.0), ("window:64", 512, 15.0), ("window:64", 1024, 16.0)]
    rows = [dict(zip(("pattern", "length", "perplexity"), row), text="all") for row in measured]
    plots.plot_perplexities([{**row, "text": "a", "perplexity": 1.0} for row in rows] + rows, tmp_path / "a.png")
    (axis,) = saved_figures[0].axes
    lines = {line.get_label(): [*map(tuple, line.get_xydata())] for line in axis.get_lines()}
    assert lines == {"window:64": [(512, 15), (1024, 16)], "exact": [(512, 14), (1024, 12)]}
    # The names stand as the lines end, from above, and lines differ without colour.
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["window:64", "exact"]
    assert len({(line.get_marker(), line.get_linestyle()) for line in axis.get_lines()}) == 2
    assert [text.get_text() for text in axis.get_xticklabels()[-2:]] == ["512", "1k"]


def test_many_patterns_stand_in_rows_of_four(tmp_path, saved_figures):
    """As those of a calibrated model, whose titles are long: none reaches into the next."""
    layers = ", layers 0-3, 5, 7, 9, 11, 13, 15, 17, 19-29"
    patterns = {f"window:{2**power}+4{layers}": Pattern.parse(f"window:{2**power}+4") for power in range(3, 13)}
    plots.plot_patterns(patterns, 4096, tmp_path / "a.png", head=0, num_heads=8, num_kv_heads=8)
    (figure,) = saved_figures
    assert (120 * figure.get_size_inches() < 1300).all()
    figure.draw_without_rendering()  # Its places at its own resolution.
    boxes = [axis.title.get_window_extent() for axis in figure.axes[:10]]
    assert all(box.count_overlaps(boxes) == 1 for box in boxes)
    assert len({round(box.y0) for box in boxes}) == 3


def test_patterns_fit_a_page(tmp_path, saved_figures):
    """Text of 800 pixels is legible: its height is at least 10 pixels."""
    patterns = {text: Pattern.parse(text) for text in ("exact", "window:512+4", "pyramid:512,3", "longnet:512/1,all/8")}
    plots.plot_patterns(patterns, 4096, tmp_path / "a.png", head=0, num_heads=8, num_kv_heads=8)
    (figure,) = saved_figures
    pixels = 800 / figure.get_figwidth() / 72
    for axis in figure.axes[:4]:
        assert axis.title.get_fontsize() * pixels >= 10
        assert all(label.get_fontsize() * pixels >= 10 for label in axis.get_xticklabels())
