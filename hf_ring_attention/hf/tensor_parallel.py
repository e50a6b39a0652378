"""Tensor parallelism of Transformers and torch: which of an attention's heads a rank has, and which rings can be beside it."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..ring.ring import Ring
from .wrappers import class_of_transformers

#: The name that Transformers and Accelerate give to the mesh dimension along which they divide heads.
_NAME = "tp"


def head_shard(module: nn.Module, query: Tensor, key: Tensor) -> tuple[int, int]:
    """Returns (i, t): this rank has the i-th of t equal parts of the layer's heads; (0, 1) if it has all of them.

    The weights of a divided layer are a `DTensor` on each rank. Some plans gather the heads before attention.

    Args:
        query: [B, H, m, D]; key: [B, Hkv, n, D]: the heads of this rank.
    """
    meshes = _meshes_of(module)
    if not meshes:
        return 0, 1
    config, heads, kv_heads = getattr(module, "config", None), query.shape[1], key.shape[1]
    # A layer counts all heads, whatever this rank has. In a few types it has another number of them than the config.
    names = ((module, "num_heads"), (module, "num_attention_heads"), (config, "num_attention_heads"))
    total = next((count for owner, name in names if isinstance(count := getattr(owner, name, None), int)), heads)
    if total == heads:
        return 0, 1
    mesh = _tensor_mesh(meshes, unnamed=True)
    size = 1 if mesh is None else mesh.size()
    if mesh is None or total != heads * size or heads != kv_heads * getattr(module, "num_key_value_groups", 1):
        raise ValueError(
            f"{type(module).__name__}: layer {getattr(module, 'layer_idx', None)} has {total} query heads, and this rank "
            f"{heads} with {kv_heads} key/value heads: divide both evenly among ranks of a mesh dimension {_NAME!r}"
        )
    return mesh.get_local_rank(), size


def tensor_parallel_mesh(model: nn.Module) -> DeviceMesh | None:
    """Returns the mesh of the ranks among which tensor parallelism divides a model; None if it does not."""
    # Earlier releases of Transformers give this mesh no name, and neither has the usual mesh of FSDP.
    return _tensor_mesh(_meshes_of(model), unnamed=(getattr(model, "tp_size", None) or 1) > 1)


def check_ring(model: nn.Module, ring: Ring) -> None:
    """Refuses a ring of ranks that have different heads of the same tokens."""
    mesh = tensor_parallel_mesh(model)
    both = [] if mesh is None else sorted({*ring.global_ranks} & {*dist.get_process_group_ranks(mesh.get_group())})
    if len(both) > 1:
        raise ValueError(
            f"patch_model: tensor parallelism divides {class_of_transformers(model).__name__} among ranks {both}, which cannot "
            f"share a ring: use ra.Ring(mesh) of another mesh dimension, or ring=None"
        )


def _meshes_of(module: nn.Module) -> list[DeviceMesh]:
    """Returns the mesh along which each weight of a module is divided."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    return [weight.device_mesh for weight in module.parameters() if isinstance(weight, DTensor)]


def _tensor_mesh(meshes: list[DeviceMesh], unnamed: bool) -> DeviceMesh | None:
    """Returns the mesh of one dimension along which tensor parallelism divides weights; `unnamed` if it may have no name."""
    named = (mesh for mesh in meshes if _NAME in (mesh.mesh_dim_names or ()))
    others = (mesh for mesh in meshes if unnamed and mesh.ndim == 1 and mesh.mesh_dim_names is None)
    mesh = next(named, next(others, None))
    return mesh if mesh is None or mesh.ndim == 1 else mesh[_NAME]
