"""Weights that FSDP and ZeRO-3 divide among processes: which modules have them, and how their gradients are averaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def sharded_by_fsdp2(module: nn.Module) -> bool:
    """Returns whether `fully_shard` divides the weights of a module, or of one inside of it."""
    return any(isinstance(inner, FSDPModule) for inner in module.modules())


def gathered_by_call(module: nn.Module | None) -> bool:
    """Returns whether FSDP or ZeRO-3 divides a module's weights, so that all processes must call it together."""
    if module is None:
        return False
    sharded = any(isinstance(inner, (FSDPModule, FullyShardedDataParallel)) for inner in module.modules())
    return sharded or any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def gather_weights(module: nn.Module | None) -> None:
    """Has a module of FSDP2 whole weights at the call that follows, which all processes make; other modules are left alone.

    In backward, FSDP2 of torch 2.9 would call a module with what the call before has left of its weights, which are freed.
    Where the weights are there, this does nothing.
    """
    if isinstance(module, FSDPModule):
        module.unshard()


@contextmanager
def whole_weights(model: nn.Module, module: nn.Module | None) -> Iterator[None]:
    """A context in which a module inside a model can be called by itself, wherever FSDP2 holds its weights.

    A module around it may hold them, and free them at the end of its own call. All processes enter the context together.
    """
    path = next((name for name, inner in model.named_modules() if inner is module), "")
    parts = path.split(".") if path else []
    around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    holder = next((outer for outer in reversed(around) if isinstance(outer, FSDPModule)), None)
    if holder is None or holder is module:  # Its own call gathers its weights.
        yield
        return
    holder.unshard()
    try:
        yield
    finally:
        holder.reshard()


def whole_norm(norm: Tensor) -> Tensor:
    """Returns the norm of whole gradients, of which a process has its part where Accelerate leaves a norm to FSDP2."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
