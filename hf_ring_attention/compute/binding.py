"""Plans bound to tensors: the rows of each kernel call, as views or as numbers on a device, made once per problem."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..plan.joins import InPlace, joined, sequences_in_place
from ..plan.plans import TileBatch, freshness, tiles_from
from ..plan.problem import Problem
from .bands import folds_are_heads
from .batched import BatchedTiles, BoundBatch
from .fused.lists import Blocks, Sizes
from .fused.tiles import FusedTiles
from .kernel import Work
from .packed_row import PackedRow
from .rows import IndexRows, ViewRows

#: Numbers of at most so many rows of a call are kept; those of more rows are added up anew in each call.
FEW_ROWS = 1 << 13


class Binder:
    """Turns tiles of one problem into rows of tensors on a device, by `Kernel.joining` of the kernel."""

    def __init__(self, problem: Problem, device: torch.device, joining: Hashable) -> None:
        self.problem, self.device, self.joining = problem, device, joining
        self.batch, self.group, held = len(problem.documents), problem.group, problem.held
        #: The number of rows that each head has in this rank's tensors of queries and of keys.
        self.query_rows = problem.layout.local_len if held is None else held.num_queries
        self.key_rows = problem.layout.local_len if held is None else held.num_rows

    def _calls(
        self,
        batches: Sequence[TileBatch],
        view: Callable[[TileBatch], BoundBatch | None],
        key_rows: int,
        places: Callable[[Tensor], Tensor] | None = None,
        is_fresh: Callable[[TileBatch], bool] = lambda batch: False,
    ) -> tuple[BoundBatch, ...]:
        """Returns the kernel calls of these tiles; `view` returns the rows of a batch as views or None.

        Tiles number keys as in a [B, Hkv, key_rows] tensor; `places` takes these numbers to those of the rows that are here.
        Calls of fresh tiles come first.
        """

        def keys(batch: TileBatch) -> IndexRows:
            rows = self._rows(self._first_rows(batch, key_rows, "keys"), batch.num_keys, batch.key_stride)
            return rows if places is None else IndexRows(places(rows.numbers()))

        calls: list[BoundBatch] = []
        for call in joined(batches, self.group, self.joining, lambda batch: view(batch) is not None):
            batch = call[0]
            if len(call) > 1:
                bound = self._joined(call, [keys(batch).numbers() for batch in call])
            else:
                bound = view(batch) or BoundBatch(
                    self._queries(batch), keys(batch), batch.shape, self._fold_size(batch)
                )
            calls.append(replace(bound, fresh=is_fresh(batch)))
        return tuple(sorted(calls, key=lambda bound: not bound.fresh))

    def remote(
        self,
        batches: Sequence[TileBatch],
        view: Callable[[TileBatch], BoundBatch | None],
        key_rows: int,
        places: Callable[[Tensor], Tensor],
    ) -> Work:
        """Returns the work of tiles with the keys of a payload; `_calls` has the arguments."""
        if isinstance(self.joining, Blocks):
            return self._fused(batches, range(self.problem.num_kv_heads), key_rows, places)
        return BatchedTiles(self._calls(batches, view, key_rows, places))

    def own(self, batches: Sequence[TileBatch], heads: range) -> Work:
        """Returns the work of tiles of these heads with keys of this rank."""
        if isinstance(self.joining, Blocks):
            return self._fused(batches, heads, self.key_rows, None)
        if isinstance(self.joining, InPlace) and self.query_rows == self.key_rows:
            every_head = range(self.problem.num_kv_heads)
            sequences = sequences_in_place(batches, self.batch, every_head, self.key_rows, self.joining)
            if sequences is not None:
                return PackedRow.of(sequences, self.batch, self.device)
        place = heads.start * self.key_rows, self.key_rows, self.problem.num_kv_heads
        fresh = freshness(batches)
        calls = self._calls(batches, lambda batch: self.view(batch, heads, *place), self.key_rows, is_fresh=fresh)
        rows = sum(batch._replace(num_keys=0).rows(self.group) for batch in batches if fresh(batch))
        every_row = self.batch * self.problem.num_heads * self.query_rows
        return BatchedTiles(calls, self._is_one_tile(calls), covered=rows == every_row)

    def _fused(
        self,
        batches: Sequence[TileBatch],
        heads: range,
        key_rows: int,
        places: Callable[[Tensor], Tensor] | None,
    ) -> Work:
        assert isinstance(self.joining, Blocks)
        sizes = Sizes(self.batch, self.problem.num_heads, self.problem.num_kv_heads, self.query_rows, key_rows)
        return FusedTiles.of(batches, sizes, heads, self.joining, self.device, places, complete=places is None)

    def _joined(self, call: list[TileBatch], keys: list[Tensor]) -> BoundBatch:
        """Returns batches of unequal tiles as one call; `keys` are the row numbers of each."""
        shape, fold_size = call[0].shape, self._fold_size(call[0])
        queries = [self._queries(batch).numbers() for batch in call]
        num_queries = [batch.num_queries * self._fold_size(batch) for batch in call for _ in range(batch.num_tiles)]
        num_keys = [batch.num_keys for batch in call for _ in range(batch.num_tiles)]
        padded_keys = IndexRows(torch.cat([_padded(x, max(num_keys)) for x in keys]))
        if shape == "full":
            key_lengths = torch.tensor(num_keys, device=self.device)
            return BoundBatch(IndexRows(torch.cat(queries)), padded_keys, shape, lengths=key_lengths)
        longest = max(num_queries)
        padded = torch.cat([_padded(x, longest) for x in queries])
        kept = torch.nonzero((torch.arange(longest) < torch.tensor(num_queries)[:, None]).flatten()).flatten()
        return BoundBatch(IndexRows(padded, kept=kept.to(self.device)), padded_keys, shape, fold_size)

    def _is_one_tile(self, calls: Sequence[BoundBatch]) -> bool:
        """Returns whether the only call has one tile, of all this rank's queries and keys, as views."""
        if len(calls) != 1 or not isinstance(calls[0].queries, ViewRows):
            return False
        rows = calls[0].queries.rows_per_unit, calls[0].keys.rows_per_unit
        per_key_head = self.batch * self.problem.num_kv_heads
        return rows == (per_key_head * self.group * self.query_rows, per_key_head * self.key_rows)

    def _fold_size(self, batch: TileBatch) -> int:
        """Returns the rows of a fold that follow each other in a call, or 1 if they are heads, which share their keys."""
        no_folds = isinstance(self.joining, InPlace)
        are_heads = batch.shape != "full" and (no_folds or folds_are_heads(batch))
        return 1 if are_heads else batch.fold_size

    def _queries(self, batch: TileBatch) -> IndexRows:
        first, fold_size = self._first_rows(batch, self.query_rows, "queries"), self._fold_size(batch)
        if fold_size < batch.fold_size:
            first = (first.unsqueeze(-1) + torch.arange(batch.fold_size, device=self.device)).flatten(1)
        return self._rows(first, batch.num_queries, batch.query_stride, fold_size)

    def _rows(self, first: Tensor, count: int, stride: int, fold_size: int = 1) -> IndexRows:
        """Returns `count` folds of rows, `stride` rows apart, of tiles whose first rows are [tiles, heads]."""
        number = torch.arange(count * fold_size, device=self.device)
        offsets = number // fold_size * stride + number % fold_size
        rows = IndexRows(first[..., None], offsets)
        # With held keys, queries are few.
        few = self.problem.held is not None or first.numel() * offsets.numel() <= FEW_ROWS
        return rows.numbered() if few else rows

    def view(
        self, batch: TileBatch, heads: range, first_key: int, keys_of_head: int, num_heads: int
    ) -> BoundBatch | None:
        """Returns rows as views if the tiles take all batch rows and these heads at equal distances; else None.

        The keys are in a tensor [B, num_heads, keys_of_head], whose row `first_key` is row 0 of the first of these heads.
        """
        tiles = batch.as_one(self.batch, heads)
        if tiles is None:
            return None
        query_row, key_row, copies, advance = tiles
        rows = partial(ViewRows, batch=self.batch, copies=copies, advance=advance)
        n, num_queries = self.query_rows, batch.num_queries
        of_queries = partial(rows, heads=len(heads) * self.group, of_head=n, of_batch_row=self.problem.num_heads * n)
        queries = of_queries(start=heads.start * self.group * n + query_row, length=num_queries)
        of_keys = partial(rows, heads=len(heads), of_head=keys_of_head, of_batch_row=num_heads * keys_of_head)
        return BoundBatch(queries, of_keys(start=first_key + key_row, length=batch.num_keys), batch.shape)

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


def _padded(rows: Tensor, length: int) -> Tensor:
    """Returns row numbers [tiles, heads, L] with the last of each tile repeated up to `length`."""
    return torch.cat([rows, rows[..., -1:].expand(-1, -1, length - rows.shape[-1])], -1)


def bind_own(problem: Problem, rank: int, device: torch.device, joining: Hashable) -> Work:
    """Binds the tiles of `rank` with its own keys, or with the keys that it holds in a cache."""
    return Binder(problem, device, joining).own(tiles_from(problem, rank, rank), range(problem.num_kv_heads))
