"""The operators of torch.library behind every call of attention: one forward, one for its backward pass.

A graph of torch.compile holds only tensors and constants. So a call travels by its number, a tensor [1] on the CPU, and the
operators look up its plan, its ring and its kernel (`CALLS`). Selective checkpointing keeps the results of the forward
operator, and the backward pass then repeats neither attention nor its messages.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ..compute.kept import kept_results
from ..compute.kernel import Saved
from ..compute.merge import accumulation_dtype
from .engine import ForwardResults

_LIBRARY = torch.library.Library("hf_ring_attention", "DEF")

#: Graph calls kept alive for a later backward pass.
_KEPT = 256

Named = TypeVar("Named")

#: The reason why no graph holds a call; torch.compile shows it at the graph break.
UNTRACEABLE = (
    "ring_dilated holds decoders of text in a compiled graph, without caches, the heads transport, or documents and layouts of "
    "one's own: others need fullgraph=False. It plans by the content of each batch and talks to other ranks, which no exported "
    "program can: export with attn_implementation='sdpa'"
)


def check_not_traced() -> None:
    """Refuses torch.export and torch.jit.trace, which would record one batch's plan for all."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        raise NotImplementedError(f"torch.export or torch.jit.trace was asked for: {UNTRACEABLE}")


def is_recorded(*tensors: Tensor | None) -> bool:
    """Returns whether a backward pass will come; then it comes on all ranks."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class Numbered(Generic[Named]):
    """Values by their numbers. It keeps alive only the last values that graphs name."""

    def __init__(self, missing: str) -> None:
        self._missing = missing
        self._values: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._kept: deque[Any] = deque(maxlen=_KEPT)

    def add(self, value: Named, keep: bool = False) -> int:
        """Returns a new number for a value."""
        number = next(self._numbers)
        self._values[number] = value
        if keep:
            self._kept.append(value)
        return number

    def __getitem__(self, number: int) -> Named:
        value: Named | None = self._values.get(number)
        if value is None:
            raise RuntimeError(self._missing)
        return value


def define(
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any] | None,
    backward: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
) -> None:
    """Defines an operator `hf_ring_attention::name`, on all devices.

    Args:
        fake: returns tensors of the results' shapes, for graphs; None for an operator that no graph holds.
        backward: returns the gradients of the inputs, by what `save` has left in the context.
    """
    name = schema.partition("(")[0]
    # A replayed CUDA graph would repeat the plan of the first batch, and send no messages.
    _LIBRARY.define(schema, tags=(torch.Tag.cudagraph_unsafe,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"hf_ring_attention::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"hf_ring_attention::{name}", backward, setup_context=save, lib=_LIBRARY)
    # Made by two threads at once, as by the ranks of a simulation, torch's cache would point to one that is freed.
    assert getattr(torch.ops.hf_ring_attention, name).default


class GraphLayer(NamedTuple):
    """The constants of a call inside a graph. The operators have few arguments for them, since each makes all calls slower."""

    text: str = ""  # the number of a layer's module, and the names of its other arguments; empty outside of graphs
    numbers: tuple[float, ...] = ()  # whether gradients are recorded, dropout, scaling, window, softcap; NaN for None

    @property
    def recorded(self) -> bool:
        """Whether the graph records gradients."""
        return bool(self.numbers[0])


#: What tensors name: calls (`Planned`, `CallsInGraph`), and the facts of masks.
CALLS: Numbered[Any] = Numbered(
    "this mask or graph belongs to a forward pass that is over, or to one of too many that wait: call the model again"
)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Tensor, number: int, text: str, numbers: list[float]
) -> tuple[Tensor, Tensor]:
    out, lse, _ = CALLS[int(call)].forward(q, k, v, sinks, GraphLayer(text, tuple(numbers)))
    return (out.contiguous(), lse.contiguous()) if numbers else (out, lse)  # Graphs are made for these strides.


def _attend_by_heads(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Tensor, number: int, text: str, numbers: list[float]
) -> ForwardResults:
    results: ForwardResults = CALLS[int(call)].forward(q, k, v, sinks, GraphLayer(text, tuple(numbers)))
    return results


def _attend_backward(
    dout: Tensor, saved: list[Tensor], sinks: Tensor | None, call: Tensor, number: int, text: str, numbers: list[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    passes = [Saved(*tensors) for tensors in zip(*[iter(saved)] * 5)]
    *grads, dsinks = CALLS[int(call)].backward(dout, passes, sinks, number, GraphLayer(text, tuple(numbers)))
    dq, dk, dv = (grad if grad.dtype == dout.dtype else grad.to(dout.dtype) for grad in grads)
    if numbers:
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    return dq, dk, dv, dout.new_empty(0) if dsinks is None else dsinks


def _fake_attend(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    check_not_traced()
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


def _fake_attend_backward(dout: Tensor, saved: list[Tensor], sinks: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    grads = (x.new_empty(x.shape, dtype=dout.dtype) for x in saved[:3])
    return *grads, dout.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def check_first_derivative() -> None:
    """Refuses a backward pass that is recorded itself: the operators have no second derivative."""
    if torch.is_grad_enabled():
        raise RuntimeError("ring_dilated has no second derivative: leave out create_graph=True, or use 'eager'")


def _save_call(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    (q, k, v, sinks, call, *ctx.constants), (out, lse, *saved) = inputs, output
    ctx.mark_non_differentiable(lse, *itertools.chain(*saved))
    ctx.call, ctx.by_heads, in_graph = None, bool(saved), type(call) is not Tensor
    if not in_graph:  # The call of this very forward pass, kept alive: a recomputation makes another call.
        ctx.call, ctx.source = call, CALLS[int(call)]
    ctx.save_for_backward(sinks, *(saved[0] if saved else (q, k, v, out, lse)), *[call] * in_graph)


def _backward(ctx: Any, dout: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    check_first_derivative()
    sinks, *saved = ctx.saved_tensors
    call = saved.pop() if ctx.call is None else ctx.call
    *grads, dsinks = torch.ops.hf_ring_attention.attend_backward.default(dout, saved, sinks, call, *ctx.constants)
    numbers: Any = [] if ctx.by_heads else None  # torch asks for the structure of lists if a result is a list
    return *grads, None if sinks is None else dsinks, None, None, None, numbers


_QUERY = "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor call, int number, str text, float[] numbers)"
_GRADIENTS = "(Tensor dout, Tensor[] saved, Tensor? sinks, Tensor call, int number, str text, float[] numbers)"
define(f"attend{_QUERY} -> (Tensor, Tensor)", _attend, _fake_attend, _backward, _save_call)
define(f"attend_by_heads{_QUERY} -> (Tensor, Tensor, Tensor[])", _attend_by_heads, None, _backward, _save_call)
define(f"attend_backward{_GRADIENTS} -> (Tensor, Tensor, Tensor, Tensor)", _attend_backward, _fake_attend_backward)


# ---- checkpointing that keeps attention


def keep_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Makes checkpointing keep the results of attention: backward recomputes a layer without attention and its messages.

    It is a `context_fn` of `torch.utils.checkpoint` (use_reentrant=False). Beside a layer's input, checkpointing then keeps the
    output [B, n, H, Dv] and the log-sum-exp [B, H, n] of its attention on this rank, about one more tensor of hidden states.

    Returns:
        The contexts of the forward pass and of its recomputation.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.randn(1, 2, 16, 8, requires_grad=True)
        >>> def layer(x):
        ...     return ra.ring_attention(x, x, x, pattern="window:4").sin()
        >>> checkpoint(layer, x, use_reentrant=False, context_fn=ra.keep_attention).sum().backward()
        >>> kept, x.grad = x.grad, None
        >>> layer(x).sum().backward()
        >>> torch.equal(kept, x.grad)
        True
    """
    names = torch.ops.hf_ring_attention
    operators = [names.attend.default, names.attend_by_heads.default]
    if torch.compiler.is_compiling():  # Graphs take only torch's contexts, which do less (`kept_results`).
        contexts: Any = create_selective_checkpoint_contexts(operators)
        return contexts
    return kept_results([*operators, names.begin_call.default])  # A compiled layer then names the same call again.
