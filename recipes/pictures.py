"""The pictures of the recipes: losses of training, losses along a document, and what patterns cost and save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # Only pictures need it.

    return Figure(figsize=(width, height), layout="constrained")


def _trailing_mean(values: Sequence[float], width: int) -> np.ndarray:
    """Returns the mean of each value and those before it, `width` in all, or as many as there are."""
    sums = np.cumsum([0.0, *values])
    stops = np.arange(1, len(values) + 1)
    starts = np.maximum(stops - width, 0)
    return (sums[stops] - sums[starts]) / (stops - starts)


def plot_training(
    losses: Sequence[float], path: Path, held_out: Mapping[int, float], learned: str = "training"
) -> None:
    """Draws the loss of each optimizer step in nats a token, its mean over a tenth of all steps, and held-out losses.

    Args:
        held_out: losses by the number of steps before them.
        learned: the name of the loss of steps.
    """
    figure = _figure(7, 4)
    axis, width, steps = figure.subplots(), max(1, len(losses) // 10), range(1, len(losses) + 1)
    axis.plot(steps, losses, color="C0", alpha=0.35, linewidth=1, label=f"{learned}, each step")
    if width > 1:
        axis.plot(steps, _trailing_mean(losses, width), color="C0", label=f"{learned}, mean of the last {width} steps")
    if held_out:
        axis.plot(*zip(*sorted(held_out.items())), color="C1", marker="o", markersize=4, label="held out")
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("loss (nats a token)")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)


def plot_losses(losses: Mapping[str, Sequence[float]], path: Path, window: int = 256) -> None:
    """Draws the loss along a document for each pattern, as a running mean, and the difference from the first pattern."""
    figure = _figure(9, 6.5)
    top, bottom = figure.subplots(2, 1, sharex=True)
    first = None
    for name, values in losses.items():
        width = min(window, len(values) - 1)
        mean = _trailing_mean(values[1:], width)[width - 1 :]  # Nothing predicts the first token.
        first = mean if first is None else first
        position = np.arange(len(mean)) + width
        top.plot(position, mean, label=name, linewidth=1)
        bottom.plot(position, mean - first, linewidth=1)
    top.set_ylabel(f"loss (nats, mean of {width} tokens)")
    bottom.set_ylabel(f"difference from {next(iter(losses))} (nats)")
    bottom.set_xlabel("position in the document (tokens)")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=min(4, len(losses)), fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)


def plot_quality(figures: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the perplexity of each pattern against its share of exact attention's FLOPs."""
    from matplotlib.ticker import LogLocator

    figure = _figure(7.5, 4.8)
    axis = figure.subplots()
    for row in figures:
        point = (row["flop_share"], row["perplexity"])
        axis.scatter(*zip(point), color="C0")
        axis.annotate(row["pattern"], point, xytext=(5, 5), textcoords="offset points", fontsize=8)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axis.minorticks_off()
    axis.margins(x=0.25, y=0.15)
    axis.set_xlabel("attention FLOPs, as a share of exact attention's")
    axis.set_ylabel("perplexity")
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
