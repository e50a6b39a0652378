"""Draws the pictures of commands with matplotlib: patterns, rings, calibrations, estimates and perplexities."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle
from matplotlib.ticker import EngFormatter

from ..cost.timeline import Timeline
from ..evaluation.whole_files import whole_file
from ..plan.patterns import Pattern
from ..plan.traffic import short_bytes
from .output import short_count, short_seconds
from .pictures import seen_under

if TYPE_CHECKING:
    from ..cost.estimate import Estimate
    from ..evaluation.calibration.result import Calibration

#: The colours of unseen pairs, of the future, and of sinks. A square is brighter, the more of its pairs are seen.
UNSEEN, FUTURE, SINKS = "#12121f", "#d8d8dc", "#19d3f3"
#: Squares along a side of a pattern's picture.
SQUARES = 256
#: Shares of a square below this are drawn as this one.
FAINTEST = 1 / 64
#: The colours and markers of patterns' lines; recipes/bench/draw.py has the same.
KINDS = {"exact": "#0077bb o", "window:*+*": "#d55e00 v", "window:*": "#f3c440 X", "pyramid:*": "#2fb28c ^"}
KINDS |= {"longnet:*": "#e29ac6 D", "*.json": "#5a1258 P", "*": "#484848 *"}
COMPUTE, SEND, WAIT = ("#2f5d9e", "#5b86c0"), "#f0a030", "#d9534f"
#: The groups of an estimate's parts, from below: words in their names, and the hatch.
GROUPS = {
    "parameters": (("parameters", "weights"), ""),
    "gradients": (("gradient",), "//"),
    "optimizer": (("optimizer",), "\\\\"),
    "saved for backward": (("saved", "pieces"), ".."),
    "exchange buffers": (("exchange",), "xx"),
    "working set": (("",), "--"),
}
#: Squares of calibrations with more key/value heads have no text.
MOST_HEADS_WITH_TEXT = 12


def _save(figure: Any, path: Path, legend: Sequence[Patch] = (), columns: int = 3) -> None:
    """Writes a figure to a file, whole or not at all, with a legend below."""
    if legend:
        figure.legend(handles=legend, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    with whole_file(path) as part:
        figure.savefig(part, dpi=120, format=path.suffix.removeprefix("."))


def plot_patterns(
    patterns: Mapping[str, Pattern], length: int, path: Path, *, head: int | None, num_heads: int, num_kv_heads: int
) -> None:
    """Draws the keys that a head sees under each pattern, or for None any of the heads, in a document of any length."""
    titles = {name: textwrap.fill(name, 30, break_long_words=False) for name in patterns}
    columns, rows = min(len(patterns), 4), -(-len(patterns) // 4)
    wide = 1.6 + columns * max(2.05, 0.069 * max(map(len, "\n".join(titles.values()).split("\n"))))
    figure = Figure(figsize=(wide, 1 + 2.6 * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, n + 1, xlabel="key position") for n in range(len(patterns))]
    colours = LinearSegmentedColormap.from_list("seen", ["#5b2a86", "#b5367a", "#f1605d", "#feb078", "#fcfdbf"])
    handles = [Patch(color=UNSEEN, label="not seen"), Patch(color=FUTURE, label="the future")]
    seen = seen_under(patterns, length, SQUARES, head=head, num_heads=num_heads, num_kv_heads=num_kv_heads)
    for axis, (name, text, visible) in zip(axes, seen):
        share = visible.share / np.where(visible.possible > 0, visible.possible, 1)
        shown = np.where(share > 0, np.clip(share, FAINTEST, 1), np.nan)
        place: dict[str, Any] = {"extent": (0, length, length, 0), "interpolation": "nearest", "zorder": 2}
        image = axis.imshow(shown, norm=LogNorm(FAINTEST, 1), cmap=colours, **place)
        axis.set_facecolor(UNSEEN)
        axis.add_patch(Polygon([(0, 0), (length, 0), (length, length)], color=FUTURE, linewidth=1, zorder=2.5))
        if visible.sinks:
            width = max(visible.sinks, length / 60)  # Sinks are a few pixels wide, however long the document is.
            axis.add_patch(Rectangle((0, 0), width, length, color=SINKS, linewidth=0, zorder=3))
            handles[:-2] = [Patch(color=SINKS, label="sinks (drawn wide enough to see)")]
        axis.set_title(f"{titles[name]}\n" + text.replace(" of the", "\nof the"), fontsize=9)
        ticks = [length * i // 4 for i in range(5)] if length % 4 == 0 else [0, length]
        axis.set_xticks(ticks, map(short_count, ticks))
        axis.set_yticks(ticks, map(short_count, ticks))
    for axis in axes[::columns]:
        axis.set_ylabel("query position")
    seen_by = f"any of {num_heads} heads sees" if head is None else f"head {head} of {num_heads} sees"
    bar = figure.colorbar(image, ax=axes, shrink=0.8 / rows, label=f"share of the pairs that\n{seen_by} (log scale)")
    bar.set_ticks([1 / 64, 1 / 16, 1 / 4, 1], labels=["≤ 1/64", "1/16", "1/4", "all"])
    bar.minorticks_off()
    # A single panel is narrower than the entries side by side.
    _save(figure, path, handles, len(handles) if len(patterns) > 1 else 1)


def plot_ring(timelines: Mapping[str, Timeline], title: str, path: Path) -> None:
    """Draws forward passes of a ring as Gantt charts, side by side: when each rank computes, sends and waits."""
    ranks = max(timeline.ranks for timeline in timelines.values())
    figure = Figure(figsize=(8, 2.2 + 0.45 * min(ranks, 24)), layout="constrained")
    waiting: dict[str, Any] = {"hatch": "////", "facecolor": "white", "edgecolor": WAIT}
    axes = figure.subplots(1, len(timelines), sharey=True, squeeze=False)[0]
    for axis, (name, timeline) in zip(axes, timelines.items()):
        for span in timeline.spans:
            low, height = (0.12, 0.26) if span.kind == "send" else (-0.42, 0.5)
            colour = SEND if span.kind == "send" else COMPUTE[span.step % 2]
            style = waiting if span.kind == "wait" else {"color": colour}
            axis.broken_barh([(span.start, span.stop - span.start)], (span.rank + low, height), linewidth=0.4, **style)
            if span.kind == "compute":
                place = (span.start + span.stop) / 2, span.rank - 0.17
                axis.text(*place, str(span.source), ha="center", va="center", fontsize=9, color="white", clip_on=True)
        axis.set(ylim=(ranks - 0.45, -0.6), yticks=range(ranks), xlim=(0, timeline.seconds or 1), xlabel="time")
        axis.locator_params(axis="x", nbins=5)
        axis.xaxis.set_major_formatter(EngFormatter("s"))
        shown = f"{name}: {short_seconds(timeline.seconds)}, ranks wait for {timeline.share('wait'):.0%} of it"
        axis.set_title(shown, fontsize=10)
    axes[0].set_ylabel("rank")
    figure.suptitle(title, fontsize=10)
    compute = Patch(color=COMPUTE[0], label="compute, with the keys of the numbered rank")
    _save(figure, path, [compute, Patch(color=SEND, label="send"), Patch(**waiting, label="wait")])


def plot_calibration(calibration: Calibration, path: Path) -> None:
    """Draws the pattern of each layer and key/value head, in the colour of its cost: cheap ones light, dear ones dark."""
    heads = calibration.of_heads()
    layers, most = sorted(heads), max(map(len, heads.values()))
    counts = Counter(str(pattern) for patterns in heads.values() for pattern in patterns)
    shares = {str(pattern): calibration.share_of(pattern) for pattern in calibration.menu if counts[str(pattern)]}
    width = max(0.36, 0.085 * max(map(len, counts))) if most <= MOST_HEADS_WITH_TEXT else 0.36
    figure = Figure(figsize=(max(4.8, 1.9 + most * width), 2.4 + 0.24 * len(layers)), layout="constrained")
    norm, colours, axis = LogNorm(min(shares.values()), 1), colormaps["YlGnBu"], figure.subplots()
    values = np.full((len(layers), most), np.nan)
    for row, layer in enumerate(layers):
        for head, pattern in enumerate(map(str, heads[layer])):
            values[row, head] = shares[pattern]
            if most <= MOST_HEADS_WITH_TEXT:
                colour = "white" if norm(shares[pattern]) > 0.55 else "black"
                axis.text(head, row, pattern, ha="center", va="center", fontsize=7, color=colour)
    axis.imshow(values, norm=norm, cmap=colours, aspect="auto", interpolation="nearest")
    axis.set(xticks=range(most), yticks=range(len(layers)), yticklabels=layers, xlabel="key/value head", ylabel="layer")
    axis.tick_params(length=0, labelsize=8)
    tokens = short_count(calibration.seq_len)
    axis.set_title(f"{calibration.flop_share:.1%} of exact attention's FLOPs at {tokens} tokens", fontsize=10)
    handles = [
        Patch(color=colours(norm(share)), label=f"{text}: {share:.1%} of the FLOPs, groups of heads: {counts[text]}")
        for text, share in sorted(shares.items(), key=lambda item: item[1])
    ]
    _save(figure, path, handles, max(1, int(figure.get_figwidth() / 3.6)))


def group_of_part(part: str) -> str:
    """Returns the first group with a word of a part's name."""
    return next(group for group, (words, _) in GROUPS.items() if any(word in part for word in words))


def plot_estimate(answer: Estimate, path: Path) -> None:
    """Draws bars of the parts of a device's peak for lengths around the estimated one."""
    from ..cost.estimate import parts_by_bound  # It imports torch.

    figure: Any = Figure(figsize=(8, 4.4), layout="constrained")
    axis, setting = figure.subplots(), answer.setting
    unit = 2 * setting.ring_size
    lengths = [max(unit, round(setting.seq_len * 2.0**power / unit) * unit) for power in range(-3, 3)]
    bars = [[x for x in parts_by_bound(answer.shape, replace(setting, seq_len=n)) if not x.host] for n in lengths]
    floors = np.zeros(len(bars))
    for (group, (_, hatch)), colour in zip(GROUPS.items(), colormaps["Pastel1"](range(len(GROUPS)))):
        heights = np.array([sum(x.bytes for x in bar if group_of_part(x.name) == group) for bar in bars]) / 2**30
        if heights.any():
            axis.bar(range(len(bars)), heights, 0.7, floors, label=group, color=colour, hatch=hatch, edgecolor="black")
        floors += heights
    axis.bar_label(axis.containers[-1], [f"{total:.3g}" for total in floors])
    if answer.memory is not None:
        axis.axhline(answer.memory / 2**30, color="black", linestyle="--")
        axis.text(-0.5, answer.memory / 2**30, f"{short_bytes(answer.memory)} of a device", va="bottom", fontsize=10)
    axis.set_xticks(range(len(lengths)), map(short_count, lengths))
    axis.set(xlabel="tokens of a sequence", ylabel="GiB of a device at the peak")
    model = f"{answer.shape.model_type}, {answer.shape.parameters / 1e9:.2f} billion parameters"
    rings = f"ring of {setting.ring_size} of {setting.devices} devices, {setting.parallel}"
    axis.set_title(f"{model}, {rings}", fontsize=10)
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=10, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
    _save(figure, path)


def plot_perplexities(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the perplexity of all texts against the length of the context, a line for each pattern."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axis, text = figure.subplots(), rows[-1]["text"]  # "all", if there are several texts.
    of_text = sorted((row for row in rows if row["text"] == text), key=lambda row: row["length"])
    ends = {row["pattern"]: row["perplexity"] for row in of_text}
    for number, pattern in enumerate(sorted(ends, key=lambda name: -ends[name])):  # The names stand as lines end.
        points = [(row["length"], row["perplexity"]) for row in of_text if row["pattern"] == pattern]
        colour, marker = next(style for form, style in KINDS.items() if fnmatch(pattern, form)).split()
        axis.plot(*zip(*points), marker + ("-", "--", "-.", ":")[number % 4], color=colour, label=pattern)
    axis.set_xscale("log", base=2)
    axis.set_xticks(*zip(*{row["length"]: short_count(row["length"]) for row in of_text}.items()))
    axis.set(xlabel="tokens of the context", ylabel=f"perplexity, {Path(text).name}")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=10, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)
