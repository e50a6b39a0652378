"""Attention to chosen rows by Triton, behind a proof on the device, as all kernels have one (`compute/proof.py`)."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..kernel import Saved
from .choice import why_not_fused
from .tiles import on_device, padded_width

#: The keys of a block for 16 bit numbers, and the stages of its loop: more would spill registers on sm_80, sm_90 or gfx942.
FORWARD_BLOCK, BACKWARD_BLOCK = (64, 2), (32, 1)
WARPS = 4

logger = logging.getLogger(__name__)


def forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns out [B, H, m, Dv] and lse [B, H, m] float32 of queries, as `attend_to_chosen` takes them."""
    from . import chosen_kernels  # Triton is not there on every machine.

    batch, heads, m, _ = q.shape
    out, lse = q.new_empty(batch, heads, m, v.shape[3]), q.new_empty(batch, heads, m, dtype=torch.float32)
    _for_each_query(
        chosen_kernels.chosen_forward_kernel, FORWARD_BLOCK, (q, k, v, indices), (out, lse), scale, (out, lse)
    )
    return out, lse


def backward(indices: Tensor, dout: Tensor, saved: Saved, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v; those of k and v are float32."""
    from . import chosen_kernels

    q, k, v, out, lse = saved
    dout, delta = dout.contiguous(), (dout.float() * out.float()).sum(-1)
    dq = q.new_empty(q.shape)  # contiguous, also where q is not
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    tensors = dout, lse, delta, dq, dk, dv
    kernel = chosen_kernels.chosen_backward_kernel
    _for_each_query(kernel, BACKWARD_BLOCK, (q, k, v, indices), tensors, scale, (dout, lse, dq), (dk, dv))
    return dq, dk, dv


def _for_each_query(
    kernel: Any, setting: tuple[int, int], inputs: Any, others: Any, scale: float, strided: Any, of_rows: Any = ()
) -> None:
    """Starts a program for each query and each key/value head."""
    *rows, indices = inputs
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in rows)
    kv_heads = k.shape[1]
    group, (batch, _, m, _), chosen = q.shape[1] // kv_heads, q.shape, indices.shape[3]
    indices = indices.expand(batch, kv_heads, m, chosen)
    strides = [x.stride()[:-1] for x in (q, k, v, indices, *strided)]
    sizes = {
        "D": k.shape[3],
        "BLOCK_D": padded_width(k.shape[3]),
        "DV": v.shape[3],
        "BLOCK_DV": padded_width(v.shape[3]),
    }
    with on_device(q):
        kernel[(m, batch * kv_heads)](
            q, k, v, indices, *others, scale, chosen, *(x for of_tensor in strides for x in of_tensor),
            *(x.stride(1) for x in of_rows), KV_HEADS=kv_heads, GROUP=group, ROWS=padded_width(group),
            BLOCK_N=setting[0] * 2 // q.element_size(), **sizes, num_warps=WARPS, num_stages=setting[1],
        )  # fmt: skip


@lru_cache(maxsize=256)
def is_right(device: torch.device, dtype: torch.dtype, group: int, head_dim: int, value_dim: int) -> bool:
    """Returns whether the kernels run on a device, and are as right there as plain products in the same dtype."""
    if why_not_fused(device, dtype, head_dim, value_dim) is not None:
        return False
    from ..proof import outcome

    fault = outcome(_fault_of_chosen, device, dtype, group, head_dim, value_dim)
    if fault is not None:
        logger.warning("kernel of chosen rows is not used on %s for %s: %s", device, dtype, fault)
    return fault is None


def _fault_of_chosen(device: torch.device, dtype: torch.dtype, group: int, head_dim: int, value_dim: int) -> str | None:
    """Returns the errors of the kernels that are beyond their bounds; None if none is."""
    from ..proof import FACTOR, FLOAT32_FACTOR, largest_error

    generator, kv_heads, queries, tokens, scale = torch.Generator().manual_seed(0), 2, 8, 96, head_dim**-0.5
    sizes = ((group, head_dim), (1, head_dim), (1, value_dim), (group, value_dim))
    rows = queries, tokens, tokens, queries
    of_tensors = [(1, kv_heads * heads, n, width) for n, (heads, width) in zip(rows, sizes)]
    q, k, v, dout = (torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in of_tensors)
    seen = torch.rand(1, 1, queries, tokens, generator=generator) < 0.4
    seen[:, :, 3] = False
    order = torch.rand(1, 1, queries, tokens, generator=generator).argsort(-1)
    indices = order.where(seen.gather(-1, order), -1).int().to(device)

    def plain(kind: torch.dtype) -> list[Tensor]:
        x, y, z, w = (t.to(kind) for t in (q, k, v, dout))
        y, z = (t.repeat_interleave(group, 1) for t in (y, z))
        scores = (x @ y.mT * scale).masked_fill(~seen.to(device), -torch.inf)
        p = torch.softmax(scores, -1).nan_to_num(0.0)
        out = p @ z
        ds = p * (w @ z.mT - (w * out).sum(-1, keepdim=True)) * scale
        dk, dv = ((t.mT @ u).unflatten(1, (kv_heads, -1)).sum(2) for t, u in ((ds, x), (p, w)))
        return [out, ds @ y, dk, dv]

    out, lse = forward(q, k, v, indices, scale)
    found = [out, *backward(indices, dout, Saved(q, k, v, out, lse), scale)]
    factor, faults = FACTOR if dtype.itemsize == 2 else FLOAT32_FACTOR, []
    for name, x, rough, right in zip(("out", "dq", "dk", "dv"), found, plain(dtype), plain(torch.float64), strict=True):
        error, bound = largest_error(x, right), factor * (largest_error(rough, right) + torch.finfo(dtype).eps)
        if not error <= bound:
            faults.append(f"{name} is {error:.1e} off, of at most {bound:.1e}")
    return ", ".join(faults) or None
