"""The loop over steps, and the one autograd function: exact attention over whatever a plan's tiles cover."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .bindings import Binding
from .blocks import accumulation_dtype
from .kernels import Kernel
from .transports import Transport


class RingAttention(torch.autograd.Function):
    """q [B, H, n, D], k [B, Hkv, n, D], v [B, Hkv, n, Dv] of this rank -> out [B, H, n, Dv], lse [B, H, n].

    Saves q, k, v, out and lse only. The backward of a tile with the merged out and lse is its exact share of the
    gradient, so tiles are visited once more and nothing of the forward pass is kept for them. lse has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, binding: Binding, transport: Transport, kernel: Kernel, scale: float
    ) -> tuple[Tensor, Tensor]:
        if binding.is_one_tile:
            out, lse = kernel.forward(q, k, v, binding.own[0].causal, scale)
        else:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            dtype = accumulation_dtype(q.dtype)
            total = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=dtype)
            lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
            for keys, values, batches in transport.forward(binding, k, v):
                for batch in batches:
                    for part in batch.parts(_rows_at_once(q)):
                        tile_out, tile_lse = kernel.forward(
                            part.queries.take(q), part.keys.take(keys), part.keys.take(values), part.causal, scale
                        )
                        part.queries.merge_(total, lse, tile_out, tile_lse)
            out = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = (binding, transport, kernel, scale)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        binding, transport, kernel, scale = ctx.call
        if binding.is_one_tile:
            dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, binding.own[0].causal, scale)
        else:
            dout = dout.contiguous()
            dtype = accumulation_dtype(q.dtype)
            dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
            for keys, values, dkeys, dvalues, batches in transport.backward(binding, k, v, dk, dv):
                for batch in batches:
                    for part in batch.parts(_rows_at_once(q)):
                        tile_dq, tile_dk, tile_dv = kernel.backward(
                            *(part.queries.take(x) for x in (dout, q)),
                            *(part.keys.take(x) for x in (keys, values)),
                            *(part.queries.take(x) for x in (out, lse)),
                            part.causal,
                            scale,
                        )
                        part.queries.add_(dq, tile_dq)
                        part.keys.add_(dkeys, tile_dk)
                        part.keys.add_(dvalues, tile_dv)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _rows_at_once(q: Tensor) -> int:
    """Query and key rows that one kernel call may hold copies of: about a quarter of the queries, but never few."""
    return max(1 << 14, q.shape[0] * q.shape[1] * q.shape[2] // 4)
