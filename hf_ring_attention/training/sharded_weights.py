"""Weights that FSDP 2 divides among processes: calls a module by itself, and reads the norm of whole gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


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
