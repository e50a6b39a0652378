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

    def work(
        self,
        batches: Sequence[TileBatch],
        view: Callable[[TileBatch], BoundBatch | None],
        key_rows: int,
        places: Callable[[Tensor], Tensor] | None = None,
    ) -> Work:
        """Returns the work of these tiles; `view` returns the rows of a batch as views or None.

        Tiles number keys as in a [B, Hkv, key_rows] tensor. Of a payload, `places` takes these numbers to those of its rows;
        without it the keys are this rank's own, and their work comes first.
        """
        is_own, calls, fresh_rows = places is None, [], 0
        is_fresh = freshness(batches if is_own else ())

        def keys(batch: TileBatch) -> IndexRows:
            rows = self._rows(self._first_rows(batch, key_rows, "keys"), batch.num_keys, batch.key_stride)
            return rows if places is None else IndexRows(places(rows.numbers()))

        for call in joined(batches, self.group, self.joining, lambda batch: view(batch) is not None):
            batch, bound = call[0], view(call[0]) if len(call) == 1 else self._joined(call, keys)
            bound = bound or BoundBatch(self._queries(batch), keys(batch), batch.shape, self._fold_size(batch))
            calls.append(replace(bound, fresh=is_fresh(batch)))
            fresh_rows += sum(x._replace(num_keys=0).rows(self.group) for x in call) * is_fresh(batch)
        calls.sort(key=lambda bound: not bound.fresh)
        heads = self.batch * self.problem.num_kv_heads
        every_row = heads * self.group * self.query_rows, heads * self.key_rows
        # The only call may be one tile, of all this rank's queries and keys.
        one = calls[0] if is_own and len(calls) == 1 and isinstance(calls[0].queries, ViewRows) else None
        is_one_tile = one is not None and (one.queries.rows_per_unit, one.keys.rows_per_unit) == every_row
        return BatchedTiles(tuple(calls), is_one_tile, covered=fresh_rows == every_row[0])

    def own(self, batches: Sequence[TileBatch], heads: range) -> Work:
        """Returns the work of tiles of these heads with keys of this rank."""
        rows, num_heads = self.key_rows, self.problem.num_kv_heads
        if isinstance(self.joining, InPlace) and rows == self.query_rows:
            sequences = sequences_in_place(batches, self.joining, self.batch, rows, range(num_heads))
            if sequences is not None:
                return PackedRow.of(*sequences, self.batch, self.device)
        return self.work(batches, lambda batch: self.view(batch, heads, heads.start * rows, rows, num_heads), rows)

    def _joined(self, call: list[TileBatch], keys: Callable[[TileBatch], IndexRows]) -> BoundBatch:
        """Returns batches of unequal tiles as one call; `keys` returns the key rows of each."""
        shape, fold_size = call[0].shape, self._fold_size(call[0])
        queries = [self._queries(batch).numbers() for batch in call]
        num_queries = [batch.num_queries * self._fold_size(batch) for batch in call for _ in range(batch.num_tiles)]
        num_keys = [batch.num_keys for batch in call for _ in range(batch.num_tiles)]
        padded_keys = IndexRows(torch.cat([_padded(keys(batch).numbers(), max(num_keys)) for batch in call]))
        if shape == "full":
            key_lengths = torch.tensor(num_keys, device=self.device)
            return BoundBatch(IndexRows(torch.cat(queries)), padded_keys, shape, lengths=key_lengths)
        longest = max(num_queries)
        padded = torch.cat([_padded(x, longest) for x in queries])
        kept = torch.nonzero((torch.arange(longest) < torch.tensor(num_queries)[:, None]).flatten()).flatten()
        return BoundBatch(IndexRows(padded, kept=kept.to(self.device)), padded_keys, shape, fold_size)

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
