"""Decides which models ring_dilated computes; every other one is refused, by name and with the reason, before it computes."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ..compute.private import calls_the_interface, is_stateful
from .hybrid_types import MIXER_LAYERS, MIXERS, hybrids_of
from .wrappers import decoder_of, runner_of

#: The types of layers that are computed.
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

_STATE = "it passes a state from token to token, which neither patterns nor shards have"

_RECURRENT = (
    "it has recurrent layers alone, and none that attends: there are no keys that a pattern could choose or a ring pass"
)

#: Model types whose attention or positions depend on more than the interface is given, as running them showed.
_BEYOND_THE_INTERFACE = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "xlstm"), _RECURRENT),
    **dict.fromkeys(
        ("qwen4_exp", "qwen4_exp_text"), "an indexer of its own selects keys, which no branch of a pattern is"
    ),
    "blt": "it attends from bytes to patches and back, which is cross-attention",
    "deepseek_v4": "it attends to compressed keys of several tokens, which it selects by a rule of its own",
    "doge": "it adds a learned mask of its own to the square mask, and so chooses keys that no pattern knows",
    "fnet": "it mixes all tokens by Fourier transforms, and has no attention",
    "git": "it lets image features see each other in both directions",
    "zaya": "convolutions inside its attention mix queries and keys of several tokens, which shards cut apart",
}

#: Model types that mix the tokens of a row outside of attention.
_MIX_TOKENS = {
    "mobilebert": "it embeds each token together with its neighbours (trigram_input)",
    "esm": "it scales embeddings by the share of mask tokens in the row (token_dropout)",
}

#: Words in the paths of modules that read images and sound, not the tokens of a row.
SENSES = ("vision", "visual", "audio", "speech", "image")

#: Model types that are decoders, although their config has is_decoder=False.
_DECODERS_ALL_THE_SAME = ("gpt_neox", "gpt_neox_japanese")


def check_config(config: PretrainedConfig, name: str | None = None) -> None:
    """Refuses the config of a model, of a class with this `name`, that ring_dilated does not compute."""
    layer_types = tuple(getattr(config, "layer_types", None) or ())
    model_class, name = _model_class(config), name or class_name(config)
    if config.model_type in _BEYOND_THE_INTERFACE:
        raise NotImplementedError(f"{name}: {_BEYOND_THE_INTERFACE[config.model_type]}: use 'sdpa' or 'eager'")
    if model_class is not None and config.get_text_config() is config:  # Elsewhere, the text model is checked.
        _check_class(model_class, name)
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise NotImplementedError(
            f"{name} attends from a decoder to an encoder (is_encoder_decoder or add_cross_attention), and some of its "
            f"kind add a position_bias: ring_dilated computes self-attention only: use 'sdpa' or 'eager'"
        )
    computed = (*LAYER_TYPES, *MIXER_LAYERS, "moe", "mlp") if config.model_type in MIXERS else LAYER_TYPES
    others = [number for number, kind in enumerate(layer_types) if kind not in computed]
    if others:
        kind = layer_types[others[0]]
        selects = "it selects keys by a rule of its own, which no branch of a pattern is"
        reason = _STATE if kind in (*MIXER_LAYERS, "moe_mamba") else selects
        raise NotImplementedError(
            f"{name}: layer {others[0]} is of type {kind!r} (of this or another such type are layers {others}): "
            f"{reason}: ring_dilated computes layers of {', '.join(LAYER_TYPES)}: use 'sdpa' or 'eager'"
        )
    if not layer_types and getattr(config, "index_topk", None):  # Configs of custom code may have no types of layers.
        raise NotImplementedError(
            f"{name} selects keys by an indexer, which no branch of a pattern is: use 'sdpa' or 'eager'"
        )


def class_name(config: PretrainedConfig | None) -> str:
    """Returns the name of the class of a config's model, or of the config itself if the class is unknown."""
    if config is None:
        return "the model"
    names = getattr(config, "architectures", None)
    return str(names[0] if names else (_model_class(config) or type(config)).__name__)


def _model_class(config: PretrainedConfig) -> Any:
    """Returns the base model that Transformers has for a config; None if it has none."""
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING):
        classes = mapping.get(type(config), None)
        if classes is not None:
            return classes[0] if isinstance(classes, (tuple, list)) else classes
    return None


@lru_cache(maxsize=256)  # Transformers reads the source of the class.
def _check_class(model_class: type[Any], name: str) -> None:
    """Refuses a class that computes attention without the interface, in all layers or in some."""
    if not calls_the_interface(model_class):
        raise ValueError(
            f"{name} does not call Transformers' attention interface, so it would ignore ring_dilated and compute "
            f"attention of its own: use it with 'eager', or a model class that calls the interface"
        )
    if is_stateful(model_class) and getattr(model_class.config_class, "model_type", None) not in MIXERS:
        raise NotImplementedError(
            f"{name}: it has recurrent, linear-attention or convolutional layers; of such a layer, {_STATE}: use 'sdpa' or "
            f"'eager'"
        )


def check_model(model: PreTrainedModel, sharded: bool) -> None:
    """Refuses a model that ring_dilated does not compute, or, if rows are sharded, does not compute on shards."""
    name, config = type(model).__name__, model.config.get_text_config()
    text_model: Any = decoder_of(model)
    text_class: Any = type(text_model)
    check_config(model.config, name)
    check_config(config, name)
    _check_class(text_class, name)
    hybrids = hybrids_of(config)
    mixers = () if hybrids is None else tuple(f"{path}." for path in hybrids.checked_mixers(model))
    for path, module in text_model.named_modules():
        known = any(word in path for word in SENSES) or path.startswith(mixers)
        if not known and isinstance(module, nn.Conv1d) and max(module.kernel_size) > 1:
            raise NotImplementedError(f"{name}: {path} is a convolution along the row: {_STATE}: use 'sdpa' or 'eager'")
    if not sharded:
        return
    if config.model_type in _MIX_TOKENS and getattr(config, "token_dropout", True):
        raise NotImplementedError(
            f"{name}: {_MIX_TOKENS[config.model_type]}, and some of them are on other ranks: use one process (ring=None)"
        )
    if "position_ids" not in inspect.signature(runner_of(model).forward).parameters:
        raise NotImplementedError(
            f"{name} numbers its tokens itself and takes no position_ids, so every shard would begin at position 0: use one "
            f"process (ring=None)"
        )


def check_predicts_next(model: PreTrainedModel, caller: str) -> None:
    """Refuses a model that is made for something else than predicting each token from those before it."""
    name, config = type(model).__name__, model.config.get_text_config()
    if LOSS_MAPPING.get(model.loss_type or "ForCausalLM", ForCausalLMLoss) is not ForCausalLMLoss:
        wrong = f"{caller}: {name} does not compute the loss of next tokens (its loss is {model.loss_type})"
        raise ValueError(f"{wrong}: use a causal language model (...ForCausalLM)")
    seeing = next((setting for setting in ("is_decoder", "causal") if getattr(config, setting, True) is False), None)
    if config.model_type in _DECODERS_ALL_THE_SAME:
        seeing = None
    if config.model_type == "xlnet" or seeing is not None:
        remedy = f"set config.{seeing}=True before the model is made" if seeing else "use a causal language model"
        raise ValueError(
            f"{caller}: each token of this {name} attends to those behind it, and so to its label: {remedy}"
        )


def has_next_token_loss(model: PreTrainedModel) -> bool:
    """Returns whether Transformers' own forward of a model passes its labels to `loss_function`, which shifts them."""
    own = next(vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))
    forward = inspect.unwrap(own)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    of_transformers = forward.__module__.startswith("transformers.models.") and "forward" not in vars(model)
    return model.get_output_embeddings() is not None and of_transformers and "loss_function" in names
