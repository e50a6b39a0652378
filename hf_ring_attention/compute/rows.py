"""The rows of a tile batch inside [B, H, n, ...] tensors: views if they lie side by side, else gathers.

Both kinds `take` rows of x [B, H, n, ...] to [tiles, heads, L, ...], the kernels' shape, and bring results back by `add_` and
`merge_`. No two tiles of a batch share a query row of a head, so results are merged without conflicts; key rows may repeat.
`split` yields the same rows in parts of at most so many of their equal `units`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import merge


@dataclass(frozen=True, kw_only=True)
class ViewRows:
    """`copies` stretches of `length` rows, `advance` apart, in all batch rows and `heads` heads from `first_head` on."""

    batch: int
    heads: int
    start: int
    length: int
    copies: int
    advance: int
    first_head: int = 0

    @property
    def units(self) -> int:
        """The number of equal parts along which `split` can cut."""
        return self.copies

    @property
    def rows_per_unit(self) -> int:
        """The number of rows in each part, over all its heads."""
        return self.batch * self.heads * self.length

    def _span(self, x: Tensor) -> Tensor:
        """Returns all rows from the first stretch to the end of the last, as a view [B, H, rows, ...]."""
        stop = self.start + (self.copies - 1) * self.advance + self.length
        return x[:, self.first_head : self.first_head + self.heads, self.start : stop]

    def _window(self, x: Tensor) -> Tensor:
        """Returns the rows as a view [B, H, copies, length, ...]."""
        return self._span(x).unfold(2, self.length, max(1, self.advance)).movedim(-1, 3)

    def view(self, x: Tensor) -> Tensor | None:
        """Returns the rows of x as `take`, as a view of x; None if no view has them."""
        return self._span(x) if self.copies == 1 else None

    def take(self, x: Tensor) -> Tensor:
        view = self.view(x)
        return self._window(x).transpose(1, 2).flatten(0, 1) if view is None else view

    take_lse = take

    def _like_window(self, values: Tensor) -> Tensor:
        """Returns [B * copies, H, length, ...] as [B, H, copies, length, ...]."""
        return values.unflatten(0, (-1, self.copies)).transpose(1, 2)

    def add_(self, x: Tensor, values: Tensor) -> None:
        values = self._like_window(values)
        # Overlapping stretches are added in turns, without overlap inside a turn.
        turns = min(self.copies, -(-self.length // self.advance)) if self.advance else 1
        for turn in range(turns):
            copies = -(-(self.copies - turn) // turns)
            part = replace(self, start=self.start + turn * self.advance, copies=copies, advance=turns * self.advance)
            part._window(x).add_(values[:, :, turn::turns])

    def merge_(self, out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
        merge.merge_(self._window(out), self._window(lse), self._like_window(new_out), self._like_window(new_lse))

    def split(self, size: int) -> Iterator[Rows]:
        for first in range(0, self.copies, size):
            yield replace(self, start=self.start + first * self.advance, copies=min(size, self.copies - first))


@dataclass(frozen=True)
class IndexRows:
    """Rows by their numbers in x.flatten(0, 2): all of them, or the first ones of tiles.

    Of tiles of unequal lengths, the last row is repeated up to the length of the longest tile.
    """

    length: int  # rows of a tile and head, L, including the rows of all folds
    first: Tensor | None = None  # [tiles, heads], the first row of each; None if `rows` has all rows
    stride: int = 1  # the distance between the first rows of neighbouring folds
    fold_size: int = 1  # the rows of a fold: with `stride` 4 and `fold_size` 2, rows are 0, 1, 4, 5, 8, 9, ...
    rows: Tensor | None = None  # [tiles, heads, L], all row numbers; None if `first` has the first rows
    kept: Tensor | None = None  # the places of rows that are not padding, in a head's [tiles * L]; None without padding

    @property
    def _of_tiles(self) -> Tensor:
        tensor = self.first if self.rows is None else self.rows
        assert tensor is not None
        return tensor

    @property
    def units(self) -> int:
        return self._of_tiles.shape[0]

    @property
    def rows_per_unit(self) -> int:
        return self._of_tiles.shape[1] * self.length

    def numbers(self) -> Tensor:
        """Returns the row numbers, [tiles, heads, L]."""
        if self.rows is not None or self.first is None:
            return self._of_tiles
        number = torch.arange(self.length, device=self.first.device)
        if self.fold_size > 1:
            number = number // self.fold_size * self.stride + number % self.fold_size
        elif self.stride != 1:
            number = number * self.stride
        return self.first.unsqueeze(-1) + number

    def take(self, x: Tensor) -> Tensor:
        numbers = self.numbers()
        return x.flatten(0, 2).index_select(0, numbers.flatten()).unflatten(0, numbers.shape)

    def view(self, x: Tensor) -> None:
        """Rows by their numbers are not a view."""

    def take_lse(self, lse: Tensor) -> Tensor:
        """Returns the rows of lse [B, H, n] as `take`; the lse of padding is +inf, which makes its gradients 0."""
        rows = self.take(lse)
        if self.kept is None:
            return rows
        tiles, _, length = rows.shape
        is_padding = torch.ones(tiles * length, dtype=torch.bool, device=lse.device).index_fill_(0, self.kept, False)
        return rows.masked_fill_(is_padding.view(tiles, 1, length), torch.inf)

    def add_(self, x: Tensor, values: Tensor) -> None:
        x.flatten(0, 2).index_add_(0, self.numbers().flatten(), values.to(x.dtype).flatten(0, 2))

    def merge_(self, out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
        index, new_out, new_lse = map(self._without_padding, (self.numbers(), new_out, new_lse))
        out, lse = out.flatten(0, 2), lse.flatten(0, 2)
        out_rows, lse_rows = out.index_select(0, index), lse.index_select(0, index)
        merge.merge_(out_rows, lse_rows, new_out, new_lse)
        out.index_copy_(0, index, out_rows)
        lse.index_copy_(0, index, lse_rows)

    def _without_padding(self, x: Tensor) -> Tensor:
        """Returns the rows of x [tiles, heads, L, ...] that are not padding, [rows, ...]."""
        if self.kept is None:
            return x.flatten(0, 2)
        return x.transpose(0, 1).flatten(1, 2).index_select(1, self.kept).flatten(0, 1)

    def split(self, size: int) -> Iterator[Rows]:
        assert self.kept is None, "tiles that share a call are not split"
        for first in range(0, self.units, size):
            first_rows, rows = (x if x is None else x[first : first + size] for x in (self.first, self.rows))
            yield replace(self, first=first_rows, rows=rows)


def explicit_rows(rows: Tensor) -> IndexRows:
    """Returns rows by their numbers, [tiles, heads, L]."""
    return IndexRows(rows.shape[-1], rows=rows)


#: Rows of one side, queries or keys, of a tile batch.
Rows = ViewRows | IndexRows


def hidden_keys(lengths: Lengths, length: int) -> Tensor:
    """Returns which keys are padding, [tiles, 1, 1, length], by the number of keys of each tile."""
    assert isinstance(lengths, Tensor)
    return torch.arange(length, device=lengths.device) >= lengths[:, None, None, None]


class Packed(NamedTuple):
    """Tiles whose rows follow each other in one tile of tensors."""

    query_ends: Tensor  # [tiles + 1], int32: 0, and the end of each tile's rows
    key_ends: Tensor
    most_queries: int  # the rows of the longest tile
    most_keys: int


#: The lengths of tiles that share a call: the number of keys of each tile, [tiles], or the ends of packed tiles.
Lengths = Tensor | Packed
