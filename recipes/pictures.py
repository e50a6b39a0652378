"""The pictures of the recipes: a ring, quality against cost, losses along a document, seconds and memory.

Those of the guides:   python recipes/pictures.py recipes/pictures

This draws whole_rows.png, and decoding.png from bench/decoding.json. A kind of patterns has one colour and one marker.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from arguments import Help
from bench.draw import KINDS, kind_of, styles_of

import hf_ring_attention as ra

OWN, OTHERS = "#2f5d9e", "#e4e6ea"


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # Only pictures need it.

    return Figure(figsize=(width, height), layout="constrained")


def plot_losses(losses: Mapping[str, Sequence[float]], path: Path, window: int = 256) -> None:
    """Draws the loss along a document for each pattern, as a running mean, and the difference from the first pattern."""
    figure = _figure(9, 6.5)
    top, bottom = figure.subplots(2, 1, sharex=True)
    first = None
    for style, (name, values) in zip(styles_of(losses).values(), losses.items()):
        width = min(window, len(values) - 1)
        mean = np.convolve(values[1:], np.ones(width), "valid") / width  # Nothing predicts the first token.
        first = mean if first is None else first
        position = np.arange(len(mean)) + width
        few = {"linewidth": 1, "markersize": 5, "markevery": max(1, len(mean) // 12)}
        top.plot(position, mean, label=name, **style, **few)
        bottom.plot(position, mean - first, **style, **few)
    top.set_ylabel(f"loss (nats, mean of {width} tokens)")
    bottom.set_ylabel(f"difference from {next(iter(losses))} (nats)")
    bottom.set_xlabel("position in the document (tokens)")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=min(4, len(losses)), fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)


def name_of(pattern: str) -> str:
    """Returns a short name: a pattern's text, or the folder of a calibration's file."""
    return Path(pattern).parent.name or Path(pattern).stem if pattern.endswith(".json") else pattern


def plot_quality(figures: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the perplexity of each pattern against its share of exact attention's FLOPs, a line for each kind of pattern."""
    from matplotlib.transforms import Bbox

    figure = _figure(8, 4.6)
    axis, named, kinds = figure.subplots(), [], {}
    for row in figures:
        kinds.setdefault(kind_of(row["pattern"]), []).append(row)
    for (kind, rows), style in zip(kinds.items(), styles_of(rows[0]["pattern"] for rows in kinds.values()).values()):
        points = sorted((row["flop_share"], row["perplexity"], name_of(row["pattern"])) for row in rows)
        axis.plot(*list(zip(*points))[:2], label=kind, **style)
        named += [(*point, kind == "calibrations") for point in points]
    axis.set_xlim(-0.02, 1.04)
    axis.margins(y=0.1)
    axis.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axis.set_xlabel("attention FLOPs, as a share of exact attention's", fontsize=11)
    axis.set_ylabel("perplexity", fontsize=11)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=6, fontsize=10, frameon=False)
    figure.draw_without_rendering()  # Now the places of points are known.
    dots = np.concatenate([line.get_path().interpolated(20).vertices for line in axis.get_lines()])
    taken = [Bbox.from_bounds(*dot - 4, 8, 8) for dot in axis.transData.transform(dots)]
    for *point, name, below in named:
        text = axis.annotate(name, point, (0, 0), textcoords="offset points", fontsize=10)
        for side, height in itertools.product((6, -6), (-16, 5, -31, 20) if below else (5, -16, 20, -31)):
            text.set(position=(side, height), ha="left" if side > 0 else "right")
            box = text.get_window_extent()
            if axis.bbox.contains(*box.min) and axis.bbox.contains(*box.max) and not box.count_overlaps(taken):
                break
        if abs(height) > 16:
            axis.annotate(
                "", point, (side, height), textcoords="offset points", arrowprops={"arrowstyle": "-", "lw": 0.5}
            )
        taken.append(text.get_window_extent())
    figure.savefig(path, dpi=100)


def plot_layer(rows: Sequence[Mapping[str, Any]], tokens: int, path: Path) -> None:
    """Draws the seconds and the MiB of layer.py as bars, with their numbers; bars of rings are hatched."""
    figure = _figure(8, 0.9 + 0.42 * len(rows))
    axes = figure.subplots(1, 2, sharey=True)
    names = [f"{row['attention']}, {row['processes']} process" + "es" * (row["processes"] > 1) for row in rows]
    columns = ("seconds", "seconds", 1, 2), ("MiB of a process", "bytes", 2**20, 0)
    for axis, (label, name, unit, digits) in zip(axes, columns):
        colours = [KINDS[kind_of(row["attention"])][0] for row in rows]
        hatches = ["//" * (row["processes"] > 1) for row in rows]
        bars = axis.barh(names, [row[name] / unit for row in rows], color=colours, edgecolor="white", hatch=hatches)
        axis.bar_label(bars, fmt=f"%.{digits}f", padding=3)
        axis.set_xlabel(label, fontsize=11)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(f"attention of {tokens} tokens, forward and backward", fontsize=11)
    figure.savefig(path, dpi=100)


def plot_decoding(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the milliseconds of a token and the MiB of the cache by the tokens in it, a line for each attention."""
    figure = _figure(8, 4)
    axes = figure.subplots(1, 2)
    for name, style in styles_of(dict.fromkeys(row["attention"] for row in rows)).items():
        own = [row for row in rows if row["attention"] == name]
        tokens, hollow = [row["tokens"] for row in own], style | {"fillstyle": "none"}
        axes[0].plot(tokens, [row["ms"] for row in own], label=name_of(name), **hollow)
        axes[1].plot(tokens, [row["bytes"] / 2**20 for row in own], **hollow)
    axes[1].set_yscale("log")
    low, high = axes[1].get_ylim()
    axes[1].set_yticks(
        [step for power in range(7) for step in (10**power, 2 * 10**power, 5 * 10**power) if low <= step <= high]
    )
    axes[1].yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    axes[0].set_ylim(bottom=0)
    for axis, label in zip(axes, ("milliseconds of a token", "MiB of the cache")):
        axis.set(xscale="log", xticks=sorted({row["tokens"] for row in rows}))
        axis.set_xlabel("tokens in the cache", fontsize=11)
        axis.set_ylabel(label, fontsize=11)
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}k")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=11, frameon=False)
    figure.savefig(path, dpi=100)


def plot_whole_rows(path: Path, ranks: int = 4) -> None:
    """Draws a call of a model over a ring: whole rows in, cut before the decoder, joined behind it, whole results out."""
    from matplotlib.patches import Rectangle

    pieces = range(2 * ranks)
    layout = ra.explain("exact", seq_len=len(pieces), ring_size=ranks, num_heads=1, head_dim=1).layout
    figure = _figure(8, 1.2 + 0.7 * ranks)
    axis = figure.subplots()

    def row(left: float, rank: int, shown: Sequence[int], dark: Sequence[int]) -> None:
        width = 24 / len(pieces)
        for place, piece in enumerate(shown):
            fill, colour = (OWN, "white") if piece in dark else (OTHERS, "#555555")
            corner = left + width * place, rank - 0.2
            axis.add_patch(Rectangle(corner, width, 0.4, facecolor=fill, edgecolor="white", zorder=3))
            axis.text(corner[0] + width / 2, rank, str(piece), ha="center", va="center", color=colour, zorder=4)

    def arrow(start: tuple[float, float], end: tuple[float, float], dashes: str = "-") -> None:
        axis.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "linestyle": dashes, "color": "black"}, zorder=2)

    for rank in range(ranks):
        own = [piece for positions in layout.pieces(rank) for piece in positions]
        axis.text(0, rank, f"rank {rank}", va="center")
        row(9, rank, pieces, own)
        arrow((34, rank), (41, rank))
        axis.add_patch(Rectangle((42, rank - 0.3), 16, 0.6, facecolor="white", edgecolor="black", zorder=2))
        row(47, rank, own, own)
        arrow((59, rank), (73, rank))
        row(74, rank, pieces, pieces)
        if rank + 1 < ranks:
            arrow((50, rank + 0.3), (50, rank + 0.7), "--")
            axis.text(51, rank + 0.5, "keys", va="center")
    last = ranks - 0.5
    axis.plot(
        [50, 50, 66, 66, 50], [last - 0.2, last, last, -0.6, -0.6], color="black", linestyle="--", linewidth=1, zorder=1
    )
    arrow((50, -0.6), (50, -0.3))
    headers = {21: "the same whole batch,\non every rank", 37.5: "cut", 50: "decoder:\nkeys travel", 66: "joined"}
    for place, text in (headers | {86: "one loss, the same logits,\non every rank"}).items():
        axis.text(place, -1.05, text, ha="center", va="center", fontsize=11)
    axis.set(xlim=(-1, 99), ylim=(ranks - 0.4, -1.4))
    axis.axis("off")
    figure.savefig(path, dpi=100)


def main(words: Sequence[str] | None = None) -> None:
    """Draws the pictures of the guides that come from no other command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("folder", type=Path, help="the folder of whole_rows.png and decoding.png")
    folder = parser.parse_args(words).folder
    plot_whole_rows(folder / "whole_rows.png")
    decoding = Path(__file__).parent / "bench" / "decoding.json"
    plot_decoding(json.loads(decoding.read_text("utf-8"))["rows"], folder / "decoding.png")
    print(f"wrote whole_rows.png and decoding.png to {folder}")


if __name__ == "__main__":
    main()
