"""Patterns in a model's config, where they are saved and loaded with it."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import PretrainedConfig

from ..compute.private import implementation_of, set_implementation
from ..plan.branches import Branch
from ..plan.layouts import SequenceLayout
from ..plan.parts import fewest_last
from ..plan.patterns import Pattern, as_pattern
from ..ring.ring import Ring
from .hybrid_types import MIXERS
from .registration import IMPLEMENTATION
from .support import check_config, class_name

logger = logging.getLogger(__name__)

#: The key of config.json by which Transformers chooses the implementation when nothing else is asked for. Transformers
#: takes it out of the config that it loads, so it has to be written again before the config is saved.
_IMPLEMENTATION = "attn_implementation"

#: It is saved beside a pattern: where this package is not imported, Transformers' error names the implementation alone.
_HINT = (
    "patterns of attention: `import hf_ring_attention` before from_pretrained; attn_implementation='sdpa' loads the model "
    "without them"
)

#: The types of layers with a window, or chunks, of their own.
_WINDOWS = ("sliding_attention", "chunked_attention")


@runtime_checkable
class PatternsOfLayers(Protocol):
    """What has a pattern for each of several layers, by their numbers: a `Calibration`."""

    @property
    def layers(self) -> Mapping[int, Pattern]: ...

    @property
    def num_hidden_layers(self) -> int: ...


@dataclass(frozen=True)
class _Patterns:
    """The patterns in a config's `ring_dilated`: one for all layers, if there is one, and those of single layers."""

    pattern: Pattern | None
    layers: Mapping[int, Pattern]


def layer_pattern(config: Any, layer: int | None, of_model: Branch | None = None) -> Pattern:
    """Returns the pattern of a layer: what `patch_config` set for it, its own one, or what was set for all layers.

    Args:
        of_model: the window or the chunks that the layer has in the model itself.

    Raises:
        ValueError: the config's `ring_dilated` is not what `patch_config` writes.
    """
    patterns = _patterns(config)
    own = None if layer is None else patterns.layers.get(layer)
    if own is not None:
        return own
    return patterns.pattern if of_model is None and patterns.pattern is not None else unpatched_pattern(of_model)


def patterns_of_layers(config: Any) -> Mapping[int, Pattern]:
    """Returns the patterns of layers that have their own, by the layers' numbers."""
    return _patterns(config).layers


def unpatched_pattern(of_model: Branch | None) -> Pattern:
    """Returns what a layer computes for which `patch_config` set nothing: its own window or chunks, or exact attention."""
    return Pattern.exact() if of_model is None else Pattern((of_model,))


#: Cache: parsed patterns, keyed by the identity of a config's attribute, with a copy that tells whether it has changed.
#: Each layer asks at every token that is generated, and comparing is far cheaper than parsing.
_read: dict[int, tuple[Any, int | None, _Patterns]] = {}


def _patterns(config: Any) -> _Patterns:
    settings = getattr(config, IMPLEMENTATION, None)
    if settings is None:
        return _Patterns(None, {})
    num_layers = getattr(config, "num_hidden_layers", None)
    entry = _read.get(id(settings))
    if entry is None or entry[:2] != (settings, num_layers):
        if len(_read) >= 256:
            _read.clear()
        entry = _read[id(settings)] = copy.deepcopy(settings), num_layers, _parsed(settings, num_layers)
    return entry[2]


def _parsed(settings: Any, num_layers: int | None) -> _Patterns:
    """Parses every key: a key that was ignored would mean exact attention where a pattern was asked for."""
    wrong = f"config.{IMPLEMENTATION} must be what ra.patch_config(config, pattern, layers=...) writes, "
    remedy = "call ra.patch_config, or delete the attribute for exact attention"
    if not isinstance(settings, Mapping):
        raise ValueError(f"{wrong}a dict with 'pattern' or 'layers', got {settings!r}: {remedy}")
    unknown = sorted(str(key) for key in settings if key not in ("pattern", "layers", "hint"))
    if unknown or not {*settings} - {"hint"}:
        raise ValueError(
            f"{wrong}a dict with 'pattern' or 'layers', got {'unknown keys' if unknown else 'no keys'} {unknown}: {remedy}"
        )
    layers = settings.get("layers", {})
    if not isinstance(layers, Mapping) or not all(
        isinstance(number, str) and re.fullmatch("[0-9]{1,6}", number) for number in layers
    ):
        raise ValueError(
            f"{wrong}where 'layers' is a dict by layer number, written as text as in JSON ({{'0': ...}}), got {layers!r}: "
            f"{remedy}"
        )
    beyond = [number for number in layers if num_layers is not None and int(number) >= num_layers]
    if beyond:
        raise ValueError(f"{wrong}for layers 0..{num_layers - 1} of this config, got layers {beyond}: {remedy}")  # type: ignore[operator]
    try:
        pattern = Pattern.from_dict(settings["pattern"]) if "pattern" in settings else None
        return _Patterns(pattern, {int(number): Pattern.from_dict(written) for number, written in layers.items()})
    except ValueError as error:
        raise ValueError(f"{wrong}got {settings!r}: {error}: {remedy}") from error


class _Implementation:
    """The implementation that a config writes: the one that its model has when it is saved, not when it was patched.

    Transformers writes a config as a deep copy of its attributes, without the implementation itself.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        config_copy = memo.get(id(self.config))
        if config_copy is not None:  # The config itself is copied, and its copy keeps such an attribute.
            return _Implementation(config_copy)
        text_config = self.config.get_text_config()
        if implementation_of(text_config) != IMPLEMENTATION or has_only_exact_attention(text_config):
            return None  # Whoever loads the config chooses.
        keys = [key for key in self.config.sub_configs if getattr(self.config, key, None) is text_config]
        return {keys[0]: IMPLEMENTATION} if keys else IMPLEMENTATION


def keep_implementation(config: PretrainedConfig) -> None:
    """Makes a config write that its model computes with "ring_dilated", so that a saved model loads as it was.

    Without the package, such a model does not load: Transformers says that it does not know the implementation.
    """
    setattr(config, _IMPLEMENTATION, _Implementation(config))


def check_made(config: PretrainedConfig, name: str) -> None:
    """Checks the config of a model that is being made, since it may have been saved or written by hand.

    A pattern under another implementation has no effect, which is logged once. One under "ring_dilated" stays so when
    the model is saved again.

    Args:
        name: the name of the model's class.

    Raises:
        ValueError: a `ring_dilated` that is not understood.
    """
    text_config = config.get_text_config()
    try:
        _patterns(text_config)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    implementation = implementation_of(text_config)
    if implementation == IMPLEMENTATION:
        keep_implementation(config)
    elif not has_only_exact_attention(text_config):
        warn_once(
            f"the config of {class_name(config)} has a pattern for {IMPLEMENTATION!r}, and the model computes attention by "
            f"{implementation!r}, where the pattern has no effect: load it with attn_implementation={IMPLEMENTATION!r}, or "
            f"call ra.patch_model(model)"
        )


def has_only_exact_attention(config: PretrainedConfig) -> bool:
    """Returns whether a text model computes what it does without this package, so that it is saved as any other model."""
    try:
        patterns = _patterns(config)
    except ValueError:
        return False  # It is refused as soon as it is computed.
    exact = all(pattern in (None, Pattern.exact()) for pattern in (patterns.pattern, *patterns.layers.values()))
    return exact and not (patterns.layers and _has_windows(config))


def check_settings(settings: Any, config: PretrainedConfig, owner: str) -> None:
    """Checks settings that were saved beside another model, such as an adapter's, for a text model with this config.

    Raises:
        ValueError: settings that are not understood, or are for another number of key/value heads or layers.
    """
    try:
        patterns = _parsed(settings, getattr(config, "num_hidden_layers", None))
        for pattern in (patterns.pattern, *patterns.layers.values()):
            if pattern is not None:
                _check_kv_heads(pattern, config)
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from error


def text_of_settings(settings: Mapping[str, Any]) -> str:
    """Returns the text of a config's `ring_dilated`: its pattern, and how many layers have others."""
    patterns = _parsed(settings, None)
    text = f"the pattern {patterns.pattern or Pattern.exact()}"
    layers = "; ".join(f"layer {number}: {pattern}" for number, pattern in sorted(patterns.layers.items()))
    return f"{text} ({layers})" if layers else text


def settings_of(config: PretrainedConfig) -> Mapping[str, Any] | None:
    """Returns the patterns that `patch_config` has written into a text config; None without any."""
    settings: Mapping[str, Any] | None = getattr(config, IMPLEMENTATION, None)
    return settings


def use_settings(config: PretrainedConfig, settings: Mapping[str, Any]) -> None:
    """Gives a config settings that `check_settings` has passed."""
    _with_settings(config, {key: copy.deepcopy(value) for key, value in settings.items() if key != "hint"})


@lru_cache(maxsize=256)
def warn_once(text: str) -> None:
    """Logs a warning the first time."""
    logger.warning(text)


@lru_cache(maxsize=1)
def warn_of_no_pattern() -> None:
    """Logs once, on the first process, that a model computes exact attention because it was given no pattern."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.warning(
            "a model with attn_implementation=%r has no pattern, so it computes exact attention: call ra.patch_model(model, "
            "pattern), or load it with config=ra.patch_config(config, pattern); 'exact' is a pattern too",
            IMPLEMENTATION,
        )


def model_pattern(model: Any) -> Pattern:
    """Returns the pattern that decides the layout of a model's rows: the one that was set for all its layers."""
    return layer_pattern(model.config.get_text_config(), None)


def model_layout(config: Any, ring: Ring, seq_len: int) -> SequenceLayout:
    """Returns the layout of a model's rows: the same for all its layers, decided by the pattern set for all of them."""
    return ring.layout_for(seq_len, layer_pattern(config, None))


def fewest_last_of(config: Any) -> int | None:
    """Returns how many of a document's last tokens see every key in all layers that have a `Last`; None if no layer has one."""
    found = [fewest_last(layer_pattern(config, layer)) for layer in (None, *range(config.num_hidden_layers))]
    return min((tokens for tokens in found if tokens is not None), default=None)


def _check_kv_heads(pattern: Pattern, config: PretrainedConfig) -> None:
    """Refuses patterns of other key/value heads; a config that does not say how many it has is checked when it computes."""
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):
        pattern.check_heads(heads, class_name(config))


def patch_config(
    config: PretrainedConfig,
    pattern: Pattern | str | PatternsOfLayers | None = None,
    layers: Iterable[int] | None = None,
    *,
    segment_lengths: Sequence[int | None] | None = None,
    dilation_rates: Sequence[int] | None = None,
) -> PretrainedConfig:
    """Stores a pattern in a config, where it is saved and loaded with it, and makes "ring_dilated" its implementation.

    A model that has this config computes the pattern from its next forward pass on, whatever implementation it was
    loaded with; so does a model that is loaded from where this one was saved, unless another implementation is asked for.

    Args:
        pattern: what the layers compute, as a `Pattern` or its text; or a `Calibration`, which replaces the patterns of all
            layers by those that it has for each.
        layers: the numbers of the layers, of which others keep their patterns; None for every layer without a window or chunks
            of its own, whatever patterns layers had before.
        segment_lengths, dilation_rates: the arguments of `Pattern.longnet`, in place of `pattern`.

    Returns:
        The config.

    Raises:
        ValueError: no pattern, two of them, one for another number of key/value heads, layers the model does not have, or
            a model that does not call the attention interface.
        NotImplementedError: a model that ring_dilated does not compute.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = ra.patch_config(LlamaConfig(num_hidden_layers=4), "pyramid:512,3")
        >>> config = ra.patch_config(config, "exact", layers=[0])  # the first layer sees all tokens
        >>> sorted(config.to_dict()["ring_dilated"])  # saved with the config, and loaded with it
        ['hint', 'layers', 'pattern']
    """
    longnet = segment_lengths is not None or dilation_rates is not None
    if (pattern is not None) == longnet:
        raise ValueError(
            "patch_config: pass either pattern=, or segment_lengths= and dilation_rates=, not "
            f"{'both' if longnet else 'neither'}"
        )
    if longnet:
        if segment_lengths is None or dilation_rates is None:
            raise ValueError(
                "patch_config: segment_lengths and dilation_rates go together, and one is missing: pass both"
            )
        pattern = Pattern.longnet(segment_lengths, dilation_rates)
    text_config = config.get_text_config()
    if isinstance(pattern, PatternsOfLayers):
        if layers is not None:
            raise ValueError("patch_config: a calibration has patterns for layers of its own: leave layers out")
        return _patch_layers(config, pattern)
    pattern = as_pattern(pattern, "patch_config")  # type: ignore[arg-type]
    check_config(text_config)
    _check_kv_heads(pattern, text_config)
    _patterns(text_config)
    settings: dict[str, Any] = {"pattern": pattern.to_dict()}
    if layers is not None:
        settings = dict(getattr(text_config, IMPLEMENTATION, None) or {})
        numbers = [*_checked_layers(layers, text_config)]
        if not numbers:
            raise ValueError("patch_config: layers is empty: name the layers, or leave it out for all of them")
        settings["layers"] = {**settings.get("layers", {}), **{str(n): pattern.to_dict() for n in numbers}}
    return _with_settings(config, settings)


def _patch_layers(config: PretrainedConfig, patterns: PatternsOfLayers) -> PretrainedConfig:
    """Stores patterns of single layers in a config, in place of whatever it has."""
    text_config, layers = config.get_text_config(), patterns.layers
    check_config(text_config)
    if patterns.num_hidden_layers != text_config.num_hidden_layers:
        raise ValueError(
            f"patch_config: the calibration is of a model of {patterns.num_hidden_layers} layers, and "
            f"{class_name(text_config)} has {text_config.num_hidden_layers}: calibrate this model"
        )
    numbers = [*_checked_layers(layers, text_config)]
    types = getattr(text_config, "layer_types", None) or ()
    without_window: Iterable[int] = (number for number, kind in enumerate(types) if kind == "full_attention")
    if not types and text_config.model_type not in MIXERS and not _has_windows(text_config):
        without_window = range(text_config.num_hidden_layers)
    left_out = next((number for number in without_window if number not in layers), None)
    if left_out is not None:
        raise ValueError(
            f"patch_config: the calibration has patterns for layers {numbers} and none for layer {left_out} of "
            f"{class_name(text_config)}, which would attend exactly: calibrate this model"
        )
    windows = [layer for layer in layers if layer < len(types) and types[layer] in _WINDOWS]
    if windows:
        raise ValueError(
            f"patch_config: the calibration has patterns for layers {windows}, of which {class_name(text_config)} computes "
            f"{types[windows[0]]} by itself, so that it is of another model: calibrate this model"
        )
    for pattern in layers.values():
        _check_kv_heads(pattern, text_config)
    return _with_settings(config, {"layers": {str(layer): pattern.to_dict() for layer, pattern in layers.items()}})


def _has_windows(config: PretrainedConfig) -> bool:
    """Returns whether layers may have windows, or chunks, of their own."""
    types = getattr(config, "layer_types", None)
    if types:
        return any(kind in _WINDOWS for kind in types)
    return any(getattr(config, name, None) is not None for name in ("sliding_window", "attention_chunk_size"))


def _checked_layers(numbers: Iterable[int], config: PretrainedConfig) -> Iterator[int]:
    """Yields the numbers of layers up to one that the model does not have, however many follow."""
    count = config.num_hidden_layers
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
            raise ValueError(f"patch_config: layers must be integers among 0..{count - 1}, got {number!r}")
        yield number


def _with_settings(config: PretrainedConfig, settings: dict[str, Any]) -> PretrainedConfig:
    text_config = config.get_text_config()
    setattr(text_config, IMPLEMENTATION, {"hint": _HINT, **settings})
    set_implementation(text_config, IMPLEMENTATION)
    keep_implementation(config)
    return config
