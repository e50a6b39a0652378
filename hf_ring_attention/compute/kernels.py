"""Attention of a batch of tiles, forward and backward, with the log-sum-exp of each row.

Every kernel takes q [T, H, Lq, D], k [T, Hkv, Lk, D], v [T, Hkv, Lk, Dv] (query head h reads key/value head
h // (H / Hkv)) and the shape of the tiles: query i sees all keys ("full"), keys 0 to i ("causal", Lq = Lk), or keys i to
i + Lk - Lq ("band"). Where a tile has folds (`plan/tiles.py`), q has the rows of a fold, `fold_size` of them one after the
other, in place of each of these Lq; they see the same keys. A `KernelCall` says all this.
`backward` takes the out and lse of the *whole* softmax: with those, a tile's gradients are its exact share
(FlashAttention, arXiv 2205.14135, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from ..plan.joins import PADDED, Joining
from .bands import Gradients, KernelCall, MaskedKernel, Results, widened
from .cuda_kernels import CudaEfficient, CudaFlash
from .math_kernel import Math


class Kernel(Protocol):
    """An implementation of attention for a batch of tiles.

    Attributes:
        joining: how it takes tiles of unequal lengths in one call; None where it does not.
    """

    name: str
    joining: Joining | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, totals: Results | None = None) -> Results:
        """Returns out [T, H, Lq, Dv] in q's dtype and lse [T, H, Lq] in the accumulation dtype.

        Args:
            totals: out and lse, both in the accumulation dtype, that the results are merged into; they are then returned.
        """

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: KernelCall,
        sums: Gradients | None = None,
    ) -> Gradients:
        """Returns dq, dk and dv, in the shapes of q, k and v.

        Args:
            sums: tensors of these shapes, in the accumulation dtype, that the gradients are added to; they are then returned.
        """


@dataclass(frozen=True)
class KernelChoice:
    """A kernel, with the reason for its choice."""

    kernel: Kernel
    reason: str


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class CpuFlash(MaskedKernel):
    """torch's flash attention for CPU, which takes grouped heads as they are, and bands as stretches."""

    name = "cpu_flash"
    joining: Joining | None = PADDED

    def forward_masked(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        value_dim, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
        q, k, v = _rows(widened(q, width)), _rows(widened(k, width)), _rows(widened(v, width))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out[..., :value_dim], lse

    def backward_masked(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head_dim, value_dim = q.shape[-1], v.shape[-1]
        dout, q, k, v, out = (_rows(widened(x, max(head_dim, value_dim))) for x in (dout, q, k, v, out))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse.contiguous(), 0.0, causal, attn_mask=mask, scale=scale
        )
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]


@lru_cache(maxsize=256)
def choose_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None = None
) -> KernelChoice:
    """Returns the fastest kernel that computes this, with the reason.

    Raises:
        ValueError: a dtype other than float64, float32, bfloat16 and float16.
    """
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"attention needs floating point tensors, got {dtype}: use float64, float32, bfloat16 or float16"
        )
    if softcap is not None:
        return KernelChoice(Math(softcap), f"scores are capped at {softcap}, which no fused kernel does: plain math")
    if device.type == "cpu":
        return KernelChoice(CpuFlash(), "torch's CPU flash attention takes these dtypes and grouped heads")
    if device.type == "cuda" and dtype != torch.float64:
        return _choose_for_cuda(torch.cuda.get_device_capability(device), dtype, max(head_dim, value_dim))
    return KernelChoice(Math(), f"no fused kernel with a log-sum-exp for {dtype} on {device.type}: plain math")


def _choose_for_cuda(capability: tuple[int, int], dtype: torch.dtype, widest: int) -> KernelChoice:
    """Returns the kernel for float32, bfloat16 or float16 on a CUDA device of this compute capability."""
    call = f"{dtype} with heads of {widest} on compute capability {'.'.join(map(str, capability))}"
    if capability < (8, 0) and dtype == torch.bfloat16:
        return KernelChoice(Math(), f"{call}: fused kernels take bfloat16 from 8.0 on: plain math")
    if capability < (8, 0):
        return KernelChoice(CudaEfficient(), f"{call}: FlashAttention-2 needs 8.0: efficient")
    if 192 < widest <= 224 and ((8, 6) <= capability <= (8, 9) or capability >= (12, 0)):
        return KernelChoice(CudaEfficient(), f"{call}: FlashAttention-2 has no backward pass for these: efficient")
    if dtype == torch.float32 or widest > 256 or not torch.backends.cuda.is_flash_attention_available():
        return KernelChoice(CudaEfficient(), f"{call} is beyond this torch's FlashAttention-2: efficient")
    return KernelChoice(CudaFlash(), f"{call}: FlashAttention-2")
