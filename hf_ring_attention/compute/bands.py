"""Bands by kernels that know no windows: stretches of rows, all in one call, with one small mask for all of them.

In a band of `width` keys, query i sees keys i to i + width - 1. `rows` consecutive queries are a stretch, and see
`rows + width - 1` consecutive keys; which of these each query sees is the same in every stretch. So stretches are a batch:
views of the queries, and overlapping views of the keys, whose gradients are added up.

A kernel also computes the pairs that a mask hides, `rows - 1` for each query, and is slower with few rows: the rows below
balance both, as measured on CPUs with AVX-512. Wide bands are cut instead: a triangle, a rectangle and a triangle that opens
the other way need no mask, and the kernel skips most pairs outside its triangles. In bands of 8192 keys, cutting
saves a tenth of the time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..plan.plans import TileBatch
from .kernel import Gradients, KernelCall, Results, Saved, added, merged
from .merge import accumulation_dtype, merge_
from .rows import hidden_keys

#: A stretch has width / FORWARD_SHARE rows in forward and width / BACKWARD_SHARE in backward, within these bounds, as a
#: multiple of ROWS_OF_A_BLOCK, the rows that torch's kernel for CPUs takes at once.
FEWEST_ROWS, MOST_ROWS = 64, 384
FORWARD_SHARE, BACKWARD_SHARE = 8, 5
ROWS_OF_A_BLOCK = 32
#: Bands of this width or more are cut into triangles and rectangles, in stretches of CUT_ROWS, a smaller number.
CUT_FROM = 4096
CUT_ROWS = 1024
#: The most numbers of a mask that repeats rows of folds.
LARGEST_MASK = 1 << 22
#: Rows summed at a time, so that the sums stay in the CPU's cache: query rows of results, and key rows of gradients.
RESULTS_AT_ONCE, GRADIENTS_AT_ONCE = 1 << 15, 1 << 14


class Masked(NamedTuple):
    """Attention of rectangles or lower triangles (`causal`); a mask is added to the scores.

    It is [Lq, Lk], or [T or 1, H or 1, Lq or 1, Lk].
    """

    causal: bool
    scale: float
    mask: Tensor | None = None


class MaskedKernel(ABC):
    """A kernel that knows rectangles, lower triangles and masks, and so takes bands as stretches."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, totals: Results | None = None) -> Results:
        if call.shape == "band":
            return _band_forward(self, q, k, v, call, totals)
        mask = None if call.lengths is None else _mask_of_keys(call.lengths, k)
        masked = Masked(call.shape == "causal", call.scale, mask)
        return merged(self.forward_masked(q, k, v, masked), totals)

    def backward(self, dout: Tensor, saved: Saved, call: KernelCall, sums: Gradients | None = None) -> Gradients:
        if call.shape == "band":
            return _band_backward(self, dout, saved, call, sums)
        mask = None if call.lengths is None else _mask_of_keys(call.lengths, saved.k)
        masked = Masked(call.shape == "causal", call.scale, mask)
        return added(self.backward_masked(dout, saved, masked), sums)

    @abstractmethod
    def forward_masked(self, q: Tensor, k: Tensor, v: Tensor, call: Masked) -> Results:
        """Returns out and lse."""

    @abstractmethod
    def backward_masked(self, dout: Tensor, saved: Saved, call: Masked) -> Gradients:
        """Returns dq, dk and dv."""


def _mask_of_keys(lengths: Tensor, k: Tensor) -> Tensor:
    """Returns a mask [T, 1, 1, Lk] that hides the padding of keys [T, H, Lk, D]."""
    return torch.zeros((), dtype=k.dtype, device=k.device).masked_fill(hidden_keys(lengths, k.shape[2]), -torch.inf)


class _Part(NamedTuple):
    """`length` keys of every stretch, from key `first` on."""

    first: int
    length: int
    kind: Literal["masked", "full", "causal", "reversed"]  # reversed: a triangle that opens the other way

    @property
    def is_triangle(self) -> bool:
        return self.kind in ("causal", "reversed")

    def turned(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Returns rows in the order that makes the part a lower triangle."""
        return tuple(x.flip(2) for x in rows) if self.kind == "reversed" else rows


class _Stretches(NamedTuple):
    """`number` stretches of `rows` x `fold_size` query rows; the first begins at query and at key `first` of the band."""

    first: int
    number: int
    rows: int
    fold_size: int

    def queries(self, x: Tensor) -> Tensor:
        """Returns the rows of x [T, H, Lq, ...] as [number, T * H, rows * fold_size, ...]."""
        return self.query_view(x).flatten(1, 2)

    def query_view(self, x: Tensor) -> Tensor:
        """Returns the rows of x [T, H, Lq, ...] as a view [number, T, H, rows * fold_size, ...]."""
        return self._view(x, self.first * self.fold_size, self.rows * self.fold_size, self.rows * self.fold_size)

    def keys(self, x: Tensor, part: _Part) -> Tensor:
        """Returns a part's keys of x [T, H, Lk, D] as [number, T * H, length, D]."""
        return self.key_view(x, part.first, part.length).flatten(1, 2)

    def key_view(self, x: Tensor, first: int, length: int) -> Tensor:
        """Returns keys of each stretch of x [T, H, Lk, D] as a view [number, T, H, length, D]."""
        return self._view(x, self.first + first, self.rows, length)

    def _view(self, x: Tensor, start: int, distance: int, length: int) -> Tensor:
        """Returns rows of x [T, H, L, ...] as a view [number, T, H, length, ...], in one operation."""
        sizes, (tile, head, row, *others) = (self.number, *x.shape[:2], length, *x.shape[3:]), x.stride()
        return x.as_strided(sizes, (distance * row, tile, head, row, *others), x.storage_offset() + start * row)

    def add_keys_(self, x: Tensor, part: _Part, values: Tensor) -> None:
        """Adds [number, T * H, length, D] to a part's keys of x [T, H, Lk, D]."""
        values = values.unflatten(1, x.shape[:2])
        if self.number * self.rows < part.length:  # A key is in more stretches than there are.
            for number, keys in enumerate(self.key_view(x, part.first, part.length)):
                keys.add_(values[number])
            return
        # Neighbouring stretches share keys, but `rows` keys at one offset in each are all different, and are added at once.
        for offset in range(0, part.length, self.rows):
            length = min(self.rows, part.length - offset)
            self.key_view(x, part.first + offset, length).add_(values[..., offset : offset + length, :])

    def split(self, count: int) -> Iterator[_Stretches]:
        """Yields these stretches in groups of at most `count`."""
        for done in range(0, self.number, count):
            yield self._replace(first=self.first + done * self.rows, number=min(count, self.number - done))


def _cut(q: Tensor, k: Tensor, fold_size: int, share: int) -> Iterator[tuple[_Stretches, list[_Part], Tensor | None]]:
    """Yields stretches of a band with the parts and the mask of their keys: all equal stretches, and one of the rest."""
    num_queries = q.shape[2] // fold_size
    width = k.shape[2] - num_queries + 1
    rows = min(max(width // share // ROWS_OF_A_BLOCK * ROWS_OF_A_BLOCK, FEWEST_ROWS), MOST_ROWS)
    rows = CUT_ROWS if width >= CUT_FROM else rows
    if fold_size > 1 and width < CUT_FROM:
        rows = min(rows, max(FEWEST_ROWS, LARGEST_MASK // (fold_size * width)))
    number, rest = divmod(num_queries, rows)
    if number:
        yield _Stretches(0, number, rows, fold_size), *_parts_of_keys(rows, width, fold_size, q)
    if rest:
        yield _Stretches(number * rows, 1, rest, fold_size), *_parts_of_keys(rest, width, fold_size, q)


def _parts_of_keys(rows: int, width: int, fold_size: int, q: Tensor) -> tuple[list[_Part], Tensor | None]:
    """Returns the three parts of a wide band's keys, or all keys and their mask.

    The mask, [rows * fold_size, rows + width - 1], is 0 if a query sees a key, and -inf if not.
    """
    if width >= CUT_FROM:
        parts = [_Part(width - 1, rows, "causal"), _Part(rows, width - 1 - rows, "full"), _Part(0, rows, "reversed")]
        return parts, None
    query = torch.arange(rows * fold_size, device=q.device)[:, None] // fold_size
    key = torch.arange(rows + width - 1, device=q.device)
    hidden = (key < query) | (key >= query + width)
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
    return [_Part(0, rows + width - 1, "masked")], mask


def folds_are_heads(batch: TileBatch) -> bool:
    """Returns whether rows of folds are separate heads: in triangles, and in bands with cut keys or a large mask."""
    width = batch.num_keys - batch.num_queries + 1
    return batch.shape == "causal" or width >= CUT_FROM or FEWEST_ROWS * batch.fold_size * width > LARGEST_MASK


def _band_forward(
    kernel: MaskedKernel, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, totals: Results | None
) -> Results:
    """Returns out and lse of a band, in the shapes of `Kernel.forward`, or `totals` with these merged into them."""
    dtype = accumulation_dtype(q.dtype)
    results = totals or (q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=dtype))
    for all_stretches, parts, mask in _cut(q, k, call.fold_size, FORWARD_SHARE):
        rows = q.shape[0] * q.shape[1] * all_stretches.rows * call.fold_size
        for stretches in all_stretches.split(max(RESULTS_AT_ONCE // rows, 1)):
            queries, total = stretches.queries(q), None
            for part in parts:
                q_, k_, v_ = part.turned(queries, stretches.keys(k, part), stretches.keys(v, part))
                out, lse = part.turned(*kernel.forward_masked(q_, k_, v_, Masked(part.is_triangle, call.scale, mask)))
                if total is not None:
                    merge_(*total, out, lse)
                else:
                    total = (out, lse) if len(parts) == 1 else (out.to(dtype), lse.contiguous())
            assert total is not None
            views = stretches.query_view(results[0]), stretches.query_view(results[1])
            out, lse = total[0].unflatten(1, q.shape[:2]), total[1].unflatten(1, q.shape[:2])
            if totals is None:
                views[0].copy_(out)
                views[1].copy_(lse)
            else:
                merge_(*views, out, lse)
    return results


def _band_backward(
    kernel: MaskedKernel, dout: Tensor, saved: Saved, call: KernelCall, sums: Gradients | None
) -> Gradients:
    """Returns dq, dk and dv of a band, in the shapes of `Kernel.backward`; adds them to `sums` and returns these if given."""
    q, k, v, out, lse = saved
    dtype = accumulation_dtype(q.dtype)
    dk, dv = (torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)) if sums is None else sums[1:]
    dq = torch.empty_like(q, memory_format=torch.contiguous_format) if sums is None else sums[0]
    for all_stretches, parts, mask in _cut(q, k, call.fold_size, BACKWARD_SHARE):
        key_rows = k.shape[0] * k.shape[1] * max(part.length for part in parts)
        for stretches in all_stretches.split(max(GRADIENTS_AT_ONCE // key_rows, 1)):
            queries = [stretches.queries(x) for x in (dout, q, out, lse)]
            total: Tensor | None = None
            for part in parts:
                dout_, q_, out_, lse_, k_, v_ = part.turned(*queries, stretches.keys(k, part), stretches.keys(v, part))
                tile, masked = Saved(q_, k_, v_, out_, lse_), Masked(part.is_triangle, call.scale, mask)
                new_dq, new_dk, new_dv = part.turned(*kernel.backward_masked(dout_, tile, masked))
                total = new_dq if total is None else total.to(dtype).add_(new_dq)
                stretches.add_keys_(dk, part, new_dk)
                stretches.add_keys_(dv, part, new_dv)
            assert total is not None
            rows_of_dq, total = stretches.query_view(dq), total.unflatten(1, q.shape[:2])
            rows_of_dq.copy_(total) if sums is None else rows_of_dq.add_(total)
    return (dq, dk.to(k.dtype), dv.to(v.dtype)) if sums is None else sums
