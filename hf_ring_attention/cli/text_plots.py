"""Describes pictures in words, and draws them as text for a terminal, in lists of lines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ..cost.timeline import Timeline
from ..plan.layouts import SequenceLayout
from ..plan.patterns import Pattern
from .output import short_count, short_seconds
from .visible import VisiblePairs, visible_pairs

#: The width of a picture in characters.
COLUMNS = 64
#: A least share of a square's pairs, and the character for it.
SHADES = ((0.75, "█"), (0.25, "▓"), (1 / 16, "▒"), (0.0, "░"))
SINK, DARK = "┃", "·"
PATTERN_LEGEND = "█ most pairs seen, ▓ from 1/4, ▒ from 1/16, ░ fewer, · none, ┃ sinks, blank: the future"
RING_LEGEND = "█ ▓ compute (steps alternate), ~ wait, ─ send"


def pattern_lines(visible: VisiblePairs) -> list[str]:
    """Returns the lines of a pattern, two rows of squares each: queries from above, keys from the left."""
    bins = len(visible.edges) - 1
    lines = []
    for first in range(0, bins, 2):
        rows = slice(first, first + 2)
        possible, shown = visible.possible[rows].mean(0), visible.share[rows].mean(0)
        characters = []
        for column in range(bins):
            share = shown[column] / possible[column] if possible[column] > 0 else 0.0
            if possible[column] == 0:
                characters.append(" ")
            elif visible.sinks > visible.edges[column]:
                characters.append(SINK)
            elif share == 0:
                characters.append(DARK)
            else:
                characters.append(next(shade for least, shade in SHADES if share >= least))
        lines.append("".join(characters).rstrip())
    return lines


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
    end = short_count(layout.padded_len)
    lines.append(f"{'':8} 0{end:>{COLUMNS - 1}}")
    return lines


def ring_lines(timeline: Timeline) -> list[str]:
    """Returns the lines of a ring's forward pass: for each rank one of computing and waiting, and one of sending."""
    lines = []
    borders = np.linspace(0, timeline.seconds, COLUMNS + 1)
    for rank in range(timeline.ranks):
        spans = [span for span in timeline.spans if span.rank == rank]
        for kinds, label in ((("compute", "wait"), f"rank {rank:>3}"), (("send",), "")):
            line = ""
            for low, high in itertools.pairwise(borders):
                overlaps = {" ": (high - low) / 8}
                for span in spans:
                    if span.kind in kinds:
                        mark = "█▓"[span.step % 2] if span.kind == "compute" else "~" if span.kind == "wait" else "─"
                        overlap = min(high, span.stop) - max(low, span.start)
                        overlaps[mark] = overlaps.get(mark, 0.0) + max(0.0, overlap)
                line += max(overlaps, key=lambda mark: overlaps[mark])
            lines.append(f"{label:8} {line.rstrip()}".rstrip())
    return lines


def shares_seen(pattern: Pattern, visible: VisiblePairs, *, head: int | None, num_heads: int, num_kv_heads: int) -> str:
    """Returns a text: how much of the causal pairs a head sees, and how much all heads see together."""
    if head is not None:
        return f"head {head} sees {visible.share_of_causal:.1%} of the pairs"
    shape = {"head": 0, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    first = visible_pairs(pattern, visible.length, len(visible.edges) - 1, **shape).share_of_causal
    return f"one head sees {first:.1%} of the pairs, {num_heads} heads {visible.share_of_causal:.1%}"


def timeline_summary(timeline: Timeline) -> str:
    """Returns a text: how long a timeline is, and the shares of it that are computing and waiting."""
    return (
        f"{short_seconds(timeline.seconds)} in all: ranks compute for {timeline.share('compute'):.0%} of it and wait for keys "
        f"for {timeline.share('wait'):.0%}"
    )
