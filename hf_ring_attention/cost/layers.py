"""The attention of all layers of a model: its heads, patterns and mixers in plain numbers, and what `explain` knows of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..plan.branches import Segment
from ..plan.choices import busiest_over_mean
from ..plan.layouts import SequenceLayout
from ..plan.patterns import Pattern
from ..plan.problem import Documents
from ..plan.state_runs import StateNumbers, linked_runs, rows_traffic, runs_of, states_traffic
from ..plan.traffic import RankTraffic
from .explain import Explanation, explain, number_bytes

#: The floating point operations of backward over those of forward: five products of matrices against two.
BACKWARD = 2.5


@dataclass(frozen=True)
class ModelMixers:
    """The mixers of a hybrid model, in the layers of these numbers.

    Attributes:
        numbers: what one mixer gathers for each run of a document; None if it gathers whole rows, of `width` features.
        with_positions: whether each gathered row has its position beside it.
    """

    layers: tuple[int, ...]
    numbers: StateNumbers | None
    width: int
    with_positions: bool


@dataclass(frozen=True)
class ModelAttention:
    """The attention of a model.

    Attributes:
        base: the pattern of layers without their own window or chunks; it also decides the layout.
        layers: the pattern of each layer that attends; these layers have the `numbers` in the model.
        sliding: whether each of them computes its own window or chunks.
        mixers: the other modules of a hybrid that mix tokens; None in all other models.
    """

    name: str
    model_type: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    base: Pattern
    layers: tuple[Pattern, ...]
    numbers: tuple[int, ...]
    sliding: tuple[bool, ...]
    mixers: ModelMixers | None = None

    def flop_share(self, tokens: int) -> float:
        """Returns the attention FLOPs of all layers for one document, as a share of exact attention's."""
        shares = [
            pattern.flop_share(tokens, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads) * layers
            for pattern, layers in Counter(self.layers).items()
        ]
        return sum(shares) / len(self.layers)


class LayerKind(NamedTuple):
    """Layers that do the same work: their kind, their numbers in the model, and the call of one of them."""

    name: str
    layers: list[int]
    call: Explanation


def explain_patterns(attention: ModelAttention, **call: Any) -> dict[Pattern, Explanation]:
    """Returns the call of the base pattern and of each other one, in the same layout, by arguments of `explain`."""
    call |= {name: getattr(attention, name) for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim")}
    calls = {attention.base: explain(attention.base, **call)}
    call["layout"] = calls[attention.base].layout
    for pattern in attention.layers:
        if pattern not in calls:
            calls[pattern] = explain(pattern, **call)
    return calls


def explain_layers(attention: ModelAttention, *, seq_len: int, **call: Any) -> dict[str, Any]:
    """Returns all figures, as JSON has them: bytes and FLOPs of the busiest rank, unless a name differs.

    The arguments and errors are those of `explain`, without the heads.
    """
    calls = explain_patterns(attention, seq_len=seq_len, **call)
    base = calls[attention.base]
    kinds = {(attention.base, False): LayerKind("full", [], base)}
    for number, pattern, has_window in zip(attention.numbers, attention.layers, attention.sliding):
        name = "full" if not has_window else "chunked" if isinstance(pattern.branches[0], Segment) else "sliding"
        kinds.setdefault((pattern, has_window), LayerKind(name, [], calls[pattern])).layers.append(number)
    used = [kind for kind in kinds.values() if kind.layers]
    documents = call["documents"] or (((0, seq_len),),) * call["batch_size"]
    mixers = None
    if attention.mixers is not None:
        mixers = _figures_of_mixers(attention.mixers, base.layout, number_bytes(call["dtype"]), documents)
    lengths = [stop - start for row in documents for start, stop in row]
    pairs = sum(n * (n + 1) // 2 if call["causal"] else n * n for n in lengths)
    exact = 2 * (attention.head_dim + attention.value_dim) * attention.num_heads * pairs
    return {
        "tokens_of_a_rank": base.layout.local_len,
        "padding": base.layout.padded_len - base.layout.seq_len,
        "layout": base.layout.kind,
        "layout_reason": base.layout_decision.reason,
        "imbalance_of_layouts": base.layouts,
        "layer_kinds": [_figures_of_kind(kind, exact) for kind in used],
        "mixers": mixers,
        "step": _figures_of_step(used, mixers, exact),
    }


def _figures_of_step(kinds: Sequence[LayerKind], mixers: dict[str, Any] | None, exact: int) -> dict[str, Any]:
    """Returns the sums over all layers."""
    ranks = range(len(kinds[0].call.ranks))
    flops = [sum(len(kind.layers) * kind.call.ranks[rank].forward_flops for kind in kinds) for rank in ranks]
    # The number of layers, and the bytes of one of them on each rank.
    moved = [(len(kind.layers), [*map(_sizes, kind.call.traffic())]) for kind in kinds]
    if mixers is not None:
        moved.append((len(mixers["layers"]), [mixers["bytes"] for _ in ranks]))
    sizes = {name: max(sum(count * of[rank][name] for count, of in moved) for rank in ranks) for name in moved[0][1][0]}
    sizes["buffers"] = max(of[rank]["buffers"] for _, of in moved for rank in ranks)  # One layer at a time has some.
    layers = sum(len(kind.layers) for kind in kinds)
    return {"layers": layers, **_figures_of_flops(flops, layers * exact), "bytes": sizes}


def _figures_of_kind(kind: LayerKind, exact: int) -> dict[str, Any]:
    call = kind.call
    return {
        "kind": kind.name,
        "layers": kind.layers,
        "pattern": str(call.pattern),
        "transport": call.decision.choice,
        "transport_reason": call.decision.reason,
        **_figures_of_flops([share.forward_flops for share in call.ranks], exact),
        **{
            f"{name}_bytes": _sizes(call.busiest(name)) | {"imbalance": balance}
            for name, balance in call.balance.items()
        },
    }


def _figures_of_flops(flops: Sequence[int], exact: int) -> dict[str, float]:
    """Returns the figures of the FLOPs of each rank; exact attention has `exact` in all."""
    return {
        "share_of_exact_flops": sum(flops) / exact,
        "imbalance": busiest_over_mean(flops),
        "forward_flops": max(flops),
        "backward_flops": BACKWARD * max(flops),
        "forward_flops_of_all_ranks": sum(flops),
    }


def _figures_of_mixers(
    mixers: ModelMixers, layout: SequenceLayout, number_sizes: tuple[int, int], documents: Documents
) -> dict[str, Any]:
    """Returns the work of a hybrid's mixers over a ring, in the layout that its attention decides."""
    if mixers.numbers is None:
        traffic = rows_traffic(mixers.width, len(documents), layout, number_sizes[0], mixers.with_positions)
    else:
        traffic = states_traffic(mixers.numbers, documents, layout, *number_sizes)
    return {
        "layers": list(mixers.layers),
        "gathers": "rows" if mixers.numbers is None else "states",
        "runs_of_a_rank": linked_runs(runs_of(documents, layout))[1],
        "most_work": layout.world_size if mixers.numbers is None else 1,
        "bytes": _sizes(traffic),
    }


def _sizes(traffic: RankTraffic) -> dict[str, int]:
    """Returns bytes by the names that JSON has."""
    ways = {"forward": traffic.forward, "backward": traffic.backward}
    moved = {f"{way}_{name}": getattr(size, name) for way, size in ways.items() for name in ("sent", "received")}
    return moved | {"buffers": traffic.buffers}
