"""Draws what `hf-ring-attention bench` measured: the memory of a training step by part, and how fast rings of any size are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .output import about_count, short_bytes, short_count
from .plots import new_figure, save_figure

#: The largest number of tokens that have a label below a picture.
_MOST_TICKS = 12


def length_that_fills(totals: Mapping[int, float], memory: float) -> float | None:
    """Returns the tokens at which the straight line through the last two totals meets `memory`.

    Args:
        totals: the bytes of each measured number of tokens.

    Returns:
        None for a single total, totals that do not grow, or a last total that is no less than `memory`.
    """
    points = sorted(totals.items())
    if len(points) < 2 or points[-1][1] >= memory:
        return None
    (before, low), (last, high) = points[-2:]
    if high <= low:
        return None
    return last + (memory - high) * (last - before) / (high - low)


def extension_text(figures: Mapping[str, Any]) -> str:
    """Returns a text: how far the memory of a step was measured, and where a straight line from there meets a rank's memory."""
    totals = {row["tokens"]: row["peak"] for row in figures["rows"]}
    measured = f"measured up to {short_count(max(totals))} tokens"
    tokens = length_that_fills(totals, figures["rank_memory"])
    if tokens is None:
        return measured
    return (
        f"{measured}; the dashed part is extended by a straight line, and meets {short_bytes(figures['rank_memory'])} at about "
        f"{about_count(tokens)} tokens"
    )


def draw_part(part: str, figures: Any, folder: Path) -> Path:
    """Writes the picture of a part of the benchmark, and returns its file."""
    path = folder / f"{part.replace('-', '_')}.png"
    draw: dict[str, Callable[[Any, Path], None]] = {
        "step-memory": plot_step_memory,
        "scaling": plot_scaling,
        "peers": plot_peers,
    }
    draw[part](figures, path)
    return path


def plot_step_memory(figures: Mapping[str, Any], path: Path) -> None:
    """Draws the memory of a training step by part against the tokens of the row, up to where it would fill a rank's memory.

    Args:
        figures: those of `measure_step_memory`.
    """
    figure = new_figure(8, 5.6)
    from matplotlib.ticker import NullLocator

    axis = figure.subplots()
    rows, memory = figures["rows"], figures["rank_memory"]
    lengths, totals = [row["tokens"] for row in rows], [row["peak"] for row in rows]
    # Weights and gradients have as many bytes, so a thin line must be seen on a broad one.
    styles = [(6, "s", 0.4), (1.6, "v", 1), (1.6, "D", 1), (1.6, "^", 1), (1.6, "o", 1)]
    for number, name in enumerate(rows[0]["parts"]):
        width, marker, opacity = styles[number % len(styles)]
        values = [row["parts"][name] for row in rows]
        axis.plot(
            lengths, values, label=name, linewidth=width, marker=marker, markersize=max(5, width + 3), alpha=opacity
        )
    axis.plot(lengths, totals, label="total", color="black", linewidth=2, marker="o", markersize=6)
    end = length_that_fills(dict(zip(lengths, totals)), memory)
    if end is not None:
        # A straight line is a curve on logarithmic axes.
        tokens = np.geomspace(lengths[-1], end, 100)
        slope = (memory - totals[-1]) / (end - lengths[-1])
        axis.plot(tokens, totals[-1] + slope * (tokens - lengths[-1]), color="black", linewidth=1.5, linestyle="--")
        axis.plot([end], [memory], color="black", marker="o", markerfacecolor="white", markersize=7, clip_on=False)
    axis.axhline(memory, color="C3", linewidth=1.2)
    axis.annotate(
        f"{short_bytes(memory)}: memory of a rank",
        (0.01, memory),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        color="C3",
        fontsize=9,
    )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    smallest = min(value for row in rows for value in (*row["parts"].values(), memory) if value > 0)
    axis.set_xlim(lengths[0] / 1.15, 1.15 * (end or lengths[-1]))
    axis.set_ylim(smallest / 1.6, 1.9 * max(memory, *totals))
    _powers(axis.xaxis, axis.get_xlim(), short_count, 1)
    _powers(axis.yaxis, axis.get_ylim(), _whole_bytes, 2)
    for one in (axis.xaxis, axis.yaxis):
        one.set_minor_locator(NullLocator())
    axis.set_xlabel("tokens of the row")
    axis.set_ylabel(f"memory of the busiest rank of {figures['ranks']}")
    # The text is longer than the picture is wide.
    lines = f"a checkpointed training step, {figures['pattern']}: {extension_text(figures)}".replace("; ", ";\n")
    axis.set_title(lines, fontsize=10)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    save_figure(figure, path)


def plot_scaling(figures: Mapping[str, Any], path: Path) -> None:
    """Draws the tokens a second of each pattern against the ranks of the ring, with the ideal of as many times one rank's.

    Args:
        figures: those of `measure_scaling`.
    """
    figure = new_figure(7.5, 5)
    from matplotlib.ticker import NullLocator

    axis = figure.subplots()
    rows, devices = figures["rows"], figures["devices"]
    sizes = list(rows[0]["rates"])
    for row in rows:
        axis.plot(sizes, list(row["rates"].values()), marker="o", linewidth=1.8, label=row["pattern"], zorder=3)
    alone = [row["rates"][1] for row in rows if 1 in row["rates"]]
    for number, rate in enumerate(alone):
        # One of these lines stands for all of them in the legend.
        label = "_" if number else "ideal: as many times the rate of 1 rank"
        axis.plot(sizes, [p * rate for p in sizes], color="grey", linestyle=":", label=label, zorder=2)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlim(sizes[0] / 1.1, 1.1 * sizes[-1])
    low, high = axis.get_ylim()
    axis.set_ylim(low / 1.2, 1.3 * high)
    if sizes[-1] > devices:
        # The band begins between the last ring that has a core for each rank and the first that has not.
        first = min(p for p in sizes if p > devices)
        before = max([p for p in sizes if p <= devices], default=first / 2)
        start = max(math.sqrt(before * first), axis.get_xlim()[0])
        axis.axvspan(start, axis.get_xlim()[1], color="#dddddd", alpha=0.6, zorder=0)
        axis.annotate(
            f"more ranks than cores ({devices})",
            (math.sqrt(start * axis.get_xlim()[1]), 0.02),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize=9,
            color="#555555",
        )
    axis.set_xticks(sizes, [str(p) for p in sizes])
    _powers(axis.yaxis, axis.get_ylim(), short_count, 1)
    for one in (axis.xaxis, axis.yaxis):
        one.set_minor_locator(NullLocator())
    axis.set_xlabel("ranks of the ring")
    axis.set_ylabel("tokens a second")
    axis.set_title(f"attention of {short_count(figures['tokens'])} tokens, forward + backward", fontsize=10)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    save_figure(figure, path)


def plot_peers(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the seconds of attention of each implementation, a panel for each pattern; what was not timed is left out.

    Args:
        rows: those of `peers.peer_row`.
    """
    timed = [row for row in rows if row["skipped"] is None and row["forward"] is not None]
    patterns = list(dict.fromkeys(row["pattern"] for row in timed))
    groups = [[row for row in timed if row["pattern"] == pattern] for pattern in patterns]
    figure = new_figure(9, 1.2 + 0.3 * len(timed) + 0.5 * len(patterns))
    panels = figure.subplots(len(patterns), 1, squeeze=False, height_ratios=[len(group) + 1 for group in groups])[:, 0]
    for axis, pattern, group in zip(panels, patterns, groups):
        places = range(len(group))
        both = [row["both"] or 0 for row in group]
        axis.barh(places, both, 0.8, color="#c6d7ea", label="forward + backward, where it is right")
        axis.barh(places, [row["forward"] for row in group], 0.4, color="#1f5a94", label="forward")
        axis.set_yticks(places, [f"{row['attention']}, {row['ranks']} x {row['threads']}" for row in group], fontsize=7)
        axis.invert_yaxis()
        axis.set_title(pattern, fontsize=9, loc="left")
        axis.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel("seconds; behind a name: ranks x threads of each")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9, frameon=False
    )
    save_figure(figure, path)


def _powers(axis: Any, limits: tuple[float, float], text: Any, step: int) -> None:
    """Sets the ticks of a logarithmic axis to powers of 2^step, or of a larger power where these would be too many."""
    low, high = math.ceil(math.log2(limits[0])), math.floor(math.log2(limits[1]))
    step *= math.ceil((high - low + 1) / step / _MOST_TICKS)
    ticks = [2**power for power in range(low + -low % step, high + 1, step)]
    axis.set_ticks(ticks, [text(tick) for tick in ticks])


def _whole_bytes(size: int) -> str:
    """Returns a power of two of bytes without decimals."""
    return short_bytes(size).replace(".0 ", " ")
