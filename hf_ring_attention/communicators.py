"""The ranks of a ring as they reach each other: over a torch.distributed process group, or inside one process.

Transports and `Ring` use these few operations and nothing else of torch.distributed.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Message(NamedTuple):
    """A contiguous tensor for a rank, or to be filled by one."""

    peer: int
    tensor: Tensor


class Pending(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Until all are there; called once.

        Raises:
            RuntimeError: a peer is gone, or too late; names it and what was awaited of it.
        """


class Communicator(Protocol):
    """This rank among `world_size` ranks, by their numbers in the ring."""

    rank: int
    world_size: int

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Starts all of them; at most one a peer and direction. All ranks start theirs in the same order."""

    def all_to_all(self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]) -> Pending:
        """Starts to send rows of `sent` to each rank, in the order of ranks, and to fill `received` likewise."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """x of all ranks, of equal shapes."""

    def gather_objects(self, x: Any) -> list[Any]:
        """x of all ranks, anything that can be pickled."""

    def sum_(self, x: Tensor) -> None:
        """Makes x the sum of all ranks' x."""


def digest(x: Any) -> str:
    """What ranks compare instead of a tensor: its shape and a checksum of its content; of other things, of their text."""
    if not isinstance(x, Tensor):
        return hashlib.sha256(repr(x).encode()).hexdigest()[:12]
    content = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{list(x.shape)} {hashlib.sha256(content.tobytes()).hexdigest()[:12]}"


def agree(
    communicator: Communicator | None,
    who: str,
    values: Mapping[str, Any],
    error: BaseException | None,
    tell: Any = None,
) -> list[Any]:
    """Checks that all ranks came with equal values and without an error; one small exchange.

    Args:
        communicator: None for a process alone.
        who: what an error calls a rank.
        values: what must be equal, by the name an error gives it.
        error: what this rank came with, raised on all.
        tell: something for the other ranks, which may differ.

    Returns:
        What each rank tells.

    Raises:
        ValueError: on every rank, if a rank came with an error or the ranks differ; says which rank has which value.
    """
    if communicator is None or communicator.world_size == 1:
        if error is not None:
            raise error
        return [tell]
    message = None if error is None else (type(error).__name__, str(error))
    said = communicator.gather_objects((dict(values), message, tell))
    if error is not None:
        raise error
    refusals = {rank: message for rank, (_, message, _) in enumerate(said) if message is not None}
    together = "of the ring" if who == "rank" else f"of {communicator.world_size}"
    if refusals:
        rank, (kind, text) = min(refusals.items())
        raise (NotImplementedError if kind == "NotImplementedError" else ValueError)(
            f"{who} {rank} {together} refused the call: {text}"
        )
    for name in values:
        by_rank = [theirs.get(name) for theirs, _, _ in said]
        if any(value != by_rank[0] for value in by_rank):
            listed = ", ".join(f"{who} {rank}: {value}" for rank, value in enumerate(by_rank))
            whom = "ranks of the ring" if who == "rank" else "processes"
            raise ValueError(f"the {whom} disagree on {name}: {listed}; all must pass the same")
    return [told for _, _, told in said]


class _Works:
    """Works of torch.distributed, each waited for once, with what to say of it if it fails."""

    def __init__(self, works: list[tuple[dist.Work, str]]) -> None:
        self.works = works

    def wait(self) -> None:
        works, self.works = self.works, []
        for work, what in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"{what} did not end: {error}") from error


class ProcessGroupCommunicator:
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        operations, said = [], []
        for name, function, messages in (
            ("sending to", dist.isend, sends),
            ("receiving from", dist.irecv, receives),
        ):
            for peer, tensor in messages:
                operations.append(dist.P2POp(function, tensor, group=self.group, group_peer=peer))
                said.append(f"{name} rank {peer}")
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise RuntimeError(f"{' and '.join(said)} did not begin: {error}") from error
        if len(works) != len(operations):  # NCCL: one work for all of them
            said = [" and ".join(said)] * len(works)
        return _Works(list(zip(works, said)))

    def all_to_all(self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]) -> Pending:
        work = dist.all_to_all_single(received, sent, receive_counts, send_counts, group=self.group, async_op=True)
        peers = [rank for rank in range(self.world_size) if receive_counts[rank] or send_counts[rank]]
        return _Works([(work, f"the exchange with ranks {peers}")])

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x, group=self.group)
        return parts

    def gather_objects(self, x: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, x, group=self.group)
        return gathered

    def sum_(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.group)


class _Room:
    """Where the ranks of one process leave messages for each other."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self.world_size = world_size
        self.timeout = timeout
        #: One for each rank, which alone waits for it.
        self.news = [threading.Condition() for _ in range(world_size)]
        self.boxes: dict[tuple[int, int], deque[Any]] = {
            (source, target): deque() for source in range(world_size) for target in range(world_size)
        }
        self.gone: dict[int, str] = {}

    def leave(self, source: int, target: int, content: Any) -> None:
        with self.news[target]:
            self.boxes[source, target].append(content)
            self.news[target].notify()

    def take(self, source: int, target: int) -> Any:
        deadline = time.monotonic() + self.timeout
        box, news = self.boxes[source, target], self.news[target]
        with news:
            while not box:
                if source in self.gone:
                    raise RuntimeError(f"receiving from rank {source} did not end: {self.gone[source]}")
                left = deadline - time.monotonic()
                if left <= 0 or not news.wait(left):
                    raise RuntimeError(f"receiving from rank {source} did not end: nothing came in {self.timeout} s")
            return box.popleft()

    def depart(self, rank: int, why: str) -> None:
        self.gone[rank] = why
        for news in self.news:
            with news:
                news.notify()


class _Receiving:
    def __init__(self, finish: Callable[[], None]) -> None:
        self.wait = finish


class SimulatedCommunicator:
    """One of several ranks in one process, each driven by a thread of its own."""

    def __init__(self, room: _Room, rank: int) -> None:
        self.room = room
        self.rank = rank
        self.world_size = room.world_size

    @classmethod
    def all_of(cls, world_size: int, timeout: float) -> list[SimulatedCommunicator]:
        """The ranks of a new ring; a rank waits `timeout` seconds for another at most."""
        room = _Room(world_size, timeout)
        return [cls(room, rank) for rank in range(world_size)]

    def depart(self, why: str) -> None:
        """Ends the waiting of other ranks for this one, which sends no more."""
        self.room.depart(self.rank, why)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        for peer, tensor in sends:
            self.room.leave(self.rank, peer, tensor.detach().clone())

        def finish() -> None:
            for peer, tensor in receives:
                tensor.copy_(self.room.take(peer, self.rank))

        return _Receiving(finish)

    def all_to_all(self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]) -> Pending:
        return self.exchange(
            [Message(peer, part) for peer, part in enumerate(sent.split(send_counts))],
            [Message(peer, part) for peer, part in enumerate(received.split(receive_counts))],
        )

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        peers = range(self.world_size)
        self.exchange([Message(peer, x) for peer in peers], [Message(peer, parts[peer]) for peer in peers]).wait()
        return parts

    def gather_objects(self, x: Any) -> list[Any]:
        for peer in range(self.world_size):
            self.room.leave(self.rank, peer, x)
        return [self.room.take(peer, self.rank) for peer in range(self.world_size)]

    def sum_(self, x: Tensor) -> None:
        x.copy_(torch.stack(self.gather(x)).sum(0))
