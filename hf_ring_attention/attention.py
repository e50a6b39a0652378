"""`ring_attention`: the call, checked on every rank before anything is computed on any."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from .blocks import accumulation_dtype
from .engine import RingAttention
from .kernels import choose_kernel
from .layouts import SequenceLayout
from .patterns import Pattern
from .plans import Documents, Problem
from .ring import Ring
from .routes import Sizes

_ALONE = Ring.alone()


# A graph break on purpose: plans, checks and messages are no work for a compiler, and kernels are compiled already.
@torch.compiler.disable(reason="ring_attention talks to other ranks and calls kernels that need no compiling")
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern,
    ring: Ring | None = None,
    layout: SequenceLayout | None = None,
    causal: bool = True,
    scale: float | None = None,
    documents: Sequence[Sequence[tuple[int, int]]] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention by `pattern` over rows whose tokens are sharded over the ranks of `ring`; see `Pattern` for the formula.

    Args:
        q: [B, H, n, D], this rank's tokens in the order of `layout.positions(ring.rank)`.
        k: [B, Hkv, n, D]; H is a multiple of Hkv, and query head h reads key/value head h // (H / Hkv).
        v: [B, Hkv, n, Dv].
        pattern: which keys a query sees.
        ring: the ranks that share the rows; None for this process alone.
        layout: how the rows are divided; None for `ring.layout_for(n * ring.world_size, pattern)`, rows without padding.
        causal: whether a query sees only itself and earlier keys.
        scale: factor of the scores; None for D ** -0.5.
        documents: per batch row, the (start, stop) in the whole row of each of its documents, ascending; tokens in none
            are padding. None for one document of `layout.seq_len` tokens a row.
        return_lse: whether to return the log-sum-exp of each query's scores too.

    Returns:
        out [B, H, n, Dv] in q's dtype, 0 for padding; with `return_lse` also lse [B, H, n], float32 (float64 for
        float64 inputs), -inf for padding and without a gradient.

    Raises:
        ValueError: tensors, documents or layouts that do not fit each other, or ranks that disagree; on every rank,
            before anything is computed.
    """
    ring = _ALONE if ring is None else ring
    problem: Problem | None = None
    error: Exception | None = None
    try:
        problem = _problem(q, k, v, pattern, ring, layout, causal, documents)
    except (ValueError, NotImplementedError) as refused:
        error = refused
    scale = q.shape[-1] ** -0.5 if scale is None and isinstance(q, Tensor) and q.dim() else scale
    if ring.world_size > 1:
        described = {} if problem is None else _describe(problem, q, v, ring, scale)
        ring.agree_cheaply(described, error, q.device if isinstance(q, Tensor) else torch.device("cpu"))
    if error is not None:
        raise error
    assert problem is not None
    assert scale is not None
    kernel = choose_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1]).kernel
    widths = q.shape[-1] + v.shape[-1]
    sizes = Sizes(widths * q.element_size(), widths * accumulation_dtype(q.dtype).itemsize)
    transport = ring._transport_for(problem, sizes, q.device)
    out, lse = RingAttention.apply(q, k, v, transport, kernel, scale)
    return (out, lse) if return_lse else out


def _describe(problem: Problem, q: Tensor, v: Tensor, ring: Ring, scale: float | None) -> dict[str, Any]:
    """What all ranks must have in common, by the names that users know."""
    return {
        "the shape of q, (B, H, n, D)": tuple(q.shape),
        "the number of key/value heads": problem.num_kv_heads,
        "the width of v": v.shape[-1],
        "dtype": q.dtype,
        "pattern": problem.pattern,
        "layout": problem.layout,
        "transport": ring.transport,
        "causal": problem.causal,
        "scale": scale,
        "documents": problem.documents,
    }


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    ring: Ring,
    layout: SequenceLayout | None,
    causal: bool,
    documents: Sequence[Sequence[tuple[int, int]]] | None,
) -> Problem:
    """The checked description of a call.

    Raises:
        ValueError: whatever does not fit.
    """
    if not isinstance(pattern, Pattern):
        raise ValueError(f"ring_attention: pattern must be a Pattern, got {pattern!r}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            what = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"ring_attention: {name} must be a tensor [batch, heads, tokens, head size], got {what}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise ValueError(f"ring_attention: every size must be at least 1, got {shapes}")
    if len({x.dtype for x in (q, k, v)}) > 1 or len({x.device for x in (q, k, v)}) > 1:
        got = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"ring_attention: q, k and v must have one dtype and one device, got {got}")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"ring_attention: batch and key/value head counts and tokens must be equal, got {shapes}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"ring_attention: as many query tokens as key tokens are expected, got {q.shape[2]} and {k.shape[2]}: {shapes}"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(
            f"ring_attention: q and k must have one head size, got {q.shape[3]} and {k.shape[3]}: {shapes}"
        )
    choose_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1])
    n = q.shape[2]
    layout = ring.layout_for(n * ring.world_size, pattern) if layout is None else layout
    ring._check_layout(layout)
    if n != layout.local_len:
        raise ValueError(
            f"ring_attention: {layout} gives each rank {layout.padded_len} / {layout.world_size} = {layout.local_len} "
            f"tokens, got {n}: shard whole rows of {layout.seq_len} tokens with ring.shard(tensor, layout)"
        )
    whole: Documents = (((0, layout.seq_len),),) * q.shape[0]
    if documents is not None:
        try:
            whole = tuple(tuple((index(start), index(stop)) for start, stop in row) for row in documents)
        except (TypeError, ValueError):
            raise ValueError(
                f"ring_attention: documents must be a list of (start, stop) for each batch row, got {documents!r}"
            ) from None
        if len(whole) != q.shape[0]:
            raise ValueError(
                f"ring_attention: documents must have one list a batch row, got {len(whole)} for {q.shape[0]}"
            )
    return Problem(pattern, layout, whole, q.shape[1], k.shape[1], bool(causal))
