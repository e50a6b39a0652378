"""Draws the figures of `make gpu` and lengths.py: milliseconds and GiB of attention against the length of a row.

The guide's:   python recipes/bench/draw.py recipes/bench/h100.json recipes/bench/cpu.json --plot recipes/pictures/speed.png
Yours:         python recipes/bench/draw.py gpu.json --plot gpu.png

Lines also differ in markers and dashes and are labelled at their ends, so one can read them without colour.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: The kinds of patterns, and the colour and marker of their lines in all pictures. Colours also differ in lightness.
KINDS = {
    "sdpa": ("#000000", "s"),
    "exact": ("#0077bb", "o"),
    "window with sinks": ("#d55e00", "v"),
    "window": ("#f3c440", "X"),
    "pyramid": ("#2fb28c", "^"),
    "longnet": ("#e29ac6", "D"),
    "calibrations": ("#5a1258", "P"),
    "others": ("#484848", "*"),
}
#: The patterns that are drawn. A large empty marker shows a line below another line.
LARGE = {"markersize": 11, "fillstyle": "none"}
PATTERNS: dict[str, dict[str, Any]] = {
    "sdpa": LARGE,
    "exact": {},
    "pyramid:512,3": LARGE,
    "longnet:2048/1,8192/4,32768/16": {},
    "window:512+4": {},
}
#: The figures that are drawn, from left to right, and their names.
FIGURES = {"both ms": "milliseconds, forward and backward", "peak GiB": "GiB at the peak, beside inputs"}


def kind_of(pattern: str) -> str:
    """Returns the kind of a pattern, or of a calibration's file."""
    kind = "calibrations" if pattern.endswith(".json") else re.split(r"\W", pattern)[0]
    kind = "window with sinks" if kind == "window" and "+" in pattern else kind
    return kind if kind in KINDS else "others"


def styles_of(patterns: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns the style of each pattern's line: the colour and the marker of its kind, and dashes in turn."""
    names = ("color", "marker", "linestyle")
    return {
        pattern: dict(zip(names, (*KINDS[kind_of(pattern)], dashes)))
        for pattern, dashes in zip(patterns, itertools.cycle(("-", "--", "-.", ":")))
    }


def lines_of(speed: Sequence[Mapping[str, Any]], figure: str) -> dict[str, list[tuple[int, float]]]:
    """Returns (tokens, figure) for each pattern that is drawn; sdpa has its faster backend for each length."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for name in PATTERNS:
        rows: dict[int, Mapping[str, Any]] = {}
        for row in speed:
            if row["name"] == name or (name == "sdpa" and row["name"].startswith("sdpa ")):
                rows[row["tokens"]] = min(rows.get(row["tokens"], row), row, key=lambda x: x["both ms"])
        points = [(tokens, row[figure]) for tokens, row in sorted(rows.items()) if row[figure] is not None]
        lines |= {name: points} if points else {}
    return lines


def ends_of(lines: Mapping[str, Sequence[tuple[int, float]]], ratio: float) -> list[tuple[str, float, float]]:
    """Returns (names, the end of their lines, where the names stand), each `ratio` or more above those below.

    Lines that end within 2 % of each other share their names' place.
    """
    ends: list[tuple[list[str], float, float]] = []
    for name, points in sorted(lines.items(), key=lambda line: line[1][-1][1]):
        value = points[-1][1]
        if ends and value < 1.02 * ends[-1][1]:
            ends[-1][0].append(name)
        else:
            ends.append(([name], value, max(value, ends[-1][2] * ratio) if ends else value))
    return [(", ".join(sorted(names, key=[*lines].index)), value, place) for names, value, place in ends]


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws all `FIGURES` of each run against tokens, a line of panels for each, on logarithmic scales."""
    from matplotlib.figure import Figure  # Only pictures need it.

    picture = Figure(figsize=(8, 3.8 * len(runs)), layout="constrained")
    for part, run in zip(picture.subfigures(len(runs), 1, squeeze=False).flat, runs):
        for axis, (figure, label) in zip(part.subplots(1, len(FIGURES)), FIGURES.items()):
            _draw_lines(axis, lines_of(run["speed"], figure), figure)
            axis.set_ylabel(label, fontsize=11)
        part.suptitle(run["machine"]["device"], fontsize=11)
    shown = ", ".join(name for name in PATTERNS if ":" in name)
    picture.supxlabel(f"sdpa: torch's own exact attention. Patterns: {shown}", fontsize=10)
    picture.savefig(path, dpi=100)


def _draw_lines(axis: Any, lines: Mapping[str, Sequence[tuple[int, float]]], figure: str) -> None:
    """Draws the lines of a figure, with their names at their ends."""
    if not lines:
        raise ValueError(f"expected rows of speed with {figure!r}, found none: measure them on a GPU")
    styles = styles_of(PATTERNS)
    for name, points in lines.items():
        axis.plot(*zip(*points), **styles[name] | PATTERNS[name])
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", subs=())
    last = max(points[-1][0] for points in lines.values())
    bottom, top = axis.get_ylim()
    digits = (1, 2, 5) if top / bottom < 1000 else (1,)
    ticks = [digit * 10.0**power for power in range(-6, 9) for digit in digits]
    axis.set_yticks([tick for tick in ticks if bottom <= tick <= top])
    short = {name.partition(":")[0]: points for name, points in lines.items()}
    for names, value, place in ends_of(short, (top / bottom) ** 0.06):
        axis.annotate(names, (last, value), xytext=(1.3 * last, place), va="center", fontsize=10)
    axis.set_xticks(sorted({tokens for points in lines.values() for tokens, _ in points}))
    axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}k")
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.tick_params(labelsize=10)
    axis.set_xlabel("tokens of a row", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)


def main(words: Sequence[str] | None = None) -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, nargs="+", help="the JSON files of runs of `make gpu` or lengths.py")
    parser.add_argument("--plot", type=Path, default="speed.png", help="the picture's file (default speed.png)")
    args = parser.parse_args(words)
    draw([json.loads(file.read_text("utf-8")) for file in args.figures], args.plot)
    print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
