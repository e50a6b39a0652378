"""The ways of key and value rows to the ranks that need them, and of their gradients home.

A transport yields steps. In forward, each step is (keys, values, tile batches to compute with them); in backward, also
the tensors that take the step's dk and dv. Messages travel while the caller computes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..compute.binding import BoundBatch, OwnBinding
from ..compute.merge import accumulation_dtype
from .communicators import Exchanger, Message, Pending
from .row_sets import MessagePool, MessageRows
from .schedules import CollectiveBinding, RingBinding, RingStep


@dataclass
class Traffic:
    """The bytes that this rank moved: key and value rows, their gradients, and gathered states or rows.

    Attributes:
        sent_bytes, received_bytes: bytes that were handed to torch.distributed, and received from it.
        hops: the number of exchanges with other ranks.
        planned_seconds: seconds in which calls of this rank waited for their plans. New documents, lengths or patterns need
            new plans. A plan that is made ahead (`Ring.prepare_data_loader`) counts only while a call waits for its end.
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
        """Counts an exchange that begins and ends inside."""
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
    """The movement of the rows of one call, by its binding."""

    #: The tile that is all work of the rank, with every query once and no key of another rank; None if there is no such.
    whole: BoundBatch | None

    def forward(self, k: Tensor, v: Tensor) -> Iterator[ForwardStep]:
        """Yields the steps of the forward pass; k and v are this rank's, [B, Hkv, n, ...] and contiguous."""

    def backward(self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> Iterator[BackwardStep]:
        """Yields the steps of the backward pass; it adds to this rank's dk and dv, in the accumulation dtype."""


class Arriving:
    """Messages under way. Waiting for them counts the time; an error names the call, the step and the rank that waited."""

    def __init__(self, pending: Pending | None, traffic: Traffic, where: str) -> None:
        self.pending, self.traffic, self.where = pending, traffic, where

    def wait(self) -> None:
        """Waits until all messages are here."""
        if self.pending is None:
            return
        start = time.perf_counter()
        with _naming(self.where):
            self.pending.wait()
        self.traffic.waited_seconds += time.perf_counter() - start


class Link:
    """The exchanges of one call with other ranks. It counts their bytes; their errors name the call, the step and this rank.

    In errors, `rank` is the number of this rank; None for its number in `ranks`.
    """

    def __init__(self, ranks: Exchanger, traffic: Traffic, call: str, rank: int | None = None) -> None:
        self.ranks, self.traffic, self.call = ranks, traffic, call
        self.rank = ranks.rank if rank is None else rank

    def exchange(self, step: str, sends: list[Message], receives: list[Message]) -> Arriving:
        """Starts all messages that are not empty."""
        sends, receives = ([m for m in messages if m.tensor.numel()] for messages in (sends, receives))
        return self._start(
            step, lambda: self.ranks.exchange(sends, receives), *([m.tensor for m in x] for x in (sends, receives))
        )

    def all_to_all(
        self, step: str, rows: Tensor, send_counts: list[int], receive_counts: list[int]
    ) -> tuple[Tensor, Arriving]:
        """Starts to send rows to each rank, in the order of ranks; returns the rows that will arrive, in that order."""
        received = rows.new_empty(sum(receive_counts), *rows.shape[1:])

        def start() -> Pending:
            return self.ranks.all_to_all(received, rows, receive_counts, send_counts)

        return received, self._start(step, start, [rows], [received])

    def _start(self, step: str, start: Callable[[], Pending], sent: list[Tensor], received: list[Tensor]) -> Arriving:
        where = f"{self.call}, {step}, on rank {self.rank}"
        if not sent and not received:
            return Arriving(None, self.traffic, where)
        with _naming(where):
            pending = start()
        self.traffic.sent_bytes += sum(x.nbytes for x in sent)
        self.traffic.received_bytes += sum(x.nbytes for x in received)
        self.traffic.hops += 1
        return Arriving(pending, self.traffic, where)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{where}: {error}") from error


class LocalTransport:
    """The transport of a rank that needs no other: nothing moves."""

    def __init__(self, binding: OwnBinding) -> None:
        self.binding, self.whole = binding, binding.whole

    def forward(self, k: Tensor, v: Tensor) -> Iterator[ForwardStep]:
        yield ForwardStep(k, v, self.binding.batches)

    def backward(self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> Iterator[BackwardStep]:
        yield BackwardStep(k, v, dk, dv, self.binding.batches)


class CollectiveTransport:
    """Rows reach all ranks that need them in one all-to-all; their gradients go home in the reverse one.

    Memory and traffic count the needed rows only. K and V travel side by side in one message, gradients in the accumulation
    dtype.
    """

    def __init__(self, binding: CollectiveBinding, communicator: Exchanger, traffic: Traffic) -> None:
        self.binding = binding
        self.whole: BoundBatch | None = None
        self.link = Link(communicator, traffic, "collective attention")

    def _start_keys(self, name: str, k: Tensor, v: Tensor) -> tuple[Tensor, Arriving]:
        binding = self.binding
        rows = torch.cat([binding.send.take(x) for x in (k, v)], dim=-1)
        return self.link.all_to_all(f"{name} pass, keys and values", rows, binding.send_counts, binding.receive_counts)

    def forward(self, k: Tensor, v: Tensor) -> Iterator[ForwardStep]:
        binding = self.binding
        received, arriving = self._start_keys("forward", k, v)
        yield ForwardStep(k, v, binding.own.batches)
        arriving.wait()
        keys, values = received[None, None].split([k.shape[-1], v.shape[-1]], dim=-1)
        yield ForwardStep(keys, values, binding.remote)

    def backward(self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> Iterator[BackwardStep]:
        binding, widths = self.binding, [k.shape[-1], v.shape[-1]]
        received, arriving = self._start_keys("backward", k, v)
        yield BackwardStep(k, v, dk, dv, binding.own.batches)
        arriving.wait()
        grads = torch.zeros_like(received, dtype=accumulation_dtype(k.dtype))
        keys, values = received[None, None].split(widths, dim=-1)
        dkeys, dvalues = grads[None, None].split(widths, dim=-1)
        yield BackwardStep(keys, values, dkeys, dvalues, binding.remote)
        home, arriving = self.link.all_to_all(
            "backward pass, gradients", grads, binding.receive_counts, binding.send_counts
        )
        arriving.wait()
        for target, part in zip((dk, dv), home.split(widths, dim=-1)):
            binding.send.add_(target, part)


class RingTransport:
    """Rows travel from neighbour to neighbour, each as far as its last reader; gradients follow them, and come home.

    While the caller computes with one payload, the next is under way: two payloads are held, whatever the number of
    ranks. K and V travel in one message. In backward they travel again; the gradients of a payload's rows follow one
    computation behind, in the accumulation dtype, and the last rank to use a row sends its gradient to the row's owner.
    """

    def __init__(
        self, binding: RingBinding, communicator: Exchanger, traffic: Traffic, rank: int | None = None
    ) -> None:
        self.binding, self.whole = binding, binding.whole
        self.link = Link(communicator, traffic, "ring attention", rank)

    def _travel(self, k: Tensor, v: Tensor, name: str) -> Iterator[tuple[RingStep, RingStep | None, Tensor, Tensor]]:
        """Yields each step, the next one, and the step's keys and values, while the keys of the next step are under way."""
        steps, widths = self.binding.steps, (k.shape[-1], v.shape[-1])
        pool = MessagePool(k, widths, k.dtype, max(max(step.arriving, step.sent.count) for step in steps))
        own = MessageRows(k.new_empty(0), k, v)
        held = own
        for step, following in zip(steps, (*steps[1:], None)):
            if following is None or not following.number:
                yield step, following, held.first, held.second
                pool.give(held)
                held = own
                continue
            (coming,) = pool.take(following.shape)
            (going,) = pool.pack(own if following.number == 1 else held, following.sent)
            arriving = self.link.exchange(
                f"{name} pass, step {following.number} of {following.of}, keys and values",
                [Message(following.following, going.message)],
                [Message(following.previous, coming.message)],
            )
            yield step, following, held.first, held.second
            arriving.wait()
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
        pool = MessagePool(k, widths, accumulation_dtype(k.dtype), most)
        flight: _InFlight | None = None
        for step, following, keys, values in self._travel(k, v, "backward"):
            if not step.number:
                yield BackwardStep(keys, values, dk, dv, step.batches)
                self._finish_gradients(flight, pool, (dk, dv))
                flight = None
                continue
            (grads,) = pool.take(step.shape)
            grads.message.zero_()
            yield BackwardStep(keys, values, grads.first, grads.second, step.batches)
            self._finish_gradients(flight, pool, (dk, dv), (step, grads))
            flight = self._start_gradients(step, following, pool, grads)
        self._finish_gradients(flight, pool, (dk, dv))

    def _start_gradients(
        self, step: RingStep, following: RingStep | None, pool: MessagePool, grads: MessageRows
    ) -> _InFlight:
        """Starts to send the gradients of a step's payload onward and home, and to receive the neighbours' gradients."""
        carried = 0 if following is None else following.carried.count
        onward, home = pool.take((1, 1, carried), (1, 1, step.home.count))
        goes_on, finished = pool.pack(grads, step.goes_on, step.finished)
        if goes_on.buffer is not grads.buffer:
            pool.give(grads)
        arriving = self.link.exchange(
            f"backward pass, step {step.number} of {step.of}, gradients",
            [Message(step.following, goes_on.message), Message(step.source, finished.message)],
            [Message(step.previous, onward.message), Message(step.last_user, home.message)],
        )
        return _InFlight(arriving, step, onward, home, goes_on)

    def _finish_gradients(
        self,
        flight: _InFlight | None,
        pool: MessagePool,
        own: tuple[Tensor, Tensor],
        payload: tuple[RingStep, MessageRows] | None = None,
    ) -> None:
        """Adds the gradients that came: for own rows to dk and dv, and for the rows of a step's payload to its gradients."""
        if flight is None:
            return
        flight.arriving.wait()
        came = [(flight.step.home, own, flight.home)]
        if payload is not None:
            step, grads = payload
            came.append((step.carried, (grads.first, grads.second), flight.onward))
        for rows, sums, arrived in came:
            if rows.count:
                rows.add_(sums[0], arrived.first.flatten(0, 2))
                rows.add_(sums[1], arrived.second.flatten(0, 2))
        pool.give(flight.onward)
        pool.give(flight.sent)


class _InFlight(NamedTuple):
    """The gradients that are under way after a step."""

    arriving: Arriving
    step: RingStep
    onward: MessageRows
    home: MessageRows
    sent: MessageRows
