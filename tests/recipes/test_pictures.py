"""The pictures of the recipes show the figures of a run."""

import itertools
import json
import re
from pathlib import Path

import draw
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
        "window with sinks": [(0.23, 11.9), (0.44, 11.4)],
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


PATTERNS = ["exact", "window:512+4", "window:128+4", "window:512", "pyramid:512,3", "longnet:512/1,all/8"]
PATTERNS += ["a/calibration.json", "branches:window=8", "sdpa, whole cache"]


def test_a_kind_of_patterns_has_one_colour_and_marker_in_all_pictures(tmp_path, saved_figures):
    """Also in those of the command line; two windows differ in their dashes."""
    plots = pytest.importorskip("hf_ring_attention.cli.plots", exc_type=ImportError)
    same = {"text": "all", "seconds": 1.0, "bytes": 2**20, "ms": 1.0, "processes": 1}
    rows = [
        {"pattern": name, "attention": name, "length": tokens, "tokens": tokens, "perplexity": 20.0 - number, **same}
        for number, name in enumerate(PATTERNS)
        for tokens in (512, 1024)
    ]
    pictures.plot_losses({name: [1.0, 2.0, 3.0] for name in PATTERNS}, tmp_path / "a.png")
    pictures.plot_decoding(rows, tmp_path / "a.png")
    plots.plot_perplexities([row for row in rows if row["pattern"] in PATTERNS[:-1]], tmp_path / "a.png")
    styles = [draw.KINDS[draw.kind_of(name)] for name in PATTERNS]
    for figure in saved_figures:
        lines = figure.axes[0].get_lines()
        assert [(line.get_color(), line.get_marker()) for line in lines] == styles[: len(lines)]
        assert lines[1].get_color() == lines[2].get_color() and lines[1].get_linestyle() != lines[2].get_linestyle()
    assert len({*styles}) == len(draw.KINDS) == len(PATTERNS) - 1, "only windows with sinks share theirs"
    pictures.plot_layer(rows[::2], 512, tmp_path / "a.png")
    bars = saved_figures[-1].axes[0].patches
    assert [bar.get_facecolor() for bar in bars] == [plots.Patch(color=colour).get_facecolor() for colour, _ in styles]
    light = sorted(sum(part * weight for part, weight in zip(bar.get_facecolor(), (0.3, 0.59, 0.11))) for bar in bars)
    steps = [above - below for below, above in itertools.pairwise(light)]
    assert sorted(steps)[0] == 0 and sorted(steps)[1] > 0.04, "colours differ in grey"


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


def test_the_picture_of_decoding_has_the_numbers_of_its_table(tmp_path, saved_figures):
    pictures.main([str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"whole_rows.png", "decoding.png"}
    page = (RECIPES / "guide" / "figures.md").read_text("utf-8").split("## Decoding")[1].split("\n## ")[0]
    table = re.search(r"^\| \|.*\n\|[-|:]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)[1]
    expected = {}
    for line in table.splitlines():
        name, *numbers = (cell.strip(" `") for cell in line.strip("|").split("|"))
        for length, (ms, mib) in zip((2048, 4096, 8192), zip(*[map(float, numbers)] * 2)):
            expected[name, length] = ms, mib
    assert len(expected) == 12
    left, right = saved_figures[1].axes
    drawn = {
        (line.get_label(), tokens): (ms, pytest.approx(mib))
        for line, other in zip(left.get_lines(), right.get_lines(), strict=True)
        for (tokens, ms), (_, mib) in zip(line.get_xydata(), other.get_xydata(), strict=True)
    }
    assert drawn == expected
    assert len(left.get_yticks()) >= 3 and len(right.get_yticks()) >= 3, "scales can be read"


# ---- figures of an H100 and a CPU, and the tables of the guide

FILES = [RECIPES / "bench" / name for name in ("h100.json", "cpu.json")]
FIGURES, CPU = (json.loads(file.read_text("utf-8")) for file in FILES)
LONGNET = "longnet:2048/1,8192/4,32768/16"


def test_pictures_have_a_line_for_each_pattern(tmp_path, saved_figures):
    draw.main([*map(str, FILES), "--plot", str(tmp_path / "speed.png")])
    (picture,) = saved_figures
    width, height = picture.get_size_inches()
    assert all(name in picture.get_supxlabel() for name in draw.PATTERNS if name != "exact"), "names are explained"
    assert width * picture.dpi == 800 and [*tmp_path.iterdir()] == [tmp_path / "speed.png"]
    assert [part.get_suptitle() for part in picture.subfigs] == [x["machine"]["device"] for x in (FIGURES, CPU)]
    panels = [(figures, figure) for figures in (FIGURES, CPU) for figure in ("both ms", "peak GiB")]
    for axis, (figures, figure) in zip(picture.axes, panels, strict=True):
        assert axis.get_xscale() == axis.get_yscale() == "log"
        lines = [[*map(tuple, line.get_xydata())] for line in axis.get_lines()]
        expected = draw.lines_of(figures["speed"], figure)
        assert lines == [*expected.values()] and all(len(line) >= 3 for line in lines)
        styles = {(line.get_color(), line.get_marker()) for line in axis.get_lines()}
        assert styles == {draw.KINDS[draw.kind_of(name)] for name in draw.PATTERNS}
        named = ", ".join(text.get_text() for text in axis.texts).split(", ")
        assert sorted(named) == sorted(name.partition(":")[0] for name in expected)
        to_figure = axis.transData + picture.transFigure.inverted()
        places = sorted(to_figure.transform(text.get_position())[1] for text in axis.texts)
        assert all(72 * height * (above - below) >= 10 for below, above in itertools.pairwise(places)), "names overlap"


def test_sdpa_is_its_faster_backend_and_missing_figures_are_left_out():
    row = {"peak GiB": None, "tokens": 8}
    speed = [{**row, "name": "sdpa flash", "both ms": 3.0}, {**row, "name": "sdpa cudnn", "both ms": 2.0}]
    speed += [{**row, "name": "exact", "both ms": 4.0}, {**row, "name": "exact, 125", "both ms": 1.0}]
    assert draw.lines_of(speed, "both ms") == {"sdpa": [(8, 2.0)], "exact": [(8, 4.0)]}
    with pytest.raises(ValueError, match="measure them on a GPU"):
        draw.draw([{"speed": speed, "machine": {}}], Path("none.png"))


def rows_of(title):
    """The rows of the table of figures.md whose first heading is this, by name."""
    page = (RECIPES / "guide" / "figures.md").read_text("utf-8")
    table = re.search(rf"^\| {title} \|.*\n\|[-|:]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)[1]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {name.replace("`", "").replace("LongNet", LONGNET): numbers for name, *numbers in cells}


def near(text, number):
    """A printed number is a figure, rounded to the printed decimals or to three digits."""
    half = 0.501 * 10.0 ** -len(text.partition(".")[2])
    return float(text) == pytest.approx(number, rel=5e-3, abs=half if "." in text else 0.5)


def test_the_table_of_speed_is_that_of_the_file():
    lines = {name: dict(points) for name, points in draw.lines_of(FIGURES["speed"], "both ms").items()}
    every = {(row["name"], row["tokens"]): row for row in FIGURES["speed"]}
    table = rows_of("tokens")
    assert len(table) == 6
    for name, cells in table.items():
        key = {"exact, 125 documents, fused": "kernel fused, exact, 125"}.get(name, name)
        for tokens, cell in zip((8192, 32768, 131072, 524288), cells):
            assert near(cell, lines["sdpa"][tokens] if "sdpa" in name else every[key, tokens]["both ms"])
        assert "sdpa" in name or near(cells[4], every[key, 131072]["of SDPA"])


def test_the_tables_of_steps_and_decoding_are_those_of_the_file():
    steps = {row["name"]: row for row in FIGURES["steps"]}
    long = {row["name"]: row for row in FIGURES["long rows"]}
    table = rows_of("attention, tokens")
    assert len(table) == 6
    for name, (rate, *peaks) in table.items():
        way, tokens = name.split(", ")
        row = steps[f"1B, {way}"] if tokens == "32768" else long[f"{tokens}, {way}"]
        assert near(rate, row["tokens/s"])
        assert all(near(cell, row[key]) for cell, key in zip(peaks, ("peak GiB", "estimate")) if cell)
    page = (RECIPES / "guide" / "figures.md").read_text("utf-8")
    assert len(FIGURES["decoding"]) == 3
    for row in FIGURES["decoding"]:
        assert re.search(rf"`?{re.escape(row['name'])}`? {row['ms']:.1f} \({row['GPU ms']:.2f}\)", page)


def test_the_figures_of_the_first_page_are_those_of_the_file():
    times = {name: dict(points)[131072] for name, points in draw.lines_of(FIGURES["speed"], "both ms").items()}
    exact, window = (times["sdpa"] / times[name] for name in ("exact", "window:512+4"))
    peaks, rates = ({row["name"]: row[what] for row in FIGURES["steps"]} for what in ("peak GiB", "tokens/s"))
    page = (RECIPES.parent / "README.md").read_text("utf-8")
    assert f"{exact:.2f}" == "1.00" and "`exact` takes the time of torch's (sdpa)" in page
    assert f"`window:512+4` 1/{window:.0f} of it" in page
    assert f"holds {peaks['1B, exact']:.1f} GiB in place of {peaks['1B, sdpa']:.1f}" in page
    for name, shown in (("exact", 18960), ("sdpa", 21850)):
        assert abs(rates[f"1B, {name}"] - shown) < 10 and str(shown) in page
