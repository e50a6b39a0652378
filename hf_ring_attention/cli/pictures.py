"""Describes pictures in words, and draws them as text for a terminal, in lists of lines.

A picture of a pattern has squares, for any length and without an n x n matrix. In a branch, the keys that a query sees are
some residues inside one interval. For each square, the picture takes the share of pairs inside the interval, and the share of
pairs with these residues. Squares of one pair are exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cost.explain import Explanation
from ..cost.timeline import Timeline
from ..plan.branches import Branch, Segment, Sink
from ..plan.patterns import Pattern
from .output import short_count, short_seconds

#: The width of a picture in characters.
COLUMNS = 64
SINK, DARK = "┃", "·"
PATTERN_LEGEND = "█ most pairs seen, ▓ from 1/4, ▒ from 1/16, ░ fewer, · none, ┃ sinks, blank: the future"
#: The intervals of at most this many queries are computed for a row of squares; their ends lie on straight lines.
QUERIES_OF_A_ROW = 128


@dataclass(frozen=True)
class VisiblePairs:
    """A causal document as squares, [bins, bins]: queries from above, keys from the left."""

    share: np.ndarray  # of the pairs in each square that are seen, sinks left out
    sinks: int  # how many first tokens every query sees
    possible: np.ndarray  # the share of the pairs in each square that causality allows
    edges: np.ndarray  # the first tokens of squares, and the end of the last one

    @property
    def share_of_causal(self) -> float:
        """The visible pairs, sinks included, as a share of exact attention's."""
        sizes, length = np.outer(np.diff(self.edges), np.diff(self.edges)), self.edges[-1]
        sink_pairs = self.sinks * length - self.sinks * (self.sinks - 1) / 2
        return float(((self.share * sizes).sum() + sink_pairs) / (self.possible * sizes).sum())


def visible_pairs(
    pattern: Pattern, length: int, bins: int, *, head: int | None = None, num_heads: int = 1, num_kv_heads: int = 1
) -> VisiblePairs:
    """Returns the pairs that one head sees, or without `head` the pairs that all heads see together.

    Of heads with different patterns, a square has the share of the pattern that shows the most of it.
    """
    edges = np.linspace(0, length, min(bins, length) + 1).astype(np.int64)
    phases: dict[Pattern, set[int]] = {}
    for number in range(num_heads) if head is None else [head]:
        kv_head = number * num_kv_heads // num_heads
        phases.setdefault(pattern.of_kv_head(kv_head), set()).add(kv_head)
    tokens = [branch.tokens for own in phases for branch in own.branches if isinstance(branch, Sink)]
    sinks = min(length, max(tokens, default=0))
    shares = [_share_of(own, length, edges, own_phases, sinks) for own, own_phases in phases.items()]
    exact = _inside(Segment(), length, edges, 0)
    return VisiblePairs(np.max(shares, axis=0), sinks, exact, edges)


def seen_under(
    patterns: Mapping[str, Pattern], length: int, bins: int, *, head: int | None, num_heads: int, num_kv_heads: int
) -> Iterator[tuple[str, str, VisiblePairs]]:
    """Yields the name of each pattern, how much of the causal pairs heads see in words, and the visible pairs."""
    number, who = (0, "one head") if head is None else (head, f"head {head}")
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for name, pattern in patterns.items():
        visible = visible_pairs(pattern, length, bins, head=head, **heads)
        own = visible_pairs(pattern, length, bins, head=number, **heads).share_of_causal
        together = f", {num_heads} heads {visible.share_of_causal:.1%}" if head is None else ""
        yield name, f"{who} sees {own:.1%} of the pairs{together}", visible


def _share_of(pattern: Pattern, length: int, edges: np.ndarray, phases: Iterable[int], sinks: int) -> np.ndarray:
    """Returns the share of each square that a pattern shows heads of these phases, keys before `sinks` left out."""
    most = layered = widest = np.zeros((len(edges) - 1, len(edges) - 1))
    branches = [branch for branch in pattern.branches if not isinstance(branch, Sink)]
    for branch in sorted(branches, key=lambda branch: branch.dilation):
        inside, residues = _inside(branch, length, edges, sinks), _of_residues(branch, edges, phases)
        most = np.maximum(most, inside * residues)
        # Branches with larger dilations add what lies beyond the intervals of the others: exact if intervals are nested.
        layered = layered + np.maximum(inside - widest, 0) * residues
        widest = np.maximum(widest, inside)
    return np.minimum(np.maximum(most, layered), 1)


def _inside(branch: Branch, length: int, edges: np.ndarray, sinks: int) -> np.ndarray:
    """Returns the share of each square that lies in the intervals of a branch, whatever the residue."""
    rows = []
    for top, bottom in itertools.pairwise(edges.tolist()):
        count = min(bottom - top, QUERIES_OF_A_ROW)
        query: Any = top + (2 * np.arange(count) + 1) * (bottom - top) // (2 * count)
        first, beyond = (border.position(query) for border in branch.borders())
        stop = np.minimum(query + 1, beyond)
        ends = (np.maximum(end, sinks) for end in (np.broadcast_to(first, query.shape), stop))
        start, stop = (end[:, None].clip(edges[:-1], edges[1:]) for end in ends)
        rows.append((stop - start).mean(0) / np.diff(edges))
    return np.array(rows)


def _of_residues(branch: Branch, edges: np.ndarray, phases: Iterable[int]) -> np.ndarray:
    """Returns the share of each square's pairs whose key, and whose query if it must, have a residue of the branch."""
    total = np.zeros((len(edges) - 1, len(edges) - 1))
    for residue in {phase % branch.dilation for phase in phases}:
        below = np.maximum((edges - residue + branch.dilation - 1) // branch.dilation, 0)
        keys = np.diff(below) / np.diff(edges)
        total += np.outer(keys if branch.queries == "dilated" else np.ones_like(keys), keys)
    return total


def lines_of_patterns(patterns: Mapping[str, Pattern], tokens: int, **shape: Any) -> list[str]:
    """Returns the lines of several patterns in a document; `shape` is as for `seen_under`."""
    lines = []
    for name, share, visible in seen_under(patterns, tokens, COLUMNS, **shape):
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


def layout_lines(call: Explanation) -> list[str]:
    """Returns a line for each rank: the positions it holds, from left to right, and its work over the mean."""
    layout, flops = call.layout, [share.forward_flops for share in call.ranks]
    places = [(2 * column + 1) * layout.padded_len // (2 * COLUMNS) for column in range(COLUMNS)]
    lines = []
    for rank, work in enumerate(flops):
        marks = ("█" if any(place in piece for piece in layout.pieces(rank)) else "·" for place in places)
        lines.append(f"rank {rank:>3} {''.join(marks)} work {work * len(flops) / (sum(flops) or 1):.2f} of the mean")
    return [*lines, f"{'':8} 0{short_count(layout.padded_len):>{COLUMNS - 1}}"]


def timeline_summary(timeline: Timeline) -> str:
    """Returns a text: how long a timeline is, and the shares of it that are computing and waiting."""
    return (
        f"{short_seconds(timeline.seconds)} in all: ranks compute for {timeline.share('compute'):.0%} of it and wait for keys "
        f"for {timeline.share('wait'):.0%}"
    )
