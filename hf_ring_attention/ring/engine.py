"""The loop over steps: exact attention over all that a plan's tiles cover, forward and backward."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..compute.kernel import Kernel, Saved
from ..compute.merge import accumulation_dtype, add_sinks, sinks_grad, without_autocast
from ..transport.heads import Finish, HeadsTransport

#: dq, dk, dv, and the gradient of sinks, if there are any.
AllGradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


#: out, lse, and the tensors beside inputs and results that the backward pass needs.
ForwardResults = tuple[Tensor, Tensor, list[Tensor]]


@dataclass(frozen=True, eq=False)
class Execution:
    """The parts that execute a planned call."""

    transport: Any  # a Transport, or a HeadsTransport
    kernel: Kernel
    scale: float

    @cached_property
    def takes_views(self) -> tuple[bool, bool]:
        """Whether queries may be views, and whether keys and values may be; keys that may be sent are contiguous."""
        transport = self.transport
        if isinstance(transport, HeadsTransport) or (transport.alone is not None and transport.alone.takes_views):
            return True, True
        return transport.alone is None and all(work.takes_views for work in transport.works), False

    def laid_out(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v, contiguous if the work takes no views.

        Views that are saved would keep more than themselves, and backward would copy them again.
        """
        of_queries, of_keys = self.takes_views
        k, v = (k, v) if of_keys else (k.contiguous(), v.contiguous())
        return q if of_queries else q.contiguous(), k, v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, with_lse: bool = False) -> ForwardResults:
        """q [B, H, n, D], k [B, Hkv, n, D], v [B, Hkv, n, Dv] of this rank -> out [B, H, n, Dv], lse [B, H, n].

        The backward pass needs only q, k, v, out and lse. By the heads transport it needs these tensors of each piece of the
        heads instead, so that it moves only gradients; the lse that is returned is empty without `with_lse`.
        """
        if isinstance(self.transport, HeadsTransport):
            out, lse, passes = _heads_forward(q, k, v, sinks, self, with_lse)
            return out, lse, [*itertools.chain.from_iterable(passes)]
        *_, out, lse = forward_pass(q, k, v, sinks, self)
        return out, lse, []

    def backward(self, dout: Tensor, passes: list[Saved], sinks: Tensor | None) -> AllGradients:
        """Returns dq, dk and dv, in the accumulation dtype or the dtype of q, and the gradient of sinks, if there are any."""
        if isinstance(self.transport, HeadsTransport):
            return _heads_backward(dout, passes, sinks, self)
        return backward_pass(dout, passes[0], sinks, self)


def _heads_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, execution: Execution, with_lse: bool
) -> tuple[Tensor, Tensor, list[Saved]]:
    """Returns out, lse and the results of each piece of the heads; the next piece arrives and the last one leaves meanwhile."""
    transport: HeadsTransport = execution.transport
    passes: list[Saved] = []
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(q.shape[:3] if with_lse else 0, dtype=accumulation_dtype(q.dtype))
    leaving: Finish = list  # Nothing leaves yet.
    for piece, (queries, keys, values) in transport.in_turn("queries, keys and values", [q], [k, v]):
        of_piece = replace(execution, transport=transport.of_piece(piece))
        passes.append(forward_pass(queries, keys, values, transport.own_heads(piece, sinks), of_piece))
        results = [(passes[-1].out, out), (passes[-1].lse, lse)]
        leaving()
        leaving = transport.to_tokens(piece, "outputs", results[: 1 + with_lse], [])
    leaving()
    return out, lse, passes


def _heads_backward(dout: Tensor, passes: list[Saved], sinks: Tensor | None, execution: Execution) -> AllGradients:
    """Returns the gradients as `backward_pass`, piece after piece as `_heads_forward`."""
    transport: HeadsTransport = execution.transport
    dtype, (batch, _, tokens, _) = accumulation_dtype(dout.dtype), dout.shape
    dq = dout.new_empty(*dout.shape[:3], passes[0].q.shape[-1])
    dk, dv = (
        dout.new_zeros(batch, transport.num_kv_heads, tokens, x.shape[-1], dtype=dtype)
        for x in (passes[0].k, passes[0].v)
    )
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    leaving: Finish = list
    for (piece, [dout_of_heads]), saved in zip(transport.in_turn("gradients of outputs", [dout], []), passes):
        of_piece = replace(execution, transport=transport.of_piece(piece))
        *grads, own_dsinks = backward_pass(dout_of_heads, saved, transport.own_heads(piece, sinks), of_piece)
        target = transport.own_heads(piece, dsinks)
        if target is not None and own_dsinks is not None:
            target.copy_(own_dsinks)
        leaving()
        own = [grad.to(dout.dtype) for grad in grads]
        leaving = transport.to_tokens(piece, "gradients", [(own[0], dq)], [(own[1], dk), (own[2], dv)])
    leaving()
    return dq, dk, dv, dsinks


def forward_pass(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, execution: Execution) -> Saved:
    """Returns the attention over all steps of the transport; out has the dtype of q."""
    transport, kernel, scale = execution.transport, execution.kernel, execution.scale
    q, k, v = execution.laid_out(q, k, v)
    with without_autocast(q):
        if transport.alone is not None:
            out, lse = transport.alone.forward(kernel, q, k, v, scale)
            if out.untyped_storage().nbytes() > out.nbytes:  # The kernel padded values that are narrower than keys.
                out = out.contiguous()
        else:
            dtype = accumulation_dtype(q.dtype)
            total = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=dtype)
            lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
            for step in transport.steps(k, v):
                step.work.forward(kernel, q, step.keys, step.values, scale, (total, lse))
                del step  # Drop its payload before the next one arrives: only two buffers exist.
            out = total.to(q.dtype)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        return Saved(q, k, v, out, lse)


def backward_pass(dout: Tensor, saved: Saved, sinks: Tensor | None, execution: Execution) -> AllGradients:
    """Returns dq, dk and dv, in the accumulation dtype or the dtype of q, and the gradient of sinks, if there are any."""
    transport, kernel, scale = execution.transport, execution.kernel, execution.scale
    saved = Saved(*execution.laid_out(*saved[:3]), *saved[3:])  # Graphs save what they got.
    with without_autocast(dout):
        if transport.alone is not None:
            dq, dk, dv = transport.alone.backward(kernel, dout, saved, scale)
        else:
            dtype = accumulation_dtype(dout.dtype)
            dq, dk, dv = (dout.new_zeros(x.shape, dtype=dtype) for x in saved[:3])
            dout = dout.contiguous()
            for step in transport.steps(saved.k, saved.v, (dk, dv)):
                of_step = saved._replace(k=step.keys, v=step.values)
                step.work.backward(kernel, dout, of_step, scale, (dq, *step.gradients))
                del step, of_step
        return dq, dk, dv, None if sinks is None else sinks_grad(dout, saved.out, saved.lse, sinks)
