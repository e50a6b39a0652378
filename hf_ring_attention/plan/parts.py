"""Patterns in parts: with a `Last`, a document's last queries and its other queries each have a pattern without `Last`.

A window of 2 tokens with the last 2 queries is two parts, here a and b:

    key        0 1 2 3 4 5
    query 0    a . . . . .     a: `Window(2)`, for all queries but the last 2
    query 1    a a . . . .
    query 2    . a a . . .
    query 3    . . a a . .
    query 4    b b b b b .     b: exact attention, for the last 2 queries
    query 5    b b b b b b

So no later step, from intervals to work and pictures, knows branches that depend on a document's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from .branches import Last
from .intervals import Run
from .patterns import Pattern


class QueryRange(NamedTuple):
    """Some queries of each document: the last `within` tokens (None for all tokens), without the last `but` tokens."""

    within: int | None = None
    but: int = 0

    def of_document(self, length: int) -> range:
        """Returns the positions of these queries in a document of so many tokens."""
        return range(0 if self.within is None else max(0, length - self.within), max(0, length - self.but))

    def of_runs(self, runs: Sequence[Run], length: int) -> Sequence[Run]:
        """Returns the parts of the runs that are these queries, in a document of so many tokens."""
        if self == ALL:
            return runs
        positions = self.of_document(length)
        ends = (
            (run, max(run.position, positions.start), min(run.position + run.length, positions.stop)) for run in runs
        )
        return [Run(run.row + low - run.position, low, high - low) for run, low, high in ends if low < high]


#: Every query.
ALL = QueryRange()


class Part(NamedTuple):
    """A pattern without `Last`, for some queries of each document; `first_branch` is the number of its first branch.

    The branches of parts that share a query have different numbers.
    """

    pattern: Pattern
    queries: QueryRange = ALL
    first_branch: int = 0


@lru_cache(maxsize=256)
def parts_of(pattern: Pattern) -> tuple[Part, ...]:
    """Returns the parts of a pattern that heads share: a key counts as often as all parts together show it to a query.

    If keys count once, the last queries see every key once, whatever else shows it. If branches are counted, each `Last` shows
    these queries every key once more.
    """
    lasts = [branch.tokens for branch in pattern.branches if isinstance(branch, Last)]
    if not lasts:
        return (Part(pattern),)
    rest = replace(pattern, branches=tuple(branch for branch in pattern.branches if not isinstance(branch, Last)))
    if pattern.overlap == "once":
        return Part(rest, QueryRange(but=max(lasts))), Part(Pattern.exact(), QueryRange(within=max(lasts)))
    return Part(rest), *(
        Part(Pattern.exact(), QueryRange(within=tokens), len(rest.branches) + number)
        for number, tokens in enumerate(lasts)
    )


def fewest_last(pattern: Pattern) -> int | None:
    """Returns how many queries at the end of a document see every key in all heads with a `Last`; None without a `Last`."""
    parts = [part for own in pattern.kv_heads or (pattern,) for part in parts_of(own)]
    return min((part.queries.within for part in parts if part.queries.within is not None), default=None)
