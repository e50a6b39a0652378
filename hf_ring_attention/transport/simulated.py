"""Ranks that are threads of one process and leave messages for each other in mailboxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from torch import Tensor

from .communicators import Message, Wait


class _Gone(NamedTuple):
    """The last content of a mailbox: its sender sends no more."""

    reason: str


@dataclass(eq=False)
class SimulatedCommunicator:
    """One of several ranks in one process, each driven by a thread of its own; a rank waits at most `timeout` seconds."""

    rank: int
    world_size: int
    boxes: dict[tuple[int, int], SimpleQueue[Any]]  # by (sender, receiver), the mailboxes that all ranks share
    timeout: float

    @classmethod
    def all_of(cls, world_size: int, timeout: float) -> list[SimulatedCommunicator]:
        """Makes the ranks of a new ring."""
        ranks = range(world_size)
        boxes: dict[tuple[int, int], SimpleQueue[Any]] = {pair: SimpleQueue() for pair in product(ranks, ranks)}
        return [cls(rank, world_size, boxes, timeout) for rank in ranks]

    def depart(self, reason: str) -> None:
        """Ends the waiting of other ranks for this rank, which sends no more."""
        for peer in range(self.world_size):
            self.boxes[self.rank, peer].put(_Gone(reason))

    def _take(self, source: int) -> Any:
        error, box = f"receiving from rank {source} did not end", self.boxes[source, self.rank]
        try:
            content = box.get(timeout=self.timeout)
        except Empty:
            raise RuntimeError(f"{error}: nothing came in {self.timeout} s") from None
        if isinstance(content, _Gone):
            box.put(content)  # for the next look
            raise RuntimeError(f"{error}: {content.reason}")
        return content

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Wait:
        for peer, tensor in sends:
            self.boxes[self.rank, peer].put(tensor.detach().clone())

        def finish() -> None:
            for peer, tensor in receives:
                tensor.copy_(self._take(peer))

        return finish

    def all_to_all(self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]) -> Wait:
        # An empty message would be taken in place of the next one from this rank.
        return self.exchange(
            [Message(peer, part) for peer, part in enumerate(sent.split(send_counts)) if len(part)],
            [Message(peer, part) for peer, part in enumerate(received.split(receive_counts)) if len(part)],
        )

    def _from_all(self, x: Any) -> list[Any]:
        for peer in range(self.world_size):
            self.boxes[self.rank, peer].put(x)
        return [self._take(peer) for peer in range(self.world_size)]

    def gather(self, x: Tensor) -> list[Tensor]:
        return [part.clone() for part in self._from_all(x.detach().clone())]

    def gather_objects(self, x: Any) -> list[Any]:
        return self._from_all(x)
