"""How key and value rows reach the ranks that need them, and how their gradients come home.

A transport yields steps. In forward, each step is (keys, values, tile batches to compute with them); in backward, also
the tensors that take the step's dk and dv. What a transport has in flight travels while the caller computes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .bindings import BoundBatch, CollectiveBinding, OwnBinding, RingBinding, RingStep, Selection
from .blocks import accumulation_dtype
from .communicators import Communicator, Message, Pending


@dataclass
class Traffic:
    """What this rank's transports moved: key and value rows in forward and backward, and their gradients.

    Attributes:
        sent_bytes, received_bytes: as handed to and received from torch.distributed.
        hops: exchanges with other ranks.
        waited_seconds: in which this rank had nothing to compute and waited for them.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    hops: int = 0
    waited_seconds: float = 0.0


class ForwardStep(NamedTuple):
    keys: Tensor
    values: Tensor
    batches: tuple[BoundBatch, ...]


class BackwardStep(NamedTuple):
    keys: Tensor
    values: Tensor
    dkeys: Tensor
    dvalues: Tensor
    batches: tuple[BoundBatch, ...]


class Transport(Protocol):
    """Moves the rows of one call, as its binding says."""

    @property
    def whole(self) -> BoundBatch | None:
        """The tile that is all of the work, where one is: every query once, and no key of another rank."""

    def forward(self, k: Tensor, v: Tensor) -> Iterator[ForwardStep]:
        """k, v: this rank's, [B, Hkv, n, ...] and contiguous."""

    def backward(self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> Iterator[BackwardStep]:
        """dk, dv: this rank's gradients, in the accumulation dtype; complete when the iterator ends."""


class LocalTransport:
    """One rank: nothing moves."""

    def __init__(self, binding: OwnBinding) -> None:
        self.binding = binding

    @property
    def whole(self) -> BoundBatch | None:
        return self.binding.batches[0] if self.binding.whole else None

    def forward(self, k: Tensor, v: Tensor) -> Iterator[ForwardStep]:
        yield ForwardStep(k, v, self.binding.batches)

    def backward(self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> Iterator[BackwardStep]:
        yield BackwardStep(k, v, dk, dv, self.binding.batches)


def _wait(pending: Pending, traffic: Traffic, what: str) -> None:
    start = time.perf_counter()
    try:
        pending.wait()
    except RuntimeError as error:
        raise RuntimeError(f"{what}: {error}") from error
    traffic.waited_seconds += time.perf_counter() - start


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


class CollectiveTransport:
    """The rows each rank needs of each other one, in one all-to-all; their gradients home in the reverse one.

    Memory and bytes are those of the rows needed. K and V travel side by side in one message, gradients in the
    accumulation dtype.
    """

    def __init__(self, binding: CollectiveBinding, communicator: Communicator, traffic: Traffic) -> None:
        self.binding = binding
        self.communicator = communicator
        self.traffic = traffic

    @property
    def whole(self) -> BoundBatch | None:
        return self.binding.own.batches[0] if self.binding.own.whole and not self.binding.used else None

    def _start(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> tuple[Tensor, Pending]:
        received = rows.new_empty(sum(receive_counts), rows.shape[1])
        pending = self.communicator.all_to_all(received, rows, receive_counts, send_counts)
        self.traffic.sent_bytes += _size(rows)
        self.traffic.received_bytes += _size(received)
        self.traffic.hops += 1
        return received, pending

    def _start_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Pending]:
        binding = self.binding
        rows = torch.cat([binding.send.take(x) for x in (k, v)], dim=-1)
        return self._start(rows, binding.send_counts, binding.receive_counts)

    def forward(self, k: Tensor, v: Tensor) -> Iterator[ForwardStep]:
        binding = self.binding
        if not binding.used:
            yield ForwardStep(k, v, binding.own.batches)
            return
        received, pending = self._start_keys(k, v)
        yield ForwardStep(k, v, binding.own.batches)
        _wait(pending, self.traffic, "collective attention, forward pass, keys and values")
        keys, values = received[None, None].split([k.shape[-1], v.shape[-1]], dim=-1)
        yield ForwardStep(keys, values, binding.remote)

    def backward(self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> Iterator[BackwardStep]:
        binding = self.binding
        if not binding.used:
            yield BackwardStep(k, v, dk, dv, binding.own.batches)
            return
        received, pending = self._start_keys(k, v)
        yield BackwardStep(k, v, dk, dv, binding.own.batches)
        _wait(pending, self.traffic, "collective attention, backward pass, keys and values")
        widths = [k.shape[-1], v.shape[-1]]
        grads = torch.zeros_like(received, dtype=accumulation_dtype(k.dtype))
        keys, values = received[None, None].split(widths, dim=-1)
        dkeys, dvalues = grads[None, None].split(widths, dim=-1)
        yield BackwardStep(keys, values, dkeys, dvalues, binding.remote)
        home, pending = self._start(grads, binding.receive_counts, binding.send_counts)
        _wait(pending, self.traffic, "collective attention, backward pass, gradients")
        for target, part in zip((dk, dv), home.split(widths, dim=-1)):
            binding.send.add_(target, part)


class _Rows(NamedTuple):
    """Two tensors' rows in one message: those of the first, then those of the second."""

    message: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, int, int], widths: tuple[int, int], like: Tensor, dtype: torch.dtype) -> _Rows:
        message = like.new_empty(shape[0] * shape[1] * shape[2] * sum(widths), dtype=dtype)
        return cls.of(message, shape, widths)

    @classmethod
    def of(cls, message: Tensor, shape: tuple[int, int, int], widths: tuple[int, int]) -> _Rows:
        first, second = message.split([shape[0] * shape[1] * shape[2] * width for width in widths])
        return cls(message, first.view(*shape, widths[0]), second.view(*shape, widths[1]))


class RingTransport:
    """Rows travel from neighbour to neighbour, each as far as its last reader; gradients follow them, and come home.

    While the caller computes with one payload, the next is under way: two payloads are held, whatever the number of
    ranks. K and V travel in one message. In backward they travel again; the gradients of a payload's rows follow one
    computation behind, in the accumulation dtype, and the last rank to use a row sends its gradient to the row's owner.
    """

    def __init__(self, binding: RingBinding, communicator: Communicator, traffic: Traffic) -> None:
        self.binding = binding
        self.communicator = communicator
        self.traffic = traffic

    @property
    def whole(self) -> BoundBatch | None:
        return self.binding.whole

    def _start(self, sends: list[Message], receives: list[Message]) -> Pending | None:
        sends, receives = ([m for m in messages if m.tensor.numel()] for messages in (sends, receives))
        if not sends and not receives:
            return None
        pending = self.communicator.exchange(sends, receives)
        self.traffic.sent_bytes += sum(_size(message.tensor) for message in sends)
        self.traffic.received_bytes += sum(_size(message.tensor) for message in receives)
        self.traffic.hops += 1
        return pending

    def _travel(self, k: Tensor, v: Tensor, name: str) -> Iterator[tuple[RingStep, Tensor, Tensor]]:
        """Each step with its keys and values; those of the next are under way until the caller comes for it."""
        steps, widths = self.binding.steps, (k.shape[-1], v.shape[-1])
        own = _Rows(k.new_empty(0), k, v)
        held = own
        for i, step in enumerate(steps):
            coming, pending = None, None
            if i + 1 < len(steps) and steps[i + 1].number:
                following = steps[i + 1]
                coming = _Rows.empty(following.shape, widths, k, k.dtype)
                message = _pack(following.sent, own if following.number == 1 else held)
                pending = self._start(
                    [Message(following.following, message)], [Message(following.previous, coming.message)]
                )
                del message
            yield step, held.first, held.second
            if pending is not None:
                _wait(pending, self.traffic, self._where(name, steps[i + 1], "keys and values"))
            held = own if coming is None else coming

    def _where(self, name: str, step: RingStep, what: str) -> str:
        return f"ring attention, {name} pass, step {step.number} of {step.of}, {what}, on rank {self.communicator.rank}"

    def forward(self, k: Tensor, v: Tensor) -> Iterator[ForwardStep]:
        for step, keys, values in self._travel(k, v, "forward"):
            yield ForwardStep(keys, values, step.batches)
            del keys, values

    def backward(self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> Iterator[BackwardStep]:
        widths, dtype = (k.shape[-1], v.shape[-1]), accumulation_dtype(k.dtype)
        flight: _Flight | None = None
        for i, (step, keys, values) in enumerate(self._travel(k, v, "backward")):
            if not step.number:
                yield BackwardStep(keys, values, dk, dv, step.batches)
                del keys, values
                if flight is not None:
                    flight.land(dk, dv)
                    flight = None
                continue
            grads = _Rows.empty(step.shape, widths, k, dtype)
            grads.message.zero_()
            if step.batches:
                yield BackwardStep(keys, values, grads.first, grads.second, step.batches)
            del keys, values
            if flight is not None:
                onward = flight.land(dk, dv)
                if step.carried.count:
                    step.carried.add_(grads.first, onward.first.flatten(0, 2))
                    step.carried.add_(grads.second, onward.second.flatten(0, 2))
                del onward
            following = self.binding.steps[i + 1] if i + 1 < len(self.binding.steps) else None
            flight = self._send_gradients(step, following, grads, widths)
            del grads
        if flight is not None:
            flight.land(dk, dv)

    def _send_gradients(
        self, step: RingStep, following: RingStep | None, grads: _Rows, widths: tuple[int, int]
    ) -> _Flight | None:
        """Starts the gradients of a step's payload, onward and home, and those that come for the next step and home."""
        dtype, coming = grads.message.dtype, 0 if following is None else following.carried.count
        onward = _Rows.empty((1, 1, coming), widths, grads.message, dtype)
        home = _Rows.empty((1, 1, step.home.count), widths, grads.message, dtype)
        pending = self._start(
            [
                Message(step.following, _pack(step.goes_on, grads)),
                Message(step.source, _pack(step.finished, grads)),
            ],
            [Message(step.previous, onward.message), Message(step.last_user, home.message)],
        )
        where = self._where("backward", step, "gradients")
        return None if pending is None else _Flight(pending, self.traffic, where, onward, home, step.home)


class _Flight(NamedTuple):
    """Gradients under way."""

    pending: Pending
    traffic: Traffic
    where: str
    onward: _Rows
    home: _Rows
    own: Selection

    def land(self, dk: Tensor, dv: Tensor) -> _Rows:
        """Adds what came home to dk and dv, and returns what came for the next step."""
        _wait(self.pending, self.traffic, self.where)
        if self.own.count:
            self.own.add_(dk, self.home.first.flatten(0, 2))
            self.own.add_(dv, self.home.second.flatten(0, 2))
        return self.onward


def _pack(selection: Selection, rows: _Rows) -> Tensor:
    """These rows as one message; the message they came in, if it is all of them."""
    if not selection.count:
        return rows.message.new_empty(0)
    if selection.index is None and rows.message.numel():
        return rows.message
    return torch.cat([selection.take(rows.first).flatten(), selection.take(rows.second).flatten()])
