"""`ring_attention`, eagerly and in graphs of torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ..compute.kernel import Saved
from ..plan.call import Call
from ..plan.layouts import SequenceLayout
from ..plan.patterns import Pattern, as_pattern
from .engine import AllGradients, ForwardResults
from .operator import CALLS, UNTRACEABLE, GraphLayer, check_not_traced, define
from .planned import Planned, planned_call
from .ring import Ring, ring_alone
from .shards import RINGS

#: Whether the objects among the arguments of a call can be constants of a graph; older releases of torch refuse them.
_OBJECTS_ARE_CONSTANTS = TorchVersion(torch.__version__) >= TorchVersion("2.13")


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
    head_shard: tuple[int, int] = (0, 1),
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention by `pattern` over sequences that are sharded over the ranks of `ring`; `Pattern` has the formula.

    Args:
        q: [B, H, n, D], this rank's tokens in the order of `layout.positions(ring.rank)`.
        k: [B, Hkv, n, D]; H is a multiple of Hkv, and query head h reads key/value head h // (H / Hkv).
        v: [B, Hkv, n, Dv].
        pattern: the keys that a query sees: a `Pattern` or its text.
        ring: the ranks that share the sequences; None for this process.
        layout: the division of the sequences; None for `ring.layout_for(n * ring.world_size, pattern)`, without padding.
        causal: whether a query sees only itself and earlier keys.
        scale: factor of the scores, above 0; None for D ** -0.5.
        documents: for each batch row the (start, stop) of its documents in the whole sequence, ascending; other tokens are
            padding. None for one document of `layout.seq_len` tokens in each row.
        softcap: scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118); None leaves them.
        sinks: [H] logits, one for each query head, of one more column of the softmax, whose value is 0 (gpt-oss,
            arXiv 2508.10925). Like a parameter's, their gradient comes from this rank's queries.
        head_shard: (i, t) if q, k and v have the i-th of t equal parts of the attention's heads (tensor parallelism). Phases
            and patterns by head go by the numbers of the heads among all.
        return_lse: whether to return the log-sum-exp of each query's scores too.

    Returns:
        out [B, H, n, Dv] in q's dtype, 0 for padding; with `return_lse` also lse [B, H, n], float32 (float64 for
        float64 inputs), -inf for padding and without a gradient.

    Raises:
        ValueError: tensors, documents or layouts that do not fit each other, or ranks that disagree; on every rank,
            before anything is computed.

    Example:
        >>> x = torch.randn(1, 4, 16, 8)
        >>> def attend(ring):
        ...     layout = ring.layout_for(16, "window:4")
        ...     shard = ring.shard(x, layout, dim=2)
        ...     return ring.unshard(ra.ring_attention(shard, shard, shard, pattern="window:4", ring=ring), layout, dim=2)
        >>> torch.allclose(ra.run_simulated(attend, 2)[0], ra.ring_attention(x, x, x, pattern="window:4"), atol=1e-5)
        True
    """
    arguments = pattern, ring, layout, causal, scale, documents, softcap, head_shard
    if not torch.compiler.is_dynamo_compiling():
        out, lse = _ring_attention(q, k, v, sinks, arguments, return_lse)
    elif (
        _OBJECTS_ARE_CONSTANTS and layout is None and documents is None and (ring is None or ring.transport != "heads")
    ):
        # Numbers that may change are factors of tensors: torch would make a graph for each other number.
        one = torch.ones((), dtype=torch.float64, device="cpu")
        scales = [None if x is None else one * x for x in (scale, softcap)]
        number = 0 if ring is None else ring.number
        call = torch.ops.hf_ring_attention.begin_call(q, number, _text_of(pattern), bool(causal), head_shard, *scales)
        out, lse = torch.ops.hf_ring_attention.attend(q, k, v, sinks, call, 0, "", [float(torch.is_grad_enabled())])
    else:  # Each division of rows would need a separate graph.
        out, lse = _ring_attention_at_a_break(q, k, v, sinks, arguments, return_lse)
    return (out, lse) if return_lse else out


def _ring_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arguments: tuple[Any, ...], return_lse: bool
) -> tuple[Tensor, Tensor]:
    check_not_traced()
    pattern, ring, *others = arguments
    return planned_call(ring or ring_alone(), q, k, v, sinks, pattern, *others, with_lse=return_lse)(q, k, v, sinks)


_ring_attention_at_a_break = torch.compiler.disable(_ring_attention, reason=UNTRACEABLE)


class CallsInGraph:
    """The calls of one run of a graph, which are checked and planned when they come; backward passes find them by value."""

    def __init__(self, check: Callable[..., Planned]) -> None:
        self._check, self._number = check, 0
        self._calls: dict[Any, tuple[Ring, Call]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: GraphLayer) -> ForwardResults:
        """Checks, plans and computes the operator."""
        planned = self._check(q, k, v, sinks, layer)
        if planned.call.recorded:
            self._number = self._number or planned.ring.calls.next_number()
            self._calls[(layer.text, q.shape, k.shape)] = planned.ring, planned.call
        return planned.forward(q, k, v, sinks, layer)

    def backward(
        self, dout: Tensor, saved: list[Saved], sinks: Tensor | None, number: int, layer: GraphLayer
    ) -> AllGradients:
        """Computes the backward operator."""
        ring, call = self._calls[(layer.text, saved[0].q.shape, saved[0].k.shape)]
        planned = ring.planned.find(call) or Planned(ring, call)  # Too many other calls may have come in between.
        return planned.backward(dout, saved, sinks, self._number, layer)


@torch.compiler.assume_constant_result
def _text_of(pattern: Pattern | str) -> str:
    return str(as_pattern(pattern, "ring_attention"))


def _begin_call(q: Tensor, ring: int, pattern: str, causal: bool, heads: list[int], *scales: Tensor | None) -> Tensor:
    """Returns the number of one run of a call of `ring_attention` in a graph."""
    scale, softcap = (None if x is None else float(x) for x in scales)
    of_call: Any = RINGS[ring] if ring else ring_alone()

    def check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: GraphLayer) -> Planned:
        options = None, causal, scale, None, softcap, (heads[0], heads[1])
        return planned_call(of_call, q, k, v, sinks, pattern, *options, recorded_in_graph=layer.recorded)

    return torch.tensor([CALLS.add(CallsInGraph(check), keep=True)])


define(
    "begin_call(Tensor q, int ring, str pattern, bool causal, int[] heads, Tensor? scale, Tensor? softcap) -> Tensor",
    _begin_call,
    lambda q, *others: torch.empty(1, dtype=torch.int64, device="cpu"),
)
