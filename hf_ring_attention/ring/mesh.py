"""Rings among all processes of an Accelerator: the mesh ("dp_replicate", "cp"), and the reasons to refuse one."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..compute.private import prepared_models
from ..transport.agreement import agree
from ..transport.communicators import Communicator, ProcessGroupCommunicator

#: The dimensions of a device mesh whose ranks share sequences: Accelerate's word, and this package's.
_RING_NAMES = ("cp", "ring")
#: The dimensions of a device mesh whose ranks read different rows, in Accelerate's words.
_DATA_NAMES = ("dp", "dp_replicate", "dp_shard")


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
    """Returns this process's place on a mesh of rings of `size` ranks, which are neighbours in the world.

    The mesh is the accelerator's own if that has a dimension for rings, and otherwise a new one.

    Raises:
        ValueError: on every process, for the reasons that `Ring.from_accelerator` lists.
    """
    world_size = accelerator.state.num_processes
    if world_size == 1:
        check_alone(
            "Ring.from_accelerator",
            "on a CPU set ACCELERATE_USE_CPU=true in the environment of the launcher, and start it with accelerate launch "
            "--multi_gpu --num_processes N, or torchrun --nproc-per-node N",
        )
    everyone = None
    if dist.is_available() and dist.is_initialized() and dist.group.WORLD is not None:
        everyone = ProcessGroupCommunicator(dist.group.WORLD)
    own_mesh = accelerator.torch_device_mesh
    rings = None if own_mesh is None else ring_dimension(own_mesh)
    if size is None and rings is not None:
        size = rings.size()
    values = {"the size of rings": size, "the accelerator's device mesh": str(own_mesh)}
    agree(everyone, "process", "Ring.from_accelerator", values, wrong_accelerator(accelerator, size, rings))
    assert size is not None  # None was refused
    if everyone is None:
        return Mesh(None, None, 0, 1)
    if rings is None:
        mesh = init_device_mesh(
            accelerator.device.type, (world_size // size, size), mesh_dim_names=("dp_replicate", "cp")
        )
        rings = mesh["cp"]
    config = accelerator.parallelism_config
    if config is not None and config.cp_size > 1:
        config = without_cp(config)
        config.device_mesh = own_mesh  # or the next Accelerator of this process would make a mesh without rings
        accelerator.state.parallelism_config = config
    return Mesh(rings.get_group(), everyone, everyone.rank // size, world_size // size)


def ring_dimension(device_mesh: DeviceMesh) -> DeviceMesh | None:
    """Returns the dimension of a device mesh whose ranks share sequences; None if there is none, or more than one."""
    names = [name for name in device_mesh.mesh_dim_names or () if name in _RING_NAMES]
    return device_mesh[names[0]] if len(names) == 1 else None


def without_cp(config: Any) -> Any:
    """Returns a ParallelismConfig by which Accelerate shards models alike, over cp and dp_shard, but no sequences.

    With cp_size above 1, `Accelerator.prepare` would hook the layers of a model and drop their masks, and Trainer would cut
    each row once more.
    """
    return replace(config, dp_shard_size=config.dp_shard_size * config.cp_size, cp_size=1, cp_handler=None)


def communicator_of(group: dist.ProcessGroup | DeviceMesh | None) -> ProcessGroupCommunicator | None:
    """Returns the communicator of a ring over a group, over a device mesh, or over the world; None for a process alone.

    Raises:
        ValueError: for the reasons that `Ring` lists.
    """
    if isinstance(group, DeviceMesh):
        if group.get_coordinate() is None:
            raise ValueError(f"Ring: rank {dist.get_rank()} of the world is not on the device mesh it was given")
        rings = group if group.ndim == 1 else ring_dimension(group)
        if rings is None:
            raise ValueError(
                f"Ring: expected a device mesh of one dimension, or with one that is called cp or ring, got one of the "
                f"dimensions {group.mesh_dim_names}: pass the one that shards sequences, as mesh[name]"
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


def wrong_accelerator(accelerator: Any, size: int | None, rings: DeviceMesh | None) -> ValueError | None:
    """Returns the error of an accelerator that cannot have rings of `size` ranks; None for one that can.

    Args:
        rings: the dimension for rings of the accelerator's own device mesh, if any.
    """
    world_size = accelerator.state.num_processes
    if size is None:
        return ValueError(
            f"the size of rings was not given (ring_size of a Trainer, cp_size of Accelerate), and there are {world_size} "
            f"processes: ring_size={world_size} makes one ring of all, which share each sequence; ring_size=1 makes each "
            f"process a ring of its own, with sequences of its own (data parallel); another divisor of {world_size} makes "
            f"several rings"
        )
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or world_size % size:
        return ValueError(
            f"Ring.from_accelerator: {world_size} processes cannot form rings of {size!r}: use a size that divides "
            f"{world_size}, or start another number of processes"
        )
    error = _wrong_parallelism(accelerator, size, rings)
    if error is not None:
        return error
    loading = accelerator.dataloader_config
    if loading.dispatch_batches or loading.split_batches:
        name = "dispatch_batches" if loading.dispatch_batches else "split_batches"
        return ValueError(
            f"Ring.from_accelerator: the accelerator has {name}=True, so it would divide batches in a way of its own, and "
            f"ranks of a ring would not get the same rows: leave it out, the ring's loaders divide them"
        )
    return None


def _wrong_parallelism(accelerator: Any, size: int, rings: DeviceMesh | None) -> ValueError | None:
    """Returns the error of a ParallelismConfig, or of a device mesh, beside which there cannot be rings of `size` ranks."""
    config, mesh = accelerator.parallelism_config, accelerator.torch_device_mesh
    names = ("sp_size", "tp_size", "cp_size")
    sizes = {} if config is None else {name: getattr(config, name) for name in names}
    if sizes.get("sp_size", 1) > 1:
        return ValueError(
            f"Ring.from_accelerator: the accelerator's ParallelismConfig has sp_size={sizes['sp_size']}, so it would shard "
            f"sequences, and a ring cannot be beside that: leave it at 1; the ring shards sequences"
        )
    if sizes.get("tp_size", 1) > 1:
        return ValueError(
            f"Ring.from_accelerator: tp_size={sizes['tp_size']} divides heads among ranks that need the same rows, which "
            f"its loaders would not give them: use ra.Ring(mesh['cp']), and give all ranks of a mesh row the same batch"
        )
    if sizes.get("cp_size", 1) > 1 and rings is None:
        return ValueError(
            f"Ring.from_accelerator: the accelerator's ParallelismConfig has cp_size={sizes['cp_size']}, and its device "
            f"mesh has no dimension cp that could be the ring: leave cp_size out, and give the size of rings"
        )
    if sizes.get("cp_size", 1) > 1 and prepared_models(accelerator):
        return ValueError(
            f"Ring.from_accelerator: accelerator.prepare has prepared a model with cp_size={sizes['cp_size']}, and made its "
            f"layers drop the masks that the ring needs: make the ring before, and prepare the model then"
        )
    if rings is None:
        return None
    others = [name for name in mesh.mesh_dim_names if name not in (*_DATA_NAMES, *_RING_NAMES)]
    name = rings.mesh_dim_names[0]  # type: ignore[index]  # ring_dimension found it by its name
    if rings.size() != size:
        problem = f"its dimension {name} has {rings.size()} ranks, and rings of {size} were asked for"
        remedy = "give one size, or the same twice"
    elif mesh.size() != accelerator.state.num_processes:
        problem = f"it has {mesh.size()} processes of {accelerator.state.num_processes}"
        remedy = "make a mesh of all of them"
    elif others:
        problem = f"of its dimensions, {' and '.join(others)} is neither {name} nor one of {', '.join(_DATA_NAMES)}"
        remedy = "leave it out"
    elif mesh.mesh_dim_names[-1] != name or mesh.mesh.flatten().tolist() != list(range(mesh.size())):
        problem = f"the ranks along {name} are not neighbours in the world, as loaders take those of a ring to be"
        remedy = f"make {name} the last dimension of init_device_mesh"
    else:
        return None
    return ValueError(
        f"Ring.from_accelerator: the accelerator's device mesh cannot have the rings: {problem}: {remedy}"
    )


def device_of(communicator: Communicator | None) -> torch.device:
    """Returns the device on which the communicator's group gathers tensors."""
    group = getattr(communicator, "group", None)
    nccl = group is not None and "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def ranks_of(communicator: Communicator | None) -> list[int]:
    """Returns the ranks of the communicator's group, by their numbers in the world; none without a group."""
    group = getattr(communicator, "group", None)
    return [] if group is None else dist.get_process_group_ranks(group)
