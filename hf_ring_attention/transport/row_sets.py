"""Sets of rows of a tensor: they are taken out, written into messages, and added to; and the buffers of the messages."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.problem import Problem
from ..plan.routes import KeyRows


class RowRuns(NamedTuple):
    """`copies` runs of `length` rows, `distance` rows from start to start."""

    start: int
    length: int
    distance: int
    copies: int

    def numbers(self) -> Tensor:
        """Returns the numbers of the rows, ascending."""
        starts = self.start + torch.arange(self.copies) * self.distance
        return (starts[:, None] + torch.arange(self.length)).flatten()

    def of(self, rows: Tensor) -> Tensor:
        """Returns the runs as a view [copies, length, ...] of rows [R, ...]."""
        stop = self.start + (self.copies - 1) * self.distance + self.length
        return rows[self.start : stop].unfold(0, self.length, self.distance).movedim(-1, 1)


@dataclass(frozen=True)
class RowSet:
    """Rows of a tensor by their numbers in x.flatten(0, 2): as equal runs if possible, else by an index.

    A set without runs and without an index is all rows, in order.
    """

    count: int
    index: Tensor | None = None
    runs: RowRuns | None = None

    @classmethod
    def of(cls, numbers: Tensor, total: int) -> RowSet:
        """Makes the set of these ascending numbers, of `total` rows."""
        count = len(numbers)
        if count in (0, total):
            return cls(count, None if count else numbers)
        breaks = torch.nonzero(numbers[1:] != numbers[:-1] + 1).flatten()
        length = int(breaks[0]) + 1 if len(breaks) else count
        starts = numbers[::length]
        distance = int(starts[1] - starts[0]) if len(starts) > 1 else length
        runs = RowRuns(int(starts[0]), length, distance, len(starts))
        if count == length * len(starts) and torch.equal(runs.numbers().to(numbers.device), numbers):
            return cls(count, None, runs)
        return cls(count, numbers)

    def take(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the rows of x [B, H, n, ...] as [rows, ...]; writes them to `out` [1, 1, rows, ...] if there is one."""
        rows, out = x.flatten(0, 2), None if out is None else out.flatten(0, 2)
        if self.index is not None:
            return torch.index_select(rows, 0, self.index, out=out)
        if self.runs is not None:
            view = self.runs.of(rows)
            if out is None:
                return view.flatten(0, 1)
            out.unflatten(0, (self.runs.copies, self.runs.length)).copy_(view)
            return out
        return rows if out is None else out.copy_(rows)

    def add_(self, x: Tensor, values: Tensor) -> None:
        """Adds [rows, ...] to the rows of a contiguous x [B, H, n, ...]."""
        rows = x.view(-1, *x.shape[3:])
        if self.index is not None:
            rows.index_add_(0, self.index, values)
        elif self.runs is not None:
            self.runs.of(rows).add_(values.unflatten(0, (self.runs.copies, self.runs.length)))
        else:
            rows.add_(values)


class Payload:
    """Key rows in the order in which they are sent: by batch row, head, row.

    Attributes:
        numbers: the ascending numbers of the rows in a [B, Hkv, n] tensor of the source.
        first: the first row of every head, if all batch rows and heads have the same run of rows; else None.
    """

    def __init__(self, rows: KeyRows, problem: Problem, heads: range, device: torch.device) -> None:
        count, local_len = problem.num_kv_heads, problem.layout.local_len
        numbers: dict[int, Tensor] = {}  # equal sets share one tensor
        row_class = {row: i for i, (_, rows_) in enumerate(problem.row_classes) for row in rows_}
        parts = []
        for batch_row, head in itertools.product(range(len(problem.documents)), heads):
            bits = rows.sets[row_class[batch_row] * count + head]
            if bits:
                if bits not in numbers:
                    numbers[bits] = _bit_numbers(bits)
                parts.append(numbers[bits] + (batch_row * count + head) * local_len)
        self.numbers = torch.cat(parts).to(device) if parts else torch.empty(0, dtype=torch.int64, device=device)
        run = rows.run(heads)
        self.first = None if run is None else run.start
        self.shape = (1, 1, len(self.numbers)) if run is None else (len(problem.documents), len(heads), len(run))

    def places(self, numbers: Tensor) -> Tensor:
        """Returns the places of these rows, which the payload must contain."""
        return torch.searchsorted(self.numbers, numbers)

    def row_set(self, part: Payload) -> RowSet:
        """Returns the rows of another payload, a part of this one, as rows of this one."""
        return RowSet.of(self.places(part.numbers), len(self.numbers))


def _bit_numbers(bits: int) -> Tensor:
    """Returns the numbers of the set bits, ascending."""
    octets = torch.frombuffer(bytearray(bits.to_bytes(-(-bits.bit_length() // 8), "little")), dtype=torch.uint8)
    return torch.nonzero((octets[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()).flatten()


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
            parts = message.split([rows * width for width in self.widths])
            first, second = (part.view(*shape, width) for part, width in zip(parts, self.widths))
            messages.append(MessageRows(message, first, second, buffer))
            start += len(message)
        return messages

    def give(self, rows: MessageRows) -> None:
        """Frees the buffer of a message, if it has one."""
        if rows.buffer is not None:
            self.free.append(rows.buffer)

    def pack(self, rows: MessageRows, *selections: RowSet) -> list[MessageRows]:
        """Returns each selection of the rows as a message; a selection of all rows is their own message."""
        for i, selection in enumerate(selections):
            if selection.index is None and selection.runs is None and rows.buffer is not None:
                return [rows if j == i else rows._replace(message=rows.message[:0]) for j in range(len(selections))]
        packed = self.take(*((1, 1, selection.count) for selection in selections))
        for selection, message in zip(selections, packed):
            selection.take(rows.first, out=message.first)
            selection.take(rows.second, out=message.second)
        return packed
