"""The rows of a tile batch among the rows of a tensor [B, H, n, ...]: views if they lie side by side, else gathers.

All functions take tensors as their rows, [B * H * n, ...]. Both kinds `take` rows to [tiles, heads, L, ...], the kernels'
shape: views of each row once if they are views (`is_view`), else copies. `write_` and `add_` bring results back. No two tiles
of a batch share a query row of a head, so results are written without conflicts; key rows may repeat. `split` yields the same
rows in parts of at most `size` of their equal `units`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ViewRows:
    """`copies` stretches of `length` rows, `advance` apart, in batch rows and heads that are equally far apart."""

    kept: ClassVar = None  # nothing is padding

    batch: int
    heads: int
    start: int  # the first row
    length: int
    copies: int
    advance: int
    of_batch_row: int  # the rows of a batch row, in all its heads
    of_head: int  # the rows of a head

    @property
    def units(self) -> int:
        """The number of equal parts along which `split` can cut."""
        return self.copies

    @property
    def tiles_per_unit(self) -> int:
        """The number of tiles in each part."""
        return self.batch

    @property
    def rows_per_unit(self) -> int:
        """The number of rows in each part, over all its heads."""
        return self.batch * self.heads * self.length

    def _window(self, x: Tensor) -> Tensor:
        """Returns the rows as a view [B, copies, heads, L, ...]."""
        sizes, (width, *others) = (self.batch, self.copies, self.heads, self.length), x.stride()
        strides = self.of_batch_row * width, self.advance * width, self.of_head * width, width
        return x.as_strided((*sizes, *x.shape[1:]), (*strides, *others), x.storage_offset() + self.start * width)

    @cached_property
    def is_view(self) -> bool:
        # Stretches at equal distances over all batch rows are one dimension of a view.
        is_even = 1 in (self.batch, self.copies) or self.of_batch_row == self.copies * self.advance
        return is_even and (self.copies == 1 or self.advance >= self.length)

    def take(self, x: Tensor) -> Tensor:
        return self._window(x).flatten(0, 1)

    def take_lse(self, lse: Tensor) -> Tensor:
        return self.take(lse)

    def add_(self, x: Tensor, values: Tensor) -> None:
        values = values.unflatten(0, (-1, self.copies))
        # Overlapping stretches are added in turns, without overlap inside a turn.
        turns = min(self.copies, -(-self.length // self.advance)) if self.advance else 1
        for turn in range(turns):
            copies = -(-(self.copies - turn) // turns)
            part = replace(self, start=self.start + turn * self.advance, copies=copies, advance=turns * self.advance)
            part._window(x).add_(values[:, turn::turns])

    def write_(self, x: Tensor, values: Tensor) -> None:
        """Writes values over the rows of x, each of which is in one tile."""
        self._window(x).copy_(values.unflatten(0, (-1, self.copies)))

    def split(self, size: int) -> Iterator[Rows]:
        for first in range(0, self.copies, size):
            yield replace(self, start=self.start + first * self.advance, copies=min(size, self.copies - first))


@dataclass(frozen=True)
class IndexRows:
    """Rows by their numbers, [tiles, heads, L].

    Of tiles of unequal lengths that are padded, the last row is repeated up to the length of the longest tile.
    """

    tiles_per_unit: ClassVar = 1
    is_view: ClassVar = False

    first: Tensor  # all numbers, or one of each tile and head
    offsets: Tensor | None = None  # [L]: added to `first`, these are all numbers
    kept: Tensor | None = None  # the places of rows that are not padding, in [tiles * heads * L]; None without padding

    @property
    def units(self) -> int:
        return self.first.shape[0]

    @property
    def length(self) -> int:
        """The rows of a tile in each head."""
        return self.first.shape[-1] * (1 if self.offsets is None else len(self.offsets))

    @property
    def rows_per_unit(self) -> int:
        return self.first.shape[1] * self.length

    @cached_property
    def numbers(self) -> Tensor:
        """All row numbers; parts keep them for one call only."""
        return self.first if self.offsets is None else self.first + self.offsets

    def take(self, x: Tensor) -> Tensor:
        # An embedding is `index_select` for numbers of any shape.
        return x[self.numbers] if x.ndim == 1 else torch.embedding(x, self.numbers)

    def take_lse(self, lse: Tensor) -> Tensor:
        """Returns the rows of lse as `take`; the lse of padding is +inf, which makes its gradients 0."""
        rows = self.take(lse)
        if self.kept is None:
            return rows
        padded = torch.full_like(rows, torch.inf).flatten()
        return padded.index_copy_(0, self.kept, rows.flatten()[self.kept]).view_as(rows)

    def add_(self, x: Tensor, values: Tensor) -> None:
        x.index_add_(0, self.numbers.flatten(), values.to(x.dtype).flatten(0, 2))

    def write_(self, x: Tensor, values: Tensor) -> None:
        numbers, values = self.numbers.flatten(), values.to(x.dtype).flatten(0, 2)
        if self.kept is not None:
            numbers, values = numbers[self.kept], values[self.kept]
        x.index_copy_(0, numbers, values)

    def split(self, size: int) -> Iterator[Rows]:
        assert self.kept is None, "tiles that share a call are not split"
        for first in self.first.split(size):
            yield replace(self, first=first)


#: Rows of one side, queries or keys, of a tile batch.
Rows = ViewRows | IndexRows


def hidden_keys(lengths: Tensor, length: int) -> Tensor:
    """Returns which keys are padding, [tiles, 1, 1, length], by the number of keys of each tile."""
    return torch.arange(length, device=lengths.device) >= lengths.view(-1, 1, 1, 1)
