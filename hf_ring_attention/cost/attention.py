"""The attention of a model in plain numbers: the heads, the pattern of each layer, and the mixers of a hybrid."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..plan.patterns import Pattern
from ..plan.state_runs import StateNumbers


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
        total = 0.0
        for pattern, layers in Counter(self.layers).items():
            share = pattern.flop_share(tokens, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
            total += share * layers
        return total / len(self.layers)
