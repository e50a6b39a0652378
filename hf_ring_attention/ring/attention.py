"""`ring_attention` and `cached_attention`: the calls, checked on every rank before anything is computed on any."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from ..compute.binding import bind_held
from ..compute.kernels import choose_kernel
from ..compute.merge import accumulation_dtype, add_sinks, merge_
from ..plan.layouts import SequenceLayout
from ..plan.patterns import Pattern, as_pattern
from ..plan.problem import Documents, HeldKeys, Problem
from ..plan.traffic import RowBytes
from ..transport.agreement import Agreement
from ..transport.transports import LocalTransport
from .engine import RingAttention
from .ring import Ring

_ALONE = Ring.alone()

#: Why no graph holds this attention; torch.compile shows it where it breaks the graph.
UNTRACEABLE = (
    "ring_dilated plans by the content of each batch and talks to other ranks, which no graph can hold: export a model with "
    "attn_implementation='sdpa'; torch.compile takes it with fullgraph=False, and breaks the graph here"
)


def check_not_traced() -> None:
    """Refuses torch.export and torch.jit.trace, which would record one batch's plan for all.

    Raises:
        NotImplementedError: one of them is under way.
    """
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        raise NotImplementedError(f"torch.export or torch.jit.trace was asked for: {UNTRACEABLE}")


# A graph break on purpose: plans, checks and messages are no work for a compiler, and kernels are compiled already.
@torch.compiler.disable(reason=UNTRACEABLE)
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | str,
    ring: Ring | None = None,
    layout: SequenceLayout | None = None,
    causal: bool = True,
    scale: float | None = None,
    documents: Sequence[Sequence[tuple[int, int]]] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention by `pattern` over rows whose tokens are sharded over the ranks of `ring`; see `Pattern` for the formula.

    Args:
        q: [B, H, n, D], this rank's tokens in the order of `layout.positions(ring.rank)`.
        k: [B, Hkv, n, D]; H is a multiple of Hkv, and query head h reads key/value head h // (H / Hkv).
        v: [B, Hkv, n, Dv].
        pattern: which keys a query sees; a `Pattern` or its text.
        ring: the ranks that share the rows; None for this process alone.
        layout: how the rows are divided; None for `ring.layout_for(n * ring.world_size, pattern)`, rows without padding.
        causal: whether a query sees only itself and earlier keys.
        scale: factor of the scores; None for D ** -0.5.
        documents: per batch row, the (start, stop) in the whole row of each of its documents, ascending; tokens in none
            are padding. None for one document of `layout.seq_len` tokens a row.
        softcap: scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118); None leaves them.
        sinks: [H] logits, one a query head, of one more column of the softmax, whose value is 0 (gpt-oss,
            arXiv 2508.10925). Its gradient is of this rank's queries, as a parameter's is.
        return_lse: whether to return the log-sum-exp of each query's scores too.

    Returns:
        out [B, H, n, Dv] in q's dtype, 0 for padding; with `return_lse` also lse [B, H, n], float32 (float64 for
        float64 inputs), -inf for padding and without a gradient.

    Raises:
        ValueError: tensors, documents or layouts that do not fit each other, or ranks that disagree; on every rank,
            before anything is computed.
    """
    check_not_traced()
    ring = _ALONE if ring is None else ring
    with ring.agreement(_device_of_call(q)) as call:
        pattern = as_pattern(pattern, "ring_attention")
        _check_tensors(q, k, v, softcap, sinks)
        problem = _problem(q, k, pattern, ring, layout, causal, documents)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if ring.world_size > 1:
            _describe(call, q, k, v, ring, problem, scale, softcap, sinks)
    kernel = choose_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1], softcap).kernel
    widths = q.shape[-1] + v.shape[-1]
    sizes = RowBytes(widths * q.element_size(), widths * accumulation_dtype(q.dtype).itemsize)
    transport = ring.transport_for(problem, sizes, q.device)
    before_backward = ring.backward_check(q.device) if _recorded(q, k, v, sinks) else None
    out, lse = RingAttention.apply(q, k, v, sinks, transport, kernel, scale, before_backward)
    return (out, lse) if return_lse else out


@torch.compiler.disable(reason=UNTRACEABLE)
def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | str,
    held: HeldKeys,
    ring: Ring | None = None,
    causal: bool = True,
    scale: float | None = None,
    documents: Sequence[Sequence[tuple[int, int]]] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a row's last tokens to all of it, with keys from a cache: only keys that are visible are touched.

    On a ring every rank comes with the same queries and its own part of the keys; the parts' results are merged, so
    what moves is one row of (out, lse) a query and rank, whatever the length of the cache.

    Args:
        q: [B, H, m, D], the last m = `held.num_queries` tokens of the row.
        k: [B, Hkv, `held.num_rows`, D], and v: [B, Hkv, `held.num_rows`, Dv]: this rank's cache, the m tokens included.
        held: which tokens of the row the rows of k and v are. Each token is held by one rank.
        documents: as in `ring_attention`, in the row of `held.row_len` tokens.

    Returns:
        out [B, H, m, Dv] in q's dtype; on a ring without a gradient.

    Raises:
        ValueError: tensors or documents that do not fit `held`, or a gradient asked of a ring.
    """
    check_not_traced()
    ring = _ALONE if ring is None else ring
    with ring.agreement(_device_of_call(q)) as call:
        pattern = as_pattern(pattern, "cached_attention")
        _check_tensors(q, k, v, softcap, sinks)
        if (q.shape[2], k.shape[2]) != (held.num_queries, held.num_rows):
            raise ValueError(
                f"cached_attention: expected {held.num_queries} queries and {held.num_rows} key rows, got "
                f"{q.shape[2]} and {k.shape[2]}"
            )
        if ring.world_size > 1 and _recorded(q, k, v):
            raise ValueError("cached_attention: sharded keys have no gradient here: use torch.no_grad()")
        whole = _documents_of_call(documents, held.row_len, q.shape[0])
        problem = Problem(
            pattern=pattern,
            layout=held.layout,
            documents=whole,
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            causal=bool(causal),
            held=held,
        )
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if ring.world_size > 1:
            _describe(call, q, k, v, ring, problem, scale, softcap, sinks)
    kernel = choose_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1], softcap).kernel
    transport = LocalTransport(ring.bindings.of(bind_held, problem, q.device))
    if ring.world_size == 1:
        return RingAttention.apply(q, k, v, sinks, transport, kernel, scale)[0]
    out, lse = RingAttention.apply(q, k, v, None, transport, kernel, scale)
    # All ranks merge all parts in one order, so that all go on with the same bits.
    parts = ring.gather(torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1))
    total, total_lse = parts[0][..., :-1].contiguous(), parts[0][..., -1].contiguous()
    for part in parts[1:]:
        merge_(total, total_lse, part[..., :-1], part[..., -1])
    return (total if sinks is None else add_sinks(total, total_lse, sinks)[0]).to(q.dtype)


def _device_of_call(q: Any) -> torch.device:
    """Where a call computes, also where q is no tensor and the call is about to be refused."""
    return q.device if isinstance(q, Tensor) else torch.device("cpu")


def _describe(
    call: Agreement,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Ring,
    problem: Problem,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Names what must be equal on all ranks in a call of attention."""
    call.values = {
        "the call": "a forward pass of attention",
        "the shape of q, (B, H, n, D)": tuple(q.shape),
        "the number of key/value heads": problem.num_kv_heads,
        "the width of v": v.shape[-1],
        "dtype": q.dtype,
        "pattern": problem.pattern,
        "layout": problem.layout,
        "whether keys come from a cache": problem.held is not None,
        "transport": ring.transport,
        "settings of the ring": ring.settings,
        "causal": problem.causal,
        "scale": scale,
        "softcap": softcap,
        "whether sinks are given": sinks is not None,
        "whether gradients are recorded": _recorded(q, k, v, sinks),
        "documents": problem.documents,
    }


def _recorded(*tensors: Tensor | None) -> bool:
    """Whether a backward pass will come, in which all ranks take part or none."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, softcap: float | None, sinks: Tensor | None) -> None:
    """Raises ValueError for tensors that do not fit each other."""
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
    if q.shape[3] != k.shape[3]:
        raise ValueError(
            f"ring_attention: q and k must have one head size, got {q.shape[3]} and {k.shape[3]}: {shapes}"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"ring_attention: softcap must be above 0, or None, got {softcap!r}")
    if sinks is not None and (not isinstance(sinks, Tensor) or sinks.shape != q.shape[1:2] or sinks.device != q.device):
        got = f"{tuple(sinks.shape)} on {sinks.device}" if isinstance(sinks, Tensor) else repr(sinks)
        raise ValueError(
            f"ring_attention: sinks must be [{q.shape[1]}], a logit a query head, on q's device, got {got}"
        )
    choose_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1], softcap)


def _problem(
    q: Tensor,
    k: Tensor,
    pattern: Pattern,
    ring: Ring,
    layout: SequenceLayout | None,
    causal: bool,
    documents: Sequence[Sequence[tuple[int, int]]] | None,
) -> Problem:
    """The checked description of a call of `ring_attention`.

    Raises:
        ValueError: whatever does not fit.
    """
    n = q.shape[2]
    if n != k.shape[2]:
        raise ValueError(
            f"ring_attention: as many query tokens as key tokens are expected, got {n} and {k.shape[2]}: "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}"
        )
    layout = ring.layout_for(n * ring.world_size, pattern) if layout is None else layout
    ring.check_layout(layout)
    if n != layout.local_len:
        raise ValueError(
            f"ring_attention: {layout} gives each rank {layout.padded_len} / {layout.world_size} = {layout.local_len} "
            f"tokens, got {n}: shard whole rows of {layout.seq_len} tokens with ring.shard(tensor, layout)"
        )
    whole = _documents_of_call(documents, layout.seq_len, q.shape[0])
    return Problem(
        pattern=pattern,
        layout=layout,
        documents=whole,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        causal=bool(causal),
        settings=ring.settings,
    )


def _documents_of_call(documents: Sequence[Sequence[tuple[int, int]]] | None, seq_len: int, batch: int) -> Documents:
    if documents is None:
        return (((0, seq_len),),) * batch
    try:
        whole = tuple(tuple((index(start), index(stop)) for start, stop in row) for row in documents)
    except (TypeError, ValueError):
        raise ValueError(
            f"ring_attention: documents must be a list of (start, stop) for each batch row, got {documents!r}"
        ) from None
    if len(whole) != batch:
        raise ValueError(f"ring_attention: documents must have one list a batch row, got {len(whole)} for {batch}")
    return whole
