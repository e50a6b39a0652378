"""Ranks that are threads of one process and leave messages for each other in mailboxes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .communicators import Message, Pending


class _Room:
    """The mailboxes in which the ranks of one process leave messages for each other."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self.world_size = world_size
        self.timeout = timeout
        #: Notifies each rank of its messages; no other rank waits for it.
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

    def depart(self, rank: int, reason: str) -> None:
        self.gone[rank] = reason
        for news in self.news:
            with news:
                news.notify()


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
        self.room.depart(self.rank, reason)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        for peer, tensor in sends:
            self.room.leave(self.rank, peer, tensor.detach().clone())

        def finish() -> None:
            for peer, tensor in receives:
                tensor.copy_(self.room.take(peer, self.rank))

        return Pending(finish)

    def all_to_all(self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]) -> Pending:
        # An empty message would be taken in place of the next one from this rank.
        return self.exchange(
            [Message(peer, part) for peer, part in enumerate(sent.split(send_counts)) if len(part)],
            [Message(peer, part) for peer, part in enumerate(received.split(receive_counts)) if len(part)],
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
