"""Sets of rows of a tensor: they are taken out, written into messages, and added to; and the buffers of the messages."""

from __future__ import annotations

import itertools
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
        """Returns the runs as a view of rows [R, width]: [copies, length, width], or [length, width] of a single run."""
        if self.copies == 1:
            return rows[self.start : self.start + self.length]
        width, along = rows.stride()
        sizes, strides = (self.copies, self.length, rows.shape[1]), (self.distance * width, width, along)
        return rows.as_strided(sizes, strides, rows.storage_offset() + self.start * width)


@dataclass(frozen=True)
class RowSet:
    """Rows of a tensor of rows [R, ...] by their numbers: as equal runs if possible, else by an index.

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
        """Returns the rows of x; writes them to `out` if there is one."""
        if self.index is not None:
            return torch.index_select(x, 0, self.index, out=out)
        rows = x if self.runs is None else self.runs.of(x)
        if out is None:
            return rows.reshape(-1, x.shape[1])
        out.view(rows.shape).copy_(rows)
        return out

    def add_(self, x: Tensor, values: Tensor) -> None:
        """Adds `values` to the rows of x."""
        if self.index is not None:
            x.index_add_(0, self.index, values)
        elif self.runs is not None:
            rows = self.runs.of(x)
            rows.add_(values.view(rows.shape))
        else:
            x.add_(values)


class Payload:
    """Key rows in the order of sending: by batch row, head, row."""

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
        #: The ascending numbers of the rows in a [B, Hkv, n] tensor of the source.
        self.numbers = torch.cat(parts).to(device) if parts else torch.empty(0, dtype=torch.int64, device=device)
        self.run = rows.run(heads)  # of every head, if all batch rows and heads have the same; else None

    def places(self, numbers: Tensor) -> Tensor:
        """Returns the places of these rows, which the payload must contain."""
        return torch.searchsorted(self.numbers, numbers)

    def row_set(self, part: Payload) -> RowSet:
        """Returns the rows of a smaller payload as rows of this payload."""
        return RowSet.of(self.places(part.numbers), len(self.numbers))


def _bit_numbers(bits: int) -> Tensor:
    """Returns the numbers of the set bits, ascending."""
    octets = torch.frombuffer(bytearray(bits.to_bytes(-(-bits.bit_length() // 8), "little")), dtype=torch.uint8)
    return torch.nonzero((octets[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()).flatten()


class MessageRows(NamedTuple):
    """The rows of two tensors, [rows, width] each, in one message, one tensor after the other."""

    message: Tensor
    first: Tensor
    second: Tensor
    buffer: Tensor | None = None


class MessagePool:
    """Buffers for messages of rows, all of one size. A free buffer is used again, so no more exist than are held at once."""

    def __init__(self, like: Tensor, widths: tuple[int, int], dtype: torch.dtype, max_rows: int) -> None:
        self.widths, self.max_rows = widths, max_rows
        self.nothing = MessageRows(*[like.new_empty(0, dtype=dtype)] * 3)
        self.free: list[Tensor] = []

    def take(self, *counts: int) -> list[MessageRows]:
        """Returns messages of these numbers of rows, side by side in one buffer."""
        if not any(counts):
            return [self.nothing for _ in counts]
        buffer = self.free.pop() if self.free else self.nothing.message.new_empty(self.max_rows * sum(self.widths))
        messages, start = [], 0
        for rows in counts:
            message = buffer[start : start + rows * sum(self.widths)]
            starts = (start, start + rows * self.widths[0])
            first, second = (buffer.as_strided((rows, x), (x, 1), at) for at, x in zip(starts, self.widths))
            messages.append(MessageRows(message, first, second, buffer))
            start += len(message)
        return messages

    def give(self, rows: MessageRows) -> None:
        """Frees the buffer of a message, if it has one."""
        if rows.buffer is not None:
            self.free.append(rows.buffer)

    def pack(self, rows: MessageRows, *selections: RowSet) -> list[MessageRows]:
        """Returns each selection of the rows as a message; a selection of all rows is their message as it is."""
        for i, selection in enumerate(selections):
            if selection.index is None and selection.runs is None and rows.buffer is not None:
                return [rows if j == i else rows._replace(message=rows.message[:0]) for j in range(len(selections))]
        packed = self.take(*(selection.count for selection in selections))
        for selection, message in zip(selections, packed):
            if selection.count:
                selection.take(rows.first, out=message.first)
                selection.take(rows.second, out=message.second)
        return packed
