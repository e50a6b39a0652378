"""Explains a call of attention before it runs: choices with reasons, bytes, FLOPs and balance of every rank, and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..plan.balance import balanced_layout, busiest_over_mean, estimated_imbalance
from ..plan.branches import check_count
from ..plan.choices import Decision, check_choices, decide_call, decide_layout
from ..plan.heads import group_size, heads_fit, heads_pairs, heads_traffic, pieces_of
from ..plan.layouts import LayoutKind, SequenceLayout
from ..plan.patterns import Pattern, as_pattern
from ..plan.plans import plan_rank
from ..plan.problem import Problem, RingSettings, documents_of
from ..plan.traffic import Bytes, RankTraffic, RowBytes, TransportKind, collective_traffic, ring_traffic
from .cache import CacheBytes, cache_of_layer

#: The bytes of a number, by the name of its dtype.
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def number_bytes(dtype: Any) -> tuple[int, int]:
    """Returns the bytes of a number of a torch.dtype or its name, and of its sums (`compute.merge.accumulation_dtype`)."""
    size = _BYTES.get(str(dtype).removeprefix("torch."))
    if size is None:
        raise ValueError(f"explain: dtype must be one of {', '.join(_BYTES)}, got {dtype!r}")
    return size, max(4, size)


def busiest_traffic(calls: Sequence[tuple[int, Sequence[RankTraffic]]]) -> RankTraffic:
    """Returns the most bytes that any rank moves in calls, each made this many times, and that it holds in one of them."""
    ranks = range(len(calls[0][1]))
    forward, backward = (
        Bytes(*(max(sum(n * getattr(of[rank], way)[end] for n, of in calls) for rank in ranks) for end in (0, 1)))
        for way in ("forward", "backward")
    )
    return RankTraffic(forward, backward, max(rank.buffers for _, of in calls for rank in of))


@dataclass(frozen=True)
class RankShare:
    """The work of one rank in one attention call, and the bytes that each transport would move and hold."""

    rank: int
    forward_flops: int  # of the forward pass, 2 (D + Dv) for each query-key pair; backward has 2.5 times as many
    own_flops: int  # the same with keys of the rank itself, without an exchange of heads
    ring: RankTraffic
    collective: RankTraffic
    heads: RankTraffic | None  # None if heads do not divide
    gathered: RankTraffic | None = None  # of a model's layer that no transport serves; None for others


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`; it prints as a table.

    Attributes:
        layout: the division of the sequence; `layout_decision` has its reason.
        decision: the transport, with its reason.
        imbalance: the work of the busiest rank, divided by the mean.
        flop_share: the FLOPs of all ranks, as a share of exact attention's.
        ranks: for each rank its `forward_flops`, and the bytes of a pass and in buffers by transport: `ring.forward.sent`,
            `collective.backward.received`, `heads.buffers` (`heads` is None if heads do not divide).
        layouts: by kind of layout, the work of the busiest rank divided by the mean, estimated.
        balance: the same by transport, in the chosen layout.
        cache: the bytes of one layer's cache for `generate` on one device, of all keys and values (`whole`) and in
            `ra.PatternCache` (`kept`); None for packed rows and for calls that are not causal.
        pieces_of_heads: the exchanges of heads in a pass, each of a piece of the heads.

    Example:
        >>> call = ra.explain("window:512+4", seq_len=65536, ring_size=4, num_heads=32, num_kv_heads=8, head_dim=128)
        >>> call.layout.kind, call.decision.choice, round(call.imbalance, 3)
        ('contiguous', 'collective', 1.004)
        >>> [share.collective.forward.received for share in call.ranks]  # bytes
        [0, 2109440, 2109440, 2109440]
    """

    pattern: Pattern
    layout: SequenceLayout
    layout_decision: Decision
    decision: Decision
    imbalance: float
    flop_share: float
    ranks: tuple[RankShare, ...]
    layouts: dict[str, float]
    balance: dict[str, float]
    cache: CacheBytes | None
    pieces_of_heads: int
    chosen: int | None = None  # the keys that each query chooses; None if the pattern decides

    @property
    def name(self) -> str:
        """The pattern, or how many keys a query chooses."""
        return str(self.pattern) if self.chosen is None else f"{self.chosen} chosen keys"

    def traffic(self, transport: str | None = None) -> list[RankTraffic]:
        """Returns the bytes of each rank by a transport; None for the chosen one."""
        name = transport or self.decision.choice
        return [getattr(share, "collective" if name == "local" else name) for share in self.ranks]

    def busiest(self, transport: str | None = None) -> RankTraffic:
        """Returns the most bytes of any rank by a transport; None for the chosen one."""
        return busiest_traffic([(1, self.traffic(transport))])

    def __str__(self) -> str:
        layout, cache, flops = self.layout, self.cache, [share.forward_flops for share in self.ranks]
        padding = f", {layout.padded_len - layout.seq_len} of padding" if layout.padded_len > layout.seq_len else ""
        lines = [
            f"pattern    {self.pattern}",
            f"sequence   {layout.seq_len} tokens over {layout.world_size} ranks: {layout.local_len} each{padding}",
            f"layout     {layout.kind}: {self.layout_decision.reason}",
            f"           busiest / mean of {', '.join(f'{kind} {x:.2f}' for kind, x in self.layouts.items())}",
            f"transport  {self.decision.choice}: {self.decision.reason}",
            f"forward    {max(flops) / 1e12:.4g} TFLOP on the busiest rank, {sum(flops) / 1e12:.4g} in all, "
            f"busiest / mean {self.imbalance:.3f}",
            *(
                []
                if cache is None
                else [f"cache      {cache.kept / 2**20:.1f} MiB by ra.PatternCache, {cache.whole / 2**20:.1f} whole"]
            ),
            "",
            "| MiB of the busiest rank | forward received | forward sent | backward received | backward sent | buffers | "
            "busiest / mean |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for name, balance in self.balance.items():
            busiest = self.busiest(name)
            sizes = (*reversed(busiest.forward), *reversed(busiest.backward), busiest.buffers)
            lines.append(f"| {name} | {' | '.join(f'{size / 2**20:.1f}' for size in sizes)} | {balance:.2f} |")
        return "\n".join(lines)


#: The backward pass takes this many times the operations of the forward pass (FlashAttention, arXiv 2205.14135).
BACKWARD = 2.5


class LayerTime(NamedTuple):
    """Seconds of the busiest rank, forward and backward."""

    computing: float
    moving: float
    hidden: float  # of `moving`: while the rank computes

    @property
    def total(self) -> float:
        return self.computing + self.moving - self.hidden


def time_of_layer(call: Explanation, transport: str, *, flops: float, bandwidth: float) -> LayerTime:
    """Returns the time of an explained call by a transport, at `flops` operations and `bandwidth` bytes a second.

    Links carry messages both ways at once. All messages of the ring travel while it computes. The collective's keys and
    values travel while a rank computes with its own, and its gradients afterwards. With heads, the first piece arrives and the
    last one leaves while nothing is computed.
    """
    moved, shares = call.busiest(transport), call.ranks
    mean = sum(share.forward_flops for share in shares) / len(shares) / flops
    forward = mean * call.balance[transport]
    computing = [forward, BACKWARD * forward]
    moving = [max(way) / bandwidth for way in (moved.forward, moved.backward)]
    if transport == "ring":
        hidden = [*map(min, moving, computing)]
    elif transport == "collective":
        own = min(share.own_flops for share in shares) / flops
        hidden = [min(moving[0], own), min(moving[0], BACKWARD * own)]
    else:
        behind = 1 - 1 / call.pieces_of_heads
        hidden = [min(behind * of_pass, rest) for of_pass, rest in zip(moving, computing)]
    return LayerTime(sum(computing), sum(moving), sum(hidden))


def explain(
    pattern: Pattern | str,
    *,
    seq_len: int,
    ring_size: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int,
    value_dim: int | None = None,
    dtype: Any = "bfloat16",
    batch_size: int = 1,
    documents: Sequence[Sequence[tuple[int, int]]] | None = None,
    causal: bool = True,
    layout: LayoutKind | Literal["auto"] | SequenceLayout = "auto",
    transport: TransportKind = "auto",
    heads: int | None = None,
) -> Explanation:
    """Explains a call of `ring_attention` with sequences of `seq_len` tokens over `ring_size` ranks; nothing runs.

    Args:
        pattern: the keys that a query sees.
        seq_len: tokens of a sequence.
        ring_size: the number of ranks that share it.
        num_heads, head_dim: query heads, and the width of q and k.
        num_kv_heads: None for `num_heads`.
        value_dim: width of v; None for `head_dim`.
        dtype: the dtype of q, k and v: a torch.dtype, or its name.
        batch_size: the number of sequences, of one document each; `documents` replace it.
        layout: as for `Ring`, or a layout that another pattern of the same model decided.
        documents, causal: as for `ring_attention`.
        transport, heads: as for `Ring`.

    Raises:
        ValueError: a call that `Ring` or `ring_attention` would refuse.

    Example:
        >>> print(ra.explain("window:512+4", seq_len=65536, ring_size=4, num_heads=32, num_kv_heads=8, head_dim=128))
        pattern    window:512+4
        sequence   65536 tokens over 4 ranks: 16384 each
        layout     contiguous: with contiguous pieces the busiest rank does 1.00 times the mean work
                   busiest / mean of contiguous 1.00, zigzag 1.00, documents 1.00
        transport  collective: the busiest of 4 ranks needs 2.0 MiB of keys and values of others, ...
        forward    0.1385 TFLOP on the busiest rank, 0.5519 in all, busiest / mean 1.004
        ...
    """
    pattern = as_pattern(pattern, "explain")
    itemsize, accumulated = number_bytes(dtype)
    check_choices("auto" if isinstance(layout, SequenceLayout) else layout, transport, ring_size, heads)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    pattern.check_heads(num_kv_heads, "explain")
    value_dim = head_dim if value_dim is None else value_dim
    numbers = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    for name, number in (numbers | {"batch_size": batch_size, "ring_size": ring_size}).items():
        check_count("explain", name, number)
    # Layouts refuse lengths below 1.
    layouts = [SequenceLayout(kind, seq_len, ring_size) for kind in ("contiguous", "zigzag")]
    given_rows = documents_of(documents, seq_len, "explain")
    rows = (((0, seq_len),),) * batch_size if given_rows is None else given_rows
    if isinstance(layout, SequenceLayout):
        division, layout_decision = layout, Decision(layout.kind, "it was decided for another pattern of the model")
    else:
        division, layout_decision = decide_layout(layout, seq_len, ring_size, pattern, given_rows, transport, heads)
    call: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "causal": causal}
    problem, widths = Problem(pattern, division, rows, **call, settings=RingSettings(heads=heads)), head_dim + value_dim
    sizes = RowBytes(widths * itemsize, widths * accumulated)
    problem, decision = decide_call(transport, problem, sizes)
    layouts.append(balanced_layout(seq_len, ring_size, pattern, rows))
    cache = None
    if causal and all(len(row) == 1 for row in rows):
        cache = cache_of_layer(pattern, num_kv_heads, seq_len, len(rows), sizes.row_bytes)
    return Explanation(
        pattern=pattern,
        layout=division,
        layout_decision=layout_decision,
        decision=decision,
        layouts={layout.kind: estimated_imbalance(layout, pattern, rows) for layout in layouts},
        cache=cache,
        **_fields_of_ranks(problem, decision.choice, sizes, 2 * widths),
    )


def _fields_of_ranks(problem: Problem, transport: str, sizes: RowBytes, pair_flops: int) -> dict[str, Any]:
    """Returns the fields of an `Explanation` that follow from the plans of all ranks."""
    ranks = range(problem.layout.world_size)
    by_heads = heads_fit(problem.num_heads, problem.num_kv_heads, group_size(problem))
    plans = [plan_rank(problem, rank) for rank in ranks]
    by_tokens = [plan.pairs for plan in plans]
    own = [pair_flops * sum(batch.pairs(problem.group) for batch in plan.own) for plan in plans]
    pairs = {"ring": by_tokens, "collective": by_tokens}
    if by_heads:
        pairs["heads"] = [heads_pairs(problem, rank) for rank in ranks]
    work = pairs.get(transport, by_tokens)
    lengths = [stop - start for row in problem.documents for start, stop in row]
    of_exact = problem.num_heads * sum(n * (n + 1) // 2 if problem.causal else n * n for n in lengths)
    ways: Any = (ring_traffic, collective_traffic, heads_traffic if by_heads else lambda *_: None)
    moved = [[traffic(problem, rank, sizes) for traffic in ways] for rank in ranks]
    return {
        "imbalance": busiest_over_mean(work),
        "flop_share": sum(work) / (of_exact or 1),
        "ranks": tuple(RankShare(rank, pair_flops * work[rank], own[rank], *moved[rank]) for rank in ranks),
        "balance": {name: busiest_over_mean(of_ranks) for name, of_ranks in pairs.items()},
        "pieces_of_heads": len(pieces_of(problem, 0)) if by_heads else 1,
    }
