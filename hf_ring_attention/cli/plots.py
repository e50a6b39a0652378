"""Draws patterns, layouts, a ring's steps, and losses of documents and of training. Only drawing needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..cost.timeline import Timeline
from ..evaluation.whole_files import whole_file
from ..plan.layouts import SequenceLayout
from ..plan.patterns import Pattern
from .arguments import missing_extra
from .output import short_count, short_seconds
from .visible import VisiblePairs, visible_pairs

#: The colours of what is not seen, of the future, and of sinks. A square is brighter, the more of its pairs are seen.
UNSEEN, FUTURE, SINKS = "#12121f", "#d8d8dc", "#19d3f3"
#: Shares of a square below this are drawn as this one.
FAINTEST = 1 / 64
COMPUTE, SEND, WAIT = ("#3b6fb6", "#7fa8dc"), "#f0a030", "#d9534f"


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of this size in inches, or raises ModuleNotFoundError that says how to get matplotlib."""
    missing = missing_extra("a picture", "matplotlib")
    if missing:
        raise ModuleNotFoundError(missing, name="matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure to a file, whole or not at all, in the format that the end of its name says."""
    with whole_file(path) as part:
        figure.savefig(part, dpi=120, format=path.suffix.removeprefix("."))


def _token_ticks(length: int) -> list[int]:
    """Returns the ticks of a document: its quarters where they are whole numbers, else its ends."""
    return [length * i // 4 for i in range(5)] if length % 4 == 0 else [0, length]


def plot_patterns(
    patterns: Mapping[str, Pattern],
    length: int,
    path: Path,
    bins: int = 256,
    *,
    head: int | None = None,
    num_heads: int = 8,
    num_kv_heads: int | None = None,
) -> None:
    """Draws who attends to whom under each pattern, in a document of any length, to a file.

    Args:
        bins: squares along a side.
        head: the head whose keys are drawn; None for what any of the heads sees.
        num_kv_heads: the number of key/value heads; None for `num_heads`.
    """
    panels = len(patterns)
    figure = new_figure(1.6 + 3.6 * panels, 4.9)
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.patches import Patch, Polygon, Rectangle

    colours = LinearSegmentedColormap.from_list("seen", ["#5b2a86", "#b5367a", "#f1605d", "#feb078", "#fcfdbf"])
    axes = figure.subplots(1, panels, squeeze=False)[0]
    image, any_sinks = None, False
    for axis, (name, pattern) in zip(axes, patterns.items()):
        visible = visible_pairs(
            pattern, length, bins, head=head, num_heads=num_heads, num_kv_heads=num_kv_heads or num_heads
        )
        share = visible.share / np.where(visible.possible > 0, visible.possible, 1)
        axis.set_facecolor(UNSEEN)
        axis.add_patch(Polygon([(0, 0), (length, 0), (length, length)], color=FUTURE, linewidth=0))
        image = axis.imshow(
            np.where(share > 0, np.clip(share, FAINTEST, 1), np.nan),
            norm=LogNorm(FAINTEST, 1),
            cmap=colours,
            extent=(0, length, length, 0),
            interpolation="nearest",
            zorder=2,
        )
        if visible.sinks:
            any_sinks = True
            width = max(visible.sinks, length / 120)  # Sinks are a few pixels wide, however long the document is.
            axis.add_patch(Rectangle((0, 0), width, length, color=SINKS, linewidth=0, zorder=3))
        axis.set_title(f"{name}\n{shares_seen(pattern, visible, head, num_heads, num_kv_heads)}", fontsize=9)
        ticks = _token_ticks(length)
        for one in (axis.xaxis, axis.yaxis):
            one.set_ticks(ticks, [short_count(tick) for tick in ticks])
        axis.set_xlabel("key position")
    axes[0].set_ylabel("query position")
    seen_by = f"any of {num_heads} heads sees" if head is None else f"head {head} of {num_heads} sees"
    bar = figure.colorbar(image, ax=list(axes), shrink=0.8, label=f"share of pairs that {seen_by}")
    bar.set_ticks([1 / 64, 1 / 16, 1 / 4, 1], labels=["1/64 or less", "1/16", "1/4", "all"])
    bar.minorticks_off()
    handles = [Patch(color=UNSEEN, label="not seen"), Patch(color=FUTURE, label="the future")]
    if any_sinks:
        handles.insert(0, Patch(color=SINKS, label="sinks, seen by all (drawn wide enough to see)"))
    columns = len(handles) if panels > 1 else 1  # A single panel is narrower than the entries side by side.
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    save_figure(figure, path)


def shares_seen(
    pattern: Pattern, visible: VisiblePairs, head: int | None, num_heads: int, num_kv_heads: int | None
) -> str:
    """Returns a text: how much of the causal pairs a head sees, and how much all heads see together."""
    if head is not None:
        return f"head {head} sees {visible.share_of_causal:.1%} of the pairs"
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads or num_heads}
    one = visible_pairs(pattern, visible.length, len(visible.edges) - 1, head=0, **heads).share_of_causal
    return f"one head sees {one:.1%} of the pairs, {num_heads} heads {visible.share_of_causal:.1%}"


def plot_layout(layout: SequenceLayout, work: Sequence[float], pattern: Pattern, path: Path) -> None:
    """Draws which tokens of a row each rank holds, and how much work a pattern gives it.

    Args:
        work: the query-key pairs of each rank over the mean.
    """
    p = layout.world_size
    figure = new_figure(9, 1.6 + 0.36 * min(p, 24))
    left, right = figure.subplots(1, 2, width_ratios=[3, 1], sharey=True)
    from matplotlib import colormaps

    colours = colormaps["viridis"](np.linspace(0.1, 0.9, p))
    for rank in range(p):
        pieces = [(piece.start, len(piece)) for piece in layout.pieces(rank)]
        left.broken_barh(pieces, (rank - 0.4, 0.8), color=colours[rank])
        right.barh(rank, work[rank], height=0.8, color=colours[rank])
    if layout.padded_len > layout.seq_len:
        left.axvspan(layout.seq_len, layout.padded_len, color="#bbbbbb", alpha=0.7, label="padding")
        figure.legend(loc="outside lower center", frameon=False)
    left.set_ylim(p - 0.4, -0.6)
    left.set_yticks(range(p))
    left.set_xlim(0, layout.padded_len)
    ticks = _token_ticks(layout.seq_len)
    left.set_xticks(ticks, [short_count(tick) for tick in ticks])
    left.set_ylabel("rank")
    left.set_xlabel("position in the row (tokens)")
    left.set_title(f"{layout.kind}: {short_count(layout.seq_len)} tokens over {p} ranks", fontsize=10)
    right.axvline(1, color="black", linewidth=0.8, linestyle=":")
    right.set_xlabel("work over the mean")
    right.set_title(f"{pattern}: busiest {max(work):.2f}", fontsize=10)
    save_figure(figure, path)


def plot_ring(timeline: Timeline, title: str, path: Path) -> None:
    """Draws a ring's forward pass as a Gantt chart to a file: what each rank computes, sends and waits for."""
    figure = new_figure(10, 1.8 + 0.5 * min(timeline.ranks, 24))
    axis, p = figure.subplots(), timeline.ranks
    from matplotlib.patches import Patch

    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    unit, name = next(((size, unit) for size, unit in units if timeline.seconds >= size), (1e-9, "ns"))
    # A bar has the number of the rank whose keys it computes with, where there is room.
    longest = max((span.stop - span.start for span in timeline.spans if span.kind == "compute"), default=0.0)
    show_sources = p <= 24 and longest > 0.012 * timeline.seconds
    lanes = {"compute": (-0.42, 0.5), "wait": (-0.42, 0.5), "send": (0.12, 0.26)}
    for span in timeline.spans:
        low, height = lanes[span.kind]
        colour = COMPUTE[span.step % 2] if span.kind == "compute" else SEND if span.kind == "send" else WAIT
        style = (
            {"hatch": "///", "facecolor": "white", "edgecolor": colour} if span.kind == "wait" else {"color": colour}
        )
        bar = [(span.start / unit, (span.stop - span.start) / unit)]
        axis.broken_barh(bar, (span.rank + low, height), linewidth=0.4, **style)
        if span.kind == "compute" and show_sources and span.stop - span.start > 0.012 * timeline.seconds:
            middle = (span.start + span.stop) / 2 / unit
            axis.text(middle, span.rank - 0.17, str(span.source), ha="center", va="center", fontsize=7, color="white")
    axis.set_ylim(p - 0.45, -0.6)
    axis.set_yticks(range(p))
    axis.set_xlim(0, timeline.seconds / unit or 1)
    axis.set_ylabel("rank")
    axis.set_xlabel(f"time ({name})")
    axis.set_title(f"{title}\n{timeline_summary(timeline)}", fontsize=10)
    handles = [
        Patch(
            color=COMPUTE[0], label="compute" + (", with the keys of the rank that is named" if show_sources else "")
        ),
        Patch(color=SEND, label="send"),
        Patch(facecolor="white", edgecolor=WAIT, hatch="///", label="wait"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    save_figure(figure, path)


def timeline_summary(timeline: Timeline) -> str:
    """Returns a text: how long a timeline is, and the shares of it that are computing and waiting."""
    return (
        f"{short_seconds(timeline.seconds)} in all: ranks compute for {timeline.share('compute'):.0%} of it and wait for keys "
        f"for {timeline.share('wait'):.0%}"
    )


def _trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the mean of each value and those before it, over `window` values where there are so many."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    stops = np.arange(1, len(values) + 1)
    starts = np.maximum(stops - window, 0)
    mean: np.ndarray = (sums[stops] - sums[starts]) / (stops - starts)
    return mean


def plot_losses(losses: Mapping[str, Sequence[float]], path: Path, window: int = 256) -> None:
    """Draws the loss along the document for each pattern, in nats, as a running mean over the last `window` tokens.

    A second panel shows the differences from the first pattern.
    """
    figure = new_figure(9, 6.5)
    top, bottom = figure.subplots(2, 1, sharex=True)
    first = None
    for name, values in losses.items():
        predicted = np.nan_to_num(np.asarray(values[1:], dtype=np.float64))  # Nothing predicts the first token.
        width = min(window, len(predicted))
        mean = _trailing_mean(predicted, width)[width - 1 :]
        position = np.arange(len(mean)) + width
        top.plot(position, mean, label=name, linewidth=1)
        first = mean if first is None else first
        bottom.plot(position, mean - first, linewidth=1)
    top.set_ylabel(f"loss (nats, mean of {width} tokens)")
    bottom.set_ylabel(f"difference from {next(iter(losses))} (nats)")
    bottom.set_xlabel("position in the document (tokens)")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=min(4, len(losses)), fontsize=9, frameon=False)
    save_figure(figure, path)


def plot_quality(figures: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws what each pattern costs and what it saves: perplexity against the share of exact attention's FLOPs.

    A line joins the patterns that no other beats in both.

    Args:
        figures: for each pattern "pattern", "perplexity" and "flop_share".
    """
    figure = new_figure(7.5, 4.8)
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis = figure.subplots()
    best = unbeaten([(row["flop_share"], row["perplexity"]) for row in figures])
    axis.plot(*zip(*best), color="C0", alpha=0.4, linewidth=1.2, zorder=1, label="no other pattern is better in both")
    for row in figures:
        share, perplexity = row["flop_share"], row["perplexity"]
        is_best = (share, perplexity) in best
        axis.scatter([share], [perplexity], color="C0" if is_best else "C7", zorder=2)
        axis.annotate(
            row["pattern"],
            (share, perplexity),
            xytext=(-5, -11) if is_best else (5, 5),  # The line falls, and patterns that are beaten lie above it.
            textcoords="offset points",
            ha="right" if is_best else "left",
            fontsize=8,
        )
    axis.set_xscale("log")
    low = min(row["flop_share"] for row in figures)
    ticks = [tick for tick in (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0) if tick >= low / 2]
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xticks(ticks)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.1%}" if x < 0.01 else f"{x:.0%}"))
    # Names stand beside the points and inside the frame: a letter takes at most 8 of its 800 pixels.
    room = min(0.3, (12 + 8 * max(len(row["pattern"]) for row in figures)) / 800)
    axis.margins(x=room / (1 - 2 * room), y=0.16)
    axis.set_xlabel("attention FLOPs, of exact attention's")
    axis.set_ylabel("perplexity")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=9, frameon=False)
    save_figure(figure, path)


def unbeaten(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points (cost, loss) of which no other one is as good in both and better in one, by ascending cost."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def plot_training(
    losses: Sequence[float], path: Path, held_out: Mapping[int, float] | None = None, learned: str = "training"
) -> None:
    """Writes a PNG: the loss of each optimizer step, in nats a token, its running mean, and losses of held-out data.

    Args:
        losses: the losses of steps 1, 2, ...; the running mean is over a tenth of all steps.
        held_out: the loss of held-out data after each step that has one; step 0 is before the first one.
        learned: the name of the loss of steps in the legend.
    """
    figure = new_figure(7, 4)
    from matplotlib.ticker import MaxNLocator

    axis = figure.subplots()
    steps, width = range(1, len(losses) + 1), max(1, len(losses) // 10)
    axis.plot(steps, losses, color="C0", alpha=0.35, linewidth=1, label=f"{learned}, each step")
    if width > 1:
        mean = [sum(losses[max(0, stop - width) : stop]) / min(width, stop) for stop in steps]
        axis.plot(steps, mean, color="C0", linewidth=1.8, label=f"{learned}, mean of the last {width} steps")
    if held_out:
        points = sorted(held_out.items())
        axis.plot(*zip(*points), color="C1", marker="o", markersize=4, linewidth=1.8, label="held out")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("loss (nats a token)")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    save_figure(figure, path)
