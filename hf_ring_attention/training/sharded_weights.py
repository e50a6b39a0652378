"""Calls a module by itself whose weights FSDP 2 divides among processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def whole_weights(model: nn.Module, module: nn.Module | None) -> Iterator[None]:
    """A context in which a module inside a model can be called by itself, wherever FSDP2 holds its weights.

    A module around it may hold them, and free them at the end of its own call. All processes enter the context together.
    """
    around = [x for x in model.modules() if isinstance(x, FSDPModule) and any(inner is module for inner in x.modules())]
    holder = around[-1] if around else None
    if holder is None or holder is module:  # Its own call gathers its weights.
        yield
        return
    holder.unshard()
    try:
        yield
    finally:
        holder.reshard()
