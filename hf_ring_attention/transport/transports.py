"""The interface of transports, which bring key and value rows to the ranks that need them, and their gradients home.

A transport yields steps. Messages travel while the caller computes.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from ..compute.kernel import Work
from .communicators import Communicator, Message, Wait
from .waits import named, naming_errors

_NBYTES = operator.attrgetter("nbytes")


@dataclass
class Traffic:
    """The bytes that this rank moved: key and value rows, their gradients, and gathered states, rows or results.

    Attributes:
        sent_bytes, received_bytes: bytes that were handed to torch.distributed, and received from it.
        hops: the number of exchanges with other ranks.
        planned_seconds: seconds that calls of this rank waited for new plans: for new documents, lengths or patterns.
        waited_seconds: seconds that this rank waited for exchanges. On CUDA the device waits, which is not counted.

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
        self.__dict__.update(vars(Traffic()))


#: The gradients of a step's keys and values, in the accumulation dtype; None in forward.
StepGradients = tuple[Tensor, Tensor] | None


class Step(NamedTuple):
    """Keys and values, of this rank or rows of a payload, their work, and in backward the tensors for their gradients."""

    keys: Tensor
    values: Tensor
    work: Work
    gradients: StepGradients = None


class Transport(Protocol):
    """The movement of the rows of one call, by its binding."""

    #: The rank's work if the call needs no message on any rank; else None, and `steps` yield it.
    alone: Work | None

    @property
    def works(self) -> Sequence[Work]:
        """The work of each step."""

    def steps(self, k: Tensor, v: Tensor, gradients: StepGradients = None) -> Iterator[Step]:
        """Yields the steps of a pass; k and v are this rank's [B, Hkv, n, ...], contiguous.

        In backward, it adds to `gradients`, this rank's contiguous dk and dv.
        """


class Link:
    """The exchanges of one call. It counts their bytes; their errors name the call, the step and this rank.

    Peers are numbered among `members`, some ranks, ascending; None for all ranks. Every rank is in exactly one
    such group, and all groups make the same exchanges at the same time.
    """

    def __init__(
        self, communicator: Communicator, traffic: Traffic, call: str, members: Sequence[int] | None = None
    ) -> None:
        self.communicator, self.traffic, self.call = communicator, traffic, call
        self.members = range(communicator.world_size) if members is None else members

    def exchange(self, step: str, sends: list[Message], receives: list[Message]) -> Wait:
        """Starts all messages that are not empty."""
        to, come = ([Message(self.members[peer], x) for peer, x in some if x.numel()] for some in (sends, receives))
        sent, received = ([x for _, x in messages] for messages in (to, come))
        peers = {message.peer for message in (come or to)}
        return self._start(step, partial(self.communicator.exchange, to, come), sent, received, peers)

    def all_to_all(
        self, step: str, rows: Tensor, send_counts: list[int], receive_counts: list[int]
    ) -> tuple[Tensor, Wait]:
        """Starts to send rows to each member, in their order; returns the rows that will arrive, in that order."""
        received = rows.new_empty(sum(receive_counts), *rows.shape[1:])
        counts, world_size = (receive_counts, send_counts), self.communicator.world_size
        if len(self.members) < world_size:
            receive, send = dict(zip(self.members, receive_counts)), dict(zip(self.members, send_counts))
            ranks = range(world_size)
            counts = [receive.get(rank, 0) for rank in ranks], [send.get(rank, 0) for rank in ranks]
        peers = {*self.members} - {self.communicator.rank}
        return received, self._start(
            step, partial(self.communicator.all_to_all, received, rows, *counts), [rows], [received], peers
        )

    def _start(
        self, step: str, start: Callable[[], Wait], sent: list[Tensor], received: list[Tensor], peers: Iterable[int]
    ) -> Wait:
        if not sent and not received:
            return lambda: None
        where = f"{self.call}, {step}, on rank {self.communicator.rank}"
        whom = partial(named, "rank", sorted(peers), "one of ")
        with naming_errors(where, whom):
            wait = start()
        self.traffic.sent_bytes += sum(map(_NBYTES, sent))
        self.traffic.received_bytes += sum(map(_NBYTES, received))
        self.traffic.hops += 1
        return partial(self._arrive, where, whom, wait, sent)

    def _arrive(self, where: str, whom: Callable[[], str], wait: Wait, sent: list[Tensor]) -> None:
        """Waits until all messages are here, and counts the time; the tensors that were sent stay until then."""
        start = time.perf_counter()
        with naming_errors(where, whom):
            wait()
        sent.clear()
        self.traffic.waited_seconds += time.perf_counter() - start


class LocalTransport(NamedTuple):
    """The transport of a rank that needs no other: nothing moves."""

    alone: Work
