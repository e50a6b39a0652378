"""The picture of an H100 and a CPU, and the tables of the H100, show what their files hold."""

import itertools
import json
import re
from pathlib import Path

import draw
import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = [RECIPES / "bench" / name for name in ("h100.json", "cpu.json")]
FIGURES, CPU = (json.loads(file.read_text("utf-8")) for file in FILES)
LONGNET = "longnet:2048/1,8192/4,32768/16"


def test_pictures_have_a_line_for_each_pattern(tmp_path, saved_figures):
    draw.main([*map(str, FILES), "--plot", str(tmp_path / "speed.png")])
    (picture,) = saved_figures
    width, height = picture.get_size_inches()
    assert width * picture.dpi == 800 and [*tmp_path.iterdir()] == [tmp_path / "speed.png"]
    assert [part.get_suptitle() for part in picture.subfigs] == [x["machine"]["device"] for x in (FIGURES, CPU)]
    panels = [(figures, figure) for figures in (FIGURES, CPU) for figure in ("both ms", "peak GiB")]
    for axis, (figures, figure) in zip(picture.axes, panels, strict=True):
        assert axis.get_xscale() == axis.get_yscale() == "log"
        lines = [[*map(tuple, line.get_xydata())] for line in axis.get_lines()]
        expected = draw.lines_of(figures["speed"], figure)
        assert lines == [*expected.values()] and all(len(line) >= 3 for line in lines)
        # Without colour they differ by marker.
        assert len({line.get_marker() for line in axis.get_lines()}) == 5
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


def test_names_stand_apart_and_share_a_place_where_lines_end_together():
    lines = {"a": [(1, 100.0)], "b": [(1, 101.0)], "c": [(1, 110.0)], "d": [(1, 500.0)]}
    assert draw.ends_of(lines, 1.5) == [("a, b", 100.0, 100.0), ("c", 110.0, 150.0), ("d", 500.0, 500.0)]


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
    exact, longnet, window = (times["sdpa"] / times[name] for name in ("exact", LONGNET, "window:512+4"))
    peaks = {row["name"]: row["peak GiB"] for row in FIGURES["steps"]}
    page = (RECIPES.parent / "README.md").read_text("utf-8")
    assert f"`exact` {exact:.2f}, LongNet {longnet:.0f}, `window:512+4` {window:.0f} times as fast" in page
    assert f"{peaks['1B, exact']:.1f} GiB; sdpa {peaks['1B, sdpa']:.1f}" in page
