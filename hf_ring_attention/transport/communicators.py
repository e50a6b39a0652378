"""The messages between ranks of a ring, over a torch.distributed process group or inside one process."""

from __future__ import annotations

import atexit
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..compute.private import as_bytes, default_store, from_bytes, timeout_of
from .waits import naming_errors

#: Gloo's connections of groups that need one (`companion_of`), as long as the groups live: all rings over a group share it.
_COMPANIONS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroupGloo] = WeakKeyDictionary()


class Message(NamedTuple):
    """A contiguous tensor that is sent to a peer, or filled by one."""

    peer: int
    tensor: Tensor


#: Waits for messages under way; it is called once, and its RuntimeError names a peer that is gone or too late.
Wait = Callable[[], None]


class Communicator(Protocol):
    """The connection of this rank to the `world_size` ranks of its ring, numbered from 0."""

    rank: int
    world_size: int

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Wait:
        """Starts all messages, at most one for each peer and direction. All ranks start theirs in the same order."""

    def all_to_all(self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]) -> Wait:
        """Starts to send rows of `sent` to each rank, in the order of ranks, and to fill `received` likewise."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Returns x of all ranks; the shapes are equal."""

    def gather_objects(self, x: Any) -> list[Any]:
        """Returns the picklable x of all ranks."""


def companion_of(group: dist.ProcessGroup) -> Any:
    """Returns gloo's connection of the ranks of a group that takes no CPU tensors, as "nccl"; None for a group that does.

    All ranks of the group make it together, and no other rank. `dist.new_group` cannot: without the other ranks of the world
    it names a group by a count that may differ between ranks. The name of `group` is the same on all.
    """
    if "cpu" in (served.partition(":")[0] for served in dist.get_backend_config(group).split(",")):
        return None
    if group not in _COMPANIONS:
        store = dist.PrefixStore(f"hf_ring_attention/{group.group_name}", default_store())
        # The group's own timeout: who waits longer for a device may wait as long for the comparison before.
        _COMPANIONS[group] = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout_of(group))
    return _COMPANIONS[group]


def _wait(works: list[tuple[dist.Work, str]]) -> None:
    """Waits for each work of torch.distributed, and drops it; each has its name for an error."""
    while works:
        work, name = works.pop(0)
        with naming_errors(f"{name} did not end"):
            work.wait()


@atexit.register
def _wait_for_workers() -> None:
    """Waits, as a process ends, until gloo's threads have dropped the tensors that they sent, for a second at most.

    torch aborts the process if such a thread drops a tensor of Python while Python ends ("terminate called without an active
    exception"). `dist.destroy_process_group()` before the end would do the same, where no ring holds the group.
    """
    looks, end = 0, time.monotonic() + 1  # A thread may also wait for Python itself, which sleep lets go.
    while looks < 3 and time.monotonic() < end:
        time.sleep(0.002)
        looks = 0 if any(map(_is_busy_worker, Path("/proc/self/task").glob("*/stat"))) else looks + 1


def _is_busy_worker(stat: Path) -> bool:
    try:
        return bool(re.search(r"\(pt_gloo_runloop\) [^S]", stat.read_text()))
    except OSError:  # It has ended.
        return False


class ProcessGroupCommunicator:
    """The ranks of a process group. CPU tensors travel by gloo if the group's backend serves other devices only."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def _beside(self, tensors: Sequence[Tensor]) -> Any:
        """Returns the companion if the group needs it for these tensors; an agreement of all ranks needs it first."""
        return companion_of(self.group) if all(x.is_cpu for x in tensors) else None

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Wait:
        names = [f"sending to rank {peer}" for peer, _ in sends]
        names += [f"receiving from rank {peer}" for peer, _ in receives]
        with naming_errors(f"{' and '.join(names)} did not begin"):
            beside = self._beside([x for _, x in (*sends, *receives)])
            if beside is None:
                operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for peer, x in sends]
                operations += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for peer, x in receives]
                works = dist.batch_isend_irecv(operations)
            else:
                works = [beside.send([x], peer, 0) for peer, x in sends]
                works += [beside.recv([x], peer, 0) for peer, x in receives]
        if len(works) != len(names):  # NCCL returns one work for all of them.
            names = [" and ".join(names)] * len(works)
        return partial(_wait, list(zip(works, names)))

    def all_to_all(self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]) -> Wait:
        name = f"the exchange with ranks {[r for r in range(self.world_size) if receive_counts[r] or send_counts[r]]}"
        with naming_errors(f"{name} did not begin"):
            beside, counts = self._beside([sent]), (receive_counts, send_counts)
            if beside is None:
                work = dist.all_to_all_single(received, sent, *counts, group=self.group, async_op=True)
            else:
                work = beside.alltoall_base(received, sent, *counts)
        return partial(_wait, [(work, name)])

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        with naming_errors("the exchange with all ranks did not end"):
            beside = self._beside([x])
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
