"""The choice of a kernel; torch's kernel for CPUs."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..plan.joins import PADDED, Joining
from .bands import Masked, MaskedKernel
from .cuda_kernels import CudaEfficient, CudaFlash
from .kernel import Gradients, Kernel, Results, Saved, widened
from .math_kernel import Math


class CpuFlash(MaskedKernel):
    """torch's flash attention for CPU, which takes grouped heads as they are, and bands as stretches."""

    name = "cpu_flash"
    joining: Joining | None = PADDED

    def forward_masked(self, q: Tensor, k: Tensor, v: Tensor, call: Masked) -> Results:
        value_dim, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
        q, k, v = _rows(widened(q, width)), _rows(widened(k, width)), _rows(widened(v, width))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, call.causal, attn_mask=call.mask, scale=call.scale
        )
        return out[..., :value_dim], lse

    def backward_masked(self, dout: Tensor, saved: Saved, call: Masked) -> Gradients:
        q, k, v, out, lse = saved
        head_dim, value_dim = q.shape[-1], v.shape[-1]
        dout, q, k, v, out = (_rows(widened(x, max(head_dim, value_dim))) for x in (dout, q, k, v, out))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse.contiguous(), 0.0, call.causal, attn_mask=call.mask, scale=call.scale
        )
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@lru_cache(maxsize=256)
def choose_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None = None
) -> Kernel:
    """Returns the fastest kernel that computes this."""
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"attention needs floating point tensors, got {dtype}: use float64, float32, bfloat16 or float16"
        )
    if softcap is not None:  # No fused kernel caps scores.
        return Math(softcap)
    if device.type == "cpu":
        return CpuFlash()
    if device.type == "cuda" and dtype != torch.float64:
        return _choose_for_cuda(torch.cuda.get_device_capability(device), dtype, max(head_dim, value_dim))
    return Math()


def _choose_for_cuda(capability: tuple[int, int], dtype: torch.dtype, widest: int) -> Kernel:
    """Returns the kernel for float32, bfloat16 or float16 on a CUDA device of this compute capability."""
    if capability < (8, 0) and dtype == torch.bfloat16:
        return Math()
    # FlashAttention-2 needs compute capability 8.0, and has no backward pass for some widths on some devices.
    no_backward = 192 < widest <= 224 and ((8, 6) <= capability <= (8, 9) or capability >= (12, 0))
    beyond = capability < (8, 0) or no_backward or dtype == torch.float32 or widest > 256
    return CudaEfficient() if beyond or not torch.backends.cuda.is_flash_attention_available() else CudaFlash()
