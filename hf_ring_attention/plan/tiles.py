"""The tiles of a pattern in one document: rectangles, lower triangles and bands of query and key rows.

A *row* is a token in some storage order (a rank's local index, or the index in the whole sequence); a *run* ties a
range of rows to consecutive positions. For one branch, one residue of queries and one residue of keys, rows are numbered in
order, 0, 1, 2, ...; the keys a query sees are then one interval of key numbers whose two ends, as functions of the
query's number, are made of flat pieces and pieces of slope one. Cutting where either end changes slope leaves
rectangles, triangles and bands. No other shape exists anywhere in the package.

A window of 3 tokens over 6 tokens is two tiles, here a and b:

    key        0 1 2 3 4 5
    query 0    a . . . . .     a: queries 0 to 1, keys 0 to 1, a lower triangle: the rows whose window is not full yet
    query 1    a a . . . .
    query 2    b b b . . .     b: queries 2 to 5, keys 0 to 5, a band: query number i sees the keys i, i + 1 and i + 2
    query 3    . b b b . .
    query 4    . . b b b .
    query 5    . . . b b b

Where all queries see the keys of one residue modulo r, most residues of queries see the same ones. At position r m + s, an end
that moves with the query is the key number m + ceil((s + c) / r) for some c, and so changes at one s only; positions between
two such changes are a *fold*: one tile, whose queries are rows of stride r and the same rows moved on by 1, 2, ... A window of
8 tokens with every 4th key has one fold, which begins with the residue of the keys, here 1:

    queries     9 10 11 12 see the keys 5 9
    queries    13 14 15 16 see the keys 9 13
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .intervals import Border, Piece, Progression, Region, Run, borders_of, covering, progressions, regions_of
from .patterns import Branch, Pattern, Sink

#: What query number i of a tile sees: all keys; keys 0 to i; or keys i to i + (number of keys - number of queries).
Shape = Literal["full", "causal", "band"]


# A frozen class takes twice as long to make, and a plan of a million tokens makes thousands of tiles.
@dataclass(kw_only=True, slots=True)
class Tile:
    """Query rows x key rows of some heads, in one of three shapes.

    Ranges may run backwards: a triangle that opens the other way is a lower one with both ranges reversed.
    """

    branch: int
    #: Tiles of one branch and part never share a query row of a head.
    part: int
    #: Key/value heads, each with its whole group of query heads; query heads if `per_query_head`.
    heads: tuple[int, ...]
    per_query_head: bool
    queries: range
    #: The query rows moved on by 1, 2, ... `folds` - 1 see the same keys, and are queries of the tile, too.
    folds: int
    keys: range
    shape: Shape


def _cells(queries: Progression, region: Region) -> Iterator[tuple[int, int, int]]:
    """Yields (number, position, count) of stretches of queries inside one piece and one block of every segment length."""
    groups = [region.first, region.beyond, *region.before_all, *region.after_all]
    lengths = sorted({term.value for group in groups for term in group if term.kind == "block"})
    stride = queries.stride
    for number, position, count in queries.pieces:
        while count:
            take = count
            for length in lengths:
                to_border = length - position % length
                take = min(take, -(-to_border // stride))
            yield number, position, take
            number, position, count = number + take, position + take * stride, count - take


class _Cell:
    """Queries against keys: between two of the `borders`, both ends of what the queries see are flat or have slope one."""

    def __init__(self, keys: Progression, region: Region, position: int, count: int) -> None:
        self.keys = keys
        self.first, self.beyond = self._resolve(region.first, position), self._resolve(region.beyond, position)
        self.before_all = [self._resolve(group, position) for group in region.before_all]
        self.after_all = [self._resolve(group, position) for group in region.after_all]
        ends = [end for group in (self.first, self.beyond, *self.before_all, *self.after_all) for end in group]
        flat = {0, keys.length, *(keys.number_below(at) for at, moves in ends if not moves)}
        cuts = {0, count}
        # A slope may change where an end that moves with the query enters or leaves a piece of the keys, or meets a flat end.
        for at in (at for at, moves in ends if moves):
            for number, piece_position, piece_length in keys.pieces:
                meets = -((piece_position - at) // keys.stride)  # the end's number in the piece, for the first query
                cuts.update(cut for cut in (-meets, piece_length - meets) if 0 < cut < count)
                cuts.update(cut for value in flat if 0 < (cut := value - number - meets) < count)
        self.borders = sorted(cuts)

    @staticmethod
    def _resolve(terms: list[Border], position: int) -> list[tuple[int, bool]]:
        """Returns (position for the cell's first query, whether it moves with the query) for each term."""
        return [(term.position(position), term.kind == "from_query") for term in terms]

    def ends(self, query: int) -> tuple[int, int]:
        """Returns the numbers of the first key that a query of the cell sees, and of the first key beyond."""
        moved = query * self.keys.stride

        def numbers(group: list[tuple[int, bool]]) -> list[int]:
            return [self.keys.number_below(at + moved if moves else at) for at, moves in group]

        a, b = max(numbers(self.first)), min(numbers(self.beyond))
        if self.before_all:
            b = min(b, min(max(numbers(group)) for group in self.before_all))
        if self.after_all:
            a = max(a, max(min(numbers(group)) for group in self.after_all))
        return a, b


class _Trapezoid(NamedTuple):
    """Queries u, ..., u + rows - 1, of which the i-th sees key numbers [a + i a_slope, b + i b_slope)."""

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
    """Yields as few trapezoids as make up what these queries see, without rows that see nothing."""
    current: _Trapezoid | None = None
    for stretch in _straight_stretches(queries, keys, region):
        longer = current.joined(stretch) if current is not None else None
        if current is not None and longer is None:
            yield from _rows_with_keys(current)
        current = longer or stretch
    if current is not None:
        yield from _rows_with_keys(current)


def _straight_stretches(queries: Progression, keys: Progression, region: Region) -> Iterator[_Trapezoid]:
    for start, position, count in _cells(queries, region):
        cell = _Cell(keys, region, position, count)
        for low, high in itertools.pairwise(cell.borders):
            (a, b), (a_last, b_last), rows = cell.ends(low), cell.ends(high - 1), high - low
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


class _TileShape(NamedTuple):
    """A shape of query and key numbers."""

    queries: range
    keys: range
    shape: Shape


def _shapes(trapezoid: _Trapezoid) -> Iterator[_TileShape]:
    """Yields the rectangles, lower triangles and bands that make up a trapezoid."""
    u, rows, a, b, slopes = trapezoid
    a_slope, b_slope = slopes or (0, 0)
    if rows == 1 or not (a_slope or b_slope):
        yield _TileShape(range(u, u + rows), range(a, b), "full")
    elif a_slope and b_slope:
        yield _TileShape(range(u, u + rows), range(a, b + rows - 1), "band")
    elif b_slope:
        if b - 1 > a:
            yield _TileShape(range(u, u + rows), range(a, b - 1), "full")
        yield _TileShape(range(u, u + rows), range(b - 1, b - 1 + rows), "causal")
    else:
        if b > a + rows:
            yield _TileShape(range(u, u + rows), range(a + rows, b), "full")
        yield _TileShape(range(u + rows - 1, u - 1, -1), range(a + rows - 1, a - 1, -1), "causal")


def _slice(progression: Progression, numbers: range) -> range:
    stride = progression.stride * numbers.step
    start = progression.row + progression.stride * numbers.start
    return range(start, start + stride * len(numbers), stride)


class _Fold(NamedTuple):
    """Rows whose positions have one residue, and the rows 1, 2, ... `size` - 1 further on, which see the same keys."""

    queries: Progression
    size: int


def _fold_starts(pattern: Pattern, number: int, branch: Branch, residue: int, length: int, causal: bool) -> list[int]:
    """Returns the residues, ascending, at which folds begin: there an end of what a branch adds changes, for these keys."""
    dilation = _dilation(branch)
    starts: set[int] = set()
    covers = covering(pattern, number) if pattern.overlap == "once" else []
    for term in itertools.chain(*(itertools.chain(*borders_of(one, length, causal)) for one in (branch, *covers))):
        if term.kind == "from_query":
            starts.add((residue - term.value + 1) % dilation)
        elif term.kind == "block" and term.value % dilation:
            return list(range(min(dilation, length)))  # Blocks begin in the middle of what would be a fold.
        elif term.kind == "block":
            starts.add(0)
    for cover in covers:
        if cover.queries == "dilated" and cover.dilation > 1:
            for taking_part in range(residue % cover.dilation, dilation, cover.dilation):
                starts |= {taking_part, (taking_part + 1) % dilation}
    return sorted(starts) or [0]


def _folds(runs: Sequence[Run], dilation: int, starts: Sequence[int]) -> Iterator[_Fold]:
    """Yields the rows of the runs as folds.

    In the middle of a run a fold has all its residues, in as many rows as the folds of any other phase, so that tiles of all
    phases have one shape. At the ends some residues are missing, and rows are folds of their own.
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
                yield _Fold(Progression(row + at - position, dilation, len(middle), pieces), after - start)
            for number in single:
                low = max(start + dilation * number, position)
                high = min(after + dilation * number, stop)
                if low < high:
                    yield _Fold(Progression(row + low - position, dilation, 1, (Piece(0, low, 1),)), high - low)


def _dilation(branch: Branch) -> int:
    return 1 if isinstance(branch, Sink) else branch.dilation


def tile_document(
    pattern: Pattern,
    *,
    length: int,
    queries: Sequence[Run],
    keys: Sequence[Run],
    num_heads: int,
    num_kv_heads: int,
    causal: bool,
) -> list[Tile]:
    """Returns tiles that cover each pair of these queries and keys as often as `Pattern.multiplicity` says.

    Args:
        length: tokens of the document.
        queries: runs of the document's tokens that are queries here, by ascending position; their rows ascend too.
        keys: runs of the tokens that are keys here, in the same order; their rows number another storage.

    Returns:
        Tiles by ascending branch.
    """
    group = num_heads // num_kv_heads
    tiles: list[Tile] = []
    for number, branch in enumerate(pattern.branches):
        dilation = _dilation(branch)
        per_query_head = dilation > 1 and pattern.phase_by == "query_head" and group > 1
        heads_of: dict[int, list[int]] = {}
        for head in range(num_heads if per_query_head else num_kv_heads):
            heads_of.setdefault(head % dilation, []).append(head)
        for residue, heads_of_residue in heads_of.items():
            key_groups = progressions(keys, dilation, residue)
            if not key_groups:
                continue
            if dilation == 1 or branch.queries == "dilated":  # type: ignore[union-attr]
                folds = [_Fold(rows, 1) for rows in progressions(queries, dilation, residue)]
            else:
                folds = list(_folds(queries, dilation, _fold_starts(pattern, number, branch, residue, length, causal)))
            regions_by_residue: dict[int, list[Region]] = {}
            for rows, size in folds:
                query_residue = rows.pieces[0].position % dilation
                if query_residue not in regions_by_residue:
                    # `residue` stands for any phase that has it: `regions_of` reduces it by dilations that divide this one.
                    regions_by_residue[query_residue] = regions_of(
                        pattern, number, query_residue, residue, length, causal
                    )
                regions = regions_by_residue[query_residue]
                for part, (region, key_group) in enumerate((r, k) for r in regions for k in key_groups):
                    for trapezoid in _trapezoids(rows, key_group, region):
                        tiles.extend(
                            Tile(
                                branch=number,
                                part=part,
                                heads=tuple(heads_of_residue),
                                per_query_head=per_query_head,
                                queries=_slice(rows, shape.queries),
                                folds=size,
                                keys=_slice(key_group, shape.keys),
                                shape=shape.shape,
                            )
                            for shape in _shapes(trapezoid)
                        )
    return tiles
