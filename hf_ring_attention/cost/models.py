"""Reads models: their config by Transformers' `AutoConfig`, and from it the attention and the mixers of their layers."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from ..hf.model.config import PatternsOfLayers, layer_pattern, patch_config
from ..hf.model.support import chosen_keys, why_own_attention
from ..hf.model.types import (
    INDEXED,
    INDEXED_LAYERS,
    MIXER_LAYERS,
    MIXERS,
    OTHER_CACHES,
    OTHER_VALUES,
    WHOLE_LAYERS,
)
from ..hf.patch import take_pattern_of_adapters
from ..plan.branches import Branch, Segment, Window
from ..plan.patterns import Pattern
from ..plan.state_runs import StateNumbers, delta_rule_sums, selective_sums, state_space_sums
from .layers import Gathering, ModelAttention, ModelMixers

#: Errors of Transformers for a config that it cannot read; its configs check little before they compute with an entry.
UNREADABLE = (
    *(OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, StrictDataclassError),
)
#: More layers, heads or experts than any model has; Transformers makes lists of that many.
_MOST = 65536
_LISTED = re.compile("(layers?|heads?|experts)$")

#: The kinds of layers that attend; a "hybrid" layer has a mixer, too.
_ATTENDING = ("full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid")

_MAMBA_2 = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
#: The names of the sizes of Mamba 2: heads, size of a head, size of the state, groups, and tokens of the convolution.
_STATE_SPACE = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), _MAMBA_2),
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
    "zamba2": ("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv"),
}
#: The names of the sizes of a delta rule: heads of values and of keys, and the sizes of a head.
_DELTA_RULE = ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim")
#: Types whose mixers gather rows, and whether positions travel with them.
_GATHERED = {"minimax": False, "recurrent_gemma": True}


def load_config(model: str, *, trust: bool = False) -> PretrainedConfig:
    """Returns the config of a folder with a config.json, of that file, or of a hub id; `trust` lets the model's code run.

    For a folder with adapters of PEFT, it is their model's config with the pattern that they were trained under.
    """
    if Path(model).is_dir() and not Path(model, "config.json").is_file():
        if Path(model, "adapter_config.json").is_file():
            return _adapted_config(model, trust)
        raise ValueError(f"the folder {model!r} has no config.json: name the folder of a model")
    try:
        _check_counts(PretrainedConfig.get_config_dict(model)[0])
        config: PretrainedConfig = AutoConfig.from_pretrained(model, trust_remote_code=trust)
    except UNREADABLE as error:
        reason = unreadable(model, error)
        if isinstance(error, OSError) and not Path(model).exists():
            reason = f"there is no folder {model!r}, and {_answer_of_hub(error)}"
        elif "trust_remote_code" in str(error):
            reason = f"{model!r} brings code of its own: read it, and pass --trust-remote-code if you trust it"
        raise ValueError(reason) from error
    return config


def _adapted_config(folder: str, trust: bool) -> PretrainedConfig:
    try:
        from peft import PeftConfig
    except ModuleNotFoundError:
        raise ValueError(f"the folder {folder!r} has adapters, which need PEFT: pip install peft") from None
    adapter = PeftConfig.from_pretrained(folder)
    config = load_config(str(adapter.base_model_name_or_path), trust=trust)
    take_pattern_of_adapters({"default": adapter}, config)
    return config


def _answer_of_hub(error: OSError) -> str:
    """Returns why the hub gave no config, and the remedy."""
    if isinstance(error.__cause__, LocalEntryNotFoundError):
        return "the hub was not reached, nor is the model in its cache: connect, or name a folder"
    if isinstance(error.__cause__, GatedRepoError):
        return "the hub gives this model to accounts that may read it: hf auth login"
    return "the hub gives no config.json of that name: name another one"


def config_of(model: Any) -> PretrainedConfig:
    """Returns the config of a Transformers model, or the config that a dict, a folder or a hub id describes."""
    if isinstance(model, str):
        return load_config(model)
    if isinstance(model, Mapping):
        model_type = str(model.get("model_type"))
        if model_type not in CONFIG_MAPPING:
            raise ValueError(f"Transformers knows no model_type {model_type!r}: set 'model_type' in the config")
        try:
            _check_counts(model)
            made: PretrainedConfig = CONFIG_MAPPING[model_type].from_dict(dict(model))
        except UNREADABLE as error:
            raise ValueError(unreadable(model_type, error)) from error
        return made
    config = getattr(model, "config", model)
    if not isinstance(config, PretrainedConfig):
        raise ValueError(
            f"expected a model, its config as object or dict, a folder or a hub id, got {type(model).__name__}"
        )
    return config


def unreadable(name: str, error: Exception) -> str:
    words = str(error).split() or [type(error).__name__]
    return f"the config of {name!r} cannot be read: {' '.join(words[:18])}{' ...' if len(words) > 18 else ''}"


def _check_counts(written: Mapping[str, Any]) -> None:
    """Refuses counts that no model has, before Transformers makes lists of that many."""
    for name, value in written.items():
        if isinstance(value, Mapping):
            _check_counts(value)
        elif isinstance(value, (int, float)) and abs(value) > _MOST and _LISTED.search(name):
            raise ValueError(f"{name}={value} is more than {_MOST}")


def attention_of_model(
    config: PretrainedConfig, name: str, pattern: Pattern | str | PatternsOfLayers | None = None
) -> ModelAttention:
    """Returns the attention of the text model that a config describes; a pattern replaces the config's, as `patch_config`."""
    if pattern is not None:
        config = patch_config(copy.deepcopy(config), pattern)
    text = copy.copy(config.get_text_config(decoder=True))
    text.is_encoder_decoder = False  # The decoder alone is a causal language model.
    if pattern is not None and (refused := why_own_attention(text, False)):
        raise ValueError(f"{name!r} takes no pattern: {refused}")
    _check_alike(text, name)
    count = _positive(text, name, "num_hidden_layers")
    window = None if text.model_type == "moshi" else getattr(text, "sliding_window", None)  # Moshi's layers ignore it.
    other_caches = text.model_type in OTHER_VALUES | OTHER_CACHES
    times = text.num_experts_per_tok if text.model_type == "jetmoe" else 1  # Its experts share keys.
    kinds = getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * count
    of_kind: dict[str, Branch | None] = {
        "sliding_attention": Window(window) if window else None,
        "chunked_attention": Segment(text.attention_chunk_size) if "chunked_attention" in kinds else None,
    }
    if text.model_type in MIXERS and not getattr(text, "layer_types", None):
        raise ValueError(f"the config of {name!r}, a hybrid of type {text.model_type!r}, needs layer_types")
    attending = (*_ATTENDING, *INDEXED_LAYERS, *(kinds if why_own_attention(text, False) else ()))
    own = {number: of_kind.get(kind) for number, kind in enumerate(kinds) if kind in attending}
    if not own:
        raise ValueError(f"no layer of {name!r} attends: its layers are {', '.join(sorted(set(kinds)))}")
    layers = {number: layer_pattern(text, number, branch) for number, branch in own.items()}
    layers |= {number: Pattern.exact() for number in own if kinds[number] in INDEXED_LAYERS}
    mixing = tuple(number for number, kind in enumerate(kinds) if kind in MIXER_LAYERS)
    mixers = []
    if mixing and text.model_type in MIXERS:
        positions = _GATHERED.get(text.model_type, False)
        mixers.append(ModelMixers(mixing, _numbers_of_run(text), text.hidden_size, positions))
    if n_grams := getattr(text, "ple_layer_ids", None):  # from 1; they are gathered with the ids of their tokens
        of_layers = tuple(number - 1 for number in n_grams)
        mixers.append(ModelMixers(of_layers, None, text.hidden_size * text.hc_count, True))
    heads = _heads_of(text, name)
    gathering = _gathering_of(text, name, kinds, heads)
    return ModelAttention(
        name=name,
        model_type=text.model_type,
        **heads,
        base=layer_pattern(text, None),
        layers=tuple(layers.values()),
        numbers=tuple(layers),
        mixers=tuple(mixers),
        kept_times=None if other_caches else times,
        first_without_keys=count - shared if (shared := getattr(text, "num_kv_shared_layers", None)) else None,
        positions=getattr(text, "max_position_embeddings", None),
        gathering=gathering,
    )


def _gathering_of(
    text: PretrainedConfig, name: str, kinds: list[str], heads: Mapping[str, Any]
) -> dict[int, Gathering]:
    """Returns what layers gather over a ring, by their numbers, in place of the messages of a transport."""
    keys = heads.get("latent") or heads["num_kv_heads"] * (heads["head_dim"] + heads["value_dim"])
    if text.model_type in WHOLE_LAYERS:
        rope = getattr(text, "qk_rope_head_dim", None)
        return dict.fromkeys(range(len(kinds)), Gathering(text.hidden_size, 2 * (rope or 0), rope is not None))
    if why_own_attention(text, True):
        return dict.fromkeys(range(len(kinds)), Gathering(keys, over_rings_only=not why_own_attention(text, False)))
    gathering = {}
    if text.model_type in INDEXED:
        if text.model_type == "qwen4_exp_text":
            _positive(text, name, "indexer_budget")
        chosen, index = chosen_keys(text)
        shares = getattr(text, "indexer_types", None) or ["full"] * len(kinds)
        for number in (number for number, kind in enumerate(kinds) if kind in INDEXED_LAYERS):
            gathering[number] = Gathering(keys, index * (shares[number] != "shared"), chosen=chosen)
    return gathering


def _heads_of(text: PretrainedConfig, name: str) -> dict[str, Any]:
    """Returns the fields of a `ModelAttention` about heads."""
    heads = _positive(text, name, "num_attention_heads")
    if getattr(text, "qk_nope_head_dim", None):  # Latent attention expands its keys.
        width = text.qk_nope_head_dim + text.qk_rope_head_dim
        of_values = getattr(text, "v_head_dim", None) or width
        latent = text.kv_lora_rank + text.qk_rope_head_dim
        return {"num_heads": heads, "num_kv_heads": heads, "head_dim": width, "value_dim": of_values, "latent": latent}
    kv_heads = 1 if getattr(text, "multi_query", False) else getattr(text, "num_key_value_heads", None) or heads
    kv_heads = getattr(getattr(text, "attn_config", None), "kv_n_heads", None) or kv_heads  # Configs of dbrx have it.
    width = next((x for x in (getattr(text, n, None) for n in ("head_dim", "kv_channels")) if x), None)
    width = width or _positive(text, name, "hidden_size") // heads
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": width, "value_dim": width}


def _positive(text: PretrainedConfig, name: str, attribute: str) -> int:
    size = getattr(text, attribute, None)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"the config of {name!r} needs {attribute} of at least 1, got {size!r}")
    return size


def _check_alike(text: PretrainedConfig, name: str) -> None:
    """Refuses models whose layers have heads of different numbers or sizes, or run several times."""
    loops = getattr(text, "n_recurrent_loops", None)
    if loops is not None:
        raise ValueError(f"{name!r} runs some layers {loops} times (n_recurrent_loops): expected layers that run once")

    def differs(size: str) -> bool:
        try:
            return isinstance(getattr(text, size, None), (list, tuple))
        except RuntimeError:  # Transformers refuses to name one size where layers differ.
            return True

    differing = [size for size in ("num_attention_heads", "num_key_value_heads", "head_dim") if differs(size)]
    if text.model_type == "mimo_v2_flash":  # Its layers with windows have twice as many.
        differing = ["num_key_value_heads"]
    if not differing and getattr(text, "global_head_dim", None) not in (None, getattr(text, "head_dim", None)):
        differing = ["global_head_dim"]
    if differing:
        raise ValueError(f"the layers of {name!r} differ in {', '.join(differing)}: expected one kind of layer")


def _numbers_of_run(text: Any) -> StateNumbers | None:
    """Returns the numbers that a mixer gathers for one run; None if it gathers rows."""
    if text.model_type in _GATHERED:
        return None
    if text.model_type in ("lfm2", "lfm2_moe", "lfm3"):
        return StateNumbers(text.hidden_size, text.conv_L_cache, 0)
    if text.model_type in ("jamba", "zamba"):
        channels = int(text.mamba_expand * text.hidden_size)
        return StateNumbers(channels, text.mamba_d_conv, selective_sums(channels, text.mamba_d_state))
    if text.model_type in _STATE_SPACE:
        heads, head_dim, state_size, groups, kernel = (getattr(text, x) for x in _STATE_SPACE[text.model_type])
        channels = heads * head_dim + 2 * groups * state_size
        return StateNumbers(channels, kernel, state_space_sums(heads, head_dim, state_size))
    sizes = _DELTA_RULE
    if hasattr(text, "linear_num_heads"):  # Keys and values of this delta rule have the same heads.
        sizes = ("linear_num_heads", "linear_num_heads", "linear_head_dim", "linear_head_dim")
    heads, key_heads, key_dim, value_dim = (getattr(text, size) for size in sizes)
    channels = 2 * key_heads * key_dim + heads * value_dim
    return StateNumbers(channels, text.linear_conv_kernel_dim, delta_rule_sums(heads, key_dim, value_dim))
