"""Describes pictures in words, and draws them as text for a terminal, in lists of lines."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from ..cost.timeline import Span, Timeline
from ..plan.layouts import SequenceLayout
from ..plan.patterns import Pattern
from .output import short_count, short_seconds
from .visible import VisiblePairs, visible_pairs

#: The width of a picture in characters.
COLUMNS = 64
SINK, DARK = "┃", "·"
PATTERN_LEGEND = "█ most pairs seen, ▓ from 1/4, ▒ from 1/16, ░ fewer, · none, ┃ sinks, blank: the future"
RING_LEGEND = "█ ▓ compute (steps alternate), ~ wait, ─ send"


def lines_of_patterns(
    patterns: Mapping[str, Pattern], tokens: int, *, head: int | None, num_heads: int, num_kv_heads: int
) -> list[str]:
    """Returns the lines of several patterns in a document, each below its name and the share of pairs that is seen."""
    lines = []
    for name, pattern in patterns.items():
        visible = visible_pairs(pattern, tokens, COLUMNS, head=head, num_heads=num_heads, num_kv_heads=num_kv_heads)
        share = shares_seen(pattern, visible, head=head, num_heads=num_heads, num_kv_heads=num_kv_heads)
        lines += [f"{name}, {short_count(tokens)} tokens: {share}", *pattern_lines(visible), ""]
    return [*lines, PATTERN_LEGEND]


def pattern_lines(visible: VisiblePairs) -> list[str]:
    """Returns the lines of a pattern, two rows of squares each: queries from above, keys from the left."""
    rows = np.arange(0, len(visible.share), 2)
    possible, seen = (np.add.reduceat(share, rows) for share in (visible.possible, visible.share))
    share = seen / np.where(possible > 0, possible, 1)
    with_sinks = np.broadcast_to(visible.sinks > visible.edges[:-1], share.shape)
    conditions = [possible == 0, with_sinks, share == 0, share >= 3 / 4, share >= 1 / 4, share >= 1 / 16]
    marks = np.select(conditions, [" ", SINK, DARK, "█", "▓", "▒"], "░")
    return ["".join(line).rstrip() for line in marks]


def layout_lines(layout: SequenceLayout, work: Sequence[float]) -> list[str]:
    """Returns a line for each rank: the positions it holds, from left to right, and its work over the mean."""
    lines = []
    borders = np.linspace(0, layout.padded_len, COLUMNS + 1)
    for rank in range(layout.world_size):
        line = ""
        for low, high in itertools.pairwise(borders):
            held = sum(max(0.0, min(high, piece.stop) - max(low, piece.start)) for piece in layout.pieces(rank))
            line += "█" if held > (high - low) / 2 else "▌" if held > 0 else "·"
        lines.append(f"rank {rank:>3} {line} work {work[rank]:.2f} of the mean")
    return [*lines, f"{'':8} 0{short_count(layout.padded_len):>{COLUMNS - 1}}"]


def ring_lines(timeline: Timeline) -> list[str]:
    """Returns for each rank of a ring's forward pass a line of computing and waiting, and one of sending."""
    lines = []
    borders = np.linspace(0, timeline.seconds, COLUMNS + 1)
    for rank, sends in itertools.product(range(timeline.ranks), (False, True)):
        spans = [span for span in timeline.spans if span.rank == rank and (span.kind == "send") == sends]
        label = "" if sends else f"rank {rank:>3}"
        marks = (_mark_of(spans, low, high) for low, high in itertools.pairwise(borders))
        lines.append(f"{label:8} {''.join(marks)}".rstrip())
    return lines


def _mark_of(spans: Sequence[Span], start: float, stop: float) -> str:
    """Returns the mark of the spans that fill most of a stretch of time; a blank if they fill less than an eighth."""
    seconds = {" ": (stop - start) / 8}
    for span in spans:
        mark = {"compute": "█▓"[span.step % 2], "wait": "~", "send": "─"}[span.kind]
        seconds[mark] = seconds.get(mark, 0.0) + max(0.0, min(stop, span.stop) - max(start, span.start))
    return max(seconds, key=lambda mark: seconds[mark])


def shares_seen(pattern: Pattern, visible: VisiblePairs, *, head: int | None, num_heads: int, num_kv_heads: int) -> str:
    """Returns a text: how much of the causal pairs a head sees, and how much all heads see together."""
    if head is not None:
        return f"head {head} sees {visible.share_of_causal:.1%} of the pairs"
    first = visible_pairs(
        pattern, visible.length, len(visible.share), head=0, num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    return f"one head sees {first.share_of_causal:.1%} of the pairs, {num_heads} heads {visible.share_of_causal:.1%}"


def timeline_summary(timeline: Timeline) -> str:
    """Returns a text: how long a timeline is, and the shares of it that are computing and waiting."""
    return (
        f"{short_seconds(timeline.seconds)} in all: ranks compute for {timeline.share('compute'):.0%} of it and wait for keys "
        f"for {timeline.share('wait'):.0%}"
    )
