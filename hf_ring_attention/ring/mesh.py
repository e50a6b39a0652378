"""The process group of a ring: from a group, a device mesh, or all processes of an Accelerator."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..compute.private import divided_among_processes, prepared_models
from ..transport.agreement import agreement
from ..transport.communicators import ProcessGroupCommunicator

#: The dimensions of a device mesh whose ranks share sequences: Accelerate's word, and this package's.
_RING_NAMES = ("cp", "ring")
#: The dimensions of a device mesh whose ranks read different rows, in Accelerate's words.
_DATA_NAMES = ("dp", "dp_replicate", "dp_shard")


class Mesh(NamedTuple):
    """The place of this process on the mesh."""

    group: dist.ProcessGroup | None  # of its ring; None for a single process
    everyone: ProcessGroupCommunicator | None  # reaches all processes that train together; None for a single process
    dp_rank: int  # the number of its ring
    dp_size: int  # the number of rings


def mesh_of(accelerator: Any, size: int | None) -> Mesh:
    """Returns this process's place on a mesh of rings of `size` ranks, which are neighbours in the world.

    If the accelerator's own mesh has a dimension for rings, this is the mesh; otherwise a new one is made.
    """
    world_size = accelerator.state.num_processes
    if world_size == 1:
        check_alone(
            "Ring.from_accelerator",
            "on a CPU set ACCELERATE_USE_CPU=true, and start accelerate launch --multi_gpu --num_processes N, or torchrun",
        )
    everyone = None
    if dist.is_available() and dist.is_initialized() and dist.group.WORLD is not None:
        everyone = ProcessGroupCommunicator(dist.group.WORLD)
    own_mesh = accelerator.torch_device_mesh
    rings = None if own_mesh is None else _ring_dimension(own_mesh)
    if size is None and rings is not None:
        size = rings.size()
    with agreement(everyone, "process", "Ring.from_accelerator") as call:
        call.values = {"the size of rings": size, "the accelerator's device mesh": str(own_mesh)}
        problem = _wrong_size(size, world_size) or _wrong_accelerator(accelerator, size, rings)
        if problem is not None:
            raise ValueError(f"Ring.from_accelerator: {problem}")
    assert size is not None  # None was refused
    if everyone is None:
        return Mesh(None, None, 0, 1)
    if rings is None:
        shape = world_size // size, size
        rings = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp_replicate", "cp"))["cp"]
    config = accelerator.parallelism_config
    if config is not None and config.cp_size > 1:
        config = without_cp(config)
        config.device_mesh = own_mesh  # or the next Accelerator of this process would make a mesh without rings
        accelerator.state.parallelism_config = config
    return Mesh(rings.get_group(), everyone, everyone.rank // size, world_size // size)


def _ring_dimension(device_mesh: DeviceMesh) -> DeviceMesh | None:
    """Returns the one dimension of a device mesh whose ranks share sequences; else None."""
    names = [name for name in device_mesh.mesh_dim_names or () if name in _RING_NAMES]
    return device_mesh[names[0]] if len(names) == 1 else None


def without_cp(config: Any) -> Any:
    """Returns a ParallelismConfig that has Accelerate shard models alike, over cp and dp_shard, but no sequences.

    With cp_size above 1, Accelerate would drop the masks of layers, and Trainer would cut each row a second time.
    """
    return replace(config, dp_shard_size=config.dp_shard_size * config.cp_size, cp_size=1, cp_handler=None)


def communicator_of(group: dist.ProcessGroup | DeviceMesh | None) -> ProcessGroupCommunicator | None:
    """Returns the communicator of a ring over a group, over a device mesh, or over the world; None for a single process."""
    if isinstance(group, DeviceMesh):
        if group.get_coordinate() is None:
            raise ValueError(f"Ring: rank {dist.get_rank()} of the world is not on the device mesh it was given")
        rings = group if group.ndim == 1 else _ring_dimension(group)
        if rings is None:
            raise ValueError(
                f"Ring: expected a device mesh of one dimension, or with one called cp or ring, got the dimensions "
                f"{group.mesh_dim_names}: pass the dimension that shards sequences, as mesh[name]"
            )
        group = rings.get_group()
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        check_alone("Ring", "call torch.distributed.init_process_group, or make the Accelerator, before the ring")
        return None
    if dist.get_rank(group) < 0:
        raise ValueError(f"Ring: rank {dist.get_rank()} of the world is not in the group it was given")
    return ProcessGroupCommunicator(group)


def check_alone(caller: str, remedy: str) -> None:
    """Refuses a ring of one if a launcher has started several processes: each would read everything by itself."""
    started = os.environ.get("WORLD_SIZE", "1")
    if started.isdigit() and int(started) > 1:
        raise ValueError(
            f"{caller}: WORLD_SIZE={started} in the environment, but this process is not connected to the others: {remedy}; "
            f"for a ring of this process alone use Ring.alone()"
        )


def _wrong_size(size: Any, world_size: int) -> str | None:
    """Returns the error of a size of rings; None if `world_size` processes can form such rings."""
    if size is None:
        return (
            f"the size of rings was not given, and there are {world_size} processes: ring_size={world_size} (or cp_size) makes "
            f"one ring, ring_size=1 makes each process its own (data parallel)"
        )
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or world_size % size:
        started = "one process" if world_size == 1 else f"{world_size} processes"
        remedy = (
            f"use a divisor of {world_size}" if world_size > 1 else f"start {size} with torchrun or accelerate launch"
        )
        return f"{started} cannot form rings of {size!r}: {remedy}"
    return None


def _wrong_accelerator(accelerator: Any, size: int | None, rings: DeviceMesh | None) -> str | None:
    """Returns the error of an accelerator that cannot have rings of `size` ranks or of its mesh; None if it can."""
    config, mesh, loading = accelerator.parallelism_config, accelerator.torch_device_mesh, accelerator.dataloader_config
    sp_size, tp_size, cp_size = (getattr(config, name, 1) for name in ("sp_size", "tp_size", "cp_size"))
    if sp_size > 1:
        return f"ParallelismConfig has sp_size={sp_size}, which would shard sequences beside the ring: leave it at 1"
    if tp_size > 1:
        return (
            f"ParallelismConfig has tp_size={tp_size}, whose ranks need the same rows: use ra.Ring(mesh['cp']), and give all "
            f"ranks of a mesh row the same batch"
        )
    if cp_size > 1 and rings is None:
        return f"ParallelismConfig has cp_size={cp_size}, and its device mesh has no dimension cp: leave cp_size out"
    if cp_size > 1 and prepared_models(accelerator):
        return (
            f"accelerator.prepare has prepared a model with cp_size={cp_size}, so its layers drop their masks: make the ring "
            f"first"
        )
    before, world_size = accelerator.num_processes, accelerator.state.num_processes
    if size is not None and before != world_size // size and divided_among_processes(accelerator):
        return f"accelerator.prepare has divided loaders or DeepSpeed's schedule among {before} processes: make the ring first"
    if loading.split_batches:
        return "the accelerator has split_batches=True, and batch sizes count the rows of a ring: leave it out"
    if rings is None:
        return None
    names, [ring_name] = mesh.mesh_dim_names, rings.mesh_dim_names or ("",)
    unknown = [name for name in names if name not in (*_DATA_NAMES, *_RING_NAMES)]
    if rings.size() != size:
        return f"the mesh's dimension {ring_name} has {rings.size()} ranks, and rings of {size} were asked for: give one size"
    if mesh.size() != accelerator.state.num_processes:
        return f"the device mesh has {mesh.size()} of {accelerator.state.num_processes} processes: make a mesh of all"
    if unknown:
        return (
            f"the mesh's dimension {' and '.join(unknown)} is neither {ring_name} nor one of {', '.join(_DATA_NAMES)}: "
            f"leave it out"
        )
    if names[-1] != ring_name or mesh.mesh.flatten().tolist() != list(range(mesh.size())):
        return (
            f"the mesh's ranks along {ring_name} are not neighbours in the world: make {ring_name} the last dimension of "
            f"init_device_mesh"
        )
    return None
