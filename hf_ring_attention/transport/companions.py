"""Gloo beside process groups whose backend serves no CPU, such as "nccl": for what ranks compare without a device."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..compute.private import default_store, timeout_of

#: The connections of the groups that need one, as long as these live: all rings over a group share it.
_COMPANIONS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroupGloo] = WeakKeyDictionary()


def companion_of(group: dist.ProcessGroup) -> Any:
    """Returns gloo's connection of the ranks of a group that takes no tensors on the CPU; None for a group that does.

    It counts ranks as the group does, and has the methods send, recv, allgather and alltoall_base of a process group.
    All ranks of the group must call this when they first do, and only they. `dist.new_group` would not do: without the other
    ranks of the world it names a group by how many each rank has, which need not be equal. The name of `group` is.

    Raises:
        RuntimeError: a rank of the group does not come in time.
    """
    if "cpu" in (served.partition(":")[0] for served in dist.get_backend_config(group).split(",")):
        return None
    companion = _COMPANIONS.get(group)
    if companion is None:
        store = dist.PrefixStore(f"hf_ring_attention/{group.group_name}", default_store())
        # The group's own timeout: who waits longer for a device may wait as long for what comes before.
        companion = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout_of(group))
        _COMPANIONS[group] = companion
    return companion
