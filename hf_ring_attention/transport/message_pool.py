"""The buffers of messages of rows, each used again when it is free."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .row_sets import RowSet


class MessageRows(NamedTuple):
    """The rows of two tensors, [B, heads, rows, ...], in one message, one tensor after the other."""

    message: Tensor
    first: Tensor
    second: Tensor
    buffer: Tensor | None = None


class MessagePool:
    """Buffers for messages of rows, all of one size. A free buffer is used again, so no more exist than are held at once."""

    def __init__(self, like: Tensor, widths: tuple[int, int], dtype: torch.dtype, max_rows: int) -> None:
        self.like, self.widths, self.dtype, self.max_rows = like, widths, dtype, max_rows
        self.free: list[Tensor] = []

    def take(self, *shapes: tuple[int, int, int]) -> list[MessageRows]:
        """Returns messages of these numbers of rows, side by side in one buffer."""
        buffer = None
        if any(map(math.prod, shapes)):
            size = self.max_rows * sum(self.widths)
            buffer = self.free.pop() if self.free else self.like.new_empty(size, dtype=self.dtype)
        whole = self.like.new_empty(0, dtype=self.dtype) if buffer is None else buffer
        messages, start = [], 0
        for shape in shapes:
            rows = math.prod(shape)
            message = whole[start : start + rows * sum(self.widths)]
            first, second = message.split([rows * width for width in self.widths])
            messages.append(
                MessageRows(message, first.view(*shape, self.widths[0]), second.view(*shape, self.widths[1]), buffer)
            )
            start += rows * sum(self.widths)
        return messages

    def give(self, rows: MessageRows) -> None:
        """Frees the buffer of a message, if it has one."""
        if rows.buffer is not None:
            self.free.append(rows.buffer)

    def pack(self, rows: MessageRows, *selections: RowSet) -> list[MessageRows]:
        """Returns each selection of the rows as a message; a selection of all rows is their own message."""
        for i, selection in enumerate(selections):
            if selection.everything and rows.buffer is not None:
                return [rows if j == i else rows._replace(message=rows.message[:0]) for j in range(len(selections))]
        packed = self.take(*((1, 1, selection.count) for selection in selections))
        for selection, message in zip(selections, packed):
            selection.take(rows.first, out=message.first)
            selection.take(rows.second, out=message.second)
        return packed
