"""The sizes of a model that decide its memory: its parameters, and the modules of each layer.

The model is made on torch's meta device, where tensors hold nothing. The names of its parameters tell modules apart.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig

from ..hf.model.models import why_not
from ..hf.names import IMPLEMENTATION
from ..hybrids.models import mixers_of
from ..plan.patterns import Pattern
from .layers import ModelAttention
from .models import UNREADABLE, attention_of_model, config_of, unreadable

#: The names of the last matrix of an MLP, [width, features]; the matrices of stacked experts have one more dimension.
_LAST_OF_MLP = ("down_proj", "w2", "output_linear")
#: The names of a gated MLP's gate, alone or joined with the matrix of its inputs.
_GATES = ("gate_proj", "w3", "gate_up_proj", "input_linear")
#: The names of norms over each head of queries and keys.
_HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
#: The names in configs of the experts of a token, and of the features of an MLP.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
_MLP_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "inner_dim")


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one layer."""

    parameters: int  # all experts included
    shared: int  # of the parameters, with a later layer
    mlp_width: int  # the features of the MLP for one token: of all of its experts together, if there are `experts`
    experts: int
    experts_per_token: int
    gated: bool  # whether the MLP multiplies two projections
    norm_widths: tuple[int, ...]  # the features of each norm whose output goes to linear layers
    norms_in_float32: bool  # whether norms compute in float32 by several operations, unlike torch's LayerNorm
    head_norm_width: int  # the features of norms of queries and keys, whose outputs go to the rotary embedding
    attends: bool  # whether it has attention; layers of hybrids may lack it
    gate_width: int  # the features of a gate of attention's output, and of the product; 0 without a gate


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model."""

    attention: ModelAttention
    model_type: str
    width: int
    vocabulary: int
    embedding: int  # the parameters of the token embeddings; the head has as many, or is the same tensor
    layers: tuple[LayerShape, ...]
    parameters: int
    largest: int  # the number of parameters in the largest tensor
    whole: str | None = None  # the type of a model that also sees or hears; only its text model is counted


def shape_of_model(model: Any, pattern: Pattern | str | None = None) -> ModelShape:
    """Returns the sizes of what `config_of` reads; a pattern replaces the config's for layers without their own window."""
    config = config_of(model)
    text = copy.deepcopy(config.get_text_config())
    if refused := why_not(text.model_type):
        raise ValueError(refused)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"Transformers makes no causal language model of type {text.model_type!r}")
    attention = attention_of_model(config, config.name_or_path or text.model_type, pattern)
    if hasattr(text, IMPLEMENTATION):
        delattr(text, IMPLEMENTATION)  # Only the sizes of the model count here.
    try:
        with torch.device("meta"):
            made: Any = AutoModelForCausalLM.from_config(text, attn_implementation="eager", trust_remote_code=False)
    except UNREADABLE as error:  # Some types have no model of their default config.
        raise ValueError(unreadable(text.model_type, error)) from error
    sizes = [parameter.numel() for parameter in made.parameters()]
    embeddings = made.get_input_embeddings().weight
    width = getattr(text, "hidden_size", None) or embeddings.shape[1]
    return ModelShape(
        attention=attention,
        model_type=text.model_type,
        width=width,
        vocabulary=text.vocab_size,
        embedding=embeddings.numel(),
        layers=_read_layers(made, config.get_text_config(decoder=True), attention, width),
        parameters=sum(sizes),
        largest=max(sizes),
        whole=None if config.get_text_config() is config else config.model_type,
    )


def _read_layers(
    made: nn.Module, text: PretrainedConfig, attention: ModelAttention, width: int
) -> tuple[LayerShape, ...]:
    count = text.num_hidden_layers
    stack = next((x for x in made.modules() if isinstance(x, nn.ModuleList) and len(x) == count), None)
    if stack is None:
        raise ValueError(f"no list of {count} layers was found in a model of type {text.model_type!r}")
    in_mixers = {id(x) for _, mixer in mixers_of(made, text) for x in mixer.parameters()}
    counted: set[int] = set()
    layers: list[LayerShape] = []
    # Backward begins with the last layer, so parameters that several layers share get their gradients there.
    for number, layer in reversed(list(enumerate(stack))):
        sizes = {id(x): x.numel() for x in layer.parameters()}
        shared = sum(size for one, size in sizes.items() if one in counted)
        counted |= sizes.keys()
        outside = {path: tuple(x.shape) for path, x in layer.named_parameters() if id(x) not in in_mixers}
        modules = _sizes_of_modules(outside, text, attention, width)
        modules["norms_in_float32"] = not any(isinstance(x, nn.LayerNorm) for x in layer.modules())
        layers.append(LayerShape(sum(sizes.values()), shared, attends=number in attention.numbers, **modules))
    return tuple(reversed(layers))


def _sizes_of_modules(
    outside: dict[str, tuple[int, ...]], text: PretrainedConfig, attention: ModelAttention, width: int
) -> dict[str, Any]:
    """Returns fields of a `LayerShape`; `outside` has the shapes of all parameters outside of mixers, by their paths."""
    norms, head_norms, dense, gate, gated = [], 0, 0, 0, False
    experts, expert_width, outputs = 0, 0, attention.num_heads * attention.value_dim
    for path, shape in outside.items():
        names = path.split(".")
        name = names[-2] if names[-1] == "weight" else names[-1]
        gated = gated or name in _GATES
        if name in _HEAD_NORMS:
            head_norms += 1
        elif len(shape) == 1 and names[-1] != "bias" and ("norm" in name or shape[0] == width):
            norms.append(shape[0])
        elif name in _LAST_OF_MLP and len(shape) == 3:
            experts, expert_width = shape[0], max(expert_width, shape[1] * shape[2] // width)
        elif name in _LAST_OF_MLP and re.search(r"experts\.\d+\.", path):
            experts, expert_width = experts + 1, shape[1]
        elif name in _LAST_OF_MLP and ".experts." in path:
            raise ValueError(f"the experts of {text.model_type!r} are in one matrix, {path}, and cannot be counted")
        elif name in _LAST_OF_MLP and len(shape) == 2:
            dense += shape[1]
        elif name == "g_proj":
            gate = outputs + shape[0]
        elif name == "q_proj" and shape[0] == 2 * attention.num_heads * attention.head_dim:
            gate = 2 * outputs  # The gates are half of the outputs of the projection.
    per_token = (_first(text, _EXPERTS_PER_TOKEN) or 1) if experts else 0
    mlp_width = per_token * expert_width + dense
    if not mlp_width and attention.mixers is None:  # An MLP whose matrices have other names.
        mlp_width = _first(text, _MLP_WIDTHS) or 4 * width
    return {
        "mlp_width": mlp_width,
        "experts": experts,
        "experts_per_token": per_token,
        "gated": gated,
        "norm_widths": tuple(norms),
        "head_norm_width": attention.head_dim * (attention.num_heads + attention.num_kv_heads) * bool(head_norms),
        "gate_width": gate,
    }


def _first(text: PretrainedConfig, names: tuple[str, ...]) -> int:
    """Returns the first number that a config has under one of these names; 0 without a number."""
    return next((x for x in (getattr(text, name, None) for name in names) if isinstance(x, int)), 0)
