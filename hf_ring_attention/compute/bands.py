"""Bands by kernels that know no windows: stretches of rows, all in one call, with one small mask for all of them.

A band of `width` keys has queries 0, 1, 2, ..., of which query i sees keys i to i + width - 1. `rows` consecutive queries are a
stretch, and see `rows + width - 1` consecutive keys; which of these each query sees is the same in every stretch. So stretches
are a batch: views of the queries, and overlapping views of the keys, whose gradients are added up where they overlap.

A kernel also computes the pairs that a mask hides, `rows - 1` for each query, and is slower with few rows: the rows below are
a balance of both, measured on CPUs with AVX-512. The stretches of wide bands are long, and are cut instead: a triangle, a
rectangle and a triangle that opens the other way need no mask, and the kernel leaves out most of what triangles do not see.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .merge import accumulation_dtype, merge_

#: The fewest and the most rows of a stretch, and of what share of the band's width they are between these: forward, backward.
FEWEST_ROWS, MOST_ROWS = 64, 384
FORWARD_SHARE, BACKWARD_SHARE = 8, 4
#: Bands of so many keys or more are cut, in stretches of CUT_ROWS.
CUT_FROM = 4096
CUT_ROWS = 1024
#: Backward holds the gradients of about so many key rows at once, and adds them up while they are in the cache.
ROWS_AT_ONCE = 1 << 14


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

    @property
    def is_triangle(self) -> bool:
        return self.kind in ("causal", "reversed")

    def turned(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Returns rows in the order in which the part is a lower triangle."""
        return tuple(x.flip(2) for x in rows) if self.kind == "reversed" else rows


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


def _cut(num_queries: int, num_keys: int, share: int) -> Iterator[tuple[_Stretches, list[_Part]]]:
    """Yields the stretches of a band, and the parts of their keys: all of equal rows, and one of the rows that are left."""
    width = num_keys - num_queries + 1
    rows = CUT_ROWS if width >= CUT_FROM else min(max(width // share, FEWEST_ROWS), MOST_ROWS)
    number, rest = divmod(num_queries, rows)
    if number:
        yield _Stretches(0, number, rows), _parts(rows, width)
    if rest:
        yield _Stretches(number * rows, 1, rest), _parts(rest, width)


def _parts(rows: int, width: int) -> list[_Part]:
    if width < CUT_FROM:
        return [_Part(0, rows + width - 1, "masked")]
    return [_Part(width - 1, rows, "causal"), _Part(rows, width - 1 - rows, "full"), _Part(0, rows, "reversed")]


@lru_cache(maxsize=32)
def _mask(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns [rows, rows + width - 1]: 0 where a query of a stretch sees a key, -inf elsewhere."""
    hidden = torch.ones(rows, rows + width - 1, dtype=torch.bool, device=device).triu().tril(width - 1).logical_not()
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def band_forward(kernel: Attend, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns out [T, H, Lq, Dv] and lse [T, H, Lq] of a band; shapes are those of `Kernel.forward`."""
    width, results = k.shape[2] - q.shape[2] + 1, []
    for stretches, parts in _cut(q.shape[2], k.shape[2], FORWARD_SHARE):
        queries = stretches.queries(q)
        total: tuple[Tensor, Tensor] | None = None
        for part in parts:
            mask = _mask(stretches.rows, width, q.dtype, q.device) if part.kind == "masked" else None
            q_, k_, v_ = part.turned(queries, stretches.keys(k, part), stretches.keys(v, part))
            out, lse = part.turned(*kernel.forward_masked(q_, k_, v_, part.is_triangle, scale, mask))
            if total is None:
                total = (out, lse) if len(parts) == 1 else (out.to(accumulation_dtype(q.dtype)), lse.contiguous())
            else:
                merge_(*total, out, lse)
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
    dtype, width = accumulation_dtype(q.dtype), k.shape[2] - q.shape[2] + 1
    dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    for all_stretches, parts in _cut(q.shape[2], k.shape[2], BACKWARD_SHARE):
        key_rows = k.shape[0] * k.shape[1] * max(part.length for part in parts)
        for stretches in all_stretches.split(max(ROWS_AT_ONCE // key_rows, 1)):
            queries = [stretches.queries(x) for x in (dout, q, out, lse)]
            total: Tensor | None = None
            for part in parts:
                mask = _mask(stretches.rows, width, q.dtype, q.device) if part.kind == "masked" else None
                dout_, q_, out_, lse_, k_, v_ = part.turned(*queries, stretches.keys(k, part), stretches.keys(v, part))
                new_dq, new_dk, new_dv = part.turned(
                    *kernel.backward_masked(dout_, q_, k_, v_, out_, lse_, part.is_triangle, scale, mask)
                )
                total = new_dq if total is None else total.to(dtype).add_(new_dq)
                stretches.add_keys_(dk, part, new_dk)
                stretches.add_keys_(dv, part, new_dv)
            assert total is not None
            stretches.query_view(dq).copy_(total.unflatten(1, q.shape[:2]))
    return dq, dk.to(k.dtype), dv.to(v.dtype)
