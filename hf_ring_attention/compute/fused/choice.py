"""A stand-in until the fused kernel is here."""

from __future__ import annotations

import torch

from ..kernel import Kernel


def why_not_fused(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> str | None:
    """Returns why the fused kernel cannot compute this; None if it can."""
    return "it is not built yet"


def fused_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None = None
) -> Kernel:
    """Makes the fused kernel."""
    raise NotImplementedError("the fused kernel is not built yet")
