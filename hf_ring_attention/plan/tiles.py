"""The tiles of a pattern in one document: rectangles and plain lower triangles of query and key rows.

A *row* is a token in some storage order (a rank's local index, or the index in the whole sequence); a *run* ties a
range of rows to consecutive positions. For one branch, one residue of queries and one residue of keys, rows are numbered in
order, 0, 1, 2, ...; the keys a query sees are then one interval of key numbers whose two ends, as functions of the
query's number, are made of flat pieces and pieces of slope one. Cutting where either end changes slope leaves
rectangles, triangles and bands, and a band is two triangles and a rectangle for every few of its rows. No other mask
exists anywhere in the package.

A window of 3 tokens over 6 tokens is six tiles, here a to f; a triangle may be a single pair:

    key        0 1 2 3 4 5
    query 0    a . . . . .     a: queries 0 to 1, keys 0 to 1, a lower triangle: the rows whose window is not full yet
    query 1    a a . . . .
    query 2    c c b . . .     b: queries 2 to 4, keys 2 to 4, a lower triangle: the last three keys of a band
    query 3    . c b b . .     c: queries 3 down to 2, keys 1 down to 0: a lower triangle with both ranges reversed
    query 4    . . b b b .
    query 5    . . . f e d     d, e, f: the last row of the band, in the same parts
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .intervals import Border, Progression, Region, Run, progressions, regions_of
from .patterns import Pattern, Sink


# A frozen class takes twice as long to make, and a plan of a million tokens makes thousands of tiles.
@dataclass(kw_only=True, slots=True)
class Tile:
    """Query rows x key rows of some heads: all pairs, or (causal) key i for query i and later ones.

    Ranges may run backwards: a triangle that opens the other way is a lower one with both ranges reversed. A band is
    many equal tiles along a diagonal, and one `Tile` stands for all of them: copy c has both ranges moved on by
    c * `advance` rows.
    """

    branch: int
    #: Tiles of one branch and part never share a query row of a head.
    part: int
    #: Key/value heads, each with its whole group of query heads; query heads if `per_query_head`.
    heads: tuple[int, ...]
    per_query_head: bool
    queries: range
    keys: range
    causal: bool
    copies: int = 1
    advance: int = 0


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


def band_rows(width: int) -> int:
    """Returns how many rows of `width` keys are tiled together: fewer waste less on triangles, but merge more often."""
    return width if width <= 64 else max(64, width // 4)


class _TileShape(NamedTuple):
    """A rectangle or lower triangle of query and key numbers, with its copies along the diagonal."""

    queries: range
    keys: range
    causal: bool
    copies: int = 1
    advance: int = 0


def _shapes(trapezoid: _Trapezoid) -> Iterator[_TileShape]:
    """Yields the rectangles and lower triangles that make up a trapezoid."""
    u, rows, a, b, slopes = trapezoid
    a_slope, b_slope = slopes or (0, 0)
    if a_slope and b_slope:
        width = b - a
        step = min(rows, band_rows(width))
        copies, rest = divmod(rows, step)
        yield from (shape._replace(copies=copies, advance=step) for shape in _band(u, step, a, width))
        if rest:
            yield from _band(u + copies * step, rest, a + copies * step, width)
    elif b_slope:
        if b - 1 > a:
            yield _TileShape(range(u, u + rows), range(a, b - 1), False)
        yield _TileShape(range(u, u + rows), range(b - 1, b - 1 + rows), True)
    elif a_slope:
        if b > a + rows:
            yield _TileShape(range(u, u + rows), range(a + rows, b), False)
        yield _TileShape(range(u + rows - 1, u - 1, -1), range(a + rows - 1, a - 1, -1), True)
    else:
        yield _TileShape(range(u, u + rows), range(a, b), False)


def _band(u: int, rows: int, a: int, width: int) -> Iterator[_TileShape]:
    """Yields the shapes of at most `width` rows of a band: row i sees key numbers [a + i, a + i + width)."""
    yield _TileShape(range(u, u + rows), range(a + width - 1, a + width - 1 + rows), True)
    opening = min(rows, width - 1)  # row width - 1 sees nothing below the triangle
    if opening:
        yield from _shapes(_Trapezoid(u, opening, a, a + width - 1, (1, 0)))


def _slice(progression: Progression, numbers: range) -> range:
    stride = progression.stride * numbers.step
    start = progression.row + progression.stride * numbers.start
    return range(start, start + stride * len(numbers), stride)


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
        dilation = 1 if isinstance(branch, Sink) else branch.dilation
        per_query_head = dilation > 1 and pattern.phase_by == "query_head" and group > 1
        heads_of: dict[int, list[int]] = {}
        for head in range(num_heads if per_query_head else num_kv_heads):
            heads_of.setdefault(head % dilation, []).append(head)
        for residue, heads_of_residue in heads_of.items():
            heads = tuple(heads_of_residue)
            dilated = not isinstance(branch, Sink) and branch.queries == "dilated"
            key_groups = progressions(keys, dilation, residue)
            for query_residue in (residue,) if dilated else range(dilation):
                # `residue` stands for any phase that has it: `regions_of` reduces it by dilations that divide this one.
                regions = regions_of(pattern, number, query_residue, residue, length, causal)
                for query_group in progressions(queries, dilation, query_residue):
                    for part, (region, key_group) in enumerate((r, k) for r in regions for k in key_groups):
                        for trapezoid in _trapezoids(query_group, key_group, region):
                            tiles.extend(
                                Tile(
                                    branch=number,
                                    part=part,
                                    heads=heads,
                                    per_query_head=per_query_head,
                                    queries=_slice(query_group, shape.queries),
                                    keys=_slice(key_group, shape.keys),
                                    causal=shape.causal,
                                    copies=shape.copies,
                                    advance=shape.advance * dilation,
                                )
                                for shape in _shapes(trapezoid)
                            )
    return tiles
