"""The work of queries in documents, estimated in no time: rows are divided among ranks by it."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from functools import lru_cache

from .branches import Segment
from .intervals import Run
from .patterns import Pattern
from .tiles import branches_of, pairs_of_tile, tile_document

#: Work is counted for documents of these lengths, each longer than the last one by this factor, and estimated between them.
_GROWTH = 1.12
#: So many segments of a pattern are also counted one by one.
_MOST_SEGMENTS = 128


@dataclass(frozen=True)
class Pairs:
    """The query-key pairs of a head in causal documents, on average over the heads.

    `means` are the keys of a query in documents of some lengths, ascending from 0. Between these they are interpolated
    linearly, which is right for exact attention.
    """

    lengths: tuple[int, ...]
    means: tuple[float, ...]

    def of_document(self, tokens: int) -> float:
        """Returns the pairs of the first `tokens` tokens of a document."""
        right = bisect.bisect_left(self.lengths, tokens)
        if right == len(self.lengths):  # Beyond the last length, every query sees the average number of keys.
            return self.means[-1] * tokens
        if self.lengths[right] == tokens:
            return self.means[right] * tokens
        left = right - 1
        share = (tokens - self.lengths[left]) / (self.lengths[right] - self.lengths[left])
        return (self.means[left] + share * (self.means[right] - self.means[left])) * tokens

    def of_tokens(self, start: int, stop: int) -> float:
        """Returns the pairs of tokens [start, stop) of a document."""
        return self.of_document(stop) - self.of_document(start) if start < stop else 0.0


def work_under(pattern: Pattern, most_tokens: int) -> Pairs:
    """Returns the work of documents of at most `most_tokens` tokens under a pattern, for one head."""
    return _work_up_to(pattern, 1 << (most_tokens - 1).bit_length())  # Rows of many lengths share the counts.


@lru_cache(maxsize=32)
def _work_up_to(pattern: Pattern, most_tokens: int) -> Pairs:
    patterns = pattern.kv_heads or (pattern,)
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
    pairs = {length: _pairs_of_document(patterns, length) / len(patterns) for length in lengths[1:]}
    return Pairs(tuple(lengths), (0.0, *(pairs[length] / length for length in lengths[1:])))


def _pairs_of_document(patterns: tuple[Pattern, ...], length: int) -> float:
    """Returns the pairs of a causal document, one head for each pattern, without a plan, since nobody would use it again."""
    rows, heads = [Run(0, 0, length)], len(patterns)
    tiles = tile_document(branches_of(Pattern((), kv_heads=patterns), heads, causal=True), length, rows, rows)
    return sum(pairs_of_tile(t.shape, len(t.queries), len(t.keys)) * t.fold_size * len(t.heads) for t in tiles)
