"""The tiles of a step in batches of one shape, each computed by one kernel call or, if it is large, by several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..plan.tiles import Shape
from .kernel import Gradients, KernelCall, Results, Saved, TileKernel
from .merge import accumulation_dtype
from .rows import Rows

#: Tiles whose rows are copied take at most about 1 / PART of the queries at once. Backward holds more tensors than forward.
FORWARD_PART, BACKWARD_PART = 2, 8
#: Parts of fewer rows would waste time on calls.
PART_ROWS = 1 << 14
#: CUDA's kernels take so many tiles in one call, and pad the sums of a tile to so many rows. Padded rows are about a quarter
#: as large as all copies of a row, so PADDED_ROWS times as many are held.
MOST_TILES, CUDA_BLOCK, PADDED_ROWS = 65_535, 128, 4


@dataclass(frozen=True)
class BoundBatch:
    """The rows of one kernel call, its shape, the folds of a band (`plan/tiles.py`), and the lengths of padded keys."""

    queries: Rows
    keys: Rows
    shape: Shape
    fold_size: int = 1
    lengths: Tensor | None = None
    fresh: bool = False  # whether its query rows are in no earlier batch of a rank's own work

    @cached_property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """The smallest parts: their number; and the tiles, query rows and key rows of each, and the query rows of a tile."""
        queries = self.queries
        return queries.units, queries.tiles_per_unit, queries.rows_per_unit, self.keys.rows_per_unit, queries.length

    def parts(self, max_rows: int, block: int) -> list[BoundBatch]:
        """Returns the batch in parts of about `max_rows` query and key rows, so that one call holds little memory.

        Kernels pad the sums of a tile's queries to a multiple of `block` rows, in float32; more of these rows are held.
        """
        units, tiles, rows, key_rows, length = self.sizes
        padded = rows // length * -(-length // block) * block
        size = min(max_rows // (rows + key_rows), PADDED_ROWS * max_rows // padded)
        size = max(1, min(size, MOST_TILES // tiles))
        few = size >= units and units * (rows + key_rows) <= PART_ROWS  # They keep their numbers for the next call.
        if few or self.lengths is not None or self.queries.kept is not None:  # Joined: `Joining.most_rows` bounds them.
            return [self]
        parts = zip(self.queries.split(size), self.keys.split(size))
        return [replace(self, queries=queries, keys=keys) for queries, keys in parts]


@dataclass(frozen=True)
class BatchedTiles:
    """A `Work` of batches of tiles, with fresh batches first.

    Attributes:
        takes_views: whether the only batch is one tile of all queries and all keys.
        narrow: whether results and dq have the dtype of the queries at once, since no query row is in more than two tiles.
            The second tile adds one rounding to out and none to dq: a sum of two numbers is rounded once in any case.
    """

    batches: tuple[BoundBatch, ...]
    takes_views: bool = False
    narrow: bool = False

    def _dtype(self, x: Tensor) -> torch.dtype:
        return x.dtype if self.narrow else accumulation_dtype(x.dtype)

    def forward(
        self, kernel: TileKernel, q: Tensor, k: Tensor, v: Tensor, scale: float, totals: Results | None = None
    ) -> Results:
        if self.takes_views:
            return kernel.forward(q, k, v, KernelCall(self.batches[0].shape, scale), totals)
        total, lse = totals or (
            q.new_zeros(*q.shape[:3], v.shape[-1], dtype=self._dtype(q)),
            q.new_full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype)),
        )
        lse_rows = lse.flatten()
        q_rows, total_rows = q.flatten(0, 2), total.flatten(0, 2)
        k, v = (k.flatten(0, 2), v.flatten(0, 2)) if k.ndim == 4 else (k, v)  # rows of a payload
        for part in self._parts(q_rows, FORWARD_PART):
            queries, keys, is_fresh = part.queries, part.keys, part.fresh and totals is None
            into = None if is_fresh else (queries.take(total_rows), queries.take(lse_rows))
            call = KernelCall(part.shape, scale, part.fold_size, part.lengths)
            results = kernel.forward(queries.take(q_rows), keys.take(k), keys.take(v), call, into)
            if is_fresh or not queries.is_view:
                queries.write_(total_rows, results[0])
                queries.write_(lse_rows, results[1])
        return totals or (total.to(q.dtype), lse)

    def backward(
        self, kernel: TileKernel, dout: Tensor, saved: Saved, scale: float, sums: Gradients | None = None
    ) -> Gradients:
        if self.takes_views:
            return kernel.backward(dout, saved, KernelCall(self.batches[0].shape, scale), sums)
        dtype = accumulation_dtype(dout.dtype)
        dq, dk, dv = sums or (
            dout.new_zeros(saved.q.shape, dtype=self._dtype(dout)),
            dout.new_zeros(saved.k.shape, dtype=dtype),
            dout.new_zeros(saved.v.shape, dtype=dtype),
        )
        tensors = dq, dk, dv, *saved[:4], dout
        dq_rows, dk_rows, dv_rows, q, k, v, out, dout = (x.flatten(0, 2) if x.ndim == 4 else x for x in tensors)
        lse = saved.lse.flatten()
        for part in self._parts(q, BACKWARD_PART):
            queries, keys = part.queries, part.keys
            views = queries.is_view and keys.is_view
            into = (queries.take(dq_rows), keys.take(dk_rows), keys.take(dv_rows)) if views else None
            taken = queries.take(q), keys.take(k), keys.take(v), queries.take(out), queries.take_lse(lse)
            call = KernelCall(part.shape, scale, part.fold_size, part.lengths)
            grads = kernel.backward(queries.take(dout), Saved(*taken), call, into)
            if not views:
                queries.add_(dq_rows, grads[0])
                keys.add_(dk_rows, grads[1])
                keys.add_(dv_rows, grads[2])
        return dq, dk, dv

    def _parts(self, q: Tensor, part: int) -> Iterator[BoundBatch]:
        """Yields parts that copy at most about 1 / `part` of the query rows, or `PART_ROWS`."""
        rows_at_once = max(PART_ROWS, q.shape[0] // part)
        for batch in self.batches:
            yield from batch.parts(rows_at_once, CUDA_BLOCK if q.is_cuda else 1)
