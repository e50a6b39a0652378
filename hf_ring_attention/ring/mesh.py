"""Rings among all processes of an Accelerator: the mesh ("dp", "ring"), and the reasons to refuse one."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..transport.agreement import agree
from ..transport.communicators import ProcessGroupCommunicator


class Mesh(NamedTuple):
    """The place of this process on the mesh.

    Attributes:
        group: the process group of its ring; None for a process alone.
        everyone: the communicator of all processes that train together; None for a process alone.
        dp_rank, dp_size: the number of its ring, and the number of rings.
    """

    group: dist.ProcessGroup | None
    everyone: ProcessGroupCommunicator | None
    dp_rank: int
    dp_size: int


def mesh_of(accelerator: Any, size: int | None) -> Mesh:
    """Makes a mesh of rings of `size` ranks, which are neighbours in the world, and returns this process's place on it.

    Raises:
        ValueError: on every process, for the reasons that `Ring.from_accelerator` lists.
    """
    world_size = accelerator.num_processes
    if world_size == 1:
        check_alone(
            "Ring.from_accelerator",
            "on a CPU set ACCELERATE_USE_CPU=true in the environment of the launcher, and start it with accelerate launch "
            "--multi_gpu --num_processes N, or torchrun --nproc-per-node N",
        )
    everyone = None
    if dist.is_available() and dist.is_initialized() and dist.group.WORLD is not None:
        everyone = ProcessGroupCommunicator(dist.group.WORLD)
    agree(everyone, "process", {"the size of rings": size}, wrong_accelerator(accelerator, size))
    assert size is not None  # None was refused
    if everyone is None:
        return Mesh(None, None, 0, 1)
    mesh = init_device_mesh(accelerator.device.type, (world_size // size, size), mesh_dim_names=("dp", "ring"))
    return Mesh(
        group=mesh.get_group("ring"), everyone=everyone, dp_rank=mesh.get_local_rank("dp"), dp_size=world_size // size
    )


def check_alone(who: str, remedy: str) -> None:
    """Refuses a ring of one where a launcher has started several processes: each would read everything by itself.

    Raises:
        ValueError: the environment's WORLD_SIZE is above 1.
    """
    started = os.environ.get("WORLD_SIZE", "1")
    if started.isdigit() and int(started) > 1:
        raise ValueError(
            f"{who}: WORLD_SIZE={started} in the environment says that {started} processes were started, and here each is by "
            f"itself, so it would be rank 0 of a ring of 1 and read everything: {remedy}; a ring of this process alone is "
            f"Ring.alone()"
        )


def wrong_accelerator(accelerator: Any, size: int | None) -> ValueError | None:
    """Returns the error of an accelerator that cannot have rings of `size` ranks; None for one that can."""
    world_size = accelerator.num_processes
    if size is None:
        return ValueError(
            f"the size of rings was not given (ring_size of a Trainer), and there are {world_size} processes: "
            f"ring_size={world_size} makes one ring of all, which share each sequence; ring_size=1 makes each process a ring "
            f"of its own, with sequences of its own (data parallel); another divisor of {world_size} makes several rings"
        )
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or world_size % size:
        return ValueError(
            f"Ring.from_accelerator: {world_size} processes cannot form rings of {size!r}: use a size that divides "
            f"{world_size}, or start another number of processes"
        )
    config = getattr(accelerator, "parallelism_config", None)
    for name in ("cp_size", "sp_size"):
        if (getattr(config, name, 1) or 1) > 1:
            return ValueError(
                f"Ring.from_accelerator: the accelerator's ParallelismConfig has {name}={getattr(config, name)}, so it "
                f"would shard sequences too: leave it at 1, the ring shards them"
            )
    loading = accelerator.dataloader_config
    if loading.dispatch_batches or loading.split_batches:
        name = "dispatch_batches" if loading.dispatch_batches else "split_batches"
        return ValueError(
            f"Ring.from_accelerator: the accelerator has {name}=True, so it would divide batches in a way of its own, and "
            f"ranks of a ring would not get the same rows: leave it out, the ring's loaders divide them"
        )
    return None
