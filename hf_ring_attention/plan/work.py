"""The work of queries in documents, estimated in no time: rows are divided among ranks by it."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .branches import Segment
from .intervals import Run
from .parts import ALL, QueryRange, parts_of
from .patterns import Pattern
from .tiles import branches_of, pairs_of_tile, tile_document

#: Work is counted for documents of these lengths, each longer than the last one by this factor, and estimated between them.
_GROWTH = 1.12
#: So many segments of a pattern are also counted one by one.
_MOST_SEGMENTS = 128


class _Share(NamedTuple):
    """The pairs that some queries of each causal document have under some patterns, on average over all heads.

    `means` are the keys of a query in documents of some lengths, ascending from 0. Between these they are interpolated
    linearly, which is right for exact attention.
    """

    queries: QueryRange
    lengths: tuple[int, ...]
    means: tuple[float, ...]

    def of_first(self, tokens: int) -> float:
        """Returns the pairs of a document's first tokens, as if all of them were among the queries."""
        right = bisect.bisect_left(self.lengths, tokens)
        if right == len(self.lengths):  # Beyond the last length, every query sees the average number of keys.
            return self.means[-1] * tokens
        if self.lengths[right] == tokens:
            return self.means[right] * tokens
        left = right - 1
        share = (tokens - self.lengths[left]) / (self.lengths[right] - self.lengths[left])
        return (self.means[left] + share * (self.means[right] - self.means[left])) * tokens


@dataclass(frozen=True)
class Pairs:
    """The query-key pairs of a head in causal documents, on average over the heads."""

    shares: tuple[_Share, ...]  # add up to the work: one of all queries, unless a document's last queries see more keys

    def of_document(self, tokens: int) -> float:
        """Returns the pairs of a document of so many tokens."""
        return self.of_tokens(0, tokens, tokens)

    def of_tokens(self, start: int, stop: int, length: int) -> float:
        """Returns the pairs of tokens [start, stop) of a document of `length` tokens."""
        work = 0.0
        for share in self.shares:
            first, beyond = start, stop
            if share.queries is not ALL:
                positions = share.queries.of_document(length)
                first, beyond = max(start, positions.start), min(stop, positions.stop)
            if first < beyond:
                work += share.of_first(beyond) - share.of_first(first)
        return work


def work_under(pattern: Pattern, most_tokens: int) -> Pairs:
    """Returns the work of documents of at most so many tokens under a pattern, for one head."""
    return _work_up_to(pattern, 1 << (most_tokens - 1).bit_length())  # Rows of many lengths share the counts.


@lru_cache(maxsize=32)
def _work_up_to(pattern: Pattern, most_tokens: int) -> Pairs:
    patterns_of: dict[QueryRange, list[Pattern]] = {}
    heads = pattern.kv_heads or (pattern,)
    for part in (part for own in heads for part in parts_of(own)):
        patterns_of.setdefault(part.queries, []).append(part.pattern)
    return Pairs(tuple(_share(*share, len(heads), most_tokens) for share in patterns_of.items()))


def _share(queries: QueryRange, patterns: list[Pattern], heads: int, most_tokens: int) -> _Share:
    """Returns the pairs under these patterns, added up and divided by the number of heads."""
    lengths = [0, *range(1, min(16, most_tokens) + 1)]
    while lengths[-1] < most_tokens:
        lengths.append(min(most_tokens, math.ceil(lengths[-1] * _GROWTH)))
    # Under dilated segments work rises in each segment, and falls behind it.
    branches = {branch for pattern in patterns for branch in pattern.branches}
    segments = sorted({branch.length for branch in branches if isinstance(branch, Segment) and branch.length})
    for segment in segments:
        if most_tokens // segment <= _MOST_SEGMENTS:
            lengths += range(segment, most_tokens, segment)
    lengths = sorted(set(lengths))
    means = (_pairs_of_document(patterns, length) / heads / length if length else 0.0 for length in lengths)
    return _Share(queries, tuple(lengths), tuple(means))


def _pairs_of_document(patterns: list[Pattern], length: int) -> float:
    """Returns the pairs of a causal document, one head for each pattern, without a plan, since nobody would use it again."""
    rows, heads = [Run(0, 0, length)], len(patterns)
    tiles = tile_document(
        branches_of(Pattern((), kv_heads=tuple(patterns)), heads, heads, causal=True), length, rows, rows
    )
    return sum(pairs_of_tile(t.shape, len(t.queries), len(t.keys)) * t.fold_size * len(t.heads) for t in tiles)
