"""What one layer of a model computes with: the sizes that decide its memory and its work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .mixer_memory import MeasuredMixer

#: The names that configs have for the experts of a token.
NAMES_OF_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")


@dataclass(frozen=True)
class LayerShape:
    """What one layer computes with and keeps.

    Attributes:
        parameters: those of the layer, all experts included.
        mlp_width: the features of the MLP that a token passes: with experts, those of all experts of a token together.
        experts, experts_per_token, expert_width: 0 in a dense layer.
        gated: whether the MLP multiplies two projections.
        norm_widths: the features of each norm, whose outputs go to linear layers.
        head_norm_width: the features of norms of queries and keys, whose outputs the rotary embedding takes.
        attends: whether it has attention, which layers of hybrids may lack.
        gate_width: the features of a gate of attention's output, and of the product; 0 without.
        mixer: a hybrid's other module that mixes tokens.
        shared: of the parameters, those that a layer behind it has, too.
    """

    parameters: int
    mlp_width: int
    experts: int
    experts_per_token: int
    expert_width: int
    gated: bool
    norm_widths: tuple[int, ...]
    head_norm_width: int
    attends: bool = True
    gate_width: int = 0
    mixer: MeasuredMixer | None = None
    shared: int = 0

    def active_parameters(self, width: int) -> int:
        """Returns the parameters that a token is multiplied with: those of its experts, not of all."""
        if not self.experts:
            return self.parameters
        matrices = 3 if self.gated else 2
        return self.parameters - (self.experts - self.experts_per_token) * matrices * width * self.expert_width


def first_of(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Returns the number under the first of these names that has one; 0 where none has."""
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)
