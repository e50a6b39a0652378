"""The layers of a hybrid on torch's meta device: which modules each has, read from the shapes of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...hf.support import mixers_of
from ..model_config import ModelAttention
from .layer_shape import NAMES_OF_EXPERTS_PER_TOKEN, LayerShape, first_of
from .mixer_memory import MeasuredMixer

#: The names of the last matrix of an MLP, [width, features]; those of stacked experts have one dimension more.
_LAST_OF_MLP = ("down_proj", "w2", "output_linear")
#: The names of the matrix that a gated MLP has beside that of its inputs, or joined with it.
_GATES = ("gate_proj", "w3", "gate_up_proj", "input_linear")
#: The names of norms of queries and keys over each head.
_HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
#: The names of the matrix whose outputs gate those of attention.
_OUTPUT_GATES = ("g_proj",)


def layers_of_hybrid(
    model: PreTrainedModel, stack: nn.ModuleList, config: Mapping[str, Any], attention: ModelAttention, width: int
) -> tuple[LayerShape, ...]:
    """Returns the layers of a hybrid that was made on the meta device; equal mixers are measured once.

    Args:
        stack: its layers.
        config: that of the language model.

    Raises:
        ValueError: layers whose config names a mixer that they do not have, or the other way round.
    """
    mixers = {id(module): module for _, module in mixers_of(model, model.config.get_text_config())}
    known: dict[Any, MeasuredMixer] = {}
    counted: set[int] = set()
    layers: list[LayerShape] = []
    # Backward meets the last layer first, so parameters that several layers have get their gradients there.
    for number, layer in reversed(list(enumerate(stack))):
        own = next((module for module in layer.modules() if id(module) in mixers), None)
        named = attention.mixers is not None and number in attention.mixers.layers
        if named != (own is not None):
            raise ValueError(
                f"estimate: by its config, layer {number} of {attention.name!r} has {'a' if named else 'no'} mixer, but the "
                f"model that this release of Transformers makes has {'none' if named else 'one'} there"
            )
        mixer = None
        if own is not None:
            kind = (type(own), *((name, tuple(x.shape)) for name, x in own.named_parameters()))
            if kind not in known:
                known[kind] = MeasuredMixer(own, width)
            mixer = known[kind]
        everything = {id(x): x.numel() for x in layer.parameters()}
        shared = sum(size for one, size in everything.items() if one in counted)
        counted |= everything.keys()
        layers.append(
            _layer_of_hybrid(
                layer, own, config, attention, number in attention.numbers, mixer, sum(everything.values()), shared
            )
        )
    return tuple(reversed(layers))


def _layer_of_hybrid(
    layer: nn.Module,
    own: nn.Module | None,
    config: Mapping[str, Any],
    attention: ModelAttention,
    attends: bool,
    mixer: MeasuredMixer | None,
    parameters: int,
    shared: int,
) -> LayerShape:
    inside = {id(x) for x in own.parameters()} if own is not None else set()
    norms, head_norms, dense, gate = [], 0, 0, 0
    experts = expert_width = 0
    gated = False
    outputs = attention.num_heads * attention.value_dim
    for path, parameter in layer.named_parameters():
        if id(parameter) in inside:
            continue
        names = path.split(".")
        name = names[-2] if names[-1] == "weight" else names[-1]
        gated = gated or name in _GATES
        if name in _HEAD_NORMS:
            head_norms += 1
        elif "norm" in name and parameter.ndim == 1:
            norms.append(parameter.numel())
        elif name in _LAST_OF_MLP and parameter.ndim == 3:
            experts, expert_width = parameter.shape[0], parameter.shape[2]
        elif name in _LAST_OF_MLP:
            dense += parameter.shape[1]
        elif name in _OUTPUT_GATES:
            gate = outputs + parameter.shape[0]
        elif name == "q_proj" and attends and parameter.shape[0] == 2 * attention.num_heads * attention.head_dim:
            gate = 2 * outputs  # The gates are half of what the projection of queries gives.
    per_token = first_of(config, NAMES_OF_EXPERTS_PER_TOKEN) if experts else 0
    return LayerShape(
        parameters=parameters,
        mlp_width=per_token * expert_width + dense,
        experts=experts,
        experts_per_token=per_token,
        expert_width=expert_width,
        gated=gated,
        norm_widths=tuple(norms),
        head_norm_width=attention.head_dim * (attention.num_heads + attention.num_kv_heads) if head_norms else 0,
        attends=attends,
        gate_width=gate,
        mixer=mixer,
        shared=shared,
    )
