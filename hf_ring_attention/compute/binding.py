"""Plans bound to tensors: the rows of each kernel call, as views or as numbers on a device, made once per problem."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..plan.joins import InPlace, joined, sequences_in_place
from ..plan.plans import TileBatch, freshness, most_tiles_of_a_row, tiles_from
from ..plan.problem import Problem
from .bands import folds_are_heads
from .batched import BatchedTiles, BoundBatch
from .fused.columns import Sizes
from .fused.settings import Settings
from .fused.tiles import FusedTiles
from .kernel import Work
from .packed_row import PackedRow
from .rows import IndexRows, ViewRows


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
        complete: bool = False,
    ) -> Work:
        """Returns the work of these tiles; `view` returns the rows of a batch as views or None.

        Tiles number keys as in a [B, Hkv, key_rows] tensor. Of a payload, `places` takes these numbers to those of its rows;
        without it the keys are this rank's own, and their work comes first. `complete`: whether the tiles are of all heads.
        """
        if isinstance(self.joining, Settings):
            sizes = Sizes(self.batch, self.problem.num_heads, self.problem.num_kv_heads, self.query_rows, key_rows)
            return FusedTiles.of(batches, sizes, self.joining, self.device, places, complete)
        is_own, calls = places is None, []
        is_fresh = freshness(batches if is_own else ())

        def keys(batch: TileBatch) -> IndexRows:
            rows = self._rows(batch, key_rows, of_queries=False)
            return rows if places is None else IndexRows(places(rows.numbers))

        for call in joined(batches, self.group, self.joining, lambda batch: view(batch) is not None):
            bound = (view(call[0]) if len(call) == 1 else None) or self._by_number(call, keys)
            calls.append(replace(bound, fresh=is_fresh(call[0])))
        calls.sort(key=lambda bound: not bound.fresh)
        heads = self.batch * self.problem.num_kv_heads
        every_row = heads * self.group * self.query_rows, heads * self.key_rows
        # The only call may be one tile, of all this rank's queries and keys.
        one = calls[0] if is_own and len(calls) == 1 and isinstance(calls[0].queries, ViewRows) else None
        is_one_tile = one is not None and (one.queries.rows_per_unit, one.keys.rows_per_unit) == every_row
        return BatchedTiles(tuple(calls), is_one_tile, is_own and most_tiles_of_a_row(batches) <= 2)

    def own(self, batches: Sequence[TileBatch], heads: range) -> Work:
        """Returns the work of tiles of these heads with keys of this rank."""
        rows, num_heads = self.key_rows, self.problem.num_kv_heads
        if isinstance(self.joining, InPlace) and rows == self.query_rows:
            sequences = sequences_in_place(batches, self.joining, self.batch, rows, range(num_heads))
            if sequences is not None:
                return PackedRow.of(*sequences, self.batch, self.device)
        view = partial(self.view, heads=heads, first_key=heads.start * rows, keys_of_head=rows, num_heads=num_heads)
        return self.work(batches, view, rows, complete=len(heads) == num_heads)

    def _by_number(self, call: list[TileBatch], keys: Callable[[TileBatch], IndexRows]) -> BoundBatch:
        """Returns a batch, or batches of unequal tiles as one call; `keys` returns the key rows of each."""
        sides = [self._rows(x, self.query_rows, of_queries=True) for x in call], [keys(batch) for batch in call]
        shape, fold_size = call[0].shape, self._fold_size(call[0])
        if len(call) == 1:
            return BoundBatch(sides[0][0], sides[1][0], shape, fold_size)
        lengths = [torch.tensor([rows.length for rows in side for _ in range(rows.units)]) for side in sides]
        queries, padded_keys = map(_padded, sides)
        if shape == "full":
            return BoundBatch(queries, padded_keys, shape, lengths=lengths[1].to(self.device))
        is_kept = torch.arange(queries.length) < lengths[0][:, None, None]
        kept = torch.nonzero(is_kept.expand(queries.first.shape).flatten()).flatten().to(self.device)
        return BoundBatch(replace(queries, kept=kept), padded_keys, shape, fold_size)

    def _fold_size(self, batch: TileBatch) -> int:
        """Returns the rows of a fold that follow each other in a call, or 1 if they are heads, which share their keys."""
        no_folds = isinstance(self.joining, InPlace)
        are_heads = batch.shape != "full" and (no_folds or folds_are_heads(batch))
        return 1 if are_heads else batch.fold_size

    def _rows(self, batch: TileBatch, length: int, of_queries: bool) -> IndexRows:
        """Returns the rows of queries or of keys by their numbers in a [B, H, length] tensor, fold by fold."""
        of_tile = self.group if of_queries else 1
        heads_of_row = self.problem.num_heads if of_queries else self.problem.num_kv_heads
        first: list[int] = []
        for item in batch.items:
            start, copies = (item.query_row, range(item.copies)) if of_queries else (item.key_row, [0] * item.copies)
            for batch_row in item.batch_rows:
                for head in item.heads:
                    row = (batch_row * heads_of_row + head * of_tile) * length + start
                    first += [row + copy for copy in copies]
        # One list is made faster than a small tensor for each item.
        rows = torch.tensor(first).unsqueeze(1) + torch.arange(of_tile) * length
        count, stride, fold_size = batch.num_keys, batch.key_stride, 1
        if of_queries:
            count, stride, fold_size = batch.num_queries, batch.query_stride, self._fold_size(batch)
            if fold_size < batch.fold_size:
                rows = (rows.unsqueeze(-1) + torch.arange(batch.fold_size)).flatten(1)
        place = torch.arange(count * fold_size)
        offsets = place // fold_size * stride + place % fold_size
        return IndexRows(rows.unsqueeze(-1).to(self.device), offsets.to(self.device))

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


def _padded(parts: Sequence[IndexRows]) -> IndexRows:
    """Returns rows of tiles together, with the last row of each tile repeated up to the length of the longest."""
    length, numbers = max(part.length for part in parts), [part.numbers for part in parts]
    padded = [torch.cat([x, x[..., -1:].expand(-1, -1, length - x.shape[-1])], -1) for x in numbers]
    return IndexRows(torch.cat(padded))


def bind_own(problem: Problem, rank: int, device: torch.device, joining: Hashable) -> Work:
    """Binds the tiles of `rank` with its keys, or with the keys that it holds in a cache."""
    return Binder(problem, device, joining).own(tiles_from(problem, rank, rank), range(problem.num_kv_heads))
