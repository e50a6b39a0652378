"""Bands by kernels that know no windows: stretches of rows, all in one call, with one small mask for all of them.

A band of `width` keys has queries 0, 1, 2, ..., of which query i sees keys i to i + width - 1. `rows` consecutive queries are a
stretch, and see `rows + width - 1` consecutive keys; which of these each query sees is the same in every stretch. So stretches
are a batch: views of the queries, and overlapping views of the keys, whose gradients are added up where they overlap.

With a mask, the kernel also computes the pairs that the mask hides, `rows - 1` for each query. Where a band is wide, its
stretches are too, and they are cut instead: a triangle, a rectangle and a triangle that opens the other way hide no pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .merge import accumulation_dtype, merge_

#: Bands of fewer keys are computed with a mask, in stretches of MASKED_ROWS; wider ones are cut.
CUT_FROM = 2048
MASKED_ROWS = 128
#: A stretch of a band that is cut has this share of the band's width, which wastes little on small triangles.
CUT_SHARE = 4
#: Backward holds the gradients of overlapping keys for about this share of the queries at once, or for FEWEST_ROWS key rows.
SHARE_AT_ONCE = 8
FEWEST_ROWS = 1 << 14


class Attend(Protocol):
    """Attention of a batch of tiles by a kernel, with a mask [Lq, Lk] that is added to the scores, or none."""

    def forward_masked(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns out and lse, as `Kernel.forward`."""

    def backward_masked(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq, dk and dv, as `Kernel.backward`."""


class _Part(NamedTuple):
    """Some of the keys of every stretch: `length` from key `first` on."""

    first: int
    length: int
    kind: Literal["masked", "full", "causal", "reversed"]


class _Stretches(NamedTuple):
    """`number` stretches of `rows` query rows, from row `first` on."""

    first: int
    number: int
    rows: int

    def queries(self, x: Tensor) -> Tensor:
        """Returns the rows of x [T, H, Lq, ...] as [number, T * H, rows, ...]."""
        return self.query_view(x).flatten(1, 2)

    def query_view(self, x: Tensor) -> Tensor:
        """Returns the rows of x [T, H, Lq, ...] as a view [number, T, H, rows, ...]."""
        rows = x[:, :, self.first : self.first + self.number * self.rows].unflatten(2, (self.number, self.rows))
        return rows.movedim(2, 0)

    def keys(self, x: Tensor, part: _Part) -> Tensor:
        """Returns a part's keys of x [T, H, Lk, D] as [number, T * H, length, D]."""
        return self.key_view(x, part.first, part.length).flatten(1, 2)

    def key_view(self, x: Tensor, first: int, length: int) -> Tensor:
        """Returns keys of each stretch of x [T, H, Lk, D] as a view [number, T, H, length, D]."""
        start = self.first + first
        stop = start + (self.number - 1) * self.rows + length
        return x[:, :, start:stop].unfold(2, length, self.rows).movedim(-1, 3).movedim(2, 0)

    def add_keys_(self, x: Tensor, part: _Part, values: Tensor) -> None:
        """Adds [number, T * H, length, D] to a part's keys of x [T, H, Lk, D]."""
        values = values.unflatten(1, x.shape[:2])
        # Keys of neighbouring stretches overlap, but not those that are as far from the stretch's first, up to `rows` of them.
        for offset in range(0, part.length, self.rows):
            length = min(self.rows, part.length - offset)
            self.key_view(x, part.first + offset, length).add_(values[..., offset : offset + length, :])

    def split(self, count: int) -> Iterator[_Stretches]:
        """Yields these stretches in groups of at most `count`."""
        for done in range(0, self.number, count):
            yield _Stretches(self.first + done * self.rows, min(count, self.number - done), self.rows)


def _cut(num_queries: int, num_keys: int) -> Iterator[tuple[_Stretches, list[_Part]]]:
    """Yields the stretches of a band, and the parts of their keys: all of equal rows, and one of the rows that are left."""
    width = num_keys - num_queries + 1
    masked = width < CUT_FROM
    rows = min(num_queries, MASKED_ROWS if masked else width // CUT_SHARE)
    count, rest = divmod(num_queries, rows)
    yield _Stretches(0, count, rows), _parts(rows, width, masked)
    if rest:
        yield _Stretches(count * rows, 1, rest), _parts(rest, width, masked)


def _parts(rows: int, width: int, masked: bool) -> list[_Part]:
    if masked:
        return [_Part(0, rows + width - 1, "masked")]
    return [_Part(width - 1, rows, "causal"), _Part(rows, width - 1 - rows, "full"), _Part(0, rows, "reversed")]


@lru_cache(maxsize=32)
def _mask(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns [rows, rows + width - 1]: 0 where a query of a stretch sees a key, -inf elsewhere."""
    hidden = torch.ones(rows, rows + width - 1, dtype=torch.bool, device=device).triu().tril(width - 1).logical_not_()
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _mask_of(part: _Part, rows: int, q: Tensor) -> Tensor | None:
    return _mask(rows, part.length - rows + 1, q.dtype, q.device) if part.kind == "masked" else None


def band_forward(kernel: Attend, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns out [T, H, Lq, Dv] and lse [T, H, Lq] of a band; shapes are those of `Kernel.forward`."""
    results = []
    for stretches, parts in _cut(q.shape[2], k.shape[2]):
        queries = stretches.queries(q)
        total: tuple[Tensor, Tensor] | None = None
        for part in parts:
            rows, keys, values = queries, stretches.keys(k, part), stretches.keys(v, part)
            if part.kind == "reversed":
                rows, keys, values = (x.flip(2) for x in (rows, keys, values))
            causal = part.kind in ("causal", "reversed")
            new = kernel.forward_masked(rows, keys, values, causal, scale, _mask_of(part, stretches.rows, q))
            if part.kind == "reversed":
                new = new[0].flip(2), new[1].flip(2)
            if total is None:
                total = new if len(parts) == 1 else (new[0].to(accumulation_dtype(q.dtype)), new[1].contiguous())
            else:
                merge_(*total, *new)
        assert total is not None
        results.append(
            [x.unflatten(1, q.shape[:2]).movedim(0, 2).flatten(2, 3) for x in (total[0].to(q.dtype), total[1])]
        )
    if len(results) == 1:
        return results[0][0], results[0][1]
    return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 2)


def band_backward(
    kernel: Attend, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv of a band; shapes are those of `Kernel.backward`."""
    dtype = accumulation_dtype(q.dtype)
    dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    for all_stretches, parts in _cut(q.shape[2], k.shape[2]):
        key_rows = k.shape[0] * k.shape[1] * sum(part.length for part in parts)
        at_once = max(FEWEST_ROWS // key_rows, all_stretches.number // SHARE_AT_ONCE, 1)
        for stretches in all_stretches.split(at_once):
            rows = [stretches.queries(x) for x in (dout, q, out, lse)]
            total: Tensor | None = None
            for part in parts:
                causal, keys, values = part.kind != "full", stretches.keys(k, part), stretches.keys(v, part)
                dout_, q_, out_, lse_ = rows
                if part.kind == "reversed":
                    dout_, q_, out_, lse_, keys, values = (x.flip(2) for x in (*rows, keys, values))
                mask = _mask_of(part, stretches.rows, q)
                grads = kernel.backward_masked(
                    dout_, q_, keys, values, out_, lse_, causal and mask is None, scale, mask
                )
                new_dq, new_dk, new_dv = (x.flip(2) for x in grads) if part.kind == "reversed" else grads
                total = new_dq if total is None else total.to(dtype).add_(new_dq)
                stretches.add_keys_(dk, part, new_dk)
                stretches.add_keys_(dv, part, new_dv)
            assert total is not None
            stretches.query_view(dq).copy_(total.unflatten(1, q.shape[:2]))
    return dq, dk.to(k.dtype), dv.to(v.dtype)
