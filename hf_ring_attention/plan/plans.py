"""The tiles of every rank, in batches of one shape, as integers.

Every rank can compute every rank's plan, so nothing is negotiated: each rank expects exactly the rows that the others send.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from .intervals import Run
from .layouts import SequenceLayout
from .patterns import Pattern
from .problem import Problem
from .tiles import BranchOfPhase, Shape, branches_of, pairs_of_tile, tile_document


class Item(NamedTuple):
    """Tiles of a batch: `copies` in each of these batch rows and heads.

    The first copy begins with query row `query_row` and key row `key_row`; the next copy has the same keys, and its query rows
    lie one row later.
    """

    batch_rows: tuple[int, ...]
    heads: tuple[int, ...]
    query_row: int
    key_row: int
    copies: int


class TileBatch(NamedTuple):
    """Tiles of one shape; no two of them share a query row of a head."""

    visit: tuple[int, int]  # no two tiles of one visit and shape share a query row of a head, even in different batches
    shape: Shape
    num_queries: int  # the query rows of a tile; with folds, the first rows of folds
    fold_size: int  # the rows of a fold (`plan/tiles.py`); a tile has `num_queries` * `fold_size` query rows
    num_keys: int
    query_stride: int  # the distance from one of the query rows to the next
    key_stride: int
    items: tuple[Item, ...] = ()

    def rows(self, group: int) -> int:
        """Returns the rows of queries, of all their heads, and of keys."""
        return (self.num_queries * self.fold_size * group + self.num_keys) * self.num_tiles

    def like(self, longest: TileBatch) -> TileBatch:
        """Returns the tiles padded to the lengths of longer tiles."""
        return self._replace(num_queries=longest.num_queries, fold_size=longest.fold_size, num_keys=longest.num_keys)

    def pairs(self, group: int) -> int:
        """Returns the query-key pairs over all batch rows and query heads; `group` of these share a key/value head."""
        tile = pairs_of_tile(self.shape, self.num_queries, self.num_keys)
        return tile * self.fold_size * self.num_tiles * group

    @property
    def num_tiles(self) -> int:
        """The number of tiles, over all batch rows and heads."""
        return sum(len(item.batch_rows) * len(item.heads) * item.copies for item in self.items)

    def as_one(self, num_batch_rows: int, heads: range) -> tuple[int, int, int, int] | None:
        """Returns the tiles as stretches of rows that can be views of a tensor; else None.

        They have it if they take all batch rows and these heads, neighbouring rows, and equal distances, at which no two
        tiles share a query row. The result is the first tile's query row and key row, the number of tiles, and their distance.
        """
        everything = tuple(range(num_batch_rows)), tuple(heads), 1
        if self.fold_size > 1:
            return None
        if any((item.batch_rows, item.heads, item.copies) != everything for item in self.items):
            return None
        if (self.query_stride != 1 and self.num_queries > 1) or (self.key_stride != 1 and self.num_keys > 1):
            return None
        starts = [(item.query_row, item.key_row) for item in self.items]
        steps = {(q - first_q, k - first_k) for (first_q, first_k), (q, k) in itertools.pairwise(starts)} or {(0, 0)}
        advance, keys_advance = min(steps)
        if len(steps) > 1 or advance != keys_advance or (len(starts) > 1 and advance < self.num_queries):
            return None
        return *starts[0], len(starts), advance


@dataclass(frozen=True)
class RankPlan:
    """The tiles of one rank; query rows are local indices."""

    own: tuple[TileBatch, ...]  # tiles with keys of the rank itself; key rows are local indices
    remote: tuple[TileBatch, ...]  # tiles with keys of other ranks; key rows are indices in the whole sequence
    pairs: int  # query-key pairs over all batch rows and query heads


@lru_cache(maxsize=256)
def plan_rank(problem: Problem, rank: int) -> RankPlan:
    """Returns the tiles of `rank`; plans are cached by value."""
    own, remote = tiles_from(problem, rank, rank), remote_tiles(problem, rank)
    return RankPlan(own, remote, sum(batch.pairs(problem.group) for batch in own + remote))


@lru_cache(maxsize=256)
def remote_tiles(problem: Problem, rank: int) -> tuple[TileBatch, ...]:
    """Returns the tiles of `rank` with keys of other ranks; key rows are indices in the whole sequence."""
    layout = problem.layout

    def elsewhere(row: int) -> _Pieces:
        pieces = (piece for other in range(layout.world_size) if other != rank for piece in layout.pieces(other, row))
        return [(piece.start, piece) for piece in sorted(pieces, key=lambda piece: piece.start)]

    return _batches(problem, partial(layout.placed_pieces, rank), elsewhere)


@lru_cache(maxsize=256)
def tiles_from(problem: Problem, rank: int, source: int) -> tuple[TileBatch, ...]:
    """Returns the tiles of `rank` with keys of rank `source`; key rows are local indices of `source`, or rows of a cache."""
    held, placed = problem.held, problem.layout.placed_pieces
    if held is None:
        return _batches(problem, partial(placed, rank), partial(placed, source))
    queries = [(0, range(held.row_len - held.num_queries, held.row_len))]
    keys = [(row, range(start, stop)) for row, start, stop in held.keys]
    return _batches(problem, lambda _: queries, lambda _: keys)


def of_heads(batches: tuple[TileBatch, ...], kv_heads: range) -> tuple[TileBatch, ...]:
    """Returns the batches without tiles of other key/value heads."""
    some = []
    for batch in batches:
        heads_of_items = [tuple(head for head in item.heads if head in kv_heads) for item in batch.items]
        items = tuple(item._replace(heads=heads) for item, heads in zip(batch.items, heads_of_items) if heads)
        if items:
            some.append(batch._replace(items=items))
    return tuple(some)


#: Pieces of a sequence, each with the row of its first token in a tensor.
_Pieces = list[tuple[int, range]]


def _batches(
    problem: Problem, queries: Callable[[int], _Pieces], keys: Callable[[int], _Pieces]
) -> tuple[TileBatch, ...]:
    """Returns the tiles of the queries against the keys; both are pieces of a batch row."""
    heads = problem.num_kv_heads, problem.causal, problem.first_kv_head
    limits, branches_below = sorted(problem.pattern.exact_lengths), dict[int, tuple[BranchOfPhase, ...]]()
    items: dict[TileBatch, list[Item]] = {}  # by their batch without items
    for documents, batch_rows in problem.row_classes:
        query_pieces, key_pieces = queries(batch_rows[0]), keys(batch_rows[0])
        for start, stop in documents:
            query_runs, key_runs = tuple(_runs(query_pieces, start, stop)), tuple(_runs(key_pieces, start, stop))
            if not query_runs or not key_runs:
                continue
            below = bisect.bisect_left(limits, stop - start)
            if below not in branches_below:
                branches_below[below] = branches_of(problem.pattern.within(stop - start), *heads)
            for tile in tile_document(branches_below[below], stop - start, query_runs, key_runs):
                # A single fold of n rows is written as n tiles of one row, so that single folds of any size have one shape.
                single = len(tile.queries) == 1
                batch = TileBatch(
                    visit=(tile.branch, tile.part),
                    shape=tile.shape,
                    num_queries=len(tile.queries),
                    fold_size=1 if single else tile.fold_size,
                    num_keys=len(tile.keys),
                    query_stride=tile.queries.step,
                    key_stride=tile.keys.step,
                )
                copies = tile.fold_size if single else 1
                item = Item(batch_rows, tile.heads, tile.queries[0], tile.keys[0], copies)
                items.setdefault(batch, []).append(item)
    return tuple(batch._replace(items=tuple(of_batch)) for batch, of_batch in items.items())


def _runs(pieces: _Pieces, start: int, stop: int) -> Iterator[Run]:
    """Yields the parts of pieces that lie in the document [start, stop)."""
    for row, piece in pieces:
        low, high = max(piece.start, start), min(piece.stop, stop)
        if low < high:
            yield Run(row + low - piece.start, low - start, high - low)


def freshness(batches: Sequence[TileBatch]) -> Callable[[TileBatch], bool]:
    """Returns which of these batches come first: no two of their tiles share a query row of a head.

    They have one visit, whose trapezoids share no row; of a rectangle and a triangle that make up one, only the triangle comes.
    """
    visit = min((batch.visit for batch in batches), default=None)
    is_cut = _cut_trapezoids(batches)
    return lambda x: x.visit == visit and not is_cut(x)


def most_tiles_of_a_row(batches: Sequence[TileBatch]) -> int:
    """Returns the most tiles that may share a query row of a head: two of each visit with cut trapezoids, else one."""
    is_cut, visits = _cut_trapezoids(batches), {batch.visit for batch in batches}
    return len(visits) + len({batch.visit for batch in batches if is_cut(batch)})


def _cut_trapezoids(batches: Sequence[TileBatch]) -> Callable[[TileBatch], bool]:
    """Returns which batches may be the rectangle of a trapezoid whose triangle has as many query rows, in the same visit."""
    triangles = {(x.visit, x.num_queries * x.fold_size) for x in batches if x.shape == "causal"}
    return lambda x: x.shape == "full" and (x.visit, x.num_queries * x.fold_size) in triangles


def pairs_of_row(pattern: Pattern, seq_len: int, num_heads: int, num_kv_heads: int, causal: bool) -> int:
    """Returns the query-key pairs of a sequence of one document on one rank, over all query heads."""
    layout = SequenceLayout("contiguous", seq_len, 1)
    problem = Problem(
        pattern, layout, (((0, seq_len),),), num_heads=num_heads, num_kv_heads=num_kv_heads, causal=causal
    )
    return plan_rank(problem, 0).pairs
