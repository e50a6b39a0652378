"""Attention to chosen rows: each query attends to the keys whose numbers it is given.

It goes through slices of queries. Either the chosen keys of each query are gathered, or a slice's scores of all keys up to the
last chosen one are formed under a mask. So neither scores nor masks of all queries ever exist. Backward forms them again from
the choice, the output and the log-sum-exp (FlashAttention, arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .merge import accumulation_dtype, add_sinks, sinks_grad, without_autocast

#: The bytes of a slice's scores, or of its gathered keys and values: on CPUs few, as their caches hold them.
SLICE_BYTES, SLICE_BYTES_OF_CPUS = 256 << 20, 16 << 20

#: A gathered key costs about as much as this many keys under a mask do for one query head (recipes/bench/chosen.py).
GATHERED_COST = 32


class _Slice(NamedTuple):
    """Keys and values of a slice of queries: [B, Hkv, t, D] for all of them, or gathered, [B, Hkv, s, t, D]."""

    queries: slice
    keys: Tensor
    values: Tensor
    visible: Tensor  # [B or 1, Hkv or 1, 1, s, t]
    places: tuple[Any, ...]  # of these keys in those of the row
    axes: str  # of keys and values, before their width


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
    gathered: bool | None = None,
) -> Tensor:
    """Returns out [B, H, m, Dv] of queries that attend to the keys of these numbers; 0 for a query without any.

    Args:
        q: [B, H, m, D]; k: [B, Hkv, n, D]; v: [B, Hkv, n, Dv].
        indices: [B or 1, Hkv or 1, m, chosen], the numbers of keys, each at most once; -1 for none. It has no gradient.
        sinks: [H] the logits of one more column of the softmax, whose value is 0.
        gathered: whether keys are gathered; None for the faster way.
    """
    chosen = gathers(indices.shape[-1], k.shape[2], q.shape[1] // k.shape[1]) if gathered is None else gathered
    with without_autocast(q):
        out: Tensor = _ChosenRows.apply(q, k, v, sinks, indices, scale, chosen)
    return out


class _ChosenRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor, scale: float, gathered: bool
    ) -> Tensor:
        ctx.by_triton = gathered and _by_triton(q, k, v)
        if ctx.by_triton:
            from .fused import chosen as by_triton

            q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
            out, lse = by_triton.forward(q, k, v, indices, scale)
            return _ChosenRows._save(ctx, (q, k, v, sinks, indices), out, lse, (scale, gathered))
        by_group = _by_group(q, k)
        out = by_group.new_empty(*by_group.shape[:-1], v.shape[-1])
        lse = out.new_empty(out.shape[:-1], dtype=accumulation_dtype(q.dtype))
        for part in _slices(by_group, k, v, indices, gathered):
            scores = _scores(by_group, part, scale)
            of_slice = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - of_slice.nan_to_num(neginf=0.0)[..., None])
            lse[..., part.queries] = of_slice
            out[..., part.queries, :] = torch.einsum(f"bhgst,{part.axes}e->bhgse", weights, part.values.to(lse.dtype))
        return _ChosenRows._save(
            ctx, (q, k, v, sinks, indices), out.flatten(1, 2), lse.flatten(1, 2), (scale, gathered)
        )

    @staticmethod
    def _save(ctx: Any, inputs: Any, out: Tensor, lse: Tensor, constants: tuple[float, bool]) -> Tensor:
        """Returns out with sinks, and keeps what backward needs."""
        if inputs[3] is not None:
            out, lse = add_sinks(out, lse, inputs[3])
        ctx.save_for_backward(*inputs, out, lse)
        ctx.constants = constants
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, sinks, indices, out, lse = ctx.saved_tensors
        scale, gathered = ctx.constants
        of_sinks = None if sinks is None else sinks_grad(dout, out, lse, sinks)
        if ctx.by_triton:
            from .fused import chosen as by_triton

            delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            dq, dk, dv = by_triton.backward(q, k, v, indices, dout.contiguous(), lse, delta, scale)
            return dq, dk.to(k.dtype), dv.to(v.dtype), of_sinks, None, None, None
        with without_autocast(q):
            delta = _by_group((dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True), k)
            by_group, dout_by_group, lse_by_group = _by_group(q, k), _by_group(dout, k), _by_group(lse[..., None], k)
            dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (by_group, k, v))
            for part in _slices(by_group, k, v, indices, gathered):
                s, axes = part.queries, part.axes
                of_slice = lse_by_group[..., s, :].nan_to_num(neginf=0.0)
                weights = torch.exp(_scores(by_group, part, scale) - of_slice)
                grads = dout_by_group[..., s, :].to(lse.dtype)
                of_values = torch.einsum(f"bhgst,bhgse->{axes}e", weights, grads)
                of_scores = torch.einsum(f"bhgse,{axes}e->bhgst", grads, part.values.to(lse.dtype))
                of_scores = of_scores.sub_(delta[..., s, :]).mul_(weights).mul_(scale)
                dq[..., s, :] = torch.einsum(f"bhgst,{axes}d->bhgsd", of_scores, part.keys.to(lse.dtype))
                of_keys = torch.einsum(f"bhgst,bhgsd->{axes}d", of_scores, by_group[..., s, :].to(lse.dtype))
                for total, of_slice in ((dk, of_keys), (dv, of_values)):
                    total.index_put_(part.places, of_slice, accumulate=True) if gathered else total[part.places].add_(
                        of_slice
                    )
        return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), of_sinks, None, None, None


def _by_triton(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns whether Triton's kernels compute this; they add gradients up in any order."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    from .fused.chosen import is_right

    return is_right(q.device, q.dtype, q.shape[1] // k.shape[1], k.shape[3], v.shape[3])


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    """Returns x [B, H, ...] as [B, Hkv, queries of a key/value head, ...]."""
    return x.unflatten(1, (k.shape[1], -1))


def _scores(q: Tensor, part: _Slice, scale: float) -> Tensor:
    """Returns the scores [B, Hkv, G, s, t] of a slice, -inf for keys that are not chosen."""
    dtype = accumulation_dtype(q.dtype)
    scores = torch.einsum(f"bhgsd,{part.axes}d->bhgst", q[..., part.queries, :].to(dtype), part.keys.to(dtype))
    return scores.mul_(scale).masked_fill_(~part.visible, -torch.inf)


def _slices(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, gathered: bool) -> Iterator[_Slice]:
    """Yields the slices of q [B, Hkv, G, m, D]."""
    batch, heads, group, m, _ = q.shape
    size, most = accumulation_dtype(q.dtype).itemsize, SLICE_BYTES if q.is_cuda else SLICE_BYTES_OF_CPUS
    rows, of_heads = (torch.arange(n, device=k.device) for n in (batch, heads))
    start = 0
    while start < m:
        if gathered:
            widths = indices.shape[-1] * (k.shape[-1] + v.shape[-1] + group)
        else:  # The keys of a later slice may be more; its scores then take more bytes.
            widths = group * max(1, min(k.shape[2], int(indices[:, :, start:].amax()) + 1))
        queries = slice(start, min(m, start + max(1, most // (batch * heads * widths * size))))
        start, chosen = queries.stop, indices[:, :, queries]
        if gathered:
            places = rows[:, None, None, None], of_heads[None, :, None, None], chosen.long().clamp_min(0)
            yield _Slice(queries, k[places], v[places], (chosen >= 0)[:, :, None], places, "bhst")
        else:
            limit = int(chosen.amax()) + 1
            visible = chosen.new_zeros(*chosen.shape[:3], limit + 1, dtype=torch.bool)
            visible = visible.scatter_(-1, chosen.long().where(chosen >= 0, limit), True)[..., :limit]
            all_keys = slice(None), slice(None), slice(limit)
            yield _Slice(queries, k[all_keys], v[all_keys], visible[:, :, None], all_keys, "bht")
