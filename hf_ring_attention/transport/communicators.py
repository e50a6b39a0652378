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
from .companions import cpu_group_of


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
    def _of_cpu(self) -> Any:
        """What reaches the ranks with tensors on the CPU; first asked for when all of them come to an agreement."""
        return cpu_group_of(self.group)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        names = [f"sending to rank {peer}" for peer, _ in sends] + [
            f"receiving from rank {peer}" for peer, _ in receives
        ]
        try:
            if all(tensor.is_cpu for _, tensor in (*sends, *receives)):
                works = [self._of_cpu.send([tensor], peer, 0) for peer, tensor in sends]
                works += [self._of_cpu.recv([tensor], peer, 0) for peer, tensor in receives]
            else:
                works = dist.batch_isend_irecv(
                    [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer) for peer, tensor in sends]
                    + [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer) for peer, tensor in receives]
                )
        except RuntimeError as error:
            raise RuntimeError(f"{' and '.join(names)} did not begin: {error}") from error
        if len(works) != len(names):  # NCCL returns one work for all of them.
            names = [" and ".join(names)] * len(works)
        return _Works(list(zip(works, names)))

    def all_to_all(self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]) -> Pending:
        name = f"the exchange with ranks {[r for r in range(self.world_size) if receive_counts[r] or send_counts[r]]}"
        try:
            if sent.is_cpu:
                work = self._of_cpu.alltoall_base(received, sent, receive_counts, send_counts)
            else:
                work = dist.all_to_all_single(
                    received, sent, receive_counts, send_counts, group=self.group, async_op=True
                )
        except RuntimeError as error:
            raise RuntimeError(f"{name} did not begin: {error}") from error
        return _Works([(work, name)])

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        if x.is_cpu:
            self._of_cpu.allgather([parts], [x]).wait()
        else:
            dist.all_gather(parts, x, group=self.group)
        return parts

    def gather_objects(self, x: Any) -> list[Any]:
        own = as_bytes(x, self.group)
        sizes = [int(size) for size in self.gather(torch.tensor([len(own)]))]
        padded = own.new_zeros(max(sizes))
        padded[: len(own)] = own
        return [from_bytes(of_rank, size, self.group) for of_rank, size in zip(self.gather(padded), sizes)]
