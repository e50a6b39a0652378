"""The pictures of the recipes show the figures of a run."""

import re
from pathlib import Path

import pictures
import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


def test_losses_are_trailing_means_with_the_legend_outside(tmp_path, saved_figures):
    losses = {"exact": [float("nan"), *map(float, range(9))], "window:4": [float("nan"), *[1.0] * 9]}
    pictures.plot_losses(losses, tmp_path / "a.png", window=3)
    top, bottom = saved_figures[0].axes
    exact, window = top.get_lines()
    assert list(exact.get_xdata()) == list(range(3, 10)), "a mean stands at the last of its tokens"
    assert list(exact.get_ydata()) == [1, 2, 3, 4, 5, 6, 7]
    assert list(window.get_ydata()) == [1] * 7
    assert list(bottom.get_lines()[1].get_ydata()) == [0, -1, -2, -3, -4, -5, -6]
    assert len(saved_figures[0].legends) == 1 and top.get_legend() is None


def test_each_pattern_has_its_cost_and_its_perplexity_and_each_kind_is_a_line(tmp_path, saved_figures):
    rows = [("exact", 10.8, 1.0), ("window:512+4", 11.9, 0.23), ("b/calibration.json", 11.0, 0.4)]
    rows += [("a/calibration.json", 11.4, 0.25), ("window:1020+4", 11.4, 0.44), ("window:512", 19.3, 0.23)]
    rows = [dict(zip(("pattern", "perplexity", "flop_share"), row)) for row in rows]
    pictures.plot_quality(rows, tmp_path / "quality.png")
    (axis,) = saved_figures[0].axes
    lines = {line.get_label(): [*map(tuple, line.get_xydata())] for line in axis.get_lines()}
    assert lines == {
        "exact": [(1.0, 10.8)],
        "windows and sinks": [(0.23, 11.9), (0.44, 11.4)],
        "calibrations": [(0.25, 11.4), (0.4, 11.0)],
        "window": [(0.23, 19.3)],
    }
    assert len({line.get_marker() for line in axis.get_lines()}) == 4, "lines differ without colour"
    assert axis.get_xscale() == axis.get_yscale() == "linear"
    names = [text for text in axis.texts if text.get_text()]
    assert {text.get_text(): text.xy for text in names} == {
        name: (row["flop_share"], row["perplexity"])
        for name, row in zip(("exact", "window:512+4", "b", "a", "window:1020+4", "window:512"), rows)
    }
    boxes = [text.get_window_extent() for text in names]
    assert all(one.count_overlaps(boxes) == 1 for one in boxes), "names overlap"


def test_a_layer_has_a_bar_of_seconds_and_of_mib_for_each_run(tmp_path, saved_figures):
    rows = [("sdpa", 1, 4.5, 80), ("window:512+4", 1, 0.26, 48), ("window:512+4", 2, 0.17, 27)]
    rows = [dict(zip(("attention", "processes", "seconds", "bytes"), (*row[:3], row[3] * 2**20))) for row in rows]
    pictures.plot_layer(rows, 32768, tmp_path / "a.png")
    seconds, memory = saved_figures[0].axes
    assert [bar.get_width() for bar in seconds.patches] == [4.5, 0.26, 0.17]
    assert [bar.get_width() for bar in memory.patches] == [80, 48, 27]
    assert [text.get_text() for text in seconds.texts] == ["4.50", "0.26", "0.17"]
    names = [label.get_text() for label in seconds.get_yticklabels()]
    assert names == ["sdpa, 1 process", "window:512+4, 1 process", "window:512+4, 2 processes"]
    assert "32768" in saved_figures[0].get_suptitle()


def test_every_piece_of_a_row_is_on_one_rank_and_in_every_result(tmp_path, saved_figures):
    pictures.plot_whole_rows(tmp_path / "a.png")
    (axis,) = saved_figures[0].axes
    rows = {}
    for text in axis.texts:
        if text.get_text().isdigit():
            rows.setdefault(text.get_position()[1], []).append(int(text.get_text()))
    assert [*rows] == [0, 1, 2, 3]
    for rank, pieces in rows.items():
        assert pieces == [*range(8), rank, 7 - rank, *range(8)], "whole rows, zigzag pieces of the rank, whole results"


def test_decoding_has_a_line_of_times_and_of_bytes_for_each_attention(tmp_path, saved_figures):
    rows = [("sdpa", 2048, 40.0, 90), ("a/b/chosen.json", 2048, 35.0, 25), ("sdpa", 8192, 100.0, 360)]
    rows = [dict(zip(("attention", "tokens", "ms", "bytes"), (*row[:3], row[3] * 2**20))) for row in rows]
    pictures.plot_decoding(rows, tmp_path / "a.png")
    (left, right), (legend,) = saved_figures[0].axes, saved_figures[0].legends
    assert [list(line.get_ydata()) for line in left.get_lines()] == [[40, 100], [35]]
    assert [list(line.get_ydata()) for line in right.get_lines()] == [[90, 360], [25]]
    assert list(left.get_lines()[0].get_xdata()) == [2048, 8192]
    assert [text.get_text() for text in legend.get_texts()] == ["sdpa", "chosen"]


def test_the_picture_of_decoding_has_the_numbers_of_the_tables(tmp_path, saved_figures):
    pictures.main([str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"whole_rows.png", "decoding.png"}
    page = (RECIPES / "guide" / "figures.md").read_text("utf-8").split("## Decoding")[1]
    first, second = re.findall(r"^\| \|.*\n\|[-|:]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    expected = {}
    for table, lengths in ((first, (2048, 4096, 8192)), (second, (32768,))):
        for line in table.splitlines():
            name, *numbers = (cell.strip(" `") for cell in line.strip("|").split("|"))
            for length, (ms, mib) in zip(lengths, zip(*[map(float, numbers)] * 2)):
                expected[name, length] = ms, mib
    assert len(expected) == 15
    left, right = saved_figures[1].axes
    drawn = {
        (line.get_label(), tokens): (ms, pytest.approx(mib))
        for line, other in zip(left.get_lines(), right.get_lines(), strict=True)
        for (tokens, ms), (_, mib) in zip(line.get_xydata(), other.get_xydata(), strict=True)
    }
    assert expected == drawn
    assert len(left.get_yticks()) >= 3 and len(right.get_yticks()) >= 3, "scales can be read"
