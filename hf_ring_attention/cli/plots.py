"""Draws the pictures of commands with matplotlib: patterns, rings, calibrations, estimates and perplexities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from .output import short_bytes, short_count
from .pictures import seen_under, timeline_summary

if TYPE_CHECKING:
    from ..cost.estimate import Estimate
    from ..evaluation.calibration.result import Calibration

#: The colours of unseen pairs, of the future, and of sinks. A square is brighter, the more of its pairs are seen.
UNSEEN, FUTURE, SINKS = "#12121f", "#d8d8dc", "#19d3f3"
#: Squares along a side of a pattern's picture.
SQUARES = 256
#: Shares of a square below this are drawn as this one.
FAINTEST = 1 / 64
COMPUTE, SEND, WAIT = ("#3b6fb6", "#7fa8dc"), "#f0a030", "#d9534f"
#: Squares of calibrations with more key/value heads have no text.
MOST_HEADS_WITH_TEXT = 12


def _save(figure: Any, path: Path, legend: Sequence[Patch] = (), columns: int = 3) -> None:
    """Writes a figure to a file, whole or not at all, with a legend below."""
    if legend:
        figure.legend(handles=legend, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    with whole_file(path) as part:
        figure.savefig(part, dpi=120, format=path.suffix.removeprefix("."))


def plot_patterns(
    patterns: Mapping[str, Pattern], length: int, path: Path, *, head: int | None, num_heads: int, num_kv_heads: int
) -> None:
    """Draws the keys that a head sees under each pattern, or for None any of the heads, in a document of any length."""
    figure = Figure(figsize=(1.6 + 3.6 * len(patterns), 4.9), layout="constrained")
    axes = figure.subplots(1, len(patterns), squeeze=False)[0]
    colours = LinearSegmentedColormap.from_list("seen", ["#5b2a86", "#b5367a", "#f1605d", "#feb078", "#fcfdbf"])
    handles = [Patch(color=UNSEEN, label="not seen"), Patch(color=FUTURE, label="the future")]
    seen = seen_under(patterns, length, SQUARES, head=head, num_heads=num_heads, num_kv_heads=num_kv_heads)
    for axis, (name, text, visible) in zip(axes, seen):
        share = visible.share / np.where(visible.possible > 0, visible.possible, 1)
        shown = np.where(share > 0, np.clip(share, FAINTEST, 1), np.nan)
        place: dict[str, Any] = {"extent": (0, length, length, 0), "interpolation": "nearest", "zorder": 2}
        image = axis.imshow(shown, norm=LogNorm(FAINTEST, 1), cmap=colours, **place)
        axis.set_facecolor(UNSEEN)
        axis.add_patch(Polygon([(0, 0), (length, 0), (length, length)], color=FUTURE, linewidth=0))
        if visible.sinks:
            width = max(visible.sinks, length / 120)  # Sinks are a few pixels wide, however long the document is.
            axis.add_patch(Rectangle((0, 0), width, length, color=SINKS, linewidth=0, zorder=3))
            if len(handles) == 2:
                handles.insert(0, Patch(color=SINKS, label="sinks, seen by all (drawn wide enough to see)"))
        axis.set_title(f"{name}\n{text}", fontsize=9)
        ticks = [length * i // 4 for i in range(5)] if length % 4 == 0 else [0, length]
        axis.set_xticks(ticks, map(short_count, ticks))
        axis.set_yticks(ticks, map(short_count, ticks))
        axis.set_xlabel("key position")
    axes[0].set_ylabel("query position")
    seen_by = f"any of {num_heads} heads sees" if head is None else f"head {head} of {num_heads} sees"
    bar = figure.colorbar(image, ax=list(axes), shrink=0.8, label=f"share of pairs that {seen_by} (log scale)")
    bar.set_ticks([1 / 64, 1 / 16, 1 / 4, 1], labels=["1/64 or less", "1/16", "1/4", "all"])
    bar.minorticks_off()
    # A single panel is narrower than the entries side by side.
    _save(figure, path, handles, len(handles) if len(patterns) > 1 else 1)


def plot_ring(timeline: Timeline, title: str, path: Path) -> None:
    """Draws a ring's forward pass as a Gantt chart: when each rank computes, sends and waits."""
    figure = Figure(figsize=(10, 1.8 + 0.5 * min(timeline.ranks, 24)), layout="constrained")
    axis, p = figure.subplots(), timeline.ranks
    waiting: dict[str, Any] = {"hatch": "///", "facecolor": "white", "edgecolor": WAIT}
    for span in timeline.spans:
        low, height = (0.12, 0.26) if span.kind == "send" else (-0.42, 0.5)
        colour = SEND if span.kind == "send" else COMPUTE[span.step % 2]
        style = waiting if span.kind == "wait" else {"color": colour}
        axis.broken_barh([(span.start, span.stop - span.start)], (span.rank + low, height), linewidth=0.4, **style)
        if span.kind == "compute":
            place = (span.start + span.stop) / 2, span.rank - 0.17
            axis.text(*place, str(span.source), ha="center", va="center", fontsize=7, color="white")
    axis.set(ylim=(p - 0.45, -0.6), yticks=range(p), ylabel="rank")
    axis.set(xlim=(0, timeline.seconds or 1), xlabel="time")
    axis.xaxis.set_major_formatter(EngFormatter("s"))
    axis.set_title(f"{title}\n{timeline_summary(timeline)}", fontsize=10)
    compute = Patch(color=COMPUTE[0], label="compute, with the keys of the rank that is named")
    _save(figure, path, [compute, Patch(color=SEND, label="send"), Patch(**waiting, label="wait")])


def plot_calibration(calibration: Calibration, path: Path) -> None:
    """Draws the pattern of each layer and key/value head, in the colour of its cost: cheap ones light, dear ones dark."""
    heads = calibration.of_heads()
    layers, most = sorted(heads), max(map(len, heads.values()))
    counts = Counter(str(pattern) for patterns in heads.values() for pattern in patterns)
    shares = {str(pattern): calibration.share_of(pattern) for pattern in calibration.menu}
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
    axis.set(xticks=range(most), xlabel="key/value head", ylabel="layer")
    axis.set_yticks(range(len(layers)), map(str, layers))
    axis.tick_params(length=0, labelsize=8)
    tokens = short_count(calibration.seq_len)
    axis.set_title(f"{calibration.flop_share:.1%} of exact attention's FLOPs at {tokens} tokens", fontsize=10)
    handles = [
        Patch(color=colours(norm(share)), label=f"{text}: {share:.1%} of the FLOPs, groups of heads: {counts[text]}")
        for text, share in sorted(shares.items(), key=lambda item: item[1])
        if counts[text]
    ]
    _save(figure, path, handles, max(1, int(figure.get_figwidth() / 3.6)))


def plot_estimate(answer: Estimate, path: Path) -> None:
    """Draws bars of the parts of a device's peak for lengths around the estimated one."""
    from ..cost.estimate import parts_by_bound  # It imports torch.

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axis, setting = figure.subplots(), answer.setting
    unit = 2 * setting.ring_size
    lengths = [max(unit, round(setting.seq_len * 2.0**power / unit) * unit) for power in range(-3, 3)]
    parts = [parts_by_bound(answer.shape, replace(setting, seq_len=length)) for length in lengths]
    bars = [{part.name: part.bytes / 2**30 for part in of_length if not part.host} for of_length in parts]
    floors = np.zeros(len(bars))
    names = list(dict.fromkeys(name for bar in bars for name in bar))
    for name, colour in zip(names, colormaps["turbo"](np.linspace(0, 1, len(names)))):
        heights = np.array([bar.get(name, 0.0) for bar in bars])
        axis.bar(range(len(bars)), heights, bottom=floors, label=name, width=0.7, color=colour)
        floors += heights
    if answer.memory is not None:
        label = f"{short_bytes(answer.memory)} of a device"
        axis.axhline(answer.memory / 2**30, color="black", linestyle="--", linewidth=1, label=label)
    axis.set_xticks(range(len(lengths)), map(short_count, lengths))
    axis.set(xlabel="tokens of a sequence", ylabel="GiB of a device at the peak")
    model = f"{answer.shape.model_type}, {answer.shape.parameters / 1e9:.2f} billion parameters"
    rings = f"ring of {setting.ring_size} of {setting.devices} devices, {setting.parallel}"
    axis.set_title(f"{model}, {rings}", fontsize=10)
    axis.grid(axis="y", alpha=0.3)
    # The last part is at the top, as in the bars.
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
    _save(figure, path)
