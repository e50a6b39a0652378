"""The keys that one query sees, as intervals: runs of positions that rows hold, and the borders of each branch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from .branches import Border, Branch, Sink, Window
from .patterns import Pattern


class Run(NamedTuple):
    """`length` consecutive tokens of a document: rows `row`, `row` + 1, ... at positions `position`, `position` + 1, ..."""

    row: int
    position: int
    length: int


class Piece(NamedTuple):
    """`length` rows of a progression, from number `number` on; positions go up from `position` by its stride."""

    number: int
    position: int
    length: int


class Progression(NamedTuple):
    """`length` rows from `row` on, `stride` apart, numbered 0, 1, 2, ...; the pieces have their positions, of one residue."""

    row: int
    stride: int
    length: int
    pieces: tuple[Piece, ...]

    def number_below(self, position: int) -> int:
        """Returns how many of the rows hold a position below `position`."""
        below = 0
        for number, first, count in self.pieces:
            if position <= first:
                break
            below = number + min(count, -((first - position) // self.stride))
        return below


def progressions(runs: Sequence[Run], stride: int, residue: int) -> list[Progression]:
    """Returns the rows whose position has this residue modulo `stride`, in as few progressions as the runs allow."""
    ranges: list[Progression] = []
    for row, position, count in runs:
        skip = (residue - position) % stride
        if skip >= count:
            continue
        row, position, count = row + skip, position + skip, -((skip - count) // stride)
        if ranges and ranges[-1].row + stride * ranges[-1].length == row:
            last, end = ranges[-1], ranges[-1].pieces[-1]
            if end.position + stride * end.length == position:  # rows and positions both go on
                pieces = (*last.pieces[:-1], end._replace(length=end.length + count))
            else:
                pieces = (*last.pieces, Piece(last.length, position, count))
            ranges[-1] = Progression(last.row, stride, last.length + count, pieces)
        else:
            ranges.append(Progression(row, stride, count, (Piece(0, position, count),)))
    return ranges


def borders_of(branch: Branch, causal: bool) -> tuple[list[Border], list[Border]]:
    """Returns the terms of the first visible position (their maximum) and of the first position beyond (their minimum)."""
    first, beyond = branch.borders()
    if not causal:
        return [first], [beyond]
    return [first], [*([beyond] if beyond.kind != "from_query" else []), Border("from_query", 1)]


class Region(NamedTuple):
    """The keys from max(first) up to min(beyond), without the keys that the two lists of groups of terms exclude."""

    first: list[Border]
    beyond: list[Border]
    before_all: list[list[Border]]  # a key must lie before the maximum of every group
    after_all: list[list[Border]]  # a key must lie at or beyond the minimum of every group

    @property
    def terms(self) -> list[Border]:
        """The terms of all groups, in one list."""
        return list(itertools.chain(self.first, self.beyond, *self.before_all, *self.after_all))

    def ends(self, query: int) -> tuple[int, int]:
        """Returns the first position that a query sees, and the first position beyond; neither is less for a later query."""
        first = max([term.position(query) for term in self.first])
        beyond = min([term.position(query) for term in self.beyond])
        for group in self.before_all:
            beyond = min(beyond, max([term.position(query) for term in group]))
        for group in self.after_all:
            first = max(first, min([term.position(query) for term in group]))
        return first, beyond


def covering(pattern: Pattern, number: int) -> list[Branch]:
    """Returns the branches whose keys branch `number` leaves out if each key counts once.

    Windows shorter than an earlier window of all queries are left out, since the longer window shows all their keys.
    """
    earlier = [branch for branch in pattern.branches[:number] if not isinstance(branch, Sink)]
    longest = max((b.length for b in earlier if isinstance(b, Window) and b.queries == "all"), default=0)
    return [branch for branch in earlier if not (isinstance(branch, Window) and branch.length < longest)]


def regions_of(pattern: Pattern, number: int, residue: int, phase: int, causal: bool) -> list[Region]:
    """Returns the keys that branch `number` adds to earlier branches, for queries of this residue modulo its dilation.

    `phase` is the head's, or its residue modulo the dilation. If each key counts once, this relies on every segment and window
    holding the query itself: two such intervals together are one.
    """
    branch = pattern.branches[number]
    first, beyond = borders_of(branch, causal)
    if pattern.overlap == "count":
        return [Region(first, beyond, [], [])]
    sinks = [(other.tokens, i) for i, other in enumerate(pattern.branches) if isinstance(other, Sink)]
    widest = max(sinks, default=(0, -1))
    if isinstance(branch, Sink):
        return [Region(first, beyond, [], [])] if number == widest[1] else []
    if sinks:
        first = [*first, Border("at", widest[0])]
    covers = []
    for earlier in covering(pattern, number):
        # Each dilation divides the next, so the residue modulo this dilation decides whether a query took part earlier.
        if earlier.queries == "all" or residue % earlier.dilation == phase % earlier.dilation:
            covers.append(borders_of(earlier, causal))
    if not covers:
        return [Region(first, beyond, [], [])]
    # Every cover holds the query itself, so together they are one interval around it.
    left = Region(first, beyond, [cover[0] for cover in covers], [])
    right = Region(first, beyond, [], [cover[1] for cover in covers])
    return [left] if causal else [left, right]
