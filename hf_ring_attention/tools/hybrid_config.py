"""Reads from config.json which layers of a hybrid attend, which have mixers, and what these mixers gather over a ring."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..hf.hybrid_types import MIXERS
from ..plan.state_traffic import StateNumbers, delta_rule_sums, selective_sums, state_space_sums

#: The kinds of layers that attend, and those that have a mixer; a "hybrid" layer does both, and others do neither.
_ATTENDING = ("full_attention", "sliding_attention", "attention", "hybrid")
_MIXING = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid")

#: The letters of `hybrid_override_pattern`, which configs of nemotron_h have.
_LETTERS = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}

#: The names of the numbers of Mamba 2: heads, size of a head, size of the state, groups, and tokens of the convolution.
_STATE_SPACE = {
    **dict.fromkeys(
        ("bamba", "falcon_h1", "granitemoehybrid"),
        ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
    ),
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
    "zamba2": ("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv"),
}
_SELECTIVE = ("jamba", "zamba")
_CONVOLUTIONS = ("lfm2", "lfm2_moe", "lfm3")
#: Types whose mixers gather rows, and whether positions come along.
_GATHERED = {"minimax": False, "recurrent_gemma": True}


@dataclass(frozen=True)
class ModelMixers:
    """The mixers of a hybrid model.

    Attributes:
        layers: the numbers of the layers that have one.
        numbers: what one of them gathers for each run of a document; None where it gathers rows.
        width: the features of a row.
        with_positions: whether each gathered row has its position beside it.
    """

    layers: tuple[int, ...]
    numbers: StateNumbers | None
    width: int
    with_positions: bool


@dataclass(frozen=True)
class HybridLayers:
    """The layers of a hybrid: the numbers of those that attend with whether each has a window, and the mixers of others."""

    attending: tuple[int, ...]
    sliding: tuple[bool, ...]
    mixers: ModelMixers


def hybrid_layers(model: str, config: Mapping[str, Any]) -> HybridLayers | None:
    """Returns the layers of a model that has mixers; None for any other.

    Args:
        model: the name that errors say.
        config: the part of a config.json that describes the language model.

    Raises:
        argparse.ArgumentTypeError: a hybrid whose config.json does not tell its layers, or the sizes of its mixers.
    """
    model_type = config.get("model_type")
    if model_type not in MIXERS:
        return None
    kinds = _kinds_of_layers(config)
    if kinds is None:
        raise argparse.ArgumentTypeError(
            f"the config.json of {model!r}, which is of the hybrid type {model_type!r}, does not tell which layers attend: "
            f"add layer_types"
        )
    mixing = tuple(number for number, kind in enumerate(kinds) if kind in _MIXING)
    if not mixing:
        return None
    attending = tuple(number for number, kind in enumerate(kinds) if kind in _ATTENDING)
    if not attending:
        raise argparse.ArgumentTypeError(
            f"no layer of {model!r} attends: its layers are {', '.join(sorted(set(kinds)))}"
        )
    sliding = tuple(kinds[number] == "sliding_attention" for number in attending)
    try:
        width, numbers = int(config["hidden_size"]), _numbers_of_run(config)
    except KeyError as lacking:
        raise argparse.ArgumentTypeError(
            f"the config.json of {model!r} has no {lacking}, a size of the mixers of the hybrid type {model_type!r}"
        ) from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise argparse.ArgumentTypeError(
            f"the config.json of {model!r} has a wrong size of the mixers of the hybrid type {model_type!r}: {error}"
        ) from None
    return HybridLayers(attending, sliding, ModelMixers(mixing, numbers, width, _GATHERED.get(model_type, False)))


def _kinds_of_layers(config: Mapping[str, Any]) -> Sequence[str] | None:
    """Returns the kind of each layer, by the names that the config of any release has for it; None where it has none."""
    listed = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(listed, list) and listed:
        return listed
    count, model_type = config.get("num_hidden_layers"), config.get("model_type")
    if isinstance(config.get("hybrid_override_pattern"), str):
        return [_LETTERS.get(letter, letter) for letter in config["hybrid_override_pattern"]]
    if not isinstance(count, int):
        return None
    if model_type == "falcon_h1":
        return ["hybrid"] * count
    if isinstance(config.get("block_types"), list) and config["block_types"]:
        kinds = {"recurrent": "recurrent", "attention": "sliding_attention"}
        return [kinds[config["block_types"][number % len(config["block_types"])]] for number in range(count)]
    mixing = "conv" if model_type in _CONVOLUTIONS else "linear_attention"
    attending = next(
        (config[name] for name in ("attn_layer_indices", "full_attn_idxs") if isinstance(config.get(name), list)), None
    )
    if model_type == "jamba" and "attn_layer_period" in config:
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        attending = [number for number in range(count) if number % period == offset]
    elif isinstance(config.get("full_attention_interval"), int):
        attending = range(config["full_attention_interval"] - 1, count, config["full_attention_interval"])
    if attending is None:
        return None
    return ["full_attention" if number in attending else mixing for number in range(count)]


def _numbers_of_run(config: Mapping[str, Any]) -> StateNumbers | None:
    """Returns what a mixer gathers for one run; None where it gathers rows.

    Raises:
        KeyError: a size that the config lacks.
    """
    model_type = config["model_type"]
    if model_type in _GATHERED:
        return None
    width = int(config["hidden_size"])
    if model_type in _CONVOLUTIONS:
        return StateNumbers(width, config["conv_L_cache"], 0)
    if model_type in _SELECTIVE:
        channels = int(config["mamba_expand"] * width)
        return StateNumbers(channels, config["mamba_d_conv"], selective_sums(channels, config["mamba_d_state"]))
    if model_type in _STATE_SPACE:
        heads, head_dim, state_size, groups, kernel = (config[name] for name in _STATE_SPACE[model_type])
        if not isinstance(head_dim, int):  # Configs of Bamba may say "auto".
            head_dim = int(config["mamba_expand"] * width) // heads
        channels = heads * head_dim + 2 * groups * state_size
        return StateNumbers(channels, kernel, state_space_sums(heads, head_dim, state_size))
    if "linear_num_heads" in config:  # Delta rules whose keys and values have the same heads.
        heads = key_heads = config["linear_num_heads"]
        key_dim = value_dim = config["linear_head_dim"]
    else:
        heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
        key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    channels = 2 * key_heads * key_dim + heads * value_dim
    return StateNumbers(channels, config["linear_conv_kernel_dim"], delta_rule_sums(heads, key_dim, value_dim))
