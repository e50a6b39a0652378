"""Draws the figures of an evaluation: quality against cost, scores by depth and length, and loss by position.

Patterns differ by marker and line as well as by colour, and shades by their number, so that a picture in grey can be read.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..evaluation.results import HIGHER_IS_BETTER
from .output import short_count
from .plots import new_figure, save_figure, unbeaten

_MARKERS = "osD^vP*X<>"
_LINES = ("-", "--", "-.", ":")
#: The metrics of qualities that are drawn against costs, with their axis labels.
_QUALITIES = {
    "perplexity": "perplexity",
    "long_perplexity": "LongPPL",
    "string_match_all": "share of answers generated",
    "acc": "share of answers ranked first",
}
#: The metrics of retrieval, the more telling one first.
RETRIEVAL_METRICS = ("string_match_all", "acc")


def _style(number: int) -> dict[str, Any]:
    return {"color": f"C{number % 10}", "marker": _MARKERS[number % len(_MARKERS)]}


def _legend(figure: Any, handles: Sequence[Any]) -> None:
    """Puts the legend below the panels, in columns that fit the width of the figure."""
    widths = [len(handle.get_label()) + 7 for handle in handles]  # in letters, of which an inch holds some 12
    room = figure.get_figwidth() * 12
    columns = len(handles) if sum(widths) <= room else max(1, int(room / max(widths)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


def quality_by_pattern(
    results: Mapping[str, Any], metric: str
) -> tuple[int, dict[str, tuple[float, float, float]]] | None:
    """Returns the longest length that has a metric, and (value, low, high) of it by pattern: its mean over tasks.

    Intervals of several tasks are averaged, end by end, which is at least as wide as that of the mean.
    """
    cells = [c for c in results["cells"] if c["metric"] == metric and c["depth"] is None and c["value"] is not None]
    if not cells:
        return None
    length = max(cell["length"] for cell in cells)
    found: dict[str, tuple[float, float, float]] = {}
    for pattern in results["config"]["patterns"]:
        of_pattern = [cell for cell in cells if (cell["pattern"], cell["length"]) == (pattern, length)]
        if of_pattern:
            ends = [
                [cell["value"] if cell[name] is None else cell[name] for cell in of_pattern]
                for name in ("value", "low", "high")
            ]
            value, low, high = (float(np.mean(end)) for end in ends)
            found[pattern] = value, low, high
    return length, found


def plot_pareto(results: Mapping[str, Any], path: Path) -> bool:
    """Draws each quality against attention FLOPs and against measured time, at the longest length; returns whether any.

    A line joins the patterns that no other beats in both.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    rows = [(metric, *quality) for metric in _QUALITIES if (quality := quality_by_pattern(results, metric)) is not None]
    patterns = list(results["config"]["patterns"])
    if not rows or len(patterns) < 2:
        return False
    figure = new_figure(9, 1.2 + 2.9 * len(rows))
    panels = figure.subplots(len(rows), 2, squeeze=False, sharey="row")
    for (metric, length, found), axes in zip(rows, panels):
        kind = "scoring" if "perplexity" in metric else "reading"
        better_up = HIGHER_IS_BETTER[metric]
        shares = {pattern: results["flop_share"][pattern][str(length)] for pattern in found}
        for axis, costs in zip(axes, (shares, results["seconds"][kind][str(length)])):
            points = {pattern: (costs[pattern], value) for pattern, (value, _, _) in found.items()}
            sign = -1 if better_up else 1
            best = [(cost, sign * loss) for cost, loss in unbeaten([(x, sign * y) for x, y in points.values()])]
            axis.plot(*zip(*best), color="0.6", linewidth=1.2, zorder=1)
            for number, pattern in enumerate(patterns):
                if pattern not in found:
                    continue
                (cost, value), (_, low, high) = points[pattern], found[pattern]
                bars = [[max(0.0, value - low)], [max(0.0, high - value)]]
                axis.errorbar([cost], [value], yerr=bars, capsize=3, elinewidth=0.8, zorder=2, **_style(number))
            axis.set_xlim(0, 1.12 * max(cost for cost, _ in points.values()))
            if sign < 0:
                axis.set_ylim(-0.05, 1.05)
            else:
                axis.margins(y=0.15)
            axis.xaxis.set_major_locator(MaxNLocator(6))
            axis.grid(alpha=0.3)
        axes[0].set_ylabel(_QUALITIES[metric])
        axes[0].xaxis.set_major_formatter(PercentFormatter(1))
        axes[0].set_xlabel(f"attention FLOPs of exact's, {short_count(length)} tokens")
        axes[1].set_xlabel(f"seconds of a pass over {short_count(length)} tokens, median")
    handles = [Line2D([], [], linestyle="", label=name, **_style(number)) for number, name in enumerate(patterns)]
    handles.append(Line2D([], [], color="0.6", label="no other pattern is better in both"))
    _legend(figure, handles)
    save_figure(figure, path)
    return True


def _draw_shares(axis: Any, values: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> Any:
    """Draws shares from 0 to 1 as shades with their numbers; returns what a colour bar needs."""
    image = axis.imshow(values, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), rows)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            axis.text(
                column, row, f"{value:.2f}", ha="center", va="center", color="w" if value < 0.5 else "k", fontsize=8
            )
    return image


def _plot_shares(
    values: Mapping[str, np.ndarray],
    rows: Sequence[str],
    columns: Sequence[str],
    labels: tuple[str, str, str],
    path: Path,
) -> None:
    """Draws a panel of shares for each pattern, as many side by side as there is room for.

    Args:
        labels: those of the rows and of the columns, and what the shares are of.
    """
    names = max(map(len, rows))
    width = max(2.2, 0.62 * len(columns) + 0.6, 0.085 * max(map(len, values)))
    deep = -(-len(values) // max(1, int(11 / width)))
    beside = -(-len(values) // deep)
    figure = new_figure(1.8 + 0.07 * names + width * beside, 1.1 + deep * (0.9 + 0.34 * len(rows)))
    axes = figure.subplots(deep, beside, squeeze=False, sharex=True, sharey=True)
    image = None
    for axis, (pattern, of_pattern) in zip(axes.flat, values.items()):
        image = _draw_shares(axis, of_pattern, rows, columns)
        axis.set_title(pattern, fontsize=9)
    for axis in axes.flat[max(0, len(values) - beside) : len(values)]:  # No panel is below these.
        axis.tick_params(labelbottom=True)
    for axis in axes.flat[len(values) :]:
        axis.set_axis_off()
    figure.supylabel(labels[0], fontsize=10)
    figure.supxlabel(labels[1], fontsize=10)
    figure.suptitle(labels[2], fontsize=10)
    figure.colorbar(image, ax=list(axes.flat), label="share", fraction=0.06, aspect=12)
    save_figure(figure, path)


def _by_length(
    cells: Sequence[Mapping[str, Any]], name: str, rows: Sequence[Any], patterns: Sequence[str]
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Returns the lengths of cells as texts, and for each pattern [rows, lengths] the values of its cells, NaN where none is.

    Args:
        rows: the values that the cells have under `name`.
    """
    lengths = sorted({cell["length"] for cell in cells})
    grids = {pattern: np.full((len(rows), len(lengths)), np.nan) for pattern in patterns}
    for cell in cells:
        grids[cell["pattern"]][rows.index(cell[name]), lengths.index(cell["length"])] = cell["value"]
    return [short_count(length) for length in lengths], grids


def plot_depths(results: Mapping[str, Any], task: str, metric: str, path: Path) -> None:
    """Draws the scores of a task by depth and length, a panel for each pattern."""
    cells = [c for c in results["cells"] if (c["task"], c["metric"]) == (task, metric) and c["depth"] is not None]
    depths = sorted({cell["depth"] for cell in cells})
    lengths, values = _by_length(cells, "depth", depths, results["config"]["patterns"])
    rows = [f"{depth:.0%}" for depth in depths]
    _plot_shares(values, rows, lengths, ("depth of the answer", "tokens", f"{task}: {_QUALITIES[metric]}"), path)


def plot_tasks(results: Mapping[str, Any], metric: str, path: Path) -> None:
    """Draws the scores of all tasks of retrieval by length, a panel for each pattern."""
    cells = [c for c in results["cells"] if c["metric"] == metric and c["depth"] is None]
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    lengths, values = _by_length(cells, "task", tasks, results["config"]["patterns"])
    _plot_shares(values, tasks, lengths, ("task", "tokens", _QUALITIES[metric]), path)


def plot_positions(results: Mapping[str, Any], path: Path) -> bool:
    """Draws the mean loss by position in pieces of the longest length, for each pattern; returns whether there is any."""
    if not results["loss_by_position"]:
        return False
    length = max(map(int, results["loss_by_position"]))
    by_pattern = results["loss_by_position"][str(length)]
    figure = new_figure(7.5, 4.4)
    axis = figure.subplots()
    for number, (pattern, buckets) in enumerate(by_pattern.items()):
        edges = [bucket[0] for bucket in buckets] + [length]
        middles = [(first * stop) ** 0.5 for first, stop in itertools.pairwise(edges)]
        line = _LINES[number % len(_LINES)]
        axis.plot(middles, [b[1] for b in buckets], linestyle=line, markersize=4, label=pattern, **_style(number))
    axis.set_xscale("log", base=2)
    from matplotlib.ticker import FuncFormatter

    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_count(round(x))))
    axis.set_xlabel(f"position in the piece of {short_count(length)} tokens")
    axis.set_ylabel("loss (nats a token, mean of the bucket)")
    axis.grid(alpha=0.3)
    _legend(figure, axis.get_legend_handles_labels()[0])
    save_figure(figure, path)
    return True


def plot_evaluation(results: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Draws all pictures that there are figures for to a folder; returns the title of each file, in order."""
    drawn = {}
    if plot_pareto(results, folder / "pareto.png"):
        drawn["pareto.png"] = "Quality against cost"
    cells = [cell for cell in results["cells"] if cell["metric"] in RETRIEVAL_METRICS]
    for metric in RETRIEVAL_METRICS:
        way = {"string_match_all": "generated", "acc": "likelihood"}[metric]
        for task in dict.fromkeys(c["task"] for c in cells if c["metric"] == metric and c["depth"] is not None):
            plot_depths(results, task, metric, folder / f"{task}_{way}.png")
            drawn[f"{task}_{way}.png"] = f"{task} by depth and length, {way}"
        if any(cell["metric"] == metric for cell in cells):
            plot_tasks(results, metric, folder / f"tasks_{way}.png")
            drawn[f"tasks_{way}.png"] = f"All tasks by length, {way}"
    if plot_positions(results, folder / "loss_by_position.png"):
        drawn["loss_by_position.png"] = "Loss by position"
    return drawn
