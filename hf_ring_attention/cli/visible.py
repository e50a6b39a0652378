"""Computes how much of each square of a picture a pattern shows, for any length and without an n x n matrix.

In a branch, the keys that a query sees are those of its residue inside one interval. The interval is dense in the picture; the
residues, of keys and of queries, count as the share of a square's rows and columns that have them. Where a square is one pair
of tokens, all of this is exact.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ..plan.branches import Segment, Sink, Window
from ..plan.intervals import Border, Region, regions_of
from ..plan.parts import parts_of
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
        edges: where squares begin and end, in tokens.
    """

    length: int
    share: np.ndarray
    sinks: int
    possible: np.ndarray
    edges: np.ndarray

    @property
    def share_of_causal(self) -> float:
        """The visible pairs, sinks included, as a share of those of exact attention."""
        sizes = np.outer(np.diff(self.edges), np.diff(self.edges))
        sink_pairs = self.sinks * self.length - self.sinks * (self.sinks - 1) / 2
        return float(((self.share * sizes).sum() + sink_pairs) / (self.possible * sizes).sum())


def visible_pairs(
    pattern: Pattern, length: int, bins: int, *, head: int | None = None, num_heads: int = 1, num_kv_heads: int = 1
) -> VisiblePairs:
    """Returns what one head sees, or what all heads see together if `head` is None.

    Branches that `overlap="once"` cannot nest are added up, to all pairs of a square at most. Of heads with different patterns,
    a square has the share of the pattern that shows the most of it.

    Raises:
        ValueError: a pattern for another number of key/value heads.
    """
    pattern.check_heads(num_kv_heads, "the picture")
    if pattern.kv_heads:
        kinds: dict[Pattern, list[int]] = {}
        for one in range(num_heads) if head is None else [head]:
            kinds.setdefault(pattern.of_kv_head(one * num_kv_heads // num_heads), []).append(one)
        pictures = [
            visible_pairs(own, length, bins, head=one, num_heads=num_heads, num_kv_heads=num_kv_heads)
            for own, heads in kinds.items()
            for one in heads
        ]
        sinks, edges = max(picture.sinks for picture in pictures), pictures[0].edges
        # The keys that some head has as sinks are counted as such for all of them.
        others = 1 - np.clip(sinks - edges[:-1], 0, np.diff(edges)) / np.diff(edges)
        shares = [picture.share * (1 if picture.sinks == sinks else others) for picture in pictures]
        return replace(pictures[0], share=np.max(shares, axis=0), sinks=sinks)
    if pattern.overlap == "count":
        with contextlib.suppress(ValueError):
            pattern = replace(pattern, overlap="once")  # A picture shows whether a pair is seen, not how often.
    bins = min(bins, length)
    edges = np.linspace(0, length, bins + 1).astype(np.int64)
    heads = range(num_heads) if head is None else [head]
    phases = {pattern.phase(one, num_heads=num_heads, num_kv_heads=num_kv_heads) for one in heads}
    share, sinks = np.zeros((bins, bins)), 0
    sinks_of_all = tuple(branch for branch in pattern.branches if isinstance(branch, Sink))
    for part in parts_of(pattern):
        others = (branch for branch in part.pattern.branches if not isinstance(branch, Sink))
        own = replace(part.pattern, branches=(*sinks_of_all, *others))  # Sinks are left out of every part.
        for number, branch in enumerate(own.branches):
            if isinstance(branch, Sink):
                sinks = max(sinks, min(branch.tokens, length))
            elif isinstance(branch, (Segment, Window)):
                residues = {phase % branch.dilation for phase in phases}
                share += _of_branch(own, number, branch, residues, part.queries.of_document(length), edges)
    exact = Region([Border("at", 0)], [Border("from_query", 1)], [], [])
    return VisiblePairs(length, np.minimum(share, 1), sinks, _dense([exact], range(length), edges), edges)


def _of_branch(
    pattern: Pattern,
    number: int,
    branch: Segment | Window,
    residues: Iterable[int],
    taking_part: range,
    edges: np.ndarray,
) -> np.ndarray:
    """Returns [bins, bins]: the share of pairs that a branch adds to those before it, over heads of these residues.

    Args:
        taking_part: the queries that the branch is for.
    """
    dilation = branch.dilation
    total = np.zeros((len(edges) - 1, len(edges) - 1))
    kinds: dict[tuple[object, ...], np.ndarray] = {}
    for residue in residues:
        keys = _share_of_residue(edges, dilation, residue)
        for query_residue, queries in _query_classes(pattern, number, branch, residue, edges):
            regions = regions_of(pattern, number, query_residue, residue, True)
            key = tuple(map(_frozen, regions))
            if key not in kinds:
                kinds[key] = _dense(regions, taking_part, edges)
            total += kinds[key] * np.outer(queries, keys)
    return total


def _frozen(region: Region) -> tuple[object, ...]:
    first, beyond, before, after = region
    return tuple(first), tuple(beyond), tuple(map(tuple, before)), tuple(map(tuple, after))


def _query_classes(
    pattern: Pattern, number: int, branch: Segment | Window, residue: int, edges: np.ndarray
) -> Iterable[tuple[int, np.ndarray]]:
    """Yields a residue of queries and their share of each row of squares, once for all that see the same keys here."""
    if branch.queries == "dilated":
        yield residue, _share_of_residue(edges, branch.dilation, residue)
        return
    dilations = [
        earlier.dilation
        for earlier in pattern.branches[:number]
        if isinstance(earlier, (Segment, Window)) and earlier.queries == "dilated" and earlier.dilation > 1
    ]
    if not dilations or pattern.overlap == "count":
        yield residue, np.ones(len(edges) - 1)
        return
    classes: dict[tuple[bool, ...], list[int]] = {}
    for query in range(branch.dilation):
        classes.setdefault(tuple(query % d == residue % d for d in dilations), []).append(query)
    for queries in classes.values():
        yield queries[0], np.sum([_share_of_residue(edges, branch.dilation, query) for query in queries], axis=0)


def _share_of_residue(edges: np.ndarray, dilation: int, residue: int) -> np.ndarray:
    """Returns the share of the tokens between neighbouring edges that has this residue."""
    below = (edges - residue + dilation - 1) // dilation
    return np.diff(np.maximum(below, 0)) / np.diff(edges)


def _dense(regions: Iterable[Region], taking_part: range, edges: np.ndarray) -> np.ndarray:
    """Returns [bins, bins]: the share of each square that lies in the intervals of the regions, whatever the residue.

    Args:
        taking_part: the queries that have these intervals; others see nothing.
    """
    rows = []
    for top, bottom in itertools.pairwise(edges.tolist()):
        first, last = max(top, taking_part.start), min(bottom, taking_part.stop)
        if first >= last:
            rows.append(np.zeros(len(edges) - 1))
            continue
        count = min(last - first, QUERIES_OF_A_ROW)
        queries = first + (2 * np.arange(count) + 1) * (last - first) // (2 * count)
        keys = np.zeros(len(edges) - 1)
        for region in regions:
            start, stop = np.array([region.ends(query) for query in queries.tolist()]).T
            stop = np.maximum(start, stop)
            below = [np.clip(ends[:, None], edges[:-1], edges[1:]).mean(0) for ends in (start, stop)]
            keys += below[1] - below[0]
        rows.append(keys / np.diff(edges) * (last - first) / (bottom - top))
    return np.array(rows)
