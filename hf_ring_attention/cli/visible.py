"""Computes how much of each square of a picture a pattern shows, for any length and without an n x n matrix.

In a branch, the keys that a query sees are some residues inside one interval. For each square, the picture takes the share of
pairs inside the interval, and the share of pairs with these residues. Squares of one pair are exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..plan.branches import Branch, Last, Segment, Sink, Window
from ..plan.patterns import Pattern

#: The intervals of at most this many queries are computed for a row of squares; their ends lie on straight lines.
QUERIES_OF_A_ROW = 128


@dataclass(frozen=True)
class VisiblePairs:
    """A causal document as squares, [bins, bins]: queries from above, keys from the left.

    Attributes:
        share: the share of the pairs in each square that are seen, sinks left out.
        sinks: how many first tokens every query sees.
        possible: the share of the pairs in each square that causality allows.
        edges: the first tokens of squares, and the end of the last one.
    """

    length: int
    share: np.ndarray
    sinks: int
    possible: np.ndarray
    edges: np.ndarray

    @property
    def share_of_causal(self) -> float:
        """The visible pairs, sinks included, as a share of exact attention's."""
        sizes = np.outer(np.diff(self.edges), np.diff(self.edges))
        sink_pairs = self.sinks * self.length - self.sinks * (self.sinks - 1) / 2
        return float(((self.share * sizes).sum() + sink_pairs) / (self.possible * sizes).sum())


def visible_pairs(
    pattern: Pattern, length: int, bins: int, *, head: int | None = None, num_heads: int = 1, num_kv_heads: int = 1
) -> VisiblePairs:
    """Returns the pairs that one head sees, or that all heads see together if `head` is None.

    Of heads with different patterns, a square has the share of the pattern that shows the most of it.

    Raises:
        ValueError: a pattern for another number of key/value heads.
    """
    pattern.check_heads(num_kv_heads, "the picture")
    edges = np.linspace(0, length, min(bins, length) + 1).astype(np.int64)
    phases: dict[Pattern, set[int]] = {}
    for number in range(num_heads) if head is None else [head]:
        own = pattern.of_kv_head(number * num_kv_heads // num_heads)
        phases.setdefault(own, set()).add(own.phase(number, num_heads=num_heads, num_kv_heads=num_kv_heads))
    sinks = max((branch.tokens for own in phases for branch in own.branches if isinstance(branch, Sink)), default=0)
    sinks = min(length, sinks)
    shares = [_share_of(own, length, edges, own_phases, sinks) for own, own_phases in phases.items()]
    exact = _inside(Segment(), length, edges, 0)
    return VisiblePairs(length, np.max(shares, axis=0), sinks, exact, edges)


def _share_of(pattern: Pattern, length: int, edges: np.ndarray, phases: Iterable[int], sinks: int) -> np.ndarray:
    """Returns the share of each square that a pattern shows heads of these phases, keys before `sinks` left out."""
    most = layered = widest = np.zeros((len(edges) - 1, len(edges) - 1))
    branches = [branch for branch in pattern.branches if not isinstance(branch, Sink)]
    for branch in sorted(branches, key=lambda branch: getattr(branch, "dilation", 1)):
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
        query = top + (2 * np.arange(count) + 1) * (bottom - top) // (2 * count)
        start, stop = np.zeros_like(query), query + 1
        if isinstance(branch, Segment) and branch.length is not None:
            start = query - query % branch.length
        elif isinstance(branch, Window):
            start = query - branch.length + 1
        elif isinstance(branch, Last):
            stop = np.where(query >= length - branch.tokens, stop, 0)
        start, stop = (np.maximum(ends, sinks)[:, None].clip(edges[:-1], edges[1:]) for ends in (start, stop))
        rows.append((stop - start).mean(0) / np.diff(edges))
    return np.array(rows)


def _of_residues(branch: Branch, edges: np.ndarray, phases: Iterable[int]) -> np.ndarray:
    """Returns the share of each square's pairs whose key, and whose query if it must, have a residue of the branch."""
    if not isinstance(branch, (Segment, Window)):
        return np.ones((len(edges) - 1, len(edges) - 1))
    total = np.zeros((len(edges) - 1, len(edges) - 1))
    for residue in {phase % branch.dilation for phase in phases}:
        below = np.maximum((edges - residue + branch.dilation - 1) // branch.dilation, 0)
        keys = np.diff(below) / np.diff(edges)
        total += np.outer(keys if branch.queries == "dilated" else np.ones_like(keys), keys)
    return total
