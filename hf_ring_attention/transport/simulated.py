"""Ranks that are threads of one process and leave messages for each other in mailboxes."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .communicators import Message, Wait


class _Gone(NamedTuple):
    """The last content of a mailbox: its sender sends no more."""

    reason: str


class _Room:
    """The mailboxes in which the ranks of one process leave messages for each other."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self.world_size, self.timeout = world_size, timeout
        ranks = range(world_size)
        self.boxes: dict[tuple[int, int], SimpleQueue[Any]] = {(a, b): SimpleQueue() for a in ranks for b in ranks}

    def leave(self, source: int, target: int, content: Any) -> None:
        self.boxes[source, target].put(content)

    def take(self, source: int, target: int) -> Any:
        error = f"receiving from rank {source} did not end"
        try:
            content = self.boxes[source, target].get(timeout=self.timeout)
        except Empty:
            raise RuntimeError(f"{error}: nothing came in {self.timeout} s") from None
        if isinstance(content, _Gone):
            self.leave(source, target, content)  # for the next look
            raise RuntimeError(f"{error}: {content.reason}")
        return content


class SimulatedCommunicator:
    """One of several ranks in one process, each driven by a thread of its own."""

    def __init__(self, room: _Room, rank: int) -> None:
        self.room = room
        self.rank = rank
        self.world_size = room.world_size

    @classmethod
    def all_of(cls, world_size: int, timeout: float) -> list[SimulatedCommunicator]:
        """Makes the ranks of a new ring; a rank waits at most `timeout` seconds for another."""
        room = _Room(world_size, timeout)
        return [cls(room, rank) for rank in range(world_size)]

    def depart(self, reason: str) -> None:
        """Ends the waiting of other ranks for this rank, which sends no more."""
        for peer in range(self.world_size):
            self.room.leave(self.rank, peer, _Gone(reason))

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Wait:
        for peer, tensor in sends:
            self.room.leave(self.rank, peer, tensor.detach().clone())

        def finish() -> None:
            for peer, tensor in receives:
                tensor.copy_(self.room.take(peer, self.rank))

        return finish

    def all_to_all(self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]) -> Wait:
        # An empty message would be taken in place of the next one from this rank.
        return self.exchange(
            [Message(peer, part) for peer, part in enumerate(sent.split(send_counts)) if len(part)],
            [Message(peer, part) for peer, part in enumerate(received.split(receive_counts)) if len(part)],
        )

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        peers = range(self.world_size)
        self.exchange([Message(peer, x) for peer in peers], [Message(peer, parts[peer]) for peer in peers])()
        return parts

    def gather_objects(self, x: Any) -> list[Any]:
        for peer in range(self.world_size):
            self.room.leave(self.rank, peer, x)
        return [self.room.take(peer, self.rank) for peer in range(self.world_size)]
