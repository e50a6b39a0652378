"""How key and value rows reach the ranks that need them, and how their gradients come home.

A transport yields steps. In forward, each step is (keys, values, tile batches to compute with them); in backward, also
the tensors that take the step's dk and dv. What a transport has in flight travels while the caller computes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .blocks import accumulation_dtype

if TYPE_CHECKING:
    from .bindings import Binding, BoundBatch


@dataclass
class Traffic:
    """What this rank's transports moved: key and value rows in forward and backward, and their gradients.

    Bytes as handed to and received from torch.distributed, messages in exchanges with other ranks, seconds in which
    this rank had nothing to compute and waited for them.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    exchanges: int = 0
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
    """Moves rows as the binding of a plan says."""

    name: str

    def forward(self, binding: Binding, k: Tensor, v: Tensor) -> Iterator[ForwardStep]: ...

    def backward(self, binding: Binding, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> Iterator[BackwardStep]:
        """dk, dv: this rank's gradients, in the accumulation dtype; complete when the iterator ends."""


class Local:
    """One rank: nothing moves."""

    name = "local"

    def forward(self, binding: Binding, k: Tensor, v: Tensor) -> Iterator[ForwardStep]:
        yield ForwardStep(k, v, binding.own)

    def backward(self, binding: Binding, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> Iterator[BackwardStep]:
        yield BackwardStep(k, v, dk, dv, binding.own)


class Collective:
    """The rows each rank needs of each other one, in one all-to-all; their gradients home in the reverse one.

    Memory and bytes are those of the rows needed. K and V travel side by side in one message, gradients in the
    accumulation dtype.
    """

    name = "collective"

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self.group = group
        self.traffic = traffic

    def _start(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> tuple[Tensor, dist.Work]:
        received = rows.new_empty(sum(receive_counts), rows.shape[1])
        work = dist.all_to_all_single(received, rows, receive_counts, send_counts, group=self.group, async_op=True)
        self.traffic.sent_bytes += rows.numel() * rows.element_size()
        self.traffic.received_bytes += received.numel() * received.element_size()
        self.traffic.exchanges += 1
        return received, work

    def _wait(self, work: dist.Work) -> None:
        start = time.perf_counter()
        work.wait()
        self.traffic.waited_seconds += time.perf_counter() - start

    def _start_keys(self, binding: Binding, k: Tensor, v: Tensor) -> tuple[Tensor, dist.Work]:
        exchange = binding.exchange
        rows = torch.cat([x.flatten(0, 2).index_select(0, exchange.send_rows) for x in (k, v)], dim=-1)
        return self._start(rows, exchange.send_counts, exchange.receive_counts)

    def forward(self, binding: Binding, k: Tensor, v: Tensor) -> Iterator[ForwardStep]:
        if not binding.exchange.used:
            yield ForwardStep(k, v, binding.own)
            return
        received, work = self._start_keys(binding, k, v)
        yield ForwardStep(k, v, binding.own)
        self._wait(work)
        keys, values = received[None, None].split([k.shape[-1], v.shape[-1]], dim=-1)
        yield ForwardStep(keys, values, binding.remote)

    def backward(self, binding: Binding, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> Iterator[BackwardStep]:
        exchange = binding.exchange
        if not exchange.used:
            yield BackwardStep(k, v, dk, dv, binding.own)
            return
        received, work = self._start_keys(binding, k, v)
        yield BackwardStep(k, v, dk, dv, binding.own)
        self._wait(work)
        widths = [k.shape[-1], v.shape[-1]]
        grads = torch.zeros_like(received, dtype=accumulation_dtype(k.dtype))
        keys, values = received[None, None].split(widths, dim=-1)
        dkeys, dvalues = grads[None, None].split(widths, dim=-1)
        yield BackwardStep(keys, values, dkeys, dvalues, binding.remote)
        home, work = self._start(grads, exchange.receive_counts, exchange.send_counts)
        self._wait(work)
        for target, part in zip((dk, dv), home.split(widths, dim=-1)):
            target.flatten(0, 2).index_add_(0, exchange.send_rows, part)
