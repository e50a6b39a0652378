"""The tiles of a pattern in one document: rectangles, lower triangles and bands of query and key rows.

A *row* is a token in some storage order (a rank's local index, or the index in the whole sequence); a *run* ties a
range of rows to consecutive positions. For one branch, one residue of queries and one residue of keys, rows are numbered in
order, 0, 1, 2, ... The keys that a query sees are then one interval of key numbers. Its two ends, as functions of the query's
number, have flat pieces and pieces of slope one. Cutting at every change of slope leaves rectangles, triangles and bands. No
other shape exists anywhere in the package.

A window of 3 tokens over 6 tokens is two tiles, here a and b:

    key        0 1 2 3 4 5
    query 0    a . . . . .     a: queries 0 to 1, keys 0 to 1, a lower triangle: the rows whose window is not full yet
    query 1    a a . . . .
    query 2    b b b . . .     b: queries 2 to 5, keys 0 to 5, a band: query number i sees the keys i, i + 1 and i + 2
    query 3    . b b b . .
    query 4    . . b b b .
    query 5    . . . b b b

In a branch of dilation r that shows keys of one residue modulo r to queries of every residue, neighbouring queries mostly see
the same keys: an end that moves with the query meets the next such key once in r positions. The consecutive queries between
two of these changes are a *fold*. Folds repeat every r positions, so one tile takes many of a kind: its `queries` are the
first rows of the folds, r rows apart, and `fold_size` is the number of rows in a fold. A window of 8 tokens with every 4th
key, here the keys at positions 1, 5, 9, ..., has one kind of fold, with 4 queries:

    queries     9 10 11 12 see the keys 5 9
    queries    13 14 15 16 see the keys 9 13

The tile is then a band with the queries 9, 13, ..., the keys 5, 9, 13, ... and `fold_size` = 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from .branches import Branch
from .intervals import Piece, Progression, Region, Run, borders_of, covering, progressions, regions_of
from .patterns import Pattern

#: Query number i of a tile sees all keys; keys 0 to i; or keys i to i + (number of keys - number of queries).
Shape = Literal["full", "causal", "band"]


# A frozen class takes twice as long to make, and a plan of a million tokens makes thousands of tiles.
@dataclass(kw_only=True, slots=True)
class Tile:
    """Query rows x key rows of some heads, in one of three shapes.

    Ranges may run backwards: a triangle that opens the other way is a lower one with both ranges reversed.
    """

    branch: int  # a number of the branch that made it
    #: Tiles of one branch and part that have the same shape, and rows in the same order, share no query row of a head.
    part: int
    heads: tuple[int, ...]  # key/value heads, each with its whole group of query heads
    queries: range
    #: The rows of a fold: each row of `queries` and the `fold_size` - 1 rows after it see the same keys. 1 without folds.
    fold_size: int
    keys: range
    shape: Shape


def pairs_of_tile(shape: Shape, queries: int, keys: int) -> int:
    """Returns the query-key pairs of a tile of one head without folds."""
    pairs = {"full": queries * keys, "causal": queries * (queries + 1) // 2, "band": queries * (keys - queries + 1)}
    return pairs[shape]


def _cells(queries: Progression, region: Region) -> Iterator[tuple[int, int, int]]:
    """Yields (first number, its position, count) of cells of queries, each in one piece and one block of every segment."""
    lengths = sorted({term.value for term in region.terms if term.kind == "block"})
    stride = queries.stride
    for number, position, count in queries.pieces:
        while count:
            take = count
            for length in lengths:
                to_border = length - position % length
                take = min(take, -(-to_border // stride))
            yield number, position, take
            number, position, count = number + take, position + take * stride, count - take


def _borders_of_cell(keys: Progression, region: Region, position: int, count: int) -> list[int]:
    """Returns the cuts of a cell, from 0 to `count`, between which each end of the visible keys is flat or has slope one."""
    ends = [(term.position(position), term.kind == "from_query") for term in region.terms]
    flat = {0, keys.length, *(keys.number_below(at) for at, moves in ends if not moves)}
    cuts = {0, count}
    # A slope may change where an end that moves with the query enters or leaves a piece of the keys, or meets a flat end.
    for at in {at for at, moves in ends if moves}:
        for number, piece_position, piece_length in keys.pieces:
            meets = -((piece_position - at) // keys.stride)  # the key of the piece where the first query's end lies
            cuts.update(cut for cut in (-meets, piece_length - meets) if 0 < cut < count)
            cuts.update(cut for value in flat if 0 < (cut := value - number - meets) < count)
    return sorted(cuts)


class _Trapezoid(NamedTuple):
    """Queries u, ..., u + rows - 1; the i-th sees key numbers [a + i a_slope, b + i b_slope)."""

    u: int
    rows: int
    a: int
    b: int
    #: (a_slope, b_slope), each 0 or 1; None while a single row leaves them open.
    slopes: tuple[int, int] | None

    def joined(self, after: _Trapezoid) -> _Trapezoid | None:
        """Returns both as one if the ends of `after`, the next queries, continue these straight; else None."""
        step = self.slopes or after.slopes or (after.a - self.a, after.b - self.b)
        continues = (after.a, after.b) == (self.a + step[0] * self.rows, self.b + step[1] * self.rows)
        if not continues or after.slopes not in (None, step) or max(step) > 1:
            return None
        return self._replace(rows=self.rows + after.rows, slopes=step)


def _trapezoids(queries: Progression, keys: Progression, region: Region) -> Iterator[_Trapezoid]:
    """Yields the keys that these queries see in as few trapezoids as possible, without rows that see nothing."""
    if queries.length == 1:
        (_, position, _), *_ = queries.pieces
        a, b = map(keys.number_below, region.ends(position))
        if a < b:
            yield _Trapezoid(0, 1, a, b, None)
        return
    if not _may_see(queries, keys, region):
        return
    current: _Trapezoid | None = None
    for stretch in _straight_stretches(queries, keys, region):
        longer = current.joined(stretch) if current is not None else None
        if current is not None and longer is None:
            yield from _rows_with_keys(current)
        current = longer or stretch
    if current is not None:
        yield from _rows_with_keys(current)


def _may_see(queries: Progression, keys: Progression, region: Region) -> bool:
    """Returns False only if no query sees any of these keys: both ends of the visible interval ascend with the query."""
    (_, first_query, _), (_, position, count) = queries.pieces[0], queries.pieces[-1]
    (_, first_key, _), (_, key_position, key_count) = keys.pieces[0], keys.pieces[-1]
    first, _ = region.ends(first_query)
    _, beyond = region.ends(position + (count - 1) * queries.stride)
    return max(first, first_key) < min(beyond, key_position + (key_count - 1) * keys.stride + 1)


def _straight_stretches(queries: Progression, keys: Progression, region: Region) -> Iterator[_Trapezoid]:
    """Yields all queries as trapezoids, in their order; neighbours may continue each other, and rows may see no key."""

    def ends(position: int) -> tuple[int, int]:
        first, beyond = region.ends(position)
        return keys.number_below(first), keys.number_below(beyond)

    for start, position, count in _cells(queries, region):
        for low, high in itertools.pairwise(_borders_of_cell(keys, region, position, count)):
            (a, b), (a_last, b_last) = (ends(position + queries.stride * query) for query in (low, high - 1))
            rows = high - low
            slopes = (int(a_last != a), int(b_last != b)) if rows > 1 else None
            assert slopes is None or (a_last - a, b_last - b) == (slopes[0] * (rows - 1), slopes[1] * (rows - 1))
            yield _Trapezoid(start + low, rows, a, b, slopes)


def _rows_with_keys(trapezoid: _Trapezoid) -> Iterator[_Trapezoid]:
    """Yields the rows of a trapezoid that see a key, as one trapezoid or none."""
    u, rows, a, b, slopes = trapezoid
    a_slope, b_slope = slopes or (0, 0)
    if b <= a:  # the first rows see no key
        if not b_slope or a_slope:
            return
        u, rows, b = u + a - b + 1, rows - (a - b + 1), a + 1
    elif b + b_slope * (rows - 1) <= a + a_slope * (rows - 1):  # the last rows see no key
        rows = b - a
    if rows > 0:
        yield _Trapezoid(u, rows, a, b, (a_slope, b_slope))


def _shapes(trapezoid: _Trapezoid) -> Iterator[tuple[range, range, Shape]]:
    """Yields the numbers of queries and of keys in the rectangles, lower triangles and bands that make up a trapezoid."""
    u, rows, a, b, slopes = trapezoid
    a_slope, b_slope = slopes or (0, 0)
    queries = range(u, u + rows)
    if rows == 1 or not (a_slope or b_slope):
        yield queries, range(a, b), "full"
    elif a_slope and b_slope:
        yield queries, range(a, b + rows - 1), "band"
    elif b_slope:
        if b - 1 > a:
            yield queries, range(a, b - 1), "full"
        yield queries, range(b - 1, b - 1 + rows), "causal"
    else:
        if b > a + rows:
            yield queries, range(a + rows, b), "full"
        yield queries[::-1], range(a, a + rows)[::-1], "causal"


def _slice(progression: Progression, numbers: range) -> range:
    """Returns the rows that have these numbers in a progression."""
    stride = progression.stride * numbers.step
    start = progression.row + progression.stride * numbers.start
    return range(start, start + stride * len(numbers), stride)


#: Folds of one kind: their first rows, and the rows of each fold.
_Folds = tuple[Progression, int]


class BranchOfPhase:
    """A branch in the heads of one phase, made once for all documents.

    Attributes:
        number: the number of the branch in its pattern.
        heads: key/value heads.
        fold_starts: the residues of queries where folds begin, ascending; empty for every residue, None without folds.
    """

    def __init__(self, pattern: Pattern, number: int, residue: int, heads: tuple[int, ...], causal: bool) -> None:
        branch = pattern.branches[number]
        self.pattern, self.number, self.causal = pattern, number, causal
        self.dilation, self.residue, self.heads = branch.dilation, residue, heads
        self.fold_starts = None
        if branch.dilation > 1 and branch.queries == "all":
            self.fold_starts = self._fold_starts(branch)
        dilated = [cover for cover in covering(pattern, number) if cover.queries == "dilated" and cover.dilation > 1]
        self._residues_differ = pattern.overlap == "once" and bool(dilated)
        self._regions: dict[int, list[Region]] = {}

    def _fold_starts(self, branch: Branch) -> list[int]:
        """Returns the residues where an end of the keys that the branch adds moves to another key."""
        starts: set[int] = set()
        covers = covering(self.pattern, self.number) if self.pattern.overlap == "once" else []
        for earlier in (branch, *covers):
            for term in itertools.chain(*borders_of(earlier, self.causal)):
                if term.kind == "from_query":  # It passes a key at p for the query at p - value + 1.
                    starts.add((self.residue - term.value + 1) % self.dilation)
                elif term.kind == "block" and term.value % self.dilation:
                    return []  # Blocks begin in the middle of what would be a fold.
                elif term.kind == "block":
                    starts.add(0)
        for cover in covers:
            if cover.queries == "dilated" and cover.dilation > 1:
                # Queries that took part in it already see its keys, unlike their neighbours: each is a separate fold.
                for taking_part in range(self.residue % cover.dilation, self.dilation, cover.dilation):
                    starts |= {taking_part, (taking_part + 1) % self.dilation}
        return sorted(starts) or [0]

    def folds(self, queries: Sequence[Run], length: int) -> list[_Folds]:
        """Returns the query rows that take part, of a document of `length` tokens, as folds; without folds, one row each."""
        if self.fold_starts is None:
            return [(rows, 1) for rows in progressions(queries, self.dilation, self.residue)]
        return list(_folds(queries, self.dilation, self.fold_starts or range(min(self.dilation, length))))

    def regions(self, residue: int) -> list[Region]:
        """Returns the keys that the branch adds to earlier branches, for queries of a residue."""
        residue = residue if self._residues_differ else self.residue
        if residue not in self._regions:
            # `self.residue` stands for any phase that has it: `regions_of` reduces it by dilations that divide this one.
            self._regions[residue] = regions_of(self.pattern, self.number, residue, self.residue, self.causal)
        return self._regions[residue]


@lru_cache(maxsize=64)
def branches_of(pattern: Pattern, num_kv_heads: int, causal: bool, first_kv_head: int = 0) -> tuple[BranchOfPhase, ...]:
    """Returns the branches in their order, each for every phase that a head has.

    Branches of heads with different patterns have the same numbers, so that their tiles of one shape make one batch.
    """
    kv_heads_of: dict[Pattern, list[int]] = {}
    for kv_head in range(num_kv_heads):
        kv_heads_of.setdefault(pattern.of_kv_head(first_kv_head + kv_head), []).append(kv_head)
    branches = []
    for own, kv_heads in kv_heads_of.items():
        for number, branch in enumerate(own.branches):
            heads_of: dict[int, list[int]] = {}
            for kv_head in kv_heads:
                heads_of.setdefault((first_kv_head + kv_head) % branch.dilation, []).append(kv_head)
            branches += [
                BranchOfPhase(own, number, residue, tuple(heads), causal) for residue, heads in heads_of.items()
            ]
    return tuple(sorted(branches, key=lambda branch: branch.number))


def _folds(runs: Sequence[Run], dilation: int, starts: Sequence[int]) -> Iterator[_Folds]:
    """Yields the rows of the runs as folds, which begin at these residues.

    In the middle of a run, folds of one kind come together, and equally many in every phase, so the tiles of all phases have
    one shape and make one kernel call. At the ends of a run they come one by one, and may be cut off.
    """
    for row, position, length in runs:
        stop = position + length
        middle = range(-(-position // dilation), (stop + 1) // dilation - 1)
        for start, after in itertools.pairwise((*starts, starts[0] + dilation)):
            first = -((after - 1 - position) // dilation)
            last = (stop - 1 - start) // dilation
            single = itertools.chain(
                range(first, min(middle.start, last + 1)), range(max(middle.stop, middle.start, first), last + 1)
            )
            if middle:
                at = start + dilation * middle.start
                pieces = (Piece(0, at, len(middle)),)
                yield Progression(row + at - position, dilation, len(middle), pieces), after - start
            for number in single:
                low = max(start + dilation * number, position)
                high = min(after + dilation * number, stop)
                if low < high:
                    yield Progression(row + low - position, dilation, 1, (Piece(0, low, 1),)), high - low


def tile_document(
    branches: Sequence[BranchOfPhase], length: int, queries: Sequence[Run], keys: Sequence[Run]
) -> list[Tile]:
    """Returns tiles that cover each pair of these queries and keys as often as `Pattern.multiplicity` counts it.

    Args:
        branches: by `branches_of`; tiles are in their order.
        length: tokens of the document.
        queries: runs of the document's tokens that are queries here, by ascending position; their rows ascend too.
        keys: runs of the tokens that are keys here, in the same order; their rows number another storage.
    """
    tiles: list[Tile] = []
    for branch in branches:
        key_groups = progressions(keys, branch.dilation, branch.residue)
        if not key_groups:
            continue
        for rows, size in branch.folds(queries, length):
            regions = branch.regions(rows.pieces[0].position % branch.dilation)
            for part, (region, key_group) in enumerate((r, k) for r in regions for k in key_groups):
                for trapezoid in _trapezoids(rows, key_group, region):
                    for query_numbers, key_numbers, shape in _shapes(trapezoid):
                        tiles.append(
                            Tile(
                                branch=branch.number,
                                part=part,
                                heads=branch.heads,
                                queries=_slice(rows, query_numbers),
                                fold_size=size,
                                keys=_slice(key_group, key_numbers),
                                shape=shape,
                            )
                        )
    return tiles
