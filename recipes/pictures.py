"""The pictures of the demo and of perplexity.py: losses along a document, and the quality that patterns keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # Only pictures need it.

    return Figure(figsize=(width, height), layout="constrained")


def plot_losses(losses: Mapping[str, Sequence[float]], path: Path, window: int = 256) -> None:
    """Draws the loss along a document for each pattern, as a running mean, and the difference from the first pattern."""
    figure = _figure(9, 6.5)
    top, bottom = figure.subplots(2, 1, sharex=True)
    first = None
    for name, values in losses.items():
        width = min(window, len(values) - 1)
        mean = np.convolve(values[1:], np.ones(width), "valid") / width  # Nothing predicts the first token.
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
    figure = _figure(7.5, 4.8)
    axis = figure.subplots()
    for row in figures:
        point = (row["flop_share"], row["perplexity"])
        axis.scatter(*zip(point), color="C0")
        axis.annotate(row["pattern"], point, xytext=(5, 5), textcoords="offset points", fontsize=8)
    axis.set_xscale("log")
    axis.margins(x=0.25, y=0.15)
    shares = [digit * 10.0**power for power in range(-6, 1) for digit in (1, 2, 3, 5)]
    axis.set_xticks([share for share in shares if axis.get_xlim()[0] <= share <= 1])
    axis.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axis.minorticks_off()
    axis.set_xlabel("attention FLOPs, as a share of exact attention's (log scale)")
    axis.set_ylabel("perplexity")
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def plot_decoding(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the milliseconds of a token and the MiB of the cache by the tokens in it, a line for each attention."""
    figure = _figure(9, 4)
    axes = figure.subplots(1, 2)
    for name in dict.fromkeys(row["attention"] for row in rows):
        own = [row for row in rows if row["attention"] == name]
        tokens = [row["tokens"] for row in own]
        axes[0].plot(
            tokens, [row["ms"] for row in own], marker="o", label=Path(name).stem if name.endswith(".json") else name
        )
        axes[1].plot(tokens, [row["bytes"] / 2**20 for row in own], marker="o")
    for axis, label in zip(axes, ("milliseconds of a token", "MiB of the cache")):
        axis.set(xscale="log", yscale="log", xlabel="tokens in the cache", ylabel=label)
        axis.set_xticks(sorted({row["tokens"] for row in rows}))
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}k")
        low, high = axis.get_ylim()
        steps = [digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5)]
        axis.set_yticks([step for step in steps if low <= step <= high])
        axis.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)
