"""Attention to chosen rows: each query attends to the keys whose numbers it is given.

It goes through slices of queries. Either the chosen keys of each query are gathered, or a slice attends, under a mask, to all
keys up to the last chosen one. So neither scores nor masks of all queries ever exist. Backward forms them again from the
choice, the output and the log-sum-exp (FlashAttention, arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..plan.kernel_choice import TileKinds
from .bands import Masked
from .kernel import Saved
from .kernels import choose_kernel
from .merge import accumulation_dtype, add_sinks, sinks_grad, without_autocast

#: The bytes of a slice's mask, or of its gathered keys and values: on CPUs few, as their caches hold them.
SLICE_BYTES, SLICE_BYTES_OF_CPUS = 256 << 20, 16 << 20

#: A gathered key costs about as much as this many keys under a mask do for one query head: 27 to 74 on a CPU
#: (`python -m tests.chosen_times`).
GATHERED_COST = 48


def gathers(num_chosen: int, num_keys: int, group: int) -> bool:
    """Returns whether it is faster to gather the chosen keys of each query than to compute the half that it may see.

    Args:
        group: the query heads of a key/value head, which share what is gathered.
    """
    return num_chosen * GATHERED_COST < group * num_keys / 2


def attend_to_chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    way: Any = None,
) -> Tensor:
    """Returns out [B, H, m, Dv] of queries that attend to the keys of these numbers; 0 for a query without any.

    Args:
        q: [B, H, m, D]; k: [B, Hkv, n, D]; v: [B, Hkv, n, Dv].
        indices: [B or 1, Hkv or 1, m, chosen], the numbers of keys, each at most once; -1 for none. It has no gradient.
        sinks: [H] the logits of one more column of the softmax, whose value is 0.
        way: what computes it: `gathering_way` or `UnderMasks`; None for the faster one.
    """
    if way is None:
        gathered = gathers(indices.shape[-1], k.shape[2], q.shape[1] // k.shape[1])
        way = gathering_way(q, k, v) if gathered else UnderMasks
    with without_autocast(q):
        out: Tensor = _ChosenRows.apply(q, k, v, sinks, indices, scale, way)
    return out


class _ChosenRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor, scale: float, way: Any
    ) -> Tensor:
        ctx.scale, ctx.way = scale, way
        out, lse = ctx.way.forward(q, k, v, indices, scale)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, indices, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, sinks, indices, out, lse = ctx.saved_tensors
        of_sinks = None if sinks is None else sinks_grad(dout, out, lse, sinks)
        with without_autocast(q):
            dq, dk, dv = ctx.way.backward(indices, dout, Saved(q, k, v, out, lse), ctx.scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), of_sinks, None, None, None


def gathering_way(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Returns Triton's kernels if they compute this; they add gradients up in any order."""
    from .fused import chosen as by_triton

    sizes = q.shape[1] // k.shape[1], k.shape[3], v.shape[3]
    deterministic = torch.are_deterministic_algorithms_enabled()
    return Gathered if deterministic or not by_triton.is_right(q.device, q.dtype, *sizes) else by_triton


def _slices(m: int, bytes_of_query: int, is_cuda: bool) -> Iterator[slice]:
    rows = max(1, (SLICE_BYTES if is_cuda else SLICE_BYTES_OF_CPUS) // bytes_of_query)
    return (slice(start, min(m, start + rows)) for start in range(0, m, rows))


class Gathered:
    """Gathers keys and values [B, Hkv, queries, chosen, D]."""

    @staticmethod
    def _parts(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> Iterator[tuple[Any, ...]]:
        """Yields slices: the queries, the places of their keys, keys, values and scores [B, Hkv, G, queries, chosen]."""
        batch, kv_heads, dtype = q.shape[0], k.shape[1], accumulation_dtype(q.dtype)
        rows, heads = (torch.arange(n, device=k.device) for n in (batch, kv_heads))
        widths = k.shape[3] + v.shape[3] + q.shape[1] // kv_heads
        size = batch * kv_heads * indices.shape[3] * widths * dtype.itemsize
        for queries in _slices(q.shape[2], size, q.is_cuda):
            chosen = indices[:, :, queries]
            places = rows[:, None, None, None], heads[None, :, None, None], chosen.long().clamp_min(0)
            keys, values, of_slice = (x.to(dtype) for x in (k[places], v[places], _by_group(q[:, :, queries], k)))
            scores = torch.einsum("bhgsd,bhstd->bhgst", of_slice, keys).mul_(scale)
            yield queries, places, keys, values, scores.masked_fill_((chosen < 0)[:, :, None], -torch.inf)

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
        for queries, _, _, values, scores in Gathered._parts(q, k, v, indices, scale):
            of_slice = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - of_slice.nan_to_num(neginf=0.0)[..., None])
            lse[:, :, queries] = of_slice.flatten(1, 2)
            out[:, :, queries] = torch.einsum("bhgst,bhste->bhgse", weights, values).flatten(1, 2)
        return out, lse

    @staticmethod
    def backward(indices: Tensor, dout: Tensor, saved: Saved, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = saved
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        for queries, places, keys, values, scores in Gathered._parts(q, k, v, indices, scale):
            of_slice, grads, less, sums = (
                _by_group(x[:, :, queries].to(lse.dtype), k) for x in (q, dout, delta, lse.nan_to_num(neginf=0.0))
            )
            weights = scores.sub_(sums[..., None]).exp_()
            of_scores = (
                torch.einsum("bhgse,bhste->bhgst", grads, values).sub_(less[..., None]).mul_(weights).mul_(scale)
            )
            dq[:, :, queries] = torch.einsum("bhgst,bhstd->bhgsd", of_scores, keys).flatten(1, 2)
            dk.index_put_(places, torch.einsum("bhgst,bhgsd->bhstd", of_scores, of_slice), accumulate=True)
            dv.index_put_(places, torch.einsum("bhgst,bhgse->bhste", weights, grads), accumulate=True)
        return dq, dk, dv


class UnderMasks:
    """Has a kernel that takes masks attend to all keys up to the last chosen one."""

    @staticmethod
    def _parts(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yields slices: the queries, how many keys they attend to, the mask, and which queries see none."""
        group, n = q.shape[1] // k.shape[1], k.shape[2]
        for queries in _slices(q.shape[2], indices.shape[0] * indices.shape[1] * n * q.element_size(), q.is_cuda):
            chosen = indices[:, :, queries]
            limit = max(1, int(chosen.amax()) + 1)
            hidden = chosen.new_ones(*chosen.shape[:3], limit + 1, dtype=torch.bool)
            hidden = hidden.scatter_(-1, chosen.long().where(chosen >= 0, limit), False)[..., :limit]
            blind = hidden.all(-1, keepdim=True)
            mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden & ~blind, -torch.inf)
            if mask.shape[1] > 1:
                mask, blind = (x.repeat_interleave(group, 1) for x in (mask, blind))
            yield queries, limit, mask, blind

    @staticmethod
    def _kernel(q: Tensor, k: Tensor, v: Tensor) -> Any:
        setting = "auto" if not q.is_cuda else "math" if q.dtype == torch.float64 else "efficient"
        return choose_kernel(q.device, q.dtype, k.shape[3], v.shape[3], None, setting, TileKinds(few_queries=True))

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        kernel, out = UnderMasks._kernel(q, k, v), q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
        for queries, limit, mask, blind in UnderMasks._parts(q, k, v, indices):
            call = Masked(False, scale, mask)
            of_slice, sums = kernel.forward_masked(q[:, :, queries], k[:, :, :limit], v[:, :, :limit], call)
            out[:, :, queries], lse[:, :, queries] = of_slice, sums
            out[:, :, queries].masked_fill_(blind, 0)
            lse[:, :, queries].masked_fill_(blind[..., 0], -torch.inf)
        return out, lse

    @staticmethod
    def backward(indices: Tensor, dout: Tensor, saved: Saved, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = saved
        kernel = UnderMasks._kernel(q, k, v)
        dq, (dk, dv) = torch.empty_like(q), (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        for queries, limit, mask, blind in UnderMasks._parts(q, k, v, indices):
            sums = lse[:, :, queries].masked_fill(blind[..., 0], torch.inf)
            of_slice = Saved(q[:, :, queries], k[:, :, :limit], v[:, :, :limit], out[:, :, queries], sums)
            found = kernel.backward_masked(dout[:, :, queries], of_slice, Masked(False, scale, mask))
            dq[:, :, queries] = found[0]
            dk[:, :, :limit] += found[1]
            dv[:, :, :limit] += found[2]
        return dq, dk, dv


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    """Returns x [B, H, ...] as [B, Hkv, queries of a key/value head, ...]."""
    return x.unflatten(1, (k.shape[1], -1))
