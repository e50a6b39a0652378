"""Ranks that are threads of one process and leave messages for each other in mailboxes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from torch import Tensor

from .communicators import Message, Wait


class _Gone(NamedTuple):
    """The last message of a rank: it sends no more."""

    reason: str


@dataclass(eq=False)
class SimulatedCommunicator:
    """One of several ranks in one process, each driven by a separate thread; a rank waits at most `timeout` seconds."""

    rank: int
    world_size: int
    boxes: list[SimpleQueue[tuple[int, Any]]]  # the mailboxes of all ranks, of (sender, content)
    timeout: float
    #: What came from each rank while this rank waited for others.
    early: dict[int, deque[Any]] = field(default_factory=lambda: defaultdict(deque))

    @classmethod
    def all_of(cls, world_size: int, timeout: float) -> list[SimulatedCommunicator]:
        """Makes the ranks of a new ring."""
        boxes: list[SimpleQueue[tuple[int, Any]]] = [SimpleQueue() for _ in range(world_size)]
        return [cls(rank, world_size, boxes, timeout) for rank in range(world_size)]

    def depart(self, reason: str) -> None:
        """Ends the waiting of other ranks for this rank, which sends no more."""
        for box in self.boxes:
            box.put((self.rank, _Gone(reason)))

    def _next(self, left: list[int]) -> tuple[int, Any]:
        """Waits for a message of one of the ranks in `left`, and returns it with its rank, which is taken from the list."""
        while (source := next(filter(self.early.get, left), None)) is None:
            try:
                sender, content = self.boxes[self.rank].get(timeout=self.timeout)
            except Empty:
                error = f"receiving from rank {left[0]} did not end: nothing came in {self.timeout} s"
                raise RuntimeError(error) from None
            self.early[sender].append(content)
        if isinstance(self.early[source][0], _Gone):
            raise RuntimeError(f"receiving from rank {source} did not end: {self.early[source][0].reason}")
        left.remove(source)
        return source, self.early[source].popleft()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Wait:
        for peer, tensor in sends:
            if len(tensor):  # An empty message would be taken in place of the next one from this rank.
                self.boxes[peer].put((self.rank, tensor.detach().clone()))

        def finish() -> None:
            tensors = {peer: tensor for peer, tensor in receives if len(tensor)}
            left = [*tensors]
            while left:
                peer, content = self._next(left)
                tensors[peer].copy_(content)  # at once: an error names the ranks that have not come

        return finish

    def all_to_all(self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]) -> Wait:
        sends, receives = sent.split(send_counts), received.split(receive_counts)
        return self.exchange([*map(Message, count(), sends)], [*map(Message, count(), receives)])

    def _from_all(self, x: Any) -> list[Any]:
        for box in self.boxes:
            box.put((self.rank, x))
        left = [*range(self.world_size)]
        came = dict(map(self._next, repeat(left, len(left))))
        return [came[peer] for peer in range(self.world_size)]

    def gather(self, x: Tensor) -> list[Tensor]:
        return [part.clone() for part in self._from_all(x.detach().clone())]

    def gather_objects(self, x: Any) -> list[Any]:
        return self._from_all(x)
