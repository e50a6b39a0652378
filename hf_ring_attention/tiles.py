"""From a pattern and one document to tiles: rectangles and plain lower triangles of query and key rows.

A *row* is a token in some storage order (a rank's local index, or the index in the whole row); a *run* ties a range of
rows to consecutive positions. For one branch, one residue of queries and one residue of keys, rows are numbered in
order, 0, 1, 2, ...; the keys a query sees are then one interval of key numbers whose two ends, as functions of the
query's number, are made of flat pieces and pieces of slope one. Cutting where either end changes slope leaves
rectangles, triangles and bands, and a band is two triangles and a rectangle for every few of its rows. No other mask
exists anywhere in the package.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .patterns import Branch, Pattern, Segment, Sink, Window


class Run(NamedTuple):
    """`length` consecutive tokens of a document: rows `row`, `row` + 1, ... at positions `position`, `position` + 1, ..."""

    row: int
    position: int
    length: int


class Tile(NamedTuple):
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


class _Piece(NamedTuple):
    """Numbers `number`, ... of a progression hold positions `position`, `position` + stride, ..."""

    number: int
    position: int
    length: int


class _Progression(NamedTuple):
    """Rows of one residue that are one range, with the positions they hold."""

    row: int
    stride: int
    length: int
    pieces: tuple[_Piece, ...]

    def number_below(self, position: int) -> int:
        """How many of the rows hold a position below `position`."""
        below = 0
        for number, first, count in self.pieces:
            if position <= first:
                break
            below = number + min(count, -((first - position) // self.stride))
        return below


def _progressions(runs: Sequence[Run], stride: int, residue: int) -> list[_Progression]:
    """The rows whose position has this residue, in as few ranges as the runs allow."""
    found: list[_Progression] = []
    for row, position, count in runs:
        skip = (residue - position) % stride
        if skip >= count:
            continue
        row, position, count = row + skip, position + skip, -((skip - count) // stride)
        if found and found[-1].row + stride * found[-1].length == row:
            last, end = found[-1], found[-1].pieces[-1]
            if end.position + stride * end.length == position:  # rows and positions go on together: still one piece
                pieces = (*last.pieces[:-1], end._replace(length=end.length + count))
            else:
                pieces = (*last.pieces, _Piece(last.length, position, count))
            found[-1] = _Progression(last.row, stride, last.length + count, pieces)
        else:
            found.append(_Progression(row, stride, count, (_Piece(0, position, count),)))
    return found


# An end of the interval a query sees is the largest (first visible key) or smallest (first key beyond) of some terms:
# ("at", c): position c.  ("from_query", c): q + c.  ("block", w, e): (q // w + e) * w.
class _Term(NamedTuple):
    kind: str
    value: int
    blocks: int = 0


def _ends(branch: Branch, length: int, causal: bool) -> tuple[list[_Term], list[_Term]]:
    """The terms of the first visible position (their maximum) and of the first one beyond (their minimum)."""
    first, beyond = [_Term("at", 0)], [_Term("at", length)]
    if isinstance(branch, Segment) and branch.length is not None and branch.length < length:
        first, beyond = [_Term("block", branch.length, 0)], [_Term("block", branch.length, 1), *beyond]
    elif isinstance(branch, Window) and branch.length < length:
        first.append(_Term("from_query", 1 - branch.length))
        beyond.append(_Term("from_query", branch.length))
    elif isinstance(branch, Sink):
        beyond = [_Term("at", min(branch.tokens, length))]
    if causal:
        beyond = [term for term in beyond if term.kind != "from_query"] + [_Term("from_query", 1)]
    return first, beyond


class _Region(NamedTuple):
    """Keys from max(first) (or, of several groups of terms, from the largest of their minima) up to min(beyond)."""

    first: list[_Term]
    beyond: list[_Term]
    #: Keys before the smallest of these maxima only ...
    before_all: list[list[_Term]]
    #: ... or keys from the largest of these minima on.
    after_all: list[list[_Term]]


def _regions(pattern: Pattern, number: int, residue: int, phase: int, length: int, causal: bool) -> list[_Region]:
    """What branch `number` adds, for queries of this residue modulo its dilation, to the branches before it."""
    branch = pattern.branches[number]
    first, beyond = _ends(branch, length, causal)
    if pattern.overlap == "count":
        return [_Region(first, beyond, [], [])]
    sinks = [(other.tokens, i) for i, other in enumerate(pattern.branches) if isinstance(other, Sink)]
    widest = max(sinks, default=(0, -1))
    if isinstance(branch, Sink):
        return [_Region(first, beyond, [], [])] if number == widest[1] else []
    if sinks:
        first = [*first, _Term("at", min(widest[0], length))]
    covers = []
    for earlier in pattern.branches[:number]:
        if isinstance(earlier, Sink):
            continue
        # Each dilation divides the next, so the residue of a query modulo ours decides whether it took part earlier.
        if earlier.queries == "all" or residue % earlier.dilation == phase % earlier.dilation:
            covers.append(_ends(earlier, length, causal))
    if not covers:
        return [_Region(first, beyond, [], [])]
    # Every cover holds the query itself, so together they are one interval around it.
    left = _Region(first, beyond, [cover[0] for cover in covers], [])
    right = _Region(first, beyond, [], [cover[1] for cover in covers])
    return [left] if causal else [left, right]


def _cells(queries: _Progression, region: _Region) -> Iterator[tuple[int, int, int]]:
    """(number, position, count): stretches of queries inside one piece and one block of every segment length involved."""
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
    """Queries of one cell against the keys: every end of what they see is flat or has slope one between `borders`."""

    def __init__(self, keys: _Progression, region: _Region, position: int, count: int) -> None:
        self.keys = keys
        self.first, self.beyond = self._resolve(region.first, position), self._resolve(region.beyond, position)
        self.before_all = [self._resolve(group, position) for group in region.before_all]
        self.after_all = [self._resolve(group, position) for group in region.after_all]
        ends = [end for group in (self.first, self.beyond, *self.before_all, *self.after_all) for end in group]
        flat = {0, keys.length, *(keys.number_below(at) for at, moves in ends if not moves)}
        cuts = {0, count}
        # Where an end that moves with the query enters or leaves a piece of the keys, or meets a flat end.
        for at in (at for at, moves in ends if moves):
            for number, piece_position, piece_length in keys.pieces:
                meets = -((piece_position - at) // keys.stride)  # the end's number in the piece, for the first query
                cuts.update(cut for cut in (-meets, piece_length - meets) if 0 < cut < count)
                cuts.update(cut for value in flat if 0 < (cut := value - number - meets) < count)
        self.borders = sorted(cuts)

    @staticmethod
    def _resolve(terms: list[_Term], position: int) -> list[tuple[int, bool]]:
        """(position of each end for the cell's first query, whether it moves with the query)."""
        return [
            (position + term.value, True)
            if term.kind == "from_query"
            else ((position // term.value + term.blocks) * term.value if term.kind == "block" else term.value, False)
            for term in terms
        ]

    def ends(self, query: int) -> tuple[int, int]:
        """Numbers of the first key seen by a query of the cell and of the first one beyond."""
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
        """The two as one, if the ends of `after`, the next queries, continue these straight."""
        step = self.slopes or after.slopes or (after.a - self.a, after.b - self.b)
        continues = (after.a, after.b) == (self.a + step[0] * self.rows, self.b + step[1] * self.rows)
        if not continues or after.slopes not in (None, step) or max(step) > 1:
            return None
        return self._replace(rows=self.rows + after.rows, slopes=step)


def _trapezoids(queries: _Progression, keys: _Progression, region: _Region) -> Iterator[_Trapezoid]:
    """As few trapezoids as make up what these queries see, without rows that see nothing."""
    held: _Trapezoid | None = None
    for found in _straight_stretches(queries, keys, region):
        joined = held.joined(found) if held is not None else None
        if held is not None and joined is None:
            yield from _seeing(held)
        held = joined or found
    if held is not None:
        yield from _seeing(held)


def _straight_stretches(queries: _Progression, keys: _Progression, region: _Region) -> Iterator[_Trapezoid]:
    for start, position, count in _cells(queries, region):
        cell = _Cell(keys, region, position, count)
        for low, high in itertools.pairwise(cell.borders):
            (a, b), (a_last, b_last), rows = cell.ends(low), cell.ends(high - 1), high - low
            slopes = (int(a_last != a), int(b_last != b)) if rows > 1 else None
            assert slopes is None or (a_last - a, b_last - b) == (slopes[0] * (rows - 1), slopes[1] * (rows - 1))
            yield _Trapezoid(start + low, rows, a, b, slopes)


def _seeing(found: _Trapezoid) -> Iterator[_Trapezoid]:
    """The rows of a trapezoid that see a key."""
    u, rows, a, b, slopes = found
    a_slope, b_slope = slopes or (0, 0)
    if b <= a:  # rows before the first that sees one
        if not b_slope or a_slope:
            return
        u, rows, b = u + a - b + 1, rows - (a - b + 1), a + 1
    elif b + b_slope * (rows - 1) <= a + a_slope * (rows - 1):  # rows after the last that sees one
        rows = b - a
    if rows > 0:
        yield _Trapezoid(u, rows, a, b, (a_slope, b_slope))


def band_rows(width: int) -> int:
    """Rows of a band, `width` keys each, that are tiled together: fewer waste less on triangles but merge more often."""
    return width if width <= 64 else max(64, width // 4)


class _Shape(NamedTuple):
    """A rectangle or lower triangle in numbers, and its copies along the diagonal."""

    queries: range
    keys: range
    causal: bool
    copies: int = 1
    advance: int = 0


def _shapes(trapezoid: _Trapezoid) -> Iterator[_Shape]:
    """Rectangles and lower triangles that make up a trapezoid."""
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
            yield _Shape(range(u, u + rows), range(a, b - 1), False)
        yield _Shape(range(u, u + rows), range(b - 1, b - 1 + rows), True)
    elif a_slope:
        if b > a + rows:
            yield _Shape(range(u, u + rows), range(a + rows, b), False)
        yield _Shape(range(u + rows - 1, u - 1, -1), range(a + rows - 1, a - 1, -1), True)
    else:
        yield _Shape(range(u, u + rows), range(a, b), False)


def _band(u: int, rows: int, a: int, width: int) -> Iterator[_Shape]:
    """At most `width` rows of a band: row i sees key numbers [a + i, a + i + width)."""
    yield _Shape(range(u, u + rows), range(a + width - 1, a + width - 1 + rows), True)
    opening = min(rows, width - 1)  # row width - 1 sees nothing below the triangle
    if opening:
        yield from _shapes(_Trapezoid(u, opening, a, a + width - 1, (1, 0)))


def _through(progression: _Progression, numbers: range) -> range:
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
    """The tiles that cover, as often as `Pattern.multiplicity` says, the pairs of these queries and keys of a document.

    Args:
        length: tokens of the document.
        queries: runs of the document's tokens that are queries here, by ascending position; their rows ascend too.
        keys: likewise for the keys; rows number another storage.

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
        for residue, heads in heads_of.items():
            dilated = not isinstance(branch, Sink) and branch.queries == "dilated"
            key_groups = _progressions(keys, dilation, residue)
            for query_residue in (residue,) if dilated else range(dilation):
                # `residue` stands for any phase that has it: `_regions` reduces it by dilations that divide ours.
                regions = _regions(pattern, number, query_residue, residue, length, causal)
                for query_group in _progressions(queries, dilation, query_residue):
                    for part, (region, key_group) in enumerate((r, k) for r in regions for k in key_groups):
                        for trapezoid in _trapezoids(query_group, key_group, region):
                            tiles.extend(
                                Tile(
                                    number,
                                    part,
                                    tuple(heads),
                                    per_query_head,
                                    _through(query_group, shape.queries),
                                    _through(key_group, shape.keys),
                                    shape.causal,
                                    shape.copies,
                                    shape.advance * dilation,
                                )
                                for shape in _shapes(trapezoid)
                            )
    return tiles
