"""Plans bound to tensors: the rows of each kernel call, as views or as numbers on a device, made once per problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.plans import TileBatch, held_tiles, plan_rank
from ..plan.problem import Problem
from ..plan.tiles import Shape
from .rows import IndexRows, Rows, ViewRows


@dataclass(frozen=True)
class BoundBatch:
    """The rows of one kernel call, and what it is told of them: the tiles' shape, and the rows of a fold (`plan/tiles.py`)."""

    queries: Rows
    keys: Rows
    shape: Shape
    folds: int = 1

    def parts(self, max_rows: int) -> list[BoundBatch]:
        """Returns the batch in parts of about `max_rows` query and key rows, so that one call holds little memory."""
        size = max(1, max_rows // (self.queries.rows_per_unit + self.keys.rows_per_unit))
        if size >= self.queries.units:
            return [self]
        parts = zip(self.queries.split(size), self.keys.split(size))
        return [BoundBatch(queries, keys, self.shape, self.folds) for queries, keys in parts]


@dataclass(frozen=True)
class OwnBinding:
    """A rank's tiles with its own keys.

    Attributes:
        whole: whether one tile is all work of the rank, with every query once.
    """

    batches: tuple[BoundBatch, ...]
    whole: bool


class Binder:
    """Turns tiles of one problem into rows of tensors on a device."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.problem = problem
        self.device = device
        self.batch = len(problem.documents)
        self.group = problem.group
        held = problem.held
        #: The number of rows that each head has in this rank's tensors of queries and of keys.
        self.query_rows = problem.layout.local_len if held is None else held.num_queries
        self.key_rows = problem.layout.local_len if held is None else held.num_rows

    def own(self, batch: TileBatch, heads: range) -> BoundBatch:
        """Returns the rows of tiles of these heads with keys of this rank."""
        view = self.view(batch, heads, self.problem.num_kv_heads, heads.start, 0)
        if view is not None:
            return view
        queries, first = self._queries(batch), self._first_rows(batch, self.key_rows, "keys")
        keys = IndexRows(batch.num_keys, first, batch.key_stride)
        if self.problem.held is not None:  # queries are few: their numbers are kept, once for all layers
            queries = IndexRows(queries.length, rows=queries.numbers())
            keys = IndexRows(keys.length, rows=keys.numbers())
        return BoundBatch(queries, keys, batch.shape, batch.folds)

    def whole(self, batches: tuple[BoundBatch, ...]) -> bool:
        """Returns whether one tile, of views, is all queries with all keys."""
        if len(batches) != 1 or not isinstance(batches[0].queries, ViewRows):
            return False
        rows = batches[0].queries.rows_per_unit, batches[0].keys.rows_per_unit
        per_key_head = self.batch * self.problem.num_kv_heads
        return rows == (per_key_head * self.group * self.query_rows, per_key_head * self.key_rows)

    def with_keys(self, batch: TileBatch, keys: Tensor) -> BoundBatch:
        """Returns the rows of tiles with keys at these row numbers, [tiles, 1, L], of a tensor of any source."""
        keys_of_tiles = IndexRows(batch.num_keys, rows=keys)
        return BoundBatch(self._queries(batch), keys_of_tiles, batch.shape, batch.folds)

    def _queries(self, batch: TileBatch) -> IndexRows:
        first = self._first_rows(batch, self.query_rows, "queries")
        return IndexRows(batch.num_queries * batch.folds, first, batch.query_stride, batch.folds)

    def view(
        self, batch: TileBatch, heads: range, key_heads: int, first_key_head: int, first_key: int
    ) -> BoundBatch | None:
        """Returns rows as views where the tiles take all batch rows and these heads at equal distances; else None.

        The keys are heads `first_key_head` and on of a tensor whose rows begin with row `first_key`.
        """
        tiles = batch.as_one(self.batch, heads)
        if tiles is None:
            return None
        first_head, num_heads = heads.start * self.group, len(heads) * self.group
        return BoundBatch(
            ViewRows(
                batch=self.batch,
                heads=num_heads,
                start=tiles.query_row,
                length=batch.num_queries,
                copies=tiles.copies,
                advance=tiles.advance,
                first_head=first_head,
            ),
            ViewRows(
                batch=self.batch,
                heads=len(heads),
                start=tiles.key_row - first_key,
                length=batch.num_keys,
                copies=tiles.copies,
                advance=tiles.advance,
                first_head=first_key_head,
            ),
            batch.shape,
        )

    def _first_rows(self, batch: TileBatch, length: int, side: str) -> Tensor:
        """Returns the first row, [tiles, heads of a tile], as its number in a [B, H, length] tensor of queries or keys."""
        problem, group, queries = self.problem, self.group, side == "queries"
        heads_of_row, of_tile = problem.num_kv_heads, 1
        if queries:
            heads_of_row, of_tile = problem.num_heads, 1 if batch.per_query_head else group
        first: list[int] = []
        for item in batch.items:
            start, copies = (item.query_row, range(item.copies)) if queries else (item.key_row, [0] * item.copies)
            for batch_row in item.batch_rows:
                for number in item.heads:
                    head = number if queries else number // group if batch.per_query_head else number
                    row = (batch_row * heads_of_row + head * of_tile) * length + start
                    first += [row + copy for copy in copies]
        # A list of numbers is made in less time than small tensors for each item.
        rows = torch.tensor(first).unsqueeze(1) + torch.arange(of_tile) * length
        return rows.to(self.device)

    def key_numbers(self, batch: TileBatch, length: int) -> Tensor:
        """Returns the key rows, [tiles, 1, L], as their numbers in a [B, Hkv, length] tensor."""
        first = self._first_rows(batch, length, "keys")
        return first.unsqueeze(-1) + torch.arange(batch.num_keys, device=self.device) * batch.key_stride


def bind_own(problem: Problem, rank: int, device: torch.device) -> OwnBinding:
    """Binds the tiles of `rank` with its own keys."""
    binder, plan, heads = Binder(problem, device), plan_rank(problem, rank), range(problem.num_kv_heads)
    batches = tuple(binder.own(batch, heads) for batch in plan.own)
    return OwnBinding(batches, not plan.remote and binder.whole(batches))


def bind_held(problem: Problem, device: torch.device) -> OwnBinding:
    """Binds the tiles of queries with held keys."""
    binder, heads = Binder(problem, device), range(problem.num_kv_heads)
    batches = tuple(binder.own(batch, heads) for batch in held_tiles(problem))
    return OwnBinding(batches, binder.whole(batches))
