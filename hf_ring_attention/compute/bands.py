"""Bands by kernels that know no windows: stretches of rows, all in one call, with one small mask for all of them.

In a band of `width` keys, query i sees keys i to i + width - 1. `rows` consecutive queries are a stretch, and see
`rows + width - 1` consecutive keys; which of these each query sees is the same in every stretch. So stretches are a batch:
views of the queries, and overlapping views of the keys, whose gradients are added up.

A kernel also computes the pairs that a mask hides, `rows - 1` for each query, and is slower with few rows: the rows below
balance both, as measured on CPUs with AVX-512.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.plans import TileBatch
from .kernel import Gradients, KernelCall, Results, Saved, added, merged
from .merge import accumulation_dtype, merge_
from .rows import hidden_keys

#: A stretch has width / FORWARD_SHARE rows in forward and width / BACKWARD_SHARE in backward, within these bounds, as a
#: multiple of ROWS_OF_A_BLOCK, the rows that torch's kernel for CPUs takes at once.
FEWEST_ROWS, MOST_ROWS = 64, 192
FORWARD_SHARE, BACKWARD_SHARE = 8, 5
ROWS_OF_A_BLOCK = 32
#: The most numbers of a mask of more than FEWEST_ROWS rows.
LARGEST_MASK = 1 << 22
#: Results of about so many query rows, and gradients of so many key rows, are held at once, and added up in the cache.
RESULTS_AT_ONCE, GRADIENTS_AT_ONCE = 1 << 15, 1 << 14


class Masked(NamedTuple):
    """Attention of rectangles or lower triangles (`causal`); a mask, [Lq, Lk] or [T, 1, 1, Lk], is added to the scores."""

    causal: bool
    scale: float
    mask: Tensor | None = None


class MaskedKernel(ABC):
    """A kernel that knows rectangles, lower triangles and masks, and so takes bands as stretches."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, totals: Results | None = None) -> Results:
        if call.shape == "band":
            return _band_forward(self, q, k, v, call, totals)
        masked = Masked(call.shape == "causal", call.scale, _mask_of_keys(call.lengths, k))
        return merged(self.forward_masked(q, k, v, masked), totals)

    def backward(self, dout: Tensor, saved: Saved, call: KernelCall, sums: Gradients | None = None) -> Gradients:
        if call.shape == "band":
            return _band_backward(self, dout, saved, call, sums)
        masked = Masked(call.shape == "causal", call.scale, _mask_of_keys(call.lengths, saved.k))
        return added(self.backward_masked(dout, saved, masked), sums)

    @abstractmethod
    def forward_masked(self, q: Tensor, k: Tensor, v: Tensor, call: Masked) -> Results:
        """Returns out and lse."""

    @abstractmethod
    def backward_masked(self, dout: Tensor, saved: Saved, call: Masked) -> Gradients:
        """Returns dq, dk and dv."""


def _mask_of_keys(lengths: Tensor | None, k: Tensor) -> Tensor | None:
    """Returns a mask [T, 1, 1, Lk] that hides the padding of keys [T, H, Lk, D]; None without padding."""
    if lengths is None:
        return None
    return torch.zeros((), dtype=k.dtype, device=k.device).masked_fill(hidden_keys(lengths, k.shape[2]), -torch.inf)


class _Stretches(NamedTuple):
    """`number` stretches of `rows` x `fold_size` query rows; the first begins at query and at key `first` of the band."""

    first: int
    number: int
    rows: int
    fold_size: int

    def queries(self, x: Tensor) -> Tensor:
        """Returns the rows of x [T, H, Lq, ...] as a view [number, T, H, rows * fold_size, ...]."""
        return self._view(x, self.first * self.fold_size, self.rows * self.fold_size, self.rows * self.fold_size)

    def keys(self, x: Tensor, length: int, offset: int = 0) -> Tensor:
        """Returns keys of each stretch of x [T, H, Lk, D], from its key `offset` on, as a view [number, T, H, length, D]."""
        return self._view(x, self.first + offset, self.rows, length)

    def _view(self, x: Tensor, start: int, distance: int, length: int) -> Tensor:
        """Returns rows of x [T, H, L, ...] as a view [number, T, H, length, ...]."""
        sizes, (tile, head, row, *others) = (self.number, *x.shape[:2], length, *x.shape[3:]), x.stride()
        return x.as_strided(sizes, (distance * row, tile, head, row, *others), x.storage_offset() + start * row)

    def add_keys_(self, x: Tensor, values: Tensor) -> None:
        """Adds [number, T * H, length, D] to the keys of x [T, H, Lk, D]."""
        values, all_keys = values.unflatten(1, x.shape[:2]), values.shape[2]
        if self.number * self.rows < all_keys:  # A key is in more stretches than there are.
            for number, keys in enumerate(self.keys(x, all_keys)):
                keys.add_(values[number])
            return
        # Neighbouring stretches share keys, but `rows` keys at one offset in each are all different, and are added at once.
        for offset in range(0, all_keys, self.rows):
            length = min(self.rows, all_keys - offset)
            self.keys(x, length, offset).add_(values[..., offset : offset + length, :])

    def split(self, count: int) -> Iterator[_Stretches]:
        """Yields these stretches in groups of at most `count`."""
        for done in range(0, self.number, count):
            yield self._replace(first=self.first + done * self.rows, number=min(count, self.number - done))


def _cut(q: Tensor, k: Tensor, call: KernelCall, share: int) -> Iterator[tuple[_Stretches, int, Masked]]:
    """Yields stretches of a band, all equal ones and one of the rest, with their number of keys, and the keys they see."""
    fold_size, num_queries = call.fold_size, q.shape[2] // call.fold_size
    width = k.shape[2] - num_queries + 1
    rows = min(max(width // share // ROWS_OF_A_BLOCK * ROWS_OF_A_BLOCK, FEWEST_ROWS), MOST_ROWS)
    rows = min(rows, max(FEWEST_ROWS, LARGEST_MASK // (fold_size * width)))
    number, rest = divmod(num_queries, rows)
    for first, count, length in ((0, number, rows), (number * rows, 1, rest)):
        if count and length:
            query = torch.arange(length * fold_size, device=q.device)[:, None] // fold_size
            key = torch.arange(length + width - 1, device=q.device)
            hidden = (key < query) | (key >= query + width)
            mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
            yield _Stretches(first, count, length, fold_size), len(key), Masked(False, call.scale, mask)


def folds_are_heads(batch: TileBatch) -> bool:
    """Returns whether rows of folds are heads of their own: in triangles, and in bands with a large mask."""
    width = batch.num_keys - batch.num_queries + 1
    return batch.shape == "causal" or FEWEST_ROWS * batch.fold_size * width > LARGEST_MASK


def _band_forward(
    kernel: MaskedKernel, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, totals: Results | None
) -> Results:
    """Returns out and lse of a band, in the shapes of `Kernel.forward`, or `totals` with these merged into them."""
    dtype = accumulation_dtype(q.dtype)
    results = totals or (q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=dtype))
    for all_stretches, num_keys, masked in _cut(q, k, call, FORWARD_SHARE):
        rows = q.shape[0] * q.shape[1] * all_stretches.rows * call.fold_size
        for stretches in all_stretches.split(max(RESULTS_AT_ONCE // rows, 1)):
            k_, v_ = (stretches.keys(x, num_keys).flatten(1, 2) for x in (k, v))
            found = kernel.forward_masked(stretches.queries(q).flatten(1, 2), k_, v_, masked)
            out, lse = (x.unflatten(1, q.shape[:2]) for x in found)
            total, total_lse = (stretches.queries(x) for x in results)
            if totals is None:
                total.copy_(out)
                total_lse.copy_(lse)
            else:
                merge_(total, total_lse, out, lse)
    return results


def _band_backward(
    kernel: MaskedKernel, dout: Tensor, saved: Saved, call: KernelCall, sums: Gradients | None
) -> Gradients:
    """Returns dq, dk and dv of a band, in the shapes of `Kernel.backward`; adds them to `sums` and returns these if given."""
    q, k, v, out, lse = saved
    dtype = accumulation_dtype(q.dtype)
    dk, dv = (torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)) if sums is None else sums[1:]
    dq = torch.empty_like(q, memory_format=torch.contiguous_format) if sums is None else sums[0]
    for all_stretches, num_keys, masked in _cut(q, k, call, BACKWARD_SHARE):
        key_rows = k.shape[0] * k.shape[1] * num_keys
        for stretches in all_stretches.split(max(GRADIENTS_AT_ONCE // key_rows, 1)):
            dout_, q_, out_, lse_ = (stretches.queries(x).flatten(1, 2) for x in (dout, q, out, lse))
            k_, v_ = (stretches.keys(x, num_keys).flatten(1, 2) for x in (k, v))
            new_dq, new_dk, new_dv = kernel.backward_masked(dout_, Saved(q_, k_, v_, out_, lse_), masked)
            stretches.add_keys_(dk, new_dk)
            stretches.add_keys_(dv, new_dv)
            total, new_dq = stretches.queries(dq), new_dq.unflatten(1, q.shape[:2])
            total.copy_(new_dq) if sums is None else total.add_(new_dq)
    return (dq, dk.to(k.dtype), dv.to(v.dtype)) if sums is None else sums
