"""Draws the pictures of `plots` as text for a terminal, in lists of lines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ..cost.timeline import Timeline
from ..plan.layouts import SequenceLayout
from .output import short_count
from .visible import VisiblePairs

#: The width of a picture in characters.
COLUMNS = 64
#: A least share of a square's pairs, and the character for it.
SHADES = ((0.75, "█"), (0.25, "▓"), (1 / 16, "▒"), (0.0, "░"))
SINK, DARK = "┃", "·"
PATTERN_LEGEND = "█ most pairs seen, ▓ from 1/4, ▒ from 1/16, ░ fewer, · none, ┃ sinks, blank: the future"


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


RING_LEGEND = "█ ▓ compute (steps alternate), ~ wait, ─ send"
