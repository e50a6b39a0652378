"""The calls of attention by value: each is checked on every rank, and planned, when it comes for the first time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..compute.binding import bind_own
from ..compute.cuda_kernels import torch_flash
from ..compute.kernel import Saved
from ..compute.kernels import choose_kernel
from ..compute.merge import accumulation_dtype, add_sinks, merge_
from ..plan.call import Call, Outside, TensorFacts
from ..plan.choices import decide_call
from ..plan.kernel_choice import tile_kinds
from ..plan.layouts import SequenceLayout
from ..plan.patterns import Pattern, as_pattern
from ..plan.problem import HeldKeys, Problem, as_documents, documents_of
from ..plan.traffic import RowBytes
from ..transport.agreement import REFUSALS
from ..transport.heads import HeadsTransport
from ..transport.table import TRANSPORTS
from ..transport.transports import LocalTransport
from .engine import AllGradients, Execution, ForwardResults
from .operator import CALLS, GraphLayer, is_recorded
from .ring import Ring

#: The name of a call of attention when ranks compare their calls, here or in a model that refuses its part.
FORWARD = "a forward pass of attention"

#: Ranks that are threads of one process plan in turn: the first one makes the plans that all share.
_PLANNING = threading.Lock()


def planned_call(
    ring: Ring,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    pattern: Pattern | str,
    layout: SequenceLayout | None = None,
    causal: bool = True,
    scale: float | None = None,
    documents: Sequence[Sequence[tuple[int, int]]] | None = None,
    softcap: float | None = None,
    head_shard: tuple[int, int] = (0, 1),
    *,
    held: HeldKeys | None = None,
    with_lse: bool = False,
    recorded_in_graph: bool | None = None,
) -> Planned:
    """Returns the planned call that is equal; for a new call, checks it on all ranks and plans it.

    With keys from a cache, every rank of a ring has the same queries and a part of the keys. Ranks merge their results,
    so one row of (out, lse) moves for each query and rank, whatever the length of the cache.

    Args:
        held: the tokens whose keys k [B, Hkv, `held.num_rows`, D] and v hold, if they come from a cache, for the last
            m = `held.num_queries` tokens, of q [B, H, m, D]. `documents` then divide `held.row_len` tokens, without `layout`.
        recorded_in_graph: whether a graph records gradients; None outside of graphs.
    """
    refused = planned = call = None
    try:
        call = Call(
            TensorFacts(q.shape, q.dtype, q.device),
            TensorFacts(k.shape, k.dtype, k.device),
            TensorFacts(v.shape, v.dtype, v.device),
            None if sinks is None else TensorFacts(sinks.shape, sinks.dtype, sinks.device),
            as_pattern(pattern, "ring_attention"),
            layout,
            None if documents is None else _hashable(documents),
            bool(causal),
            scale,
            softcap,
            (*head_shard,),
            held,
            is_recorded(q, k, v, sinks) if recorded_in_graph is None else recorded_in_graph,
            with_lse,
            recorded_in_graph is not None,
            outside(ring),
        )
        call.pattern.check_heads(k.shape[1] * head_shard[1], "k")
        planned = ring.planned.find(call)
    except REFUSALS as error:
        refused = error
    if planned is not None:
        return planned
    with ring.agreement(FORWARD, by_digest=True) as agreed:
        _check_tensors(q, k, v, softcap, sinks)
        if call is not None:
            planned = Planned(ring, call)  # Its errors name an argument without a hash.
        if refused is not None:
            raise refused
        assert call is not None and planned is not None
        if held is not None and ring.world_size > 1 and is_recorded(q, k, v):
            raise ValueError("cached_attention: the keys of a sharded cache have no gradient: use torch.no_grad()")
        if ring.world_size > 1:
            agreed.values = planned.shared()
    planned.digest = agreed.digest
    planned.plan()
    ring.planned.keep(call, planned)
    ring.calls.compared = planned
    return planned


@contextmanager
def refusals_of_all(ring: Ring) -> Iterator[None]:
    """A context whose errors end a forward pass of attention on all ranks, which compare their calls meanwhile."""
    try:
        yield
    except (ValueError, NotImplementedError) as refused:
        with ring.agreement(FORWARD, by_digest=True):
            raise refused


def outside(ring: Ring) -> Outside:
    """Returns the settings beside a call that decide its transport or its kernel."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return Outside(ring.transport, ring.kernel, ring.settings, deterministic, torch_flash())


def _hashable(documents: Sequence[Sequence[tuple[int, int]]]) -> Any:
    try:
        hash(documents)
    except TypeError:
        return as_documents(documents, "ring_attention")
    return documents


class Planned:
    """A call that was checked, its problem and its kernel; and its transport once it is planned. All equal calls share it."""

    def __init__(self, ring: Ring, call: Call) -> None:
        self.ring, self.call = ring, call
        (_, dtype, device), widths = call.q, (call.q.shape[-1], call.v.shape[-1])
        self.problem = problem = _problem(call, ring)
        tiles, notes = tile_kinds(problem, ring.rank), ring.note_kernel
        self.kernel = choose_kernel(
            device, dtype, *widths, call.softcap, call.outside.kernel, tiles, notes, problem.group
        )
        # Masks are -inf, which only a factor above 0 leaves as it is.
        if call.scale is not None and not call.scale > 0:
            raise ValueError(f"ring_attention: scale must be above 0, or None for D ** -0.5, got {call.scale!r}")
        self.scale = widths[0] ** -0.5 if call.scale is None else call.scale
        self.sizes = RowBytes(sum(widths) * dtype.itemsize, sum(widths) * accumulation_dtype(dtype).itemsize)
        self.digest = 0  # of the values that ranks have in common
        self.kept: Any = None  # the binding of its plan
        self._execution: Execution | None = None
        self.number = torch.tensor([CALLS.add(self)])

    def shared(self) -> dict[str, Any]:
        """Returns the values that all ranks must have in common, by their names in an error."""
        call, problem = self.call, self.problem
        return {
            "the shape of q, (B, H, n, D)": tuple(call.q.shape),
            "the number of key/value heads": problem.num_kv_heads,
            "the number of the first key/value head": problem.first_kv_head,
            "the width of v": call.v.shape[-1],
            "dtype": call.q.dtype,
            "pattern": problem.pattern,
            "layout": problem.layout,
            "whether keys come from a cache": call.held is not None,
            "transport": call.outside.transport,
            "settings of the ring": call.outside.ring,
            "kernel": call.outside.kernel,
            "causal": problem.causal,
            "scale": self.scale,
            "softcap": call.softcap,
            "whether sinks are given": call.sinks is not None,
            "whether gradients are recorded": call.recorded,
            "documents": problem.documents,
        }

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `ring_attention` for this call, beside tensors."""
        names = "pattern", "layout", "causal", "scale", "documents", "softcap", "head_shard"
        return {"ring": self.ring, **{name: getattr(self.call, name) for name in names}}

    def _transport(self) -> Any:
        """Returns the transport of the call, bound to its row numbers on the device."""
        ring, place, start = self.ring, (self.call.q.device, self.kernel.joining), time.perf_counter()
        with _PLANNING:
            if self.call.held is not None:
                self.kept = ring.planned.binding(bind_own, self.problem, 0, *place)
                return LocalTransport(self.kept.binding)
            problem, decision = decide_call(self.call.outside.transport, self.problem, self.sizes)
            bind, make = TRANSPORTS[decision.choice]
            self.kept = ring.planned.binding(bind, problem, ring.rank, *place)
        ring.note_transport(decision)
        ring.counters.planned_seconds += time.perf_counter() - start
        return make(self.kept.binding, ring.communicator, ring.counters)

    def plan(self) -> Execution:
        """Returns the parts that execute the call; the first time, it plans the call without messages."""
        if self._execution is None:
            transport = self._transport()
            self._execution = Execution(transport, self.kernel, self.scale)
            names = torch.ops.hf_ring_attention
            by_heads = isinstance(transport, HeadsTransport)
            self._operator = (names.attend_by_heads if by_heads else names.attend).default
        return self._execution

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns out [B, H, n, Dv] in q's dtype, and lse [B, H, n], which may be empty without `Call.with_lse`."""
        tangents = forward_ad.unpack_dual(q)[1], forward_ad.unpack_dual(k)[1], forward_ad.unpack_dual(v)[1]
        if tangents != (None, None, None):
            raise RuntimeError("ring_dilated has no forward-mode derivative (jvp, jacfwd): use backward, or 'eager'")
        q, k, v = (self._execution or self.plan()).laid_out(q, k, v)
        number = self.ring.calls.next_number() if self.call.recorded else 0
        try:
            results = self._operator(q, k, v, sinks, self.number, number, "", ())
        except ValueError:  # The ranks disagree.
            self.ring.calls.take_back(number)
            raise
        return results[0], results[1]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: GraphLayer) -> ForwardResults:
        """Computes the operator, once the ranks agree that they all make this call."""
        calls, is_ring = self.ring.calls, self.ring.world_size > 1
        if is_ring and calls.compared is not self:
            calls.compare(FORWARD, self.shared, self.digest)
        calls.compared = None  # The ranks have compared this call, but not its repetitions.
        if self.problem.held is not None and is_ring:
            return *self._attend_to_cache(q, k, v, sinks), []
        return (self._execution or self.plan()).forward(q, k, v, sinks, self.call.with_lse)

    def backward(
        self, dout: Tensor, saved: list[Saved], sinks: Tensor | None, number: int, layer: GraphLayer
    ) -> AllGradients:
        """Computes the backward operator, once the ranks agree that they all run the backward pass of one call."""
        self.ring.calls.compare_backward(number)
        return self.plan().backward(dout, saved, sinks)

    def _attend_to_cache(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attends to this rank's part of a cache."""
        out, lse, _ = self.plan().forward(q, k, v, None)
        total, total_lse = merged_over(self.ring, out, lse)
        return (total if sinks is None else add_sinks(total, total_lse, sinks)[0]).to(q.dtype), total_lse


def merged_over(ring: Ring, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the merged results of all ranks, in lse's dtype; all merge in one order, so all go on with the same bits."""
    assert ring.communicator is not None
    part = torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1)
    with ring.counters.exchange(*[(ring.world_size - 1) * part.nbytes] * 2):
        parts = ring.communicator.gather(part)
    total, total_lse = parts[0][..., :-1].contiguous(), parts[0][..., -1].contiguous()
    for part in parts[1:]:
        merge_(total, total_lse, part[..., :-1], part[..., -1])
    return total, total_lse


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


def _problem(call: Call, ring: Ring) -> Problem:
    """Returns the problem of a call."""
    held, (shard, shards), documents = call.held, call.head_shard, call.documents
    (batch, heads, n, _), (_, kv_heads, key_rows, _) = call.q.shape, call.k.shape
    if not 0 <= shard < shards:
        raise ValueError(f"ring_attention: head_shard must be (i, t) with 0 <= i < t, got {call.head_shard}")
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
        layout = call.layout or ring.layout_for(n * ring.world_size, call.pattern)
        ring.check_layout(layout)
        if n != layout.local_len:
            raise ValueError(
                f"ring_attention: {layout} gives each rank {layout.padded_len} / {layout.world_size} = {layout.local_len} "
                f"tokens, got {n}: shard whole sequences of {layout.seq_len} tokens with ring.shard(tensor, layout)"
            )
    documents = documents_of(documents, layout.seq_len, "ring_attention")
    if documents is not None and len(documents) != batch:
        got = f"{len(documents)} for {batch} batch rows"
        raise ValueError(f"ring_attention: documents must have one list for each batch row, got {got}")
    return Problem(
        pattern=call.pattern,
        layout=layout,
        documents=(((0, layout.seq_len),),) * batch if documents is None else documents,
        num_heads=heads,
        num_kv_heads=kv_heads,
        causal=call.causal,
        held=held,
        settings=replace(call.outside.ring, may_exchange_heads=False) if call.in_graph else call.outside.ring,
        first_kv_head=shard * kv_heads,
    )
