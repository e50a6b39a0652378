"""The attention of all layers of a model: its heads, patterns and mixers in plain numbers, and `explain` of a whole step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..plan.balance import busiest_over_mean
from ..plan.branches import Window
from ..plan.choices import Decision
from ..plan.layouts import SequenceLayout
from ..plan.patterns import Pattern
from ..plan.problem import Documents
from ..plan.state_runs import StateNumbers, gathered_traffic, rows_traffic, states_traffic
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
class Gathering:
    """What a layer gathers for whole rows over a ring, since its queries need keys that no pattern names."""

    numbers: int  # of a token, in the dtype of activations: keys and values, or hidden states
    without_gradients: int = 0  # more numbers: index keys, cosines and sines
    with_positions: bool = False
    chosen: int | None = None  # the keys that a query chooses; None if the layer attends as in Transformers
    over_rings_only: bool = False  # on one device, patterns are computed

    def traffic(self, layout: SequenceLayout, batch_size: int, dtype: Any) -> RankTraffic:
        """Returns the bytes that every rank moves and holds in one of these layers."""
        tokens, size = batch_size * layout.local_len, number_bytes(dtype)[0]
        more = tokens * (self.without_gradients * size + 8 * self.with_positions)
        return gathered_traffic(tokens * self.numbers * size, layout.world_size, more)

    def in_place_of_transport(self, call: Explanation, moved: RankTraffic) -> Explanation:
        """Returns the explanation of a call with these messages in place of those of a transport."""
        if call.layout.world_size == 1:
            return call
        what = "no pattern expresses it" if self.chosen is None else f"each query chooses {self.chosen} keys"
        return replace(
            call,
            decision=Decision("gathered", f"{what}, so each rank gathers the keys of whole rows"),
            ranks=tuple(replace(share, gathered=moved) for share in call.ranks),
            balance={"gathered": call.imbalance},
            pieces_of_heads=1,  # Nothing is computed while they travel.
        )


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
    mixers: tuple[ModelMixers, ...] = ()  # the other modules of a hybrid that mix tokens, by kind
    latent: int | None = None  # the numbers of a token in Transformers' caches of latent attention; None for others
    kept_times: int | None = 1  # the heads for each key/value head in a `PatternCache`; None if it keeps every row
    first_without_keys: int | None = None  # from this layer on, layers read the keys of earlier ones; None for none
    positions: int | None = None  # that the config names; None if it does not
    gathering: Mapping[int, Gathering] = field(default_factory=dict)  # by layer, of those that no transport serves

    def is_own(self, ranks: int) -> bool:
        """Whether its layers attend as in Transformers on so many ranks, and not by ring_dilated."""
        return any(x.chosen is None and (ranks > 1 or not x.over_rings_only) for x in self.gathering.values())

    @property
    def takes_pattern_cache(self) -> bool:
        return all(x.over_rings_only for x in self.gathering.values())

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
            if not self.takes_pattern_cache:
                one = CacheBytes(one.whole, one.whole)
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
    mixers: list[tuple[ModelMixers, RankTraffic]]  # with the bytes of each rank in one layer of each kind
    flops: int  # of the busiest rank's forward pass
    imbalance: float  # the same over the mean
    flop_share: float  # the FLOPs of all ranks, as a share of exact attention's
    traffic: RankTraffic  # the most bytes that any rank moves in all layers, and holds at once


def explain_calls(
    attention: ModelAttention, *, batch_size: int, dtype: Any, **call: Any
) -> tuple[Explanation, list[tuple[list[int], Explanation]]]:
    """Returns the call that decides the layout; and for each kind of layers their numbers, and the call of one of them.

    Args:
        call: arguments of `explain`.
    """
    names = "num_heads", "num_kv_heads", "head_dim", "value_dim"
    call |= {name: getattr(attention, name) for name in names} | {"batch_size": batch_size, "dtype": dtype}
    is_own = attention.is_own(call["ring_size"])
    if is_own and {attention.base, *attention.layers} != {Pattern.exact()}:
        raise ValueError(f"{attention.name!r} takes no pattern over a ring: its attention is that of Transformers")
    base = explain(attention.base, **call | ({"layout": "contiguous"} if is_own else {}))
    if is_own:
        base = replace(base, layout_decision=Decision("contiguous", "masks of Transformers know no other order"))
    call["layout"] = base.layout
    kinds: dict[tuple[Pattern, Gathering | None], list[int]] = {}
    for number, pattern in zip(attention.numbers, attention.layers):
        kinds.setdefault((pattern, attention.gathering.get(number)), []).append(number)
    calls = []
    for (pattern, gathering), numbers in kinds.items():
        # A query that chooses keys computes with as many as one with a window.
        chosen = None if gathering is None or gathering.chosen is None else Pattern((Window(gathering.chosen),))
        of_kind = base if pattern == attention.base and chosen is None else explain(chosen or pattern, **call)
        if gathering is not None:
            moved = gathering.traffic(base.layout, batch_size, dtype)
            of_kind = replace(of_kind, pattern=pattern, chosen=gathering.chosen)
            of_kind = gathering.in_place_of_transport(of_kind, moved)
        calls.append((numbers, of_kind))
    return base, calls


def explain_layers(
    attention: ModelAttention, *, batch_size: int = 1, dtype: Any = "bfloat16", **call: Any
) -> StepExplanation:
    """Explains one step of all layers, by the arguments and with the errors of `explain`, but without the heads."""
    base, of_layers = explain_calls(attention, batch_size=batch_size, dtype=dtype, **call)
    counts = [(len(numbers), call) for numbers, call in of_layers]
    layout = base.layout
    documents = call.get("documents") or (((0, layout.seq_len),),) * batch_size
    mixers = [(x, x.traffic(layout, number_bytes(dtype), documents)) for x in attention.mixers]
    moved = [(count, call.traffic()) for count, call in counts]
    moved += [(len(kind.layers), [of_layer] * layout.world_size) for kind, of_layer in mixers]
    flops = [sum(n * call.ranks[rank].forward_flops for n, call in counts) for rank in range(layout.world_size)]
    return StepExplanation(
        base=base,
        calls=of_layers,
        mixers=mixers,
        flops=max(flops),
        imbalance=busiest_over_mean(flops),
        flop_share=sum(count * call.flop_share for count, call in counts) / len(attention.layers),
        traffic=busiest_traffic(moved),
    )
