"""Pictures of patterns, of losses along a document and of training. Only drawing them needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..plan.intervals import Run
from ..plan.patterns import Pattern
from ..plan.tiles import tile_document
from .arguments import missing_extra


def _figure(width: float, height: float) -> Any:
    missing = missing_extra("a picture", "matplotlib")
    if missing:
        raise ModuleNotFoundError(missing, name="matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def visible_keys(pattern: Pattern, length: int, bins: int, head: int = 0, num_kv_heads: int = 1) -> np.ndarray:
    """[bins, bins] share of query-key pairs that a head sees, over squares of a document of `length` tokens (causal)."""
    runs = [Run(0, 0, length)]
    tiles = tile_document(
        pattern, length=length, queries=runs, keys=runs, num_heads=num_kv_heads, num_kv_heads=num_kv_heads, causal=True
    )
    seen = np.zeros((length, length), dtype=np.uint8)
    for tile in tiles:
        if head not in tile.heads:
            continue
        for copy in range(tile.copies):
            rows = np.asarray(tile.queries) + copy * tile.advance
            columns = np.asarray(tile.keys) + copy * tile.advance
            pairs = np.tri(len(rows), dtype=np.uint8) if tile.causal else np.uint8(1)
            seen[np.ix_(rows, columns)] |= pairs
    edges = np.linspace(0, length, bins + 1).astype(int)[:-1]
    total = np.add.reduceat(np.add.reduceat(seen.astype(np.float64), edges, axis=0), edges, axis=1)
    sizes = np.diff([*edges, length])
    return total / np.outer(sizes, sizes)


def plot_patterns(patterns: Mapping[str, Pattern], length: int, path: Path, bins: int = 256) -> None:
    """Writes a PNG: who attends to whom under each pattern, for the first head, as the share of pairs seen."""
    figure = _figure(4.2 * len(patterns), 4.8)
    from matplotlib.colors import LogNorm

    axes = figure.subplots(1, len(patterns), squeeze=False)[0]
    for axis, (name, pattern) in zip(axes, patterns.items()):
        share = visible_keys(pattern, length, min(bins, length))
        image = axis.imshow(
            np.where(share > 0, share, np.nan), norm=LogNorm(1 / 64, 1), cmap="viridis_r", extent=(0, length, length, 0)
        )
        axis.set_title(f"{name}\n{share.sum() / np.tri(len(share)).sum():.0%} of the causal pairs", fontsize=10)
        axis.set_xlabel("key position")
    axes[0].set_ylabel("query position")
    figure.colorbar(image, ax=list(axes), shrink=0.8, label="share of pairs seen, head 0")
    figure.savefig(path, dpi=120)


def plot_losses(losses: Mapping[str, Sequence[float]], path: Path, window: int = 256) -> None:
    """Writes a PNG: loss along the document for each pattern, in nats, as a running mean over `window` tokens.

    Below it the same as differences from the first pattern.
    """
    figure = _figure(9, 6.5)
    top, bottom = figure.subplots(2, 1, sharex=True)
    first = None
    for name, values in losses.items():
        known = np.nan_to_num(np.asarray(values[1:], dtype=np.float64))  # the first token is not predicted
        width = min(window, len(known))
        mean = np.convolve(known, np.ones(width) / width, mode="valid")
        position = np.arange(len(mean)) + width
        top.plot(position, mean, label=name, linewidth=1)
        first = mean if first is None else first
        bottom.plot(position, mean - first, label=name, linewidth=1)
    top.set_ylabel(f"loss, mean of {width} tokens (nats)")
    top.legend(fontsize=9)
    bottom.set_ylabel(f"difference from {next(iter(losses))} (nats)")
    bottom.set_xlabel("position in the document (tokens)")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def plot_training(losses: Sequence[float], path: Path, held_out: Mapping[int, float] | None = None) -> None:
    """Writes a PNG: the loss of each optimizer step, in nats a token, its running mean, and losses of held-out data.

    Args:
        losses: of steps 1, 2, ...; their mean is that of the steps before, a tenth of all at most.
        held_out: losses after steps; 0 is before the first one.
    """
    figure = _figure(7, 4)
    from matplotlib.ticker import MaxNLocator

    axis = figure.subplots()
    steps, width = range(1, len(losses) + 1), max(1, len(losses) // 10)
    axis.plot(steps, losses, color="C0", alpha=0.35, linewidth=1, label="training, each step")
    if width > 1:
        mean = [sum(losses[max(0, stop - width) : stop]) / min(width, stop) for stop in steps]
        axis.plot(steps, mean, color="C0", linewidth=1.8, label=f"training, mean of the last {width} steps")
    if held_out:
        points = sorted(held_out.items())
        axis.plot(*zip(*points), color="C1", marker="o", markersize=4, linewidth=1.8, label="held out")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("loss (nats a token)")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)
