"""The rows of a tile batch among the rows of a tensor [B, H, n, ...]: views if they lie side by side, else gathers.

All functions take tensors as their rows, [B * H * n, ...]. Both kinds `take` rows to [tiles, heads, L, ...], the kernels'
shape: views of each row once if they are views (`is_view`), else copies. `write_` and `add_` bring results back. No two tiles
of a batch share a query row of a head, so results are written without conflicts; key rows may repeat. `split` yields the same
rows in parts of at most so many of their equal `units`.

On a GPU, starting an operation often takes longer than its work, so these functions need few of them, views included.
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

    def numbered(self) -> ViewRows:
        """Views need no row numbers."""
        return self

    @property
    def _at_equal_distances(self) -> bool:
        """Whether all stretches of all batch rows are equally far apart, so that a view has them in one dimension."""
        return 1 in (self.batch, self.copies) or self.of_batch_row == self.copies * self.advance

    @cached_property
    def _dimensions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes of `_window` and the distances in rows."""
        tiles = [(self.batch, self.of_batch_row), (self.copies, self.advance)]
        if self._at_equal_distances:
            tiles = [(self.batch * self.copies, self.of_batch_row if self.copies == 1 else self.advance)]
        sizes, distances = zip(*tiles, (self.heads, self.of_head), (self.length, 1))
        return sizes, distances

    def _window(self, x: Tensor) -> Tensor:
        """Returns the rows as a view [B, copies, heads, L, ...], or [B * copies, heads, L, ...] at equal distances."""
        (sizes, distances), (width, *others) = self._dimensions, x.stride()
        strides = [distance * width for distance in distances]
        return x.as_strided((*sizes, *x.shape[1:]), (*strides, *others), x.storage_offset() + self.start * width)

    @property
    def is_view(self) -> bool:
        return self._at_equal_distances and (self.copies == 1 or self.advance >= self.length)

    def take(self, x: Tensor) -> Tensor:
        window = self._window(x)
        return window if self._at_equal_distances else window.flatten(0, 1)

    def take_lse(self, lse: Tensor) -> Tensor:
        return self.take(lse)

    def add_(self, x: Tensor, values: Tensor) -> None:
        values = values.unflatten(0, (-1, self.copies))
        # Overlapping stretches are added in turns, without overlap inside a turn.
        turns = min(self.copies, -(-self.length // self.advance)) if self.advance else 1
        for turn in range(turns):
            copies = -(-(self.copies - turn) // turns)
            part = replace(self, start=self.start + turn * self.advance, copies=copies, advance=turns * self.advance)
            window = part._window(x)
            window.add_(values[:, turn::turns].reshape(window.shape))

    def write_(self, x: Tensor, values: Tensor) -> None:
        """Writes values over the rows of x, each of which is in one tile."""
        window = self._window(x)
        window.copy_(values.reshape(window.shape))

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
    kept: Tensor | None = None  # the places of rows that are not padding, in a head's [tiles * L]; None without padding

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

    def numbers(self) -> Tensor:
        """Returns all row numbers."""
        return self.first if self.offsets is None else self.first + self.offsets

    def numbered(self) -> IndexRows:
        """Returns the rows with all their numbers, which the functions below need."""
        return self if self.offsets is None else replace(self, first=self.numbers(), offsets=None)

    @cached_property
    def _flat(self) -> Tensor:
        return self.first.flatten()

    def take(self, x: Tensor) -> Tensor:
        # An embedding is `index_select` for numbers of any shape.
        return x[self.first] if x.ndim == 1 else torch.embedding(x, self.first)

    def take_lse(self, lse: Tensor) -> Tensor:
        """Returns the rows of lse as `take`; the lse of padding is +inf, which makes its gradients 0."""
        rows = self.take(lse)
        if self.kept is None:
            return rows
        tiles, _, length = rows.shape
        is_padding = torch.ones(tiles * length, dtype=torch.bool, device=lse.device).index_fill_(0, self.kept, False)
        return rows.masked_fill_(is_padding.view(tiles, 1, length), torch.inf)

    def add_(self, x: Tensor, values: Tensor) -> None:
        x.index_add_(0, self._flat, values.to(x.dtype).reshape(-1, x.shape[1]))

    def write_(self, x: Tensor, values: Tensor) -> None:
        x.index_put_((self._without_padding(self.first),), self._without_padding(values).to(x.dtype))

    def _without_padding(self, x: Tensor) -> Tensor:
        """Returns the rows of x [tiles, heads, L, ...] that are not padding, [rows, ...]; x itself without padding."""
        return x if self.kept is None else x.transpose(0, 1).flatten(1, 2).index_select(1, self.kept).flatten(0, 1)

    def split(self, size: int) -> Iterator[Rows]:
        assert self.kept is None, "tiles that share a call are not split"
        for first in self.first.split(size):
            yield replace(self, first=first)


#: Rows of one side, queries or keys, of a tile batch.
Rows = ViewRows | IndexRows


def hidden_keys(lengths: Tensor, length: int) -> Tensor:
    """Returns which keys are padding, [tiles, 1, 1, length], by the number of keys of each tile."""
    return torch.arange(length, device=lengths.device) >= lengths.view(-1, 1, 1, 1)
