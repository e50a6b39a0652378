"""Decides which models ring_dilated computes; every other one is refused, by name and with the reason, before it computes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
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

from ...compute.foreign_code import names_in
from ...compute.private import calls_the_interface, is_stateful
from .types import (
    BEYOND_THE_INTERFACE,
    DECODERS_ALL_THE_SAME,
    INDEXED,
    INDEXED_LAYERS,
    INDEXER,
    MIX_TOKENS,
    MIXER_LAYERS,
    MIXERS,
    OWN_ATTENTION,
    OWN_ATTENTION_OVER_RINGS,
)
from .wrappers import decoder_of, runner_of

#: The types of layers that are computed.
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

_INSTEAD = "use 'sdpa' or 'eager'"

_STATE = "it passes a state from token to token, which neither patterns nor shards have"
_OTHER_RULE = "it selects keys by a rule that no pattern can express"

#: Words in the paths of modules that read images and sound, not the tokens of a row.
SENSES = ("vision", "visual", "audio", "speech", "image")


def check_config(config: PretrainedConfig, name: str | None = None) -> None:
    """Refuses the config of a model, of a class with this `name`, that ring_dilated does not compute."""
    layer_types = tuple(getattr(config, "layer_types", None) or ())
    model_class, name = _model_class(config), name or class_name(config)
    if config.model_type in BEYOND_THE_INTERFACE:
        why = BEYOND_THE_INTERFACE[config.model_type]
        raise NotImplementedError(f"{name}: {why}: {'leave this package out' if 'no attention' in why else _INSTEAD}")
    if model_class is not None and config.get_text_config() is config:  # Elsewhere, the text model is checked.
        _check_class(model_class, name)
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise NotImplementedError(
            f"{name} attends from a decoder to an encoder (is_encoder_decoder or add_cross_attention), and some of its "
            f"kind add a position_bias: ring_dilated computes self-attention only: {_INSTEAD}"
        )
    of_type: tuple[str, ...] = (*MIXER_LAYERS, "moe", "mlp") if config.model_type in MIXERS else ()
    computed = (*LAYER_TYPES, *of_type, *(INDEXED_LAYERS if config.model_type in INDEXED else ()))
    others = [number for number, kind in enumerate(layer_types) if kind not in computed]
    if others:
        kinds = dict.fromkeys(layer_types[number] for number in others)
        reason = _STATE if kinds.keys() & {*MIXER_LAYERS, "moe_mamba"} else _OTHER_RULE
        listed = f"{', '.join(map(str, others[:-1]))} and {others[-1]} are" if others[1:] else f"{others[0]} is"
        raise NotImplementedError(
            f"{name}: layer{'s' * (len(others) > 1)} {listed} {' or '.join(map(repr, kinds))}, which ring_dilated does not "
            f"compute: {reason}: {_INSTEAD}"
        )
    if not layer_types and getattr(config, "index_topk", None):  # Configs of custom code may have no types of layers.
        raise NotImplementedError(f"{name}: {INDEXER}: {_INSTEAD}")


def attention_dropout(config: PretrainedConfig) -> str | None:
    """Returns the setting of a text model that drops attention weights in training, which ring_dilated does not; else None."""
    given = vars(config).items()
    return next((f"{k}={x}" for k, x in given if "drop" in k and "att" in k and isinstance(x, float) and x > 0), None)


def why_own_attention(config: PretrainedConfig, sharded: bool) -> str | None:
    """Returns why a text model keeps the attention that Transformers gives it; None if it attends by ring_dilated."""
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return None
    if sharded and config.model_type in OWN_ATTENTION_OVER_RINGS:
        return OWN_ATTENTION_OVER_RINGS[config.model_type]
    sees_later = getattr(config, "is_decoder", True) is False and config.model_type not in DECODERS_ALL_THE_SAME
    return None if sees_later else OWN_ATTENTION.get(config.model_type)


def why_no_pattern(config: PretrainedConfig, sharded: bool = False) -> str | None:
    """Returns why layers of a text model compute no pattern, so that nothing can choose one; None if all may have one."""
    if config.model_type in INDEXED:
        return "its layers choose their keys at run time"
    return why_own_attention(config, sharded)


def chosen_keys(config: Any) -> tuple[int, int]:
    """Returns how many keys a query of an indexed type chooses, and the numbers of an index key."""
    if config.model_type == "qwen4_exp_text":  # It chooses by positions, too.
        rotary = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1))
        return config.indexer_budget, config.indexer_head_dim + 2 * rotary
    if hasattr(config, "index_block_size"):
        return config.index_topk_blocks * config.index_block_size, config.index_head_dim
    if hasattr(config, "index_kpool"):  # A key has gates beside it, and a mark of padding.
        return config.index_topk, 2 * config.index_head_dim + 1
    return config.index_topk, config.index_head_dim


def class_name(config: PretrainedConfig | None) -> str:
    """Returns the name of the class of a config's model, or of the config itself if the class is unknown."""
    if config is None:
        return "the model"
    names = getattr(config, "architectures", None)
    return str(names[0] if names else (_model_class(config) or type(config)).__name__)


def _model_class(config: PretrainedConfig) -> Any:
    """Returns the base model that Transformers has for a config; None if it has none."""
    mappings: Any = (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING)
    classes = next(filter(None, (mapping.get(type(config), None) for mapping in mappings)), None)
    return classes[0] if isinstance(classes, (tuple, list)) else classes


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
            f"{name}: it has recurrent, linear-attention or convolutional layers; of such a layer, {_STATE}: {_INSTEAD}"
        )


def check_model(model: PreTrainedModel, sharded: bool, mixers: Sequence[str]) -> None:
    """Refuses a model that ring_dilated does not compute, or, if rows are sharded, does not compute on shards.

    Args:
        mixers: the paths of its mixers, which are computed.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    text_model: Any = decoder_of(model)
    text_class: Any = type(text_model)
    check_config(model.config, name)
    check_config(config, name)
    _check_class(text_class, name)
    inside_mixers = tuple(f"{path}." for path in mixers)
    for path, module in text_model.named_modules():
        known = any(word in path for word in SENSES) or path.startswith(inside_mixers)
        if not known and isinstance(module, nn.Conv1d) and max(module.kernel_size) > 1:
            raise NotImplementedError(f"{name}: {path} is a convolution along the row: {_STATE}: {_INSTEAD}")
    if not sharded:
        return
    if config.model_type in MIX_TOKENS and getattr(config, "token_dropout", True):
        raise NotImplementedError(
            f"{name}: {MIX_TOKENS[config.model_type]}, and some of them are on other ranks: use one process (ring=None)"
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
    settings = () if config.model_type in DECODERS_ALL_THE_SAME else ("is_decoder", "causal")
    seeing = next((setting for setting in settings if getattr(config, setting, True) is False), None)
    if config.model_type == "xlnet" or seeing is not None:
        remedy = f"set config.{seeing}=True before the model is made" if seeing else "use a causal language model"
        raise ValueError(
            f"{caller}: each token of this {name} attends to those behind it, and so to its label: {remedy}"
        )


def has_next_token_loss(model: PreTrainedModel) -> bool:
    """Returns whether Transformers' own forward of a model passes its labels to `loss_function`, which shifts them."""
    own = next(vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))
    of_transformers = inspect.unwrap(own).__module__.startswith("transformers.models.") and "forward" not in vars(model)
    return model.get_output_embeddings() is not None and of_transformers and "loss_function" in names_in(own)
