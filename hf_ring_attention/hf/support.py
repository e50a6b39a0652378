"""Which models ring_dilated computes: every other one is refused, by name and with the reason, before it computes."""

from __future__ import annotations

import inspect
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
from .wrappers import decoder_of, runner_of

#: What the layers of a model may be.
LAYER_TYPES = ("full_attention", "sliding_attention")

_STATE = "it passes a state from token to token, which neither patterns nor shards have"

#: Why a layer of another type is not computed; other types select keys by rules of their own.
_REASONS = {
    "chunked_attention": "it attends inside chunks, which no branch of a pattern is",
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid", "moe_mamba"), _STATE),
}

#: Model types whose attention or positions depend on more than the interface is given, seen by running them.
_BEYOND_THE_INTERFACE = {
    "doge": "it adds a learned mask of its own to the square mask, and so chooses keys that no pattern knows",
    "blt": "it attends from bytes to patches and back, which is cross-attention",
    "git": "it lets image features see each other in both directions",
    "fnet": "it mixes all tokens by Fourier transforms, and has no attention",
}

#: Model types that mix the tokens of a row outside of attention.
_MIX_TOKENS = {
    "mobilebert": "it embeds each token together with its neighbours (trigram_input)",
    "esm": "it scales embeddings by the share of mask tokens in the row (token_dropout)",
}

#: Modules that make tokens of images and sound, not of a row's tokens.
_SENSES = ("vision", "visual", "audio", "speech", "image")

#: Heads that read one token of a row, by what their class names end with.
_HEADS_OF_WHOLE_ROWS = (
    "ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining", "DoubleHeadsModel",
)  # fmt: skip

#: Model types that are decoders, although their config has is_decoder=False.
_DECODERS_ALL_THE_SAME = ("gpt_neox", "gpt_neox_japanese")

#: A cache: the configs that passed, keyed by the fields that the check reads.
_passed: set[tuple[Any, ...]] = set()


def check_config(config: PretrainedConfig, name: str | None = None) -> None:
    """Refuses the config of a model that ring_dilated does not compute.

    Args:
        name: of the model's class, where it is known.

    Raises:
        ValueError: its model does not call the attention interface.
        NotImplementedError: attention, layers or an architecture that ring_dilated does not compute.
    """
    layer_types = tuple(getattr(config, "layer_types", None) or ())
    crossing = bool(config.is_encoder_decoder or getattr(config, "add_cross_attention", False))
    indexed = not layer_types and bool(getattr(config, "index_topk", None))
    key = (type(config), layer_types, crossing, indexed)
    if key not in _passed:
        _check_config(config, layer_types, crossing, indexed, name)
        _passed.add(key)


def _check_config(
    config: PretrainedConfig, layer_types: tuple[str, ...], crossing: bool, indexed: bool, known: str | None
) -> None:
    model_class, name = _model_class(config), known or class_name(config)
    if model_class is not None and config.get_text_config() is config:  # of others, the text model counts
        check_class(model_class, name)
    if crossing:
        raise NotImplementedError(
            f"{name} attends from a decoder to an encoder (is_encoder_decoder or add_cross_attention), and some of its "
            f"kind add a position_bias: ring_dilated computes self-attention only: use 'sdpa' or 'eager'"
        )
    others = [number for number, kind in enumerate(layer_types) if kind not in LAYER_TYPES]
    if others:
        kind = layer_types[others[0]]
        reason = _REASONS.get(kind, "it selects keys by a rule of its own, which no branch of a pattern is")
        raise NotImplementedError(
            f"{name}: layer {others[0]} is of type {kind!r} (of this or another such type are layers {others}): "
            f"{reason}: ring_dilated computes layers of {' and '.join(LAYER_TYPES)}: use 'sdpa' or 'eager'"
        )
    if indexed:  # before Transformers had a type for such layers
        raise NotImplementedError(
            f"{name} selects keys by an indexer, which no branch of a pattern is: use 'sdpa' or 'eager'"
        )
    if config.model_type in _BEYOND_THE_INTERFACE:
        raise NotImplementedError(f"{name}: {_BEYOND_THE_INTERFACE[config.model_type]}: use 'sdpa' or 'eager'")


def class_name(config: PretrainedConfig | None) -> str:
    """What to call the model of a config: its class, as far as the config tells."""
    if config is None:
        return "the model"
    names = getattr(config, "architectures", None)
    return str(names[0] if names else (_model_class(config) or type(config)).__name__)


def _model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The base model of a config in Transformers, where it has one."""
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING):
        found = mapping.get(type(config), None)
        if found is not None:
            return found[0] if isinstance(found, (tuple, list)) else found
    return None


def check_class(model_class: type[Any], name: str) -> None:
    """Refuses a class whose attention is not, or not all, that of the interface.

    Raises:
        ValueError, NotImplementedError: as `check_config`.
    """
    if not calls_the_interface(model_class):
        raise ValueError(
            f"{name} does not call Transformers' attention interface, so it would ignore ring_dilated and compute "
            f"attention of its own: use it with 'eager', or a model class that calls the interface"
        )
    if is_stateful(model_class):
        raise NotImplementedError(
            f"{name} has recurrent, linear-attention or convolutional layers; of such a layer, {_STATE}: use 'sdpa' or "
            f"'eager'"
        )


def check_model(model: PreTrainedModel, sharded: bool) -> None:
    """Refuses a model that ring_dilated does not compute, or, if its rows are to be sharded, not on shards.

    Raises:
        ValueError, NotImplementedError: as `check_config`.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    text_model = decoder_of(model)
    check_class(type(text_model), name)
    check_config(model.config, name)
    check_config(config, name)
    for path, module in text_model.named_modules():
        sense = any(word in path for word in _SENSES)
        if not sense and isinstance(module, nn.Conv1d) and max(module.kernel_size) > 1:
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
    if config is not model.config:
        raise NotImplementedError(
            f"{name} puts features of images or sound between the tokens, whose places in a shard nothing tells: "
            f"shard its text model alone, or use one process (ring=None)"
        )
    if name.endswith(_HEADS_OF_WHOLE_ROWS):
        raise NotImplementedError(
            f"{name} classifies a whole row by one of its tokens, which only one rank of a ring has: use one process "
            f"(ring=None), or shard the base model ({type(model.base_model).__name__}) and classify what ring.unshard "
            f"returns"
        )


def check_predicts_next(model: PreTrainedModel, caller: str) -> None:
    """Refuses a model that is made for something else than predicting each token from those before it.

    Raises:
        ValueError: of another loss, or one whose tokens attend to those that they are to predict.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    if LOSS_MAPPING.get(model.loss_type or "ForCausalLM", ForCausalLMLoss) is not ForCausalLMLoss:
        raise ValueError(
            f"{caller}: {name} does not compute the loss of next tokens (its loss is {model.loss_type}): use a causal language "
            f"model (...ForCausalLM)"
        )
    seeing = next((setting for setting in ("is_decoder", "causal") if getattr(config, setting, True) is False), None)
    if config.model_type in _DECODERS_ALL_THE_SAME:
        seeing = None
    if config.model_type == "xlnet" or seeing is not None:
        remedy = f"set config.{seeing}=True before the model is made" if seeing else "use a causal language model"
        raise ValueError(
            f"{caller}: each token of this {name} attends to those behind it, so it would be predicted from itself: {remedy}"
        )


def calls_loss_function(model_class: type[Any]) -> bool:
    """Whether a class, or one that it is made from, computes its loss by `loss_function`: decoders of encoder-decoder
    models neither shift labels nor take those that are shifted."""
    forwards = [inspect.unwrap(vars(kind)["forward"]) for kind in model_class.__mro__ if "forward" in vars(kind)]
    return any("loss_function" in getattr(forward, "__code__", _NO_CODE).co_names for forward in forwards)


_NO_CODE = compile("", "", "exec")


def takes_shift_labels(model: PreTrainedModel) -> bool:
    """Whether the loss of a model is the sum over shift_labels, divided by num_items_in_batch, where both are given."""
    if "shift_labels" in inspect.signature(model.forward).parameters:
        return True
    causal = LOSS_MAPPING.get(model.loss_type or "ForCausalLM", ForCausalLMLoss) is ForCausalLMLoss
    return causal and calls_loss_function(type(model))


def untrainable(model: PreTrainedModel) -> ValueError | None:
    """Why a model cannot be trained under ring_dilated, as its config tells: it would drop attention weights at random."""
    dropout = [
        f"{name}={value}"
        for name, value in vars(model.config.get_text_config()).items()
        if "drop" in name and "att" in name and isinstance(value, float) and value > 0
    ]
    if not dropout:
        return None
    return ValueError(
        f"{type(model).__name__} has attention dropout ({', '.join(dropout)}), and ring_dilated has none: set it to 0 in the "
        f"config before the model is made"
    )
