"""`ring_attention`: the call, checked on every rank before anything is computed on any."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.torch_version import TorchVersion

from ..compute.binding import bind_own
from ..compute.kernel import Saved
from ..compute.kernels import choose_kernel
from ..compute.merge import accumulation_dtype, add_sinks, merge_
from ..plan.kernel_choice import tile_kinds
from ..plan.layouts import SequenceLayout
from ..plan.patterns import Pattern, as_pattern
from ..plan.problem import HeldKeys, Problem, documents_of
from ..plan.traffic import RowBytes
from ..transport.agreement import Agreement
from ..transport.heads import HeadsTransport
from ..transport.transports import LocalTransport
from .engine import AllGradients, Execution, ForwardResults
from .operator import CALLS, UNTRACEABLE, GraphLayer, check_not_traced, define
from .planner import CallKey
from .ring import Ring, is_recorded, ring_alone
from .shards import RINGS

#: The name of a call of attention when ranks compare their calls, here or in a model that refuses its part.
FORWARD = "a forward pass of attention"

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
        ring: the ranks that share the sequences; None for this process alone.
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
    arguments = (pattern, ring, layout, causal, scale, documents, softcap, head_shard)
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
    else:  # Rows of their own would need a graph of their own.
        out, lse = _ring_attention_at_a_break(q, k, v, sinks, arguments, return_lse)
    return (out, lse) if return_lse else out


def _ring_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arguments: tuple[Any, ...], return_lse: bool
) -> tuple[Tensor, Tensor]:
    check_not_traced()
    return checked_call(q, k, v, sinks, Options(*arguments)._replace(with_lse=return_lse))(q, k, v, sinks)


_ring_attention_at_a_break = torch.compiler.disable(_ring_attention, reason=UNTRACEABLE)


class Options(NamedTuple):
    """The arguments of `ring_attention` beside tensors.

    Attributes:
        held: the tokens whose keys k [B, Hkv, `held.num_rows`, D] and v hold, if they come from a cache, for the last
            m = `held.num_queries` tokens, of q [B, H, m, D]. `documents` then divide `held.row_len` tokens, without `layout`.
        with_lse: whether the log-sum-exp is needed, which the heads transport moves for it.
        recorded_in_graph: whether a graph records gradients; None outside of graphs.
    """

    pattern: Pattern | str
    ring: Ring | None = None
    layout: SequenceLayout | None = None
    causal: bool = True
    scale: float | None = None
    documents: Sequence[Sequence[tuple[int, int]]] | None = None
    softcap: float | None = None
    head_shard: tuple[int, int] = (0, 1)
    held: HeldKeys | None = None
    with_lse: bool = False
    recorded_in_graph: bool | None = None


class CallsInGraph:
    """The calls of one run of a graph, which are checked and planned when they come, and kept for their backward passes.

    The last runs alone keep their plans; a backward pass of an earlier one plans again.
    """

    def __init__(self, check: Callable[..., CheckedCall]) -> None:
        self._check, self._number = check, 0
        self._calls: dict[Any, CheckedCall] = {}
        _RECENT.append(self)
        if len(_RECENT) > _RUNS_WITH_PLANS:
            _RECENT.popleft().forget()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: GraphLayer) -> ForwardResults:
        """Checks, plans and computes the operator."""
        call = self._check(q, k, v, sinks, layer)
        if call.recorded:
            self._number = self._number or call.ring.calls.next_number()
            self._calls[(layer.text, q.shape, k.shape)] = call
        return call.forward(q, k, v, sinks, layer)

    def backward(
        self, dout: Tensor, saved: list[Saved], sinks: Tensor | None, number: int, layer: GraphLayer
    ) -> AllGradients:
        """Computes the backward operator."""
        call = self._calls[(layer.text, saved[0].q.shape, saved[0].k.shape)]
        return call.backward(dout, saved, sinks, self._number, layer)

    def forget(self) -> None:
        """Drops the plans."""
        for call in self._calls.values():
            call.forget()


@torch.compiler.assume_constant_result
def _text_of(pattern: Pattern | str) -> str:
    return str(as_pattern(pattern, "ring_attention"))


def _begin_call(q: Tensor, ring: int, pattern: str, causal: bool, heads: list[int], *scales: Tensor | None) -> Tensor:
    """Returns the number of one run of a call of `ring_attention` in a graph."""
    scale, softcap = (None if x is None else float(x) for x in scales)
    of_call: Any = RINGS[ring] if ring else None
    options = Options(pattern, of_call, None, causal, scale, None, softcap, (heads[0], heads[1]))

    def check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: GraphLayer) -> CheckedCall:
        return checked_call(q, k, v, sinks, options._replace(recorded_in_graph=layer.recorded))

    return torch.tensor([CALLS.add(CallsInGraph(check), keep=True)])


define(
    "begin_call(Tensor q, int ring, str pattern, bool causal, int[] heads, Tensor? scale, Tensor? softcap) -> Tensor",
    _begin_call,
    lambda q, *others: torch.empty(1, dtype=torch.int64, device="cpu"),
)

#: The last runs of graphs.
_RECENT: deque[CallsInGraph] = deque()
_RUNS_WITH_PLANS = 4


class CheckedCall:
    """A call of attention that was checked and planned. It serves all layers whose calls differ in their numbers only.

    Args:
        plan: makes the plan, or finds it again, without messages.
        agreed: the values that all ranks have in common; its digest stands for them when ranks compare later calls.
        recorded: whether a backward pass will come.
        with_lse: as in `Options`.
    """

    def __init__(
        self,
        ring: Ring,
        problem: Problem,
        plan: Callable[[], Execution],
        agreed: Agreement,
        recorded: bool,
        with_lse: bool,
    ) -> None:
        self.ring, self.problem, self.recorded = ring, problem, recorded
        self._plan, self._agreed, self._with_lse = plan, agreed, with_lse
        self._execution: Execution | None = plan()
        self._compared = True  # The ranks have just compared this call, but not its repetitions.
        self._key = torch.tensor([CALLS.add(self)])
        names = torch.ops.hf_ring_attention
        by_heads = isinstance(self._execution.transport, HeadsTransport)
        self._operator = (names.attend_by_heads if by_heads else names.attend).default

    def forget(self) -> None:
        """Drops the plan, which a later pass makes again."""
        self._execution = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns out [B, H, n, Dv] in q's dtype, and lse [B, H, n], which may be empty without `Options.with_lse`."""
        tangents = forward_ad.unpack_dual(q)[1], forward_ad.unpack_dual(k)[1], forward_ad.unpack_dual(v)[1]
        if tangents != (None, None, None):
            raise RuntimeError("ring_dilated has no forward-mode derivative (jvp, jacfwd): use backward, or 'eager'")
        q, k, v = (self._execution or self._plan()).laid_out(q, k, v)
        number = self.ring.calls.next_number() if self.recorded else 0
        results = self._operator(q, k, v, sinks, self._key, number, "", ())
        return results[0], results[1]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: GraphLayer) -> ForwardResults:
        """Computes the operator, once the ranks agree that they all make this call."""
        if not self._compared and self.ring.world_size > 1:
            self.ring.calls.compare(FORWARD, self._agreed.values, self._agreed.digest)
        self._compared = False
        if self.problem.held is not None and self.ring.world_size > 1:
            return *self._attend_to_cache(q, k, v, sinks), []
        return (self._execution or self._plan()).forward(q, k, v, sinks, self._with_lse)

    def backward(
        self, dout: Tensor, saved: list[Saved], sinks: Tensor | None, number: int, layer: GraphLayer
    ) -> AllGradients:
        """Computes the backward operator, once the ranks agree that they all run the backward pass of one call."""
        self.ring.calls.compare_backward(number)
        return (self._execution or self._plan()).backward(dout, saved, sinks)

    def _attend_to_cache(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attends to this rank's part of a cache. All ranks merge all parts in one order, so all go on with the same bits."""
        out, lse, _ = (self._execution or self._plan()).forward(q, k, v, None)
        assert self.ring.communicator is not None
        parts = self.ring.communicator.gather(torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1))
        total, total_lse = parts[0][..., :-1].contiguous(), parts[0][..., -1].contiguous()
        for part in parts[1:]:
            merge_(total, total_lse, part[..., :-1], part[..., -1])
        return (total if sinks is None else add_sinks(total, total_lse, sinks)[0]).to(q.dtype), total_lse


def checked_call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: Options) -> CheckedCall:
    """Checks a call of `ring_attention` on all ranks, and plans it.

    With keys from a cache, every rank of a ring has the same queries and its own part of the keys. Ranks merge their results,
    so one row of (out, lse) moves for each query and rank, whatever the length of the cache.
    """
    ring, held, scale, softcap = options.ring or ring_alone(), options.held, options.scale, options.softcap
    with ring.agreement(FORWARD, by_digest=True) as call:
        pattern = as_pattern(options.pattern, "ring_attention")
        _check_tensors(q, k, v, softcap, sinks)
        in_graph = options.recorded_in_graph
        recorded = is_recorded(q, k, v, sinks) if in_graph is None else in_graph
        problem = _problem(q, k, pattern, ring, options)
        tiles = tile_kinds(problem, ring.rank)
        widths = q.shape[-1], v.shape[-1]
        by_query_head = any(own.phase_by == "query_head" for own in pattern.kv_heads or (pattern,))
        groups = (problem.group, 1) if by_query_head and problem.group > 1 else (problem.group,)
        kernel = choose_kernel(q.device, q.dtype, *widths, softcap, ring.kernel, tiles, ring.note_kernel, groups)
        if held is not None and ring.world_size > 1 and is_recorded(q, k, v):
            raise ValueError("cached_attention: the keys of a sharded cache have no gradient: use torch.no_grad()")
        if scale is not None and not scale > 0:  # Masks are -inf, which only a factor above 0 leaves as it is.
            raise ValueError(f"ring_attention: scale must be above 0, or None for D ** -0.5, got {scale!r}")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if ring.world_size > 1:
            call.values = {
                "the shape of q, (B, H, n, D)": tuple(q.shape),
                "the number of key/value heads": problem.num_kv_heads,
                "the number of the first key/value head": problem.first_kv_head,
                "the width of v": v.shape[-1],
                "dtype": q.dtype,
                "pattern": problem.pattern,
                "layout": problem.layout,
                "whether keys come from a cache": held is not None,
                "transport": ring.transport,
                "settings of the ring": ring.settings,
                "kernel": ring.kernel,
                "causal": problem.causal,
                "scale": scale,
                "softcap": softcap,
                "whether sinks are given": sinks is not None,
                "whether gradients are recorded": recorded,
                "documents": problem.documents,
            }
    sizes = RowBytes(sum(widths) * q.element_size(), sum(widths) * accumulation_dtype(q.dtype).itemsize)
    key = CallKey(problem, sizes, q.device, kernel.joining)

    def plan() -> Execution:
        if held is None:
            return Execution(ring.planner.transport_for(key), kernel, scale)
        return Execution(LocalTransport(ring.bindings.of(bind_own, problem, 0, key.device, key.joining)), kernel, scale)

    return CheckedCall(ring, problem, plan, call, recorded, options.with_lse)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, softcap: float | None, sinks: Tensor | None) -> None:
    """Raises ValueError for tensors that do not fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"ring_attention: {name} must be a tensor [batch, heads, tokens, head size], got {got}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise ValueError(f"ring_attention: every size must be at least 1, got {shapes}")
    if len({x.dtype for x in (q, k, v)}) > 1 or len({x.device for x in (q, k, v)}) > 1:
        tensors = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"ring_attention: q, k and v must have one dtype and one device, got {tensors}")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"ring_attention: batch and key/value head counts and tokens must be equal, got {shapes}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"ring_attention: q and k must have one head size, got {q.shape[3]} and {k.shape[3]}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"ring_attention: softcap must be above 0, or None, got {softcap!r}")
    if sinks is not None and (not isinstance(sinks, Tensor) or sinks.shape != q.shape[1:2] or sinks.device != q.device):
        value = f"{tuple(sinks.shape)} on {sinks.device}" if isinstance(sinks, Tensor) else repr(sinks)
        raise ValueError(
            f"ring_attention: sinks must be [{q.shape[1]}], a logit for each query head, on q's device, got {value}"
        )


def _problem(q: Tensor, k: Tensor, pattern: Pattern, ring: Ring, options: Options) -> Problem:
    """Returns the problem of a call."""
    held, (shard, shards) = options.held, options.head_shard
    if not 0 <= shard < shards:
        raise ValueError(f"ring_attention: head_shard must be (i, t) with 0 <= i < t, got {options.head_shard}")
    pattern.check_heads(k.shape[1] * shards, "k")
    n, key_rows = q.shape[2], k.shape[2]
    if held is not None:
        layout = held.layout
        if (n, key_rows) != (held.num_queries, held.num_rows):
            raise ValueError(
                f"cached_attention: expected {held.num_queries} queries and {held.num_rows} key rows, got {n} and {key_rows}"
            )
    else:
        if n != key_rows:
            raise ValueError(f"ring_attention: as many query tokens as key tokens are expected, got {n} and {key_rows}")
        # This layout does not depend on documents, so a caller who shards by `ring.layout_for` gets the same one.
        layout = options.layout or ring.layout_for(n * ring.world_size, pattern)
        ring.check_layout(layout)
        if n != layout.local_len:
            raise ValueError(
                f"ring_attention: {layout} gives each rank {layout.padded_len} / {layout.world_size} = {layout.local_len} "
                f"tokens, got {n}: shard whole sequences of {layout.seq_len} tokens with ring.shard(tensor, layout)"
            )
    batch, documents = q.shape[0], documents_of(options.documents, layout.seq_len, "ring_attention")
    if documents is not None and len(documents) != batch:
        got = f"{len(documents)} for {batch} batch rows"
        raise ValueError(f"ring_attention: documents must have one list for each batch row, got {got}")
    return Problem(
        pattern=pattern,
        layout=layout,
        documents=(((0, layout.seq_len),),) * batch if documents is None else documents,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        causal=bool(options.causal),
        held=held,
        settings=ring.settings
        if options.recorded_in_graph is None
        else replace(ring.settings, may_exchange_heads=False),
        first_head=shard * q.shape[1],
        first_kv_head=shard * k.shape[1],
    )
