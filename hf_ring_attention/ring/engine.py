"""The loop over steps, and the autograd functions: exact attention over all that a plan's tiles cover."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compute.binding import BoundBatch
from ..compute.kernel import Kernel, KernelCall, Saved
from ..compute.merge import accumulation_dtype, add_sinks, sinks_grad, without_autocast
from ..transport.heads import Finish, HeadsTransport
from ..transport.transports import Step

#: Tiles whose rows are copied take at most about 1 / PART of the queries at once. Backward holds more tensors than forward.
FORWARD_PART, BACKWARD_PART = 2, 8


class Execution(NamedTuple):
    """The parts that execute a planned call; `before_backward`, the first act of backward, compares the ranks' calls."""

    transport: Any  # a Transport, or a HeadsTransport for HeadsAttention
    kernel: Kernel
    scale: float
    before_backward: Callable[[], None] | None = None


class RingAttention(torch.autograd.Function):
    """q [B, H, n, D], k [B, Hkv, n, D], v [B, Hkv, n, Dv] of this rank -> out [B, H, n, Dv], lse [B, H, n].

    `sinks`, [H] or None, are logits of a column of value 0 in every softmax (`merge.add_sinks`).
    The function saves q, k, v, sinks, out and lse only. The backward of a tile with the merged out and lse is its exact
    share of the gradient, so backward visits the tiles again and needs nothing else from forward. lse has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, execution: Execution
    ) -> tuple[Tensor, Tensor]:
        saved = forward_pass(q, k, v, sinks, execution)
        ctx.save_for_backward(*saved, sinks)
        ctx.execution = execution
        ctx.mark_non_differentiable(saved.lse)
        return saved.out, saved.lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        if ctx.execution.before_backward is not None:
            ctx.execution.before_backward()
        *grads, dsinks = backward_pass(dout, Saved(*saved), sinks, ctx.execution)
        return *(grad.to(dout.dtype) for grad in grads), dsinks, None


class HeadsAttention(torch.autograd.Function):
    """The same by the heads transport: each rank computes some heads of the whole sequence, one piece of heads after another.

    While a piece is computed, the next one arrives and the previous one leaves. The function saves a piece's q, k, v, out and
    lse as they were computed, so that backward moves gradients alone. The lse that it returns is empty without `with_lse`.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, execution: Execution, with_lse: bool = False
    ) -> tuple[Tensor, Tensor]:
        transport: HeadsTransport = execution.transport
        passes = []
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = q.new_empty(q.shape[:3] if with_lse else 0, dtype=accumulation_dtype(q.dtype))
        leaving: Finish = list  # Nothing leaves yet.
        for piece, whole in transport.in_turn("queries, keys and values", [q], [k, v]):
            of_piece = execution._replace(transport=transport.of_piece(piece))
            saved = forward_pass(whole[0], whole[1], whole[2], transport.own_heads(piece, sinks), of_piece)
            passes.append(saved)
            leaving()
            leaving = transport.to_tokens(piece, "outputs", [(saved.out, out), (saved.lse, lse)][: 1 + with_lse], [])
        leaving()
        ctx.save_for_backward(sinks, *itertools.chain.from_iterable(passes))
        ctx.execution, ctx.shapes = execution, (q.shape, k.shape, v.shape)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        sinks, *saved = ctx.saved_tensors
        execution: Execution = ctx.execution
        transport = execution.transport
        if execution.before_backward is not None:
            execution.before_backward()
        size = len(saved) // len(transport.binding.pieces)
        passes = [Saved(*saved[start : start + size]) for start in range(0, len(saved), size)]
        dtype = accumulation_dtype(dout.dtype)
        dq = dout.new_empty(ctx.shapes[0])
        dk, dv = (dout.new_zeros(shape, dtype=dtype) for shape in ctx.shapes[1:])
        dsinks = None if sinks is None else torch.zeros_like(sinks)
        leaving: Finish = list
        for (piece, [dout_of_heads]), of_forward in zip(transport.in_turn("gradients of outputs", [dout], []), passes):
            of_piece = execution._replace(transport=transport.of_piece(piece))
            own_sinks = transport.own_heads(piece, sinks)
            *grads, dsinks_of_heads = backward_pass(dout_of_heads, of_forward, own_sinks, of_piece)
            if dsinks is not None:
                transport.own_heads(piece, dsinks).copy_(dsinks_of_heads)
            leaving()
            own = [grad.to(dout.dtype) for grad in grads]
            leaving = transport.to_tokens(piece, "gradients", [(own[0], dq)], [(own[1], dk), (own[2], dv)])
        leaving()
        return dq, dk.to(dout.dtype), dv.to(dout.dtype), dsinks, None, None


def forward_pass(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, execution: Execution) -> Saved:
    """Returns the attention over all steps of the transport; out has the dtype of q."""
    transport, kernel, scale, _ = execution
    with without_autocast(q):
        whole = transport.whole
        if whole is not None:
            out, lse = kernel.forward(q, k, v, KernelCall(whole.shape, scale))
        else:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            dtype = accumulation_dtype(q.dtype)
            total = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=dtype)
            lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
            for step in transport.steps(k, v):
                _forward_step(step, q, total, lse, kernel, scale)
                del step  # Drop its payload before the next one arrives: only two buffers exist.
            out = total.to(q.dtype)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        return Saved(q, k, v, out, lse)


def backward_pass(
    dout: Tensor, saved: Saved, sinks: Tensor | None, execution: Execution
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns dq, dk and dv, in the accumulation dtype or the dtype of q, and the gradient of sinks, if there are any."""
    transport, kernel, scale, _ = execution
    with without_autocast(dout):
        whole = transport.whole
        if whole is not None:
            dq, dk, dv = kernel.backward(dout, saved, KernelCall(whole.shape, scale))
        else:
            dout, dtype = dout.contiguous(), accumulation_dtype(dout.dtype)
            dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in saved[:3])
            for step in transport.steps(saved.k, saved.v, (dk, dv)):
                _backward_step(step, dout, saved, dq, kernel, scale)
                del step
        return dq, dk, dv, None if sinks is None else sinks_grad(dout, saved.out, saved.lse, sinks)


def _forward_step(step: Step, q: Tensor, total: Tensor, lse: Tensor, kernel: Kernel, scale: float) -> None:
    for part in _parts(step.batches, q, FORWARD_PART):
        queries, keys = part.queries, part.keys
        views = queries.view(total), queries.view(lse)
        totals = None if views[0] is None or views[1] is None else (views[0], views[1])
        call = KernelCall(part.shape, scale, part.fold_size, part.lengths)
        results = kernel.forward(queries.take(q), keys.take(step.keys), keys.take(step.values), call, totals)
        if totals is None:
            queries.merge_(total, lse, *results)


def _backward_step(step: Step, dout: Tensor, saved: Saved, dq: Tensor, kernel: Kernel, scale: float) -> None:
    assert step.gradients is not None
    dkeys, dvalues = step.gradients
    for part in _parts(step.batches, saved.q, BACKWARD_PART):
        queries, keys = part.queries, part.keys
        views = queries.view(dq), keys.view(dkeys), keys.view(dvalues)
        sums = None if views[0] is None or views[1] is None or views[2] is None else (views[0], views[1], views[2])
        of_tiles = Saved(
            queries.take(saved.q),
            keys.take(step.keys),
            keys.take(step.values),
            queries.take(saved.out),
            queries.take_lse(saved.lse),
        )
        call = KernelCall(part.shape, scale, part.fold_size, part.lengths)
        tile_dq, tile_dk, tile_dv = kernel.backward(queries.take(dout), of_tiles, call, sums)
        if sums is None:
            queries.add_(dq, tile_dq)
            keys.add_(dkeys, tile_dk)
            keys.add_(dvalues, tile_dv)


def _parts(batches: tuple[BoundBatch, ...], q: Tensor, part: int) -> Iterator[BoundBatch]:
    """Yields parts that copy at most about 1 / `part` of the queries; parts of few rows would waste time on calls."""
    rows_at_once = max(1 << 14, q.shape[0] * q.shape[1] * q.shape[2] // part)
    for batch in batches:
        yield from batch.parts(rows_at_once)
