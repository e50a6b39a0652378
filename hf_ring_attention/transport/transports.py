"""The ways of key and value rows to the ranks that need them, and of their gradients home.

A transport yields steps. In forward, each step is (keys, values, tile batches to compute with them); in backward, also
the tensors that take the step's dk and dv. What a transport has in flight travels while the caller computes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..compute.binding import BoundBatch, OwnBinding
from ..compute.merge import accumulation_dtype
from .communicators import Exchanger, Message, Pending
from .row_sets import RowSet
from .schedules import CollectiveBinding, RingBinding, RingStep


@dataclass
class Traffic:
    """What this rank moved: key and value rows and their gradients, and what ranks gather: states, or rows to unshard.

    Attributes:
        sent_bytes, received_bytes: bytes that were handed to torch.distributed, and received from it.
        hops: the number of exchanges with other ranks.
        planned_seconds: seconds in which calls of this rank waited for their plans, which is where documents, lengths or
            patterns are other ones than before. Plans that are made ahead, while a batch before computes
            (`Ring.prepare_data_loader`), count as far as a call has to wait for their end.
        waited_seconds: seconds in which this rank waited for the exchanges and computed nothing. On CUDA the device
            waits, and this counts the host only.

    Example:
        >>> def attend(ring):
        ...     x = torch.ones(1, 1, 4, 8)  # a key and a value of 8 float32 numbers each are 64 bytes
        ...     ra.ring_attention(x, x, x, pattern="exact", ring=ring)
        ...     return ring.traffic()
        >>> traffic = ra.run_simulated(attend, 2, transport="ring")[0]
        >>> traffic.sent_bytes, traffic.received_bytes, traffic.hops  # rank 1 needs 2 of the 4 rows of rank 0
        (128, 256, 1)
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    hops: int = 0
    planned_seconds: float = 0.0
    waited_seconds: float = 0.0

    @contextmanager
    def exchange(self, sent_bytes: int, received_bytes: int) -> Iterator[None]:
        """Counts the exchange inside, for whose end this rank waits."""
        start = time.perf_counter()
        yield
        self.waited_seconds += time.perf_counter() - start
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes
        self.hops += 1

    def reset(self) -> None:
        """Sets all counters to zero."""
        self.sent_bytes = self.received_bytes = self.hops = 0
        self.planned_seconds = self.waited_seconds = 0.0


class ForwardStep(NamedTuple):
    """Keys and values, and the tiles to compute with them."""

    keys: Tensor
    values: Tensor
    batches: tuple[BoundBatch, ...]


class BackwardStep(NamedTuple):
    """Keys and values, the tensors that take their gradients, and the tiles to compute with them."""

    keys: Tensor
    values: Tensor
    dkeys: Tensor
    dvalues: Tensor
    batches: tuple[BoundBatch, ...]


class Transport(Protocol):
    """The movement of the rows of one call, as its binding says."""

    @property
    def whole(self) -> BoundBatch | None:
        """The one tile that is all work of the rank: every query once, and no key of another rank; None if there is none."""

    def forward(self, k: Tensor, v: Tensor) -> Iterator[ForwardStep]:
        """Yields the steps of the forward pass; k and v are this rank's, [B, Hkv, n, ...] and contiguous."""

    def backward(self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> Iterator[BackwardStep]:
        """Yields the steps of the backward pass; it adds to this rank's dk and dv, which are of the accumulation dtype."""


class LocalTransport:
    """The transport of a rank that needs no other: nothing moves."""

    def __init__(self, binding: OwnBinding) -> None:
        self.binding = binding

    @property
    def whole(self) -> BoundBatch | None:
        return self.binding.batches[0] if self.binding.whole else None

    def forward(self, k: Tensor, v: Tensor) -> Iterator[ForwardStep]:
        yield ForwardStep(k, v, self.binding.batches)

    def backward(self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> Iterator[BackwardStep]:
        yield BackwardStep(k, v, dk, dv, self.binding.batches)


@contextmanager
def telling(where: str) -> Iterator[None]:
    """Has an error of the messages inside tell `where` it was."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{where}: {error}") from error


def wait_for(pending: Pending, traffic: Traffic, where: str) -> None:
    """Waits for messages, and counts the time; an error tells `where` it was."""
    start = time.perf_counter()
    with telling(where):
        pending.wait()
    traffic.waited_seconds += time.perf_counter() - start


def size_of(x: Tensor) -> int:
    """Returns the bytes of a tensor."""
    return x.numel() * x.element_size()


class CollectiveTransport:
    """Rows reach all ranks that need them in one all-to-all; their gradients go home in the reverse one.

    Memory and bytes are those of the rows that are needed. K and V travel side by side in one message, gradients in the
    accumulation dtype.
    """

    def __init__(self, binding: CollectiveBinding, communicator: Exchanger, traffic: Traffic) -> None:
        self.binding = binding
        self.communicator = communicator
        self.traffic = traffic

    @property
    def whole(self) -> BoundBatch | None:
        return self.binding.own.batches[0] if self.binding.own.whole and not self.binding.used else None

    def _start(
        self, where: str, rows: Tensor, send_counts: list[int], receive_counts: list[int]
    ) -> tuple[Tensor, Pending]:
        received = rows.new_empty(sum(receive_counts), rows.shape[1])
        with telling(where):
            pending = self.communicator.all_to_all(received, rows, receive_counts, send_counts)
        self.traffic.sent_bytes += size_of(rows)
        self.traffic.received_bytes += size_of(received)
        self.traffic.hops += 1
        return received, pending

    def _where(self, content: str) -> str:
        return f"collective attention, {content}, on rank {self.communicator.rank}"

    def _start_keys(self, where: str, k: Tensor, v: Tensor) -> tuple[Tensor, Pending]:
        binding = self.binding
        rows = torch.cat([binding.send.take(x) for x in (k, v)], dim=-1)
        return self._start(where, rows, binding.send_counts, binding.receive_counts)

    def forward(self, k: Tensor, v: Tensor) -> Iterator[ForwardStep]:
        binding = self.binding
        if not binding.used:
            yield ForwardStep(k, v, binding.own.batches)
            return
        where = self._where("forward pass, keys and values")
        received, pending = self._start_keys(where, k, v)
        yield ForwardStep(k, v, binding.own.batches)
        wait_for(pending, self.traffic, where)
        keys, values = received[None, None].split([k.shape[-1], v.shape[-1]], dim=-1)
        yield ForwardStep(keys, values, binding.remote)

    def backward(self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> Iterator[BackwardStep]:
        binding = self.binding
        if not binding.used:
            yield BackwardStep(k, v, dk, dv, binding.own.batches)
            return
        where = self._where("backward pass, keys and values")
        received, pending = self._start_keys(where, k, v)
        yield BackwardStep(k, v, dk, dv, binding.own.batches)
        wait_for(pending, self.traffic, where)
        widths = [k.shape[-1], v.shape[-1]]
        grads = torch.zeros_like(received, dtype=accumulation_dtype(k.dtype))
        keys, values = received[None, None].split(widths, dim=-1)
        dkeys, dvalues = grads[None, None].split(widths, dim=-1)
        yield BackwardStep(keys, values, dkeys, dvalues, binding.remote)
        where = self._where("backward pass, gradients")
        home, pending = self._start(where, grads, binding.receive_counts, binding.send_counts)
        wait_for(pending, self.traffic, where)
        for target, part in zip((dk, dv), home.split(widths, dim=-1)):
            binding.send.add_(target, part)


class _Rows(NamedTuple):
    """The rows of two tensors, [B, heads, rows, ...], in one message: those of the first, then those of the second."""

    message: Tensor
    first: Tensor
    second: Tensor
    buffer: Tensor | None = None


class _Pool:
    """Buffers for messages of rows, all of one size: as many as are held at once, each used again when it is free."""

    def __init__(self, like: Tensor, widths: tuple[int, int], dtype: torch.dtype, max_rows: int) -> None:
        self.like, self.widths, self.dtype, self.max_rows = like, widths, dtype, max_rows
        self.free: list[Tensor] = []

    def take(self, *shapes: tuple[int, int, int]) -> list[_Rows]:
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
                _Rows(message, first.view(*shape, self.widths[0]), second.view(*shape, self.widths[1]), buffer)
            )
            start += rows * sum(self.widths)
        return messages

    def give(self, rows: _Rows) -> None:
        """Frees the buffer of a message, if it has one."""
        if rows.buffer is not None:
            self.free.append(rows.buffer)

    def pack(self, rows: _Rows, *selections: RowSet) -> list[_Rows]:
        """Returns each selection of the rows as a message; a selection of all rows is the message that they are in."""
        for i, selection in enumerate(selections):
            if selection.everything and rows.buffer is not None:
                return [rows if j == i else rows._replace(message=rows.message[:0]) for j in range(len(selections))]
        packed = self.take(*((1, 1, selection.count) for selection in selections))
        for selection, message in zip(selections, packed):
            selection.take(rows.first, out=message.first)
            selection.take(rows.second, out=message.second)
        return packed


class RingTransport:
    """Rows travel from neighbour to neighbour, each as far as its last reader; gradients follow them, and come home.

    While the caller computes with one payload, the next is under way: two payloads are held, whatever the number of
    ranks. K and V travel in one message. In backward they travel again; the gradients of a payload's rows follow one
    computation behind, in the accumulation dtype, and the last rank to use a row sends its gradient to the row's owner.

    Args:
        name: of this rank, for errors; None for its number in `communicator`.
    """

    def __init__(
        self, binding: RingBinding, communicator: Exchanger, traffic: Traffic, name: int | None = None
    ) -> None:
        self.binding = binding
        self.communicator = communicator
        self.traffic = traffic
        self.name = communicator.rank if name is None else name

    @property
    def whole(self) -> BoundBatch | None:
        return self.binding.whole

    def _start(self, where: str, sends: list[Message], receives: list[Message]) -> Pending | None:
        sends, receives = ([m for m in messages if m.tensor.numel()] for messages in (sends, receives))
        if not sends and not receives:
            return None
        with telling(where):
            pending = self.communicator.exchange(sends, receives)
        self.traffic.sent_bytes += sum(size_of(message.tensor) for message in sends)
        self.traffic.received_bytes += sum(size_of(message.tensor) for message in receives)
        self.traffic.hops += 1
        return pending

    def _where(self, name: str, step: RingStep, content: str) -> str:
        return f"ring attention, {name} pass, step {step.number} of {step.of}, {content}, on rank {self.name}"

    def _travel(self, k: Tensor, v: Tensor, name: str) -> Iterator[tuple[RingStep, RingStep | None, Tensor, Tensor]]:
        """Yields each step, the next one, and the step's keys and values; those of the next are under way meanwhile."""
        steps, widths = self.binding.steps, (k.shape[-1], v.shape[-1])
        pool = _Pool(k, widths, k.dtype, max(max(step.arriving, step.sent.count) for step in steps))
        own = _Rows(k.new_empty(0), k, v)
        held = own
        for step, following in zip(steps, (*steps[1:], None)):
            if following is None or not following.number:
                yield step, following, held.first, held.second
                pool.give(held)
                held = own
                continue
            (coming,) = pool.take(following.shape)
            (going,) = pool.pack(own if following.number == 1 else held, following.sent)
            where = self._where(name, following, "keys and values")
            pending = self._start(
                where, [Message(following.following, going.message)], [Message(following.previous, coming.message)]
            )
            yield step, following, held.first, held.second
            if pending is not None:
                wait_for(pending, self.traffic, where)
            pool.give(held)
            if going.buffer is not held.buffer:
                pool.give(going)
            held = coming

    def forward(self, k: Tensor, v: Tensor) -> Iterator[ForwardStep]:
        for step, _, keys, values in self._travel(k, v, "forward"):
            yield ForwardStep(keys, values, step.batches)

    def backward(self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> Iterator[BackwardStep]:
        steps, widths = self.binding.steps, (k.shape[-1], v.shape[-1])
        coming = [step.home.count + after.carried.count for step, after in itertools.pairwise(steps)]
        most = max(steps[-1].home.count, *coming, *(step.arriving for step in steps))
        pool = _Pool(k, widths, accumulation_dtype(k.dtype), most)
        flight: _InFlight | None = None
        for step, following, keys, values in self._travel(k, v, "backward"):
            if not step.number:
                yield BackwardStep(keys, values, dk, dv, step.batches)
                self._finish_gradients(flight, pool, dk, dv)
                flight = None
                continue
            (grads,) = pool.take(step.shape)
            grads.message.zero_()
            yield BackwardStep(keys, values, grads.first, grads.second, step.batches)
            self._finish_gradients(flight, pool, dk, dv, step, grads)
            flight = self._start_gradients(step, following, pool, grads)
        self._finish_gradients(flight, pool, dk, dv)

    def _start_gradients(self, step: RingStep, following: RingStep | None, pool: _Pool, grads: _Rows) -> _InFlight:
        """Starts to send the gradients of a step's payload onward and home, and to receive those that come here."""
        carried = 0 if following is None else following.carried.count
        onward, home = pool.take((1, 1, carried), (1, 1, step.home.count))
        goes_on, finished = pool.pack(grads, step.goes_on, step.finished)
        if goes_on.buffer is not grads.buffer:
            pool.give(grads)
        pending = self._start(
            self._where("backward", step, "gradients"),
            [Message(step.following, goes_on.message), Message(step.source, finished.message)],
            [Message(step.previous, onward.message), Message(step.last_user, home.message)],
        )
        return _InFlight(pending, step, onward, home, goes_on)

    def _finish_gradients(
        self,
        flight: _InFlight | None,
        pool: _Pool,
        dk: Tensor,
        dv: Tensor,
        step: RingStep | None = None,
        grads: _Rows | None = None,
    ) -> None:
        """Adds the gradients that came: those of own rows to dk and dv, those of the rows of `step` to `grads`."""
        if flight is None:
            return
        if flight.pending is not None:
            wait_for(flight.pending, self.traffic, self._where("backward", flight.step, "gradients"))
        if flight.step.home.count:
            flight.step.home.add_(dk, flight.home.first.flatten(0, 2))
            flight.step.home.add_(dv, flight.home.second.flatten(0, 2))
        if step is not None and grads is not None and step.carried.count:
            step.carried.add_(grads.first, flight.onward.first.flatten(0, 2))
            step.carried.add_(grads.second, flight.onward.second.flatten(0, 2))
        pool.give(flight.onward)
        pool.give(flight.sent)


class _InFlight(NamedTuple):
    """The gradients that are under way after a step."""

    pending: Pending | None
    step: RingStep
    onward: _Rows
    home: _Rows
    sent: _Rows
