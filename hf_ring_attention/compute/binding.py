"""Plans bound to tensors: the rows of each kernel call, as views or as numbers on a device, made once per problem."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..plan.joins import Joining, joined
from ..plan.plans import TileBatch, remote_tiles, tiles_from
from ..plan.problem import Problem
from ..plan.tiles import Shape
from .rows import IndexRows, Lengths, Packed, Rows, ViewRows, explicit_rows


@dataclass(frozen=True)
class BoundBatch:
    """The rows of one kernel call, its shape and folds (`plan/tiles.py`), and lengths of tiles that differ if it needs them."""

    queries: Rows
    keys: Rows
    shape: Shape
    fold_size: int = 1
    lengths: Lengths | None = None

    def parts(self, max_rows: int) -> list[BoundBatch]:
        """Returns the batch in parts of about `max_rows` query and key rows, so that one call holds little memory."""
        size = max(1, max_rows // (self.queries.rows_per_unit + self.keys.rows_per_unit))
        if size >= self.queries.units:
            return [self]
        assert self.lengths is None, "tiles that share a call have few rows (`Joining.most_rows`)"
        parts = zip(self.queries.split(size), self.keys.split(size))
        return [BoundBatch(queries, keys, self.shape, self.fold_size) for queries, keys in parts]


@dataclass(frozen=True)
class OwnBinding:
    """A rank's tiles with its own keys, and the tile that is all its work (`whole`), with every query once, if there is one."""

    batches: tuple[BoundBatch, ...]
    whole: BoundBatch | None


class Binder:
    """Turns tiles of one problem into rows of tensors on a device, by `Kernel.joining` of the kernel."""

    def __init__(self, problem: Problem, device: torch.device, joining: Joining | None) -> None:
        self.problem, self.device, self.joining = problem, device, joining
        self.batch, self.group, held = len(problem.documents), problem.group, problem.held
        #: The number of rows that each head has in this rank's tensors of queries and of keys.
        self.query_rows = problem.layout.local_len if held is None else held.num_queries
        self.key_rows = problem.layout.local_len if held is None else held.num_rows

    def calls(
        self,
        batches: Sequence[TileBatch],
        view: Callable[[TileBatch], BoundBatch | None],
        keys: Callable[[TileBatch], IndexRows],
    ) -> tuple[BoundBatch, ...]:
        """Returns the kernel calls of these tiles; `view` returns the rows of a batch as views or None, `keys` its key rows."""
        calls = []
        for call in joined(batches, self.group, self.joining, lambda batch: view(batch) is not None):
            if len(call) > 1:
                calls.append(self._joined(call, [keys(batch).numbers() for batch in call]))
                continue
            [batch] = call
            calls.append(view(batch) or BoundBatch(self._queries(batch), keys(batch), batch.shape, batch.fold_size))
        return tuple(calls)

    def own(self, batches: Sequence[TileBatch], heads: range) -> tuple[BoundBatch, ...]:
        """Returns the kernel calls of tiles of these heads with keys of this rank."""

        def keys(batch: TileBatch) -> IndexRows:
            rows = IndexRows(batch.num_keys, self._first_rows(batch, self.key_rows, "keys"), batch.key_stride)
            return rows if self.problem.held is None else explicit_rows(rows.numbers())

        return self.calls(batches, lambda batch: self.view(batch, heads, heads.start, 0), keys)

    def _joined(self, call: list[TileBatch], keys: list[Tensor]) -> BoundBatch:
        """Returns batches of unequal tiles as one call; `keys` are the row numbers of each, [tiles, 1, L]."""
        assert self.joining is not None
        shape, fold_size = call[0].shape, call[0].fold_size
        queries = [self._queries(batch).numbers() for batch in call]
        num_queries, num_keys = (
            [getattr(batch, side) for batch in call for _ in range(batch.num_tiles)]
            for side in ("num_queries", "num_keys")
        )
        if self.joining.kind == "packed":
            # The rows of a fold are heads of their own, which share the keys as grouped heads do.
            rows = torch.cat([_by_head(x.unflatten(2, (-1, fold_size)).movedim(3, 2)) for x in queries], -1)
            own_keys = torch.cat([_by_head(x.unsqueeze(2)) for x in keys], -1)
            query_ends, key_ends = (
                torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=self.device)
                for lengths in (num_queries, num_keys)
            )
            lengths = Packed(query_ends, key_ends, max(num_queries), max(num_keys))
            return BoundBatch(explicit_rows(rows[None]), explicit_rows(own_keys[None]), shape, lengths=lengths)
        padded_keys = explicit_rows(torch.cat([_padded(x, max(num_keys)) for x in keys]))
        if shape == "full":
            key_lengths = torch.tensor(num_keys, device=self.device)
            return BoundBatch(explicit_rows(torch.cat(queries)), padded_keys, shape, fold_size, key_lengths)
        longest = max(num_queries) * fold_size
        rows = torch.cat([_padded(x, longest) for x in queries])
        lengths_of_tiles = torch.tensor(num_queries)[:, None] * fold_size
        kept = torch.nonzero((torch.arange(longest) < lengths_of_tiles).flatten()).flatten().to(self.device)
        return BoundBatch(IndexRows(longest, rows=rows, kept=kept), padded_keys, shape, fold_size)

    def whole(self, batches: tuple[BoundBatch, ...]) -> BoundBatch | None:
        """Returns the tile, of views, that is all queries with all keys; None without such a tile."""
        if len(batches) != 1 or not isinstance(batches[0].queries, ViewRows):
            return None
        rows = batches[0].queries.rows_per_unit, batches[0].keys.rows_per_unit
        per_key_head = self.batch * self.problem.num_kv_heads
        everything = per_key_head * self.group * self.query_rows, per_key_head * self.key_rows
        return batches[0] if rows == everything else None

    def _queries(self, batch: TileBatch) -> IndexRows:
        first = self._first_rows(batch, self.query_rows, "queries")
        rows = IndexRows(batch.num_queries * batch.fold_size, first, batch.query_stride, batch.fold_size)
        # With held keys, queries are few: all their numbers are kept, once for all layers.
        return rows if self.problem.held is None else explicit_rows(rows.numbers())

    def view(self, batch: TileBatch, heads: range, first_key_head: int, first_key: int) -> BoundBatch | None:
        """Returns rows as views if the tiles take all batch rows and these heads at equal distances; else None.

        The keys are heads from `first_key_head` on of a tensor whose rows begin with row `first_key`.
        """
        tiles = batch.as_one(self.batch, heads)
        if tiles is None:
            return None
        query_row, key_row, copies, advance = tiles
        rows = partial(ViewRows, batch=self.batch, copies=copies, advance=advance)
        first_head, num_heads = heads.start * self.group, len(heads) * self.group
        queries = rows(heads=num_heads, first_head=first_head, start=query_row, length=batch.num_queries)
        keys = rows(heads=len(heads), first_head=first_key_head, start=key_row - first_key, length=batch.num_keys)
        return BoundBatch(queries, keys, batch.shape)

    def _first_rows(self, batch: TileBatch, length: int, side: str) -> Tensor:
        """Returns the first row, [tiles, heads of a tile], as its number in a [B, H, length] tensor of queries or keys."""
        group, queries = self.group, side == "queries"
        heads_of_row = self.problem.num_heads if queries else self.problem.num_kv_heads
        of_tile = group if queries and not batch.per_query_head else 1
        first: list[int] = []
        for item in batch.items:
            start, copies = (item.query_row, range(item.copies)) if queries else (item.key_row, [0] * item.copies)
            for batch_row in item.batch_rows:
                for number in item.heads:
                    head = number if queries else number // group if batch.per_query_head else number
                    row = (batch_row * heads_of_row + head * of_tile) * length + start
                    first += [row + copy for copy in copies]
        # One list is made faster than a small tensor for each item.
        rows = torch.tensor(first).unsqueeze(1) + torch.arange(of_tile) * length
        return rows.to(self.device)

    def key_numbers(self, batch: TileBatch, length: int) -> Tensor:
        """Returns the key rows, [tiles, 1, L], as their numbers in a [B, Hkv, length] tensor."""
        first = self._first_rows(batch, length, "keys")
        return first.unsqueeze(-1) + torch.arange(batch.num_keys, device=self.device) * batch.key_stride


def _by_head(rows: Tensor) -> Tensor:
    """Returns row numbers of equal tiles, [tiles, heads, folds, L], as [heads * folds, tiles * L]."""
    return rows.movedim(0, 2).flatten(2, 3).flatten(0, 1)


def _padded(rows: Tensor, length: int) -> Tensor:
    """Returns row numbers [tiles, heads, L] with the last of each tile repeated up to `length`."""
    return torch.cat([rows, rows[..., -1:].expand(-1, -1, length - rows.shape[-1])], -1)


def bind_own(problem: Problem, rank: int, device: torch.device, joining: Joining | None) -> OwnBinding:
    """Binds the tiles of `rank` with its own keys, or with the keys that it holds in a cache."""
    binder = Binder(problem, device, joining)
    batches = binder.own(tiles_from(problem, rank, rank), range(problem.num_kv_heads))
    needs_others = problem.layout.world_size > 1 and remote_tiles(problem, rank)
    return OwnBinding(batches, None if needs_others else binder.whole(batches))
