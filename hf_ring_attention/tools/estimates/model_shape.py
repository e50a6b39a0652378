"""The sizes of a model that decide its memory and its work: parameters, layers, heads, widths of MLPs.

Parameters of the commonest types are counted by formulas from config.json, which takes no time; those of all others by making
the model on torch's meta device, which takes some seconds and no memory. A test compares the two. Hybrids are always made
there, since their mixers are measured on it (`mixer_memory.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...hf.models import supported_models
from ...plan.patterns import Pattern
from ..model_config import (
    NUMBERS_OF_EXPERTS,
    WIDTHS,
    ModelAttention,
    attention_of_config,
    first_number,
    read_config,
    text_config_of,
)
from .layer_shape import NAMES_OF_EXPERTS_PER_TOKEN, LayerShape, first_of

#: Types with gated MLPs, root-mean-square norms and linear layers without biases, whose parameters are counted by formulas,
#: and how they differ: the norms of a layer, norms of queries and keys over each head, biases, gate and up in one tensor, and
#: tied embeddings by default. The experts of a layer are two tensors, of which that of gate and up is the larger one.
COUNTED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {"experts": True},
    "qwen2": {"query_biases": True},
    "qwen3": {"head_norms": True},
    "qwen3_moe": {"head_norms": True, "experts": True},
    "gemma2": {"norms": 4, "tied": True},
    "gemma3_text": {"norms": 4, "head_norms": True, "tied": True},
    "smollm3": {"tied": True},
    "phi3": {"fused": True},
    "granite": {},
    "deepseek_v3": {"experts": True, "latent": True},
}
_MLP_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "inner_dim")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model.

    Attributes:
        attention: heads, and the pattern of each layer.
        embedding: the parameters of the token embeddings; of the head, too, which has as many or is the same tensor (`tied`).
        parameters: all of them; `largest` are those of the largest tensor.
        counted_by: how the parameters were counted.
    """

    attention: ModelAttention
    model_type: str
    width: int
    vocabulary: int
    embedding: int
    tied: bool
    layers: tuple[LayerShape, ...]
    parameters: int
    largest: int
    counted_by: str


def shape_of_model(model: Any, pattern: Pattern | None = None, *, on_meta: bool = False) -> ModelShape:
    """Returns the sizes of a model.

    Args:
        model: a Transformers model or config, the dict of a config, a folder with a config.json, or an id of the hub.
        pattern: that of layers without a window of their own, in place of the one that the config has.
        on_meta: whether to count parameters on torch's meta device where formulas would do.

    Raises:
        ValueError: a model that the package does not compute, or a config that says too little.
    """
    name, whole = _config_of(model)
    config = text_config_of(whole)
    model_type = str(config.get("model_type") or whole.get("model_type") or "unknown")
    support = next((one for one in supported_models() if one.model_type == model_type), None)
    if support is not None and support.status == "refused":
        raise ValueError(f"estimate: models of type {model_type!r} are not computed: {support.reason}")
    try:
        attention = attention_of_config(whole, name, pattern)
        width = first_number(name, config, WIDTHS)
        vocabulary = first_number(name, config, ("vocab_size",))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"estimate: {error}") from None
    special = COUNTED.get(model_type)
    if special is None or on_meta or config.get("mlp_bias") or config.get("per_layer_config"):
        return _counted_on_meta(config, model_type, attention, width, vocabulary)
    layers = tuple(_layer(config, special, attention, width, number) for number in range(len(attention.layers)))
    tied = bool(config.get("tie_word_embeddings", special.get("tied", False)))
    embedding = vocabulary * width
    total = sum(layer.parameters for layer in layers) + embedding * (1 if tied else 2) + width
    fused = 2 if special.get("fused") else 1
    matrices = [width * (2 * one.experts * one.expert_width or fused * one.mlp_width) for one in layers]
    return ModelShape(
        attention=attention,
        model_type=model_type,
        width=width,
        vocabulary=vocabulary,
        embedding=embedding,
        tied=tied,
        layers=layers,
        parameters=total,
        largest=max(embedding, *matrices),
        counted_by="formulas from config.json",
    )


def _config_of(model: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(model, str):
        try:
            return model, read_config(model)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"estimate: {error}") from None
    if isinstance(model, Mapping):
        return str(model.get("_name_or_path") or model.get("model_type") or "the config"), model
    config = getattr(model, "config", model)
    if not callable(getattr(config, "to_dict", None)):
        raise ValueError(
            f"estimate: a Transformers model, its config, the dict of a config, a folder or a hub id was expected, got "
            f"{type(model).__name__}"
        )
    written = config.to_dict()
    return str(written.get("_name_or_path") or written.get("model_type") or "the config"), written


def _experts_of(config: Mapping[str, Any], number: int) -> tuple[int, int, int, int]:
    """Returns a layer's experts, those of a token, the width of one, and that of experts that all tokens share."""
    experts = first_of(config, NUMBERS_OF_EXPERTS)
    dense = number < (config.get("first_k_dense_replace") or 0) or number in (config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step") or 1
    if not experts or dense or (number + 1) % step:
        return 0, 0, 0, 0
    width = int(config.get("moe_intermediate_size") or first_of(config, _MLP_WIDTHS))
    shared = width * int(config.get("n_shared_experts") or 0) or int(config.get("shared_expert_intermediate_size") or 0)
    return experts, first_of(config, NAMES_OF_EXPERTS_PER_TOKEN), width, shared


def _layer(
    config: Mapping[str, Any], special: Mapping[str, Any], attention: ModelAttention, width: int, number: int
) -> LayerShape:
    """Returns a layer of one of the types of `COUNTED`."""
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    biased = bool(config.get("attention_bias"))
    norms = [width] * special.get("norms", 2)
    head_norm_width = dim * (heads + kv_heads) if special.get("head_norms") else 0
    if special.get("latent"):
        parameters, latent_norms = _latent_attention(config, attention, width)
        norms += latent_norms
    else:
        widths = (heads * dim, kv_heads * dim, kv_heads * attention.value_dim)
        parameters = width * (sum(widths) + heads * attention.value_dim)
        parameters += sum(widths) if biased or special.get("query_biases") else 0
        parameters += width if biased and not special.get("query_biases") else 0
        parameters += 2 * dim if special.get("head_norms") else 0
    experts, per_token, of_expert, shared = _experts_of(config, number) if special.get("experts") else (0, 0, 0, 0)
    if experts:
        parameters += 3 * width * (experts * of_expert + shared) + width * experts
        mlp_width = per_token * of_expert + shared
    else:
        mlp_width = first_of(config, _MLP_WIDTHS)
        parameters += 3 * width * mlp_width
    return LayerShape(
        parameters=parameters + sum(norms),
        mlp_width=mlp_width,
        experts=experts,
        experts_per_token=per_token,
        expert_width=of_expert,
        gated=True,
        norm_widths=tuple(norms),
        head_norm_width=head_norm_width,
    )


def _latent_attention(config: Mapping[str, Any], attention: ModelAttention, width: int) -> tuple[int, list[int]]:
    """Returns the parameters of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), and the widths of its norms."""
    heads, dim, value_dim = attention.num_heads, attention.head_dim, attention.value_dim
    rank, rotary = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    query_rank = config.get("q_lora_rank")
    queries = width * heads * dim if query_rank is None else query_rank * (width + heads * dim)
    keys = width * (rank + rotary) + rank * heads * (dim - rotary + value_dim)
    return queries + keys + heads * value_dim * width, [rank, *([query_rank] if query_rank else [])]


def _counted_on_meta(
    config: Mapping[str, Any],
    model_type: str,
    attention: ModelAttention,
    width: int,
    vocabulary: int,
) -> ModelShape:
    """Returns the sizes of a model that is made on the meta device, where tensors have no data."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made_of = AutoConfig.for_model(model_type, **{k: v for k, v in config.items() if k != "model_type"})
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(made_of)
    total = sum(parameter.numel() for parameter in model.parameters())
    largest = max(parameter.numel() for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight.numel()
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    stacks = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    count = len(attention.layers) if attention.mixers is None else int(model.config.num_hidden_layers)
    stack = next((module for module in stacks if len(module) == count), None)
    if stack is None:
        raise ValueError(f"estimate: no list of {count} layers was found in a model of type {model_type!r}")
    layers: list[LayerShape] = []
    if attention.mixers is not None:
        from .hybrid_layers import layers_of_hybrid

        layers.extend(layers_of_hybrid(model.train(), stack, config, attention, width))
    for number, module in enumerate(() if layers else stack):
        experts, per_token, of_expert, shared = _experts_of(config, number)
        norms = [
            parameter.numel()
            for name, parameter in module.named_parameters()
            if parameter.ndim == 1 and name.endswith("weight")
        ]
        mlp_width = per_token * of_expert + shared if experts else first_of(config, _MLP_WIDTHS) or 4 * width
        gated = any("gate" in name and parameter.ndim > 1 for name, parameter in module.named_parameters())
        layers.append(
            LayerShape(
                parameters=sum(parameter.numel() for parameter in module.parameters()),
                mlp_width=mlp_width,
                experts=experts,
                experts_per_token=per_token,
                expert_width=of_expert,
                gated=gated,
                norm_widths=tuple(size for size in norms if size == width),
                head_norm_width=0,
            )
        )
    return ModelShape(
        attention=attention,
        model_type=model_type,
        width=width,
        vocabulary=vocabulary,
        embedding=embedding,
        tied=tied,
        layers=tuple(layers),
        parameters=total,
        largest=largest,
        counted_by="the tensors of the model on torch's meta device",
    )
