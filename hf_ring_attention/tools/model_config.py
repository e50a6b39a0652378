"""Reads what a model's config.json says of its attention, without Transformers, which takes seconds to load."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..plan.branches import Branch, Segment, Window
from ..plan.patterns import Pattern
from .hybrid_config import ModelMixers, hybrid_layers
from .output import spinner

#: Types whose config.json may lack layer_types, with (n, i): every n-th layer from layer i on has no window of its own.
_FULL_EVERY = {
    "afmoe": (4, 3),
    "cohere2": (4, 3),
    "cohere2_moe": (4, 3),
    "cohere_compass_text": (1, 0),
    "cwm": (4, 0),
    "exaone4": (4, 3),
    "exaone_moe": (4, 3),
    "gemma2": (2, 1),
    "gemma3_text": (6, 5),
    "gemma3n_text": (5, 4),
    "gemma4_text": (6, 5),
    "gemma4_unified_text": (6, 5),
    "gpt_oss": (2, 1),
    "granite_swa": (4, 0),
    "granitemoe_swa": (4, 0),
    "kolibri1": (5, 4),
    "laguna": (1, 0),
    "mellum": (1, 0),
    "modernbert-decoder": (3, 0),
    "olmo3": (4, 3),
    "vaultgemma": (2, 1),
}
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_HEAD_DIMS = ("head_dim", "attention_head_dim", "kv_channels")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
#: The names that configs have for the width of the residual stream.
WIDTHS = ("hidden_size", "n_embd", "d_model")
#: The names that configs have for the number of experts.
NUMBERS_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
#: What a model has of each of these: a list is made of its layers, and a plan has tiles for its heads.
_COUNTS = (*_HEADS, *_LAYER_COUNTS, *NUMBERS_OF_EXPERTS, "num_key_value_heads", "kv_n_heads")
_MOST = 65536
_WIDTHS_OF_HEADS = (*_HEAD_DIMS, *WIDTHS, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LARGEST_WIDTH = 2**31


@dataclass(frozen=True)
class ModelAttention:
    """The attention of a model.

    Attributes:
        name: the id or folder that names the model.
        base: the pattern of layers without a window or chunks of their own; it also decides the layout.
        layers: the pattern of each layer that attends.
        numbers: the numbers of these layers in the model, which are all in most models.
        sliding: which of them have a window or chunks of their own.
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


def read_config(model: str) -> dict[str, Any]:
    """Returns the config.json of a folder, or of a model of the hub, or the one that is named itself.

    Raises:
        argparse.ArgumentTypeError: no config.json, or one that cannot be fetched or read.
    """
    folder = Path(model)
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise argparse.ArgumentTypeError(f"the folder {model!r} holds no model: there is no config.json in it")
    elif folder.is_file() and folder.suffix == ".json":
        file = folder
    elif folder.exists():
        raise argparse.ArgumentTypeError(f"a folder or a hub id as 'owner/name' was expected, got the file {model!r}")
    else:
        file = _download(model)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{file} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise argparse.ArgumentTypeError(f"{file} is no config of a model: an object was expected, got {config!r:.80}")
    _check_counts(model, text_config_of(config))
    return config


def _check_counts(model: str, config: Mapping[str, Any]) -> None:
    """Refuses counts and sizes that no model has, before any list is made of so many."""
    for names, most in ((_COUNTS, _MOST), (_WIDTHS_OF_HEADS, _LARGEST_WIDTH)):
        for name in names:
            value = config.get(name)
            if isinstance(value, (list, dict)) or value is None:  # One number for each layer.
                continue
            if not isinstance(value, int) or not 0 <= value <= most:
                raise argparse.ArgumentTypeError(
                    f"the config.json of {model!r} has {name}={value!r:.40}, and a whole number of at most {most} was "
                    f"expected: correct the file"
                )


def _download(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # The hub's client would print each new attempt.
    try:
        with spinner(f"asking the hub for the config of {model}"):  # An unreachable hub is asked for half a minute.
            return Path(hf_hub_download(model, "config.json"))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = re.split(r"(?<=[a-z)'])\. ", " ".join(str(error).split()))[0].rstrip(".")
        raise argparse.ArgumentTypeError(
            f"there is no folder {model!r} (from {Path.cwd()}), and the hub does not give its config.json: {reason}. "
            f"Name a folder with a config.json"
        ) from None


def model_attention(model: str, pattern: Pattern | None = None) -> ModelAttention:
    """Returns the attention of a model, with `pattern` in place of the one that its config has for layers without a window.

    Raises:
        argparse.ArgumentTypeError: no config that can be read, or one that says too little; commands that ask for it also take
            the sizes of heads.
    """
    try:
        return attention_of_config(read_config(model), model, pattern)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{error}; or, for attention alone, give --heads, --kv-heads and --head-dim"
        ) from None


def text_config_of(whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config.json that describes the language model, which is all of it for a model of text alone."""
    part = whole.get("text_config")
    return part if part and isinstance(part, Mapping) else whole


def most_positions(config: Mapping[str, Any]) -> int | None:
    """Returns the most tokens that a model has positions for; None where its config does not say."""
    found = (text_config_of(config).get(name) for name in ("max_position_embeddings", "n_positions"))
    return next((number for number in found if isinstance(number, int)), None)


def check_positions(config: Mapping[str, Any], tokens: int) -> None:
    """Refuses rows of more tokens than a model has positions for.

    Raises:
        argparse.ArgumentTypeError: for such rows.
    """
    positions = most_positions(config)
    if positions is not None and tokens > positions:
        raise argparse.ArgumentTypeError(
            f"the model has positions for {positions} tokens, and rows have {tokens}: ask for {positions} at most, or take a "
            f"checkpoint with more"
        )


def check_kv_heads(config: Mapping[str, Any], model: str, pattern: Pattern) -> None:
    """Refuses patterns for other numbers of key/value heads than a model has.

    Raises:
        argparse.ArgumentTypeError: for such a pattern, or a config that says too little.
    """
    if pattern.kv_heads:
        try:
            pattern.check_heads(attention_of_config(config, model).num_kv_heads, model)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None


def attention_of_config(whole: Mapping[str, Any], model: str, pattern: Pattern | None = None) -> ModelAttention:
    """Returns the attention of the model that a config.json describes, as `model_attention` does, which has its errors.

    Args:
        model: the name that errors say.
    """
    config = text_config_of(whole)
    _check_counts(model, config)
    _check_alike(model, config)
    heads, hybrid = first_number(model, config, _HEADS), hybrid_layers(model, config)
    kv_heads = config.get("num_key_value_heads") or (1 if config.get("multi_query") else heads)
    if isinstance(config.get("attn_config"), Mapping):  # Configs of dbrx have one.
        _check_counts(model, config["attn_config"])
        kv_heads = config["attn_config"].get("kv_n_heads") or kv_heads
    head_dim = value_dim = next((config[name] for name in _HEAD_DIMS if config.get(name)), None)
    if config.get("qk_nope_head_dim") and config.get("qk_rope_head_dim"):  # latent attention expands its keys
        head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        value_dim, kv_heads = config.get("v_head_dim") or head_dim, heads
    if not head_dim:
        head_dim = value_dim = first_number(model, config, WIDTHS) // heads
    base, own = _saved_patterns(model, config, pattern)
    of_model: list[Branch | None]
    if hybrid is not None:
        window = config.get("sliding_window") or config.get("attention_window_size")
        numbers, of_model = (
            hybrid.attending,
            [Window(int(window)) if one and window else None for one in hybrid.sliding],
        )
    else:
        numbers = tuple(range(first_number(model, config, _LAYER_COUNTS)))
        windows = _windows(config, len(numbers))
        of_model = _chunks(config, len(numbers)) or [Window(length) if length else None for length in windows]
    return ModelAttention(
        name=model,
        model_type=str(config.get("model_type") or whole.get("model_type") or "unknown"),
        num_heads=heads,
        num_kv_heads=int(kv_heads),
        head_dim=int(head_dim),
        value_dim=int(value_dim or head_dim),
        base=base,
        layers=tuple(own.get(i) or (Pattern((branch,)) if branch else base) for i, branch in zip(numbers, of_model)),
        numbers=numbers,
        sliding=tuple(branch is not None and i not in own for i, branch in zip(numbers, of_model)),
        mixers=None if hybrid is None else hybrid.mixers,
    )


def _check_alike(model: str, config: Mapping[str, Any]) -> None:
    """Refuses a model whose layers have heads of different numbers or sizes."""
    loops = config.get("n_recurrent_loops")
    if loops is not None:
        raise argparse.ArgumentTypeError(
            f"{model} runs some of its layers {loops} times (n_recurrent_loops), and layers that run once were expected"
        )
    own = [layer for layer in (config.get("per_layer_config") or {}).values() if isinstance(layer, Mapping)]
    differing = sorted({key for layer in own for key in layer if key in ("head_dim", "num_key_value_heads", *_HEADS)})
    differing += [name for name in ("num_key_value_heads", *_HEADS, *_HEAD_DIMS) if isinstance(config.get(name), list)]
    differing += ["global_head_dim"] if config.get("global_head_dim") not in (None, config.get("head_dim")) else []
    if differing:
        raise argparse.ArgumentTypeError(
            f"the layers of {model!r} differ in {', '.join(differing)}, and one kind of layer was expected"
        )


def first_number(model: str, config: Mapping[str, Any], names: Sequence[str]) -> int:
    """Returns the number that a config has under the first of these names; one of at least 1 is expected."""
    for name in names:
        if isinstance(config.get(name), int) and config[name] >= 1:
            return int(config[name])
    raise argparse.ArgumentTypeError(f"the config.json of {model!r} has none of {', '.join(names)}: add it")


def _saved_patterns(
    model: str, config: Mapping[str, Any], pattern: Pattern | None
) -> tuple[Pattern, dict[int, Pattern]]:
    """Returns the pattern of layers without a window, and the patterns of single layers: this one, or what was saved."""
    if pattern is not None:  # It replaces all of them, as patch_config does.
        return pattern, {}
    saved = config.get("ring_dilated") or {}
    try:
        own = {int(number): Pattern.from_dict(written) for number, written in saved.get("layers", {}).items()}
        base = Pattern.from_dict(saved["pattern"]) if "pattern" in saved else Pattern.exact()
    except (ValueError, AttributeError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"the config.json of {model!r} has a 'ring_dilated' that ra.patch_config did not write: {error}"
        ) from None
    return base, own


def _chunks(config: Mapping[str, Any], layers: int) -> list[Branch | None] | None:
    """Returns the chunks of each layer, None for a layer without; None for a model that has none."""
    length, types, with_rope = (
        config.get("attention_chunk_size"),
        config.get("layer_types"),
        config.get("no_rope_layers"),
    )
    if not isinstance(length, int) or length < 1:
        return None
    if isinstance(types, list) and len(types) >= layers:
        chunked = [kind == "chunked_attention" for kind in types[:layers]]
    elif isinstance(with_rope, list) and len(with_rope) >= layers:  # 1 for a layer with RoPE, which has chunks
        chunked = [bool(rope) for rope in with_rope[:layers]]
    else:
        every = config.get("no_rope_layer_interval") or 4
        chunked = [(number + 1) % every != 0 for number in range(layers)]
    return [Segment(length) if one else None for one in chunked]


def _windows(config: Mapping[str, Any], layers: int) -> list[int | None]:
    """Returns the window of each layer, None for a layer that has none of its own."""
    window, types, model_type = config.get("sliding_window"), config.get("layer_types"), config.get("model_type")
    if not isinstance(window, int) or window < 1 or config.get("use_sliding_window") is False:
        return [None] * layers
    if isinstance(types, list) and len(types) >= layers:
        return [window if kind == "sliding_attention" else None for kind in types[:layers]]
    every = config.get("sliding_window_pattern")
    if model_type in _FULL_EVERY:
        period, first = _FULL_EVERY[model_type]
        if isinstance(every, int) and every > 0 and first == period - 1:
            period, first = every, every - 1
        return [None if number % period == first else window for number in range(layers)]
    if isinstance(config.get("max_window_layers"), int):
        return [window if number >= config["max_window_layers"] else None for number in range(layers)]
    return [window] * layers
