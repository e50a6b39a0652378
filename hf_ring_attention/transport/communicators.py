"""The messages between ranks of a ring, over a torch.distributed process group or inside one process.

Transports and `Ring` send rows by these few operations, and by nothing else of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..compute.private import as_bytes, from_bytes
from .companions import companion_of


class Message(NamedTuple):
    """A contiguous tensor that is sent to a peer, or filled by one."""

    peer: int
    tensor: Tensor


class Pending(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Waits until all are there; it is called once.

        Raises:
            RuntimeError: a peer is gone, or too late; the message names it and the messages that were awaited.
        """


class Exchanger(Protocol):
    """The connection of this rank to `world_size` ranks, by their numbers among these, for rows."""

    rank: int
    world_size: int

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Starts all messages, at most one for each peer and direction. All ranks start theirs in the same order."""

    def all_to_all(self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]) -> Pending:
        """Starts to send rows of `sent` to each rank, in the order of ranks, and to fill `received` likewise."""


class Communicator(Exchanger, Protocol):
    """The connection of this rank to the ranks of its ring, by their numbers there."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Returns x of all ranks; the shapes are equal."""

    def gather_objects(self, x: Any) -> list[Any]:
        """Returns x of all ranks; it can be anything that pickle takes."""


class PartOfRanks:
    """Some ranks of a communicator, by their place among `members`; other parts send at the same time as this one.

    Every rank of the communicator is in one part, and all of them make the same calls, each in its own part.
    """

    def __init__(self, whole: Exchanger, members: Sequence[int]) -> None:
        self.whole = whole
        self.members = list(members)
        self.rank = self.members.index(whole.rank)
        self.world_size = len(self.members)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """As `Communicator.exchange`."""
        return self.whole.exchange(
            [Message(self.members[peer], tensor) for peer, tensor in sends],
            [Message(self.members[peer], tensor) for peer, tensor in receives],
        )

    def all_to_all(self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]) -> Pending:
        """As `Communicator.all_to_all`, of neighbours in ascending order: ranks between them would be between the rows."""
        counts = [[0] * self.whole.world_size for _ in range(2)]
        for whole, part in zip(counts, (receive_counts, send_counts)):
            for member, count in zip(self.members, part):
                whole[member] = count
        return self.whole.all_to_all(received, sent, *counts)


class _Works:
    """Works of torch.distributed, each with its name for an error, and each waited for once."""

    def __init__(self, works: list[tuple[dist.Work, str]]) -> None:
        self.works = works

    def wait(self) -> None:
        works, self.works = self.works, []
        for work, name in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"{name} did not end: {error}") from error


class ProcessGroupCommunicator:
    """The ranks of a process group; what is on the CPU travels by gloo where the group's backend serves other devices alone."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    @cached_property
    def _companion(self) -> Any:
        return companion_of(self.group)

    def _beside(self, tensors: Sequence[Tensor]) -> Any:
        """Returns the companion of the group for tensors that are on the CPU, where the group takes none; else None.

        All ranks ask for it first in an agreement. A ring that only some of them make waits for nobody.
        """
        return self._companion if all(x.is_cpu for x in tensors) else None

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        names = [f"sending to rank {peer}" for peer, _ in sends]
        names += [f"receiving from rank {peer}" for peer, _ in receives]
        try:
            beside = self._beside([x for _, x in (*sends, *receives)])
            if beside is None:
                operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for peer, x in sends]
                operations += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for peer, x in receives]
                works = dist.batch_isend_irecv(operations)
            else:
                works = [beside.send([x], peer, 0) for peer, x in sends]
                works += [beside.recv([x], peer, 0) for peer, x in receives]
        except RuntimeError as error:
            raise RuntimeError(f"{' and '.join(names)} did not begin: {error}") from error
        if len(works) != len(names):  # NCCL returns one work for all of them.
            names = [" and ".join(names)] * len(works)
        return _Works(list(zip(works, names)))

    def all_to_all(self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]) -> Pending:
        name = f"the exchange with ranks {[r for r in range(self.world_size) if receive_counts[r] or send_counts[r]]}"
        try:
            beside, counts = self._beside([sent]), (receive_counts, send_counts)
            if beside is None:
                work = dist.all_to_all_single(received, sent, *counts, group=self.group, async_op=True)
            else:
                work = beside.alltoall_base(received, sent, *counts)
        except RuntimeError as error:
            raise RuntimeError(f"{name} did not begin: {error}") from error
        return _Works([(work, name)])

    def gather(self, x: Tensor) -> list[Tensor]:
        parts, beside = [torch.empty_like(x) for _ in range(self.world_size)], self._beside([x])
        if beside is None:
            dist.all_gather(parts, x, group=self.group)
        else:
            beside.allgather([parts], [x]).wait()
        return parts

    def gather_objects(self, x: Any) -> list[Any]:
        own = as_bytes(x, self.group)
        sizes = [int(size) for size in self.gather(torch.tensor([len(own)]))]
        padded = own.new_zeros(max(sizes))
        padded[: len(own)] = own
        return [from_bytes(of_rank, size, self.group) for of_rank, size in zip(self.gather(padded), sizes)]
