"""The attention of all layers of a model: its heads, patterns and mixers in plain numbers, and `explain` of a whole step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..plan.balance import busiest_over_mean
from ..plan.layouts import SequenceLayout
from ..plan.patterns import Pattern
from ..plan.problem import Documents
from ..plan.state_runs import StateNumbers, rows_traffic, states_traffic
from ..plan.traffic import RankTraffic
from .cache import CacheBytes, cache_of_layer
from .explain import Explanation, busiest_traffic, explain, number_bytes


@dataclass(frozen=True)
class ModelMixers:
    """The mixers of a hybrid model, in the layers of these numbers."""

    layers: tuple[int, ...]
    numbers: StateNumbers | None  # what one mixer gathers for each run of a document; None if it gathers whole rows
    width: int  # the features of a row
    with_positions: bool  # whether each gathered row has its position beside it

    def traffic(self, layout: SequenceLayout, number_sizes: tuple[int, int], documents: Documents) -> RankTraffic:
        """Returns the bytes of each rank in one of these layers, in the layout that attention decides."""
        if self.numbers is None:
            return rows_traffic(self.width, len(documents), layout, number_sizes[0], self.with_positions)
        return states_traffic(self.numbers, documents, layout, *number_sizes)


@dataclass(frozen=True)
class ModelAttention:
    """The attention of a model."""

    name: str
    model_type: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    base: Pattern  # of layers without their own window or chunks; it also decides the layout
    layers: tuple[Pattern, ...]  # of each layer that attends
    numbers: tuple[int, ...]  # of these layers in the model
    mixers: ModelMixers | None = None  # the other modules of a hybrid that mix tokens
    latent: int | None = None  # the numbers of a token in Transformers' caches of latent attention; None for others
    kept_times: int | None = 1  # the heads for each key/value head in a `PatternCache`; None if it keeps every row
    first_without_keys: int | None = None  # from this layer on, layers read the keys of earlier ones; None for none
    positions: int | None = None  # that the config names; None if it does not

    def layers_of_patterns(self) -> dict[Pattern, list[int]]:
        """Returns the numbers of the layers that have each pattern."""
        layers: dict[Pattern, list[int]] = {}
        for number, pattern in zip(self.numbers, self.layers):
            layers.setdefault(pattern, []).append(number)
        return layers

    def caches(self, tokens: int, batch_size: int, number_bytes: int) -> dict[Pattern, tuple[list[int], CacheBytes]]:
        """Returns, for each pattern, the numbers of its layers with keys, and the bytes of their cache for `generate`."""
        beyond, caches = self.first_without_keys, {}
        row_bytes = (self.head_dim + self.value_dim) * number_bytes
        for pattern, numbers in self.layers_of_patterns().items():
            layers = [number for number in numbers if beyond is None or number < beyond]
            one = cache_of_layer(pattern, self.num_kv_heads, tokens, batch_size, row_bytes)
            one = CacheBytes(one.whole, one.whole if self.kept_times is None else one.kept * self.kept_times)
            if self.latent is not None:
                one = CacheBytes(tokens * batch_size * self.latent * number_bytes, one.kept)
            if layers:
                caches[pattern] = layers, one.times(len(layers))
        return caches

    def flop_share(self, tokens: int) -> float:
        """Returns the attention FLOPs of all layers for one document, as a share of exact attention's."""
        heads: dict[str, Any] = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        shares = [x.flop_share(tokens, **heads) * len(layers) for x, layers in self.layers_of_patterns().items()]
        return sum(shares) / len(self.layers)


@dataclass(frozen=True)
class StepExplanation:
    """The attention and the mixers of all layers of a model in one step, over a ring."""

    base: Explanation  # the call that decides the layout
    calls: list[tuple[list[int], Explanation]]  # for each pattern the numbers of its layers, and one layer's call
    mixers: RankTraffic | None  # the bytes of each rank in one layer with a mixer; None without mixers
    flops: int  # of the busiest rank's forward pass
    imbalance: float  # the same over the mean
    flop_share: float  # the FLOPs of all ranks, as a share of exact attention's
    traffic: RankTraffic  # the most bytes that any rank moves in all layers, and holds at once


def explain_patterns(attention: ModelAttention, **call: Any) -> dict[Pattern, Explanation]:
    """Returns the call of the base pattern and of each other one, in the same layout, by arguments of `explain`."""
    call |= {name: getattr(attention, name) for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim")}
    calls = {attention.base: explain(attention.base, **call)}
    call["layout"] = calls[attention.base].layout
    others = [pattern for pattern in dict.fromkeys(attention.layers) if pattern != attention.base]
    return calls | {pattern: explain(pattern, **call) for pattern in others}


def explain_layers(
    attention: ModelAttention, *, batch_size: int = 1, dtype: Any = "bfloat16", **call: Any
) -> StepExplanation:
    """Explains one step of all layers, by the arguments and with the errors of `explain`, but without the heads."""
    calls = explain_patterns(attention, batch_size=batch_size, dtype=dtype, **call)
    of_layers = [(numbers, calls[pattern]) for pattern, numbers in attention.layers_of_patterns().items()]
    counts = [(len(numbers), call) for numbers, call in of_layers]
    layout, mixers = calls[attention.base].layout, None
    moved = [(count, call.traffic()) for count, call in counts]
    if attention.mixers is not None:
        documents = call.get("documents") or (((0, layout.seq_len),),) * batch_size
        mixers = attention.mixers.traffic(layout, number_bytes(dtype), documents)
        moved.append((len(attention.mixers.layers), [mixers] * layout.world_size))
    flops = [sum(n * call.ranks[rank].forward_flops for n, call in counts) for rank in range(layout.world_size)]
    return StepExplanation(
        base=calls[attention.base],
        calls=of_layers,
        mixers=mixers,
        flops=max(flops),
        imbalance=busiest_over_mean(flops),
        flop_share=sum(count * call.flop_share for count, call in counts) / len(attention.layers),
        traffic=busiest_traffic(moved),
    )
