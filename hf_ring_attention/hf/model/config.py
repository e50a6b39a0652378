"""Patterns in a model's config, which saves and loads them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol, runtime_checkable

from transformers import PretrainedConfig

from ...compute.private import implementation_of, set_implementation
from ...plan.branches import Branch
from ...plan.patterns import Pattern, as_pattern
from ...ring.callbacks import CALLBACKS
from ..names import IMPLEMENTATION
from .support import check_config, class_name
from .types import INDEXED_LAYERS, MIXERS

logger = logging.getLogger(__name__)

#: The key of config.json that names the implementation to Transformers. It takes the key out of a config that it loads, so
#: the key is written again before the config is saved.
_IMPLEMENTATION = "attn_implementation"

#: It is saved beside a pattern: without this package, the error of Transformers names only the implementation.
_HINT = (
    "patterns of attention: `import hf_ring_attention` before from_pretrained; attn_implementation='sdpa' loads the model "
    "without them"
)

#: The types of layers with a window, or chunks, in the model itself.
_WINDOWS = ("sliding_attention", "chunked_attention")


@runtime_checkable
class PatternsOfLayers(Protocol):
    """What has a pattern for each of several layers, by their numbers: a `Calibration`."""

    @property
    def layers(self) -> Mapping[int, Pattern]: ...

    @property
    def num_hidden_layers(self) -> int: ...


class Patterns(dict[int | None, Pattern]):
    """The patterns in a config's `ring_dilated`: those of single layers by their numbers, and by None that of all layers."""

    @property
    def layers(self) -> dict[int, Pattern]:
        """The patterns of single layers."""
        return {number: pattern for number, pattern in self.items() if number is not None}

    def __repr__(self) -> str:
        layers = "; ".join(f"layer {number}: {pattern}" for number, pattern in sorted(self.layers.items()))
        return f"the pattern {self.get(None, Pattern.exact())}" + (f" ({layers})" if layers else "")

    def check(self, config: PretrainedConfig | None) -> None:
        """Refuses patterns of other key/value heads than a config has; if it names none, they are checked in the layers."""
        heads: Any = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
        for pattern in self.values() if isinstance(heads, int) else ():
            pattern.check_heads(heads, class_name(config))
        kinds = getattr(config, "layer_types", None) or ()
        indexed = {number for number, kind in enumerate(kinds) if kind in INDEXED_LAYERS}
        sparse = {number for number, pattern in self.items() if pattern != Pattern.exact()}
        if sparse & indexed or (None in sparse and indexed and len(indexed) == len(kinds)):
            raise ValueError(
                f"{class_name(config)}: layers {sorted(indexed)} choose their keys at run time, so no pattern applies to them: "
                f"leave them out"
            )

    def set_in(self, config: PretrainedConfig) -> PretrainedConfig:
        """Writes the patterns into a config, and makes "ring_dilated" its implementation."""
        text_config, layers = config.get_text_config(), {str(number): str(x) for number, x in self.layers.items()}
        settings = self[None].to_dict() if None in self else {}
        setattr(text_config, IMPLEMENTATION, {**settings, **({"layers": layers} if layers else {}), "hint": _HINT})
        set_implementation(text_config, IMPLEMENTATION)
        keep_implementation(config)
        return config


def layer_pattern(config: Any, layer: int | None, of_model: Branch | None = None) -> Pattern:
    """Returns the layer's pattern; else the model's window or chunks `of_model`; else the pattern of all layers."""
    patterns = patterns_of(config)
    if layer is not None and layer in patterns:
        return patterns[layer]
    if of_model is not None:
        return Pattern((of_model,))
    if layer is not None and patterns and None not in patterns:
        raise ValueError(
            f"{class_name(config)}: expected a pattern for layer {layer}, found patterns for layers "
            f"{sorted(patterns.layers)} only: call ra.patch_config with one for it"
        )
    return patterns.get(None, Pattern.exact())


def patterns_of_layers(config: Any) -> Mapping[int, Pattern]:
    """Returns the patterns of single layers by the layers' numbers."""
    return patterns_of(config).layers


#: Cache: patterns, by the text of a config's attribute, because each layer asks at every token that is generated.
_read_before: dict[str, Patterns] = {}


def patterns_of(config: Any) -> Patterns:
    """Returns the patterns in a text config, which may be edited in place."""
    settings = settings_of(config)
    if settings is None:
        return Patterns()
    key = repr(settings)
    if len(_read_before) >= 256:
        _read_before.clear()
    return _read_before.get(key) or _read_before.setdefault(key, read_patterns(settings, None, class_name(config)))


def read_patterns(settings: Any, config: PretrainedConfig | None, owner: str) -> Patterns:
    """Returns the patterns in settings that were saved, for a text model with this config; errors begin with the owner.

    It reads every key: an ignored key would mean exact attention instead of a pattern.
    """
    try:
        keys = {*settings} - {"hint"} if isinstance(settings, Mapping) else set()
        if not keys or not keys <= {"pattern", "layers"}:
            raise ValueError(f"expected a dict with 'pattern' or 'layers', got keys {sorted(map(str, keys))}")
        layers = settings.get("layers", {})
        numbers = [*layers] if isinstance(layers, Mapping) else [layers]
        if not all(isinstance(number, str) and re.fullmatch("[0-9]{1,6}", number) for number in numbers):
            raise ValueError("'layers' must be a dict by layer number, written as text as in JSON: {'0': ...}")
        saved: dict[int | None, Any] = {int(number): layers[number] for number in numbers}
        if "pattern" in settings:
            saved[None] = settings["pattern"]
        patterns = Patterns({layer: Pattern.parse(text) for layer, text in saved.items()})
        patterns.check(config)
        return patterns
    except ValueError as error:
        raise ValueError(
            f"{owner}: config.{IMPLEMENTATION} must be as ra.patch_config writes it, got {settings!r}: {error}: call "
            f"ra.patch_config, or delete the attribute for exact attention"
        ) from error


class ComputedOnCopy(partial[Any]):
    """A function of a model's config, called when it is saved: Transformers and PEFT write deep copies of fields."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        config = memo.get(id(self.args[0]))
        # If the config itself is copied, its copy keeps such a function.
        return self() if config is None else ComputedOnCopy(self.func, config, *self.args[1:])


def _saved_implementation(config: PretrainedConfig) -> Any:
    """Returns the implementation that a config writes: the one that its model has now, not when it was patched."""
    text_config = config.get_text_config()
    if implementation_of(text_config) != IMPLEMENTATION or has_only_exact_attention(text_config):
        return None  # Whoever loads the config chooses.
    return implementation_argument(config)


def implementation_argument(config: PretrainedConfig) -> Any:
    """Returns "ring_dilated" for the text model of a config, as Transformers takes an `attn_implementation`."""
    text_config = config.get_text_config()
    keys = [key for key in config.sub_configs if getattr(config, key, None) is text_config]
    return {keys[0]: IMPLEMENTATION} if keys else IMPLEMENTATION


def keep_implementation(config: PretrainedConfig) -> None:
    """Makes a config write that its model computes with "ring_dilated": where the package is, it loads as it was."""
    setattr(config, _IMPLEMENTATION, ComputedOnCopy(_saved_implementation, config))


def has_only_exact_attention(config: PretrainedConfig) -> bool:
    """Returns whether a text model computes the same without this package, so that it is saved as any other model."""
    try:
        patterns = patterns_of(config)
    except ValueError:
        return False  # It is refused as soon as it is computed.
    exact = all(pattern == Pattern.exact() for pattern in patterns.values())
    return exact and not (patterns.layers and _has_windows(config))


def warn_of_unused_pattern(config: PretrainedConfig) -> None:
    """Logs once that a model has a pattern and computes attention by another implementation."""
    text_config = config.get_text_config()
    implementation = implementation_of(text_config)
    if implementation != IMPLEMENTATION and not has_only_exact_attention(text_config):
        warn_once(
            f"the config of {class_name(config)} has a pattern, and the model computes attention by {implementation!r}, "
            f"where the pattern has no effect: call ra.patch_model(model), or load it with {IMPLEMENTATION!r}"
        )


def settings_of(config: PretrainedConfig) -> Mapping[str, Any] | None:
    """Returns the patterns that `patch_config` has written into a text config; None without any."""
    settings: Mapping[str, Any] | None = getattr(config, IMPLEMENTATION, None)
    return settings


def differs_from_saved(config: PretrainedConfig, folder: Path) -> bool:
    """Whether a checkpoint of a model, or of adapters, was saved with other patterns than a config has."""
    for file, part in ((folder / "config.json", "text_config"), (folder / "adapter_config.json", "auto_mapping")):
        if file.is_file():
            saved = json.loads(file.read_text(encoding="utf-8"))
            if part == "auto_mapping" and saved.get("task_type") is None:
                return False  # Such adapters save no pattern.
            saved = (saved.get(part) or saved).get(IMPLEMENTATION)
            known = (
                {"pattern": "exact", **(x or {}), "hint": _HINT} for x in (saved, settings_of(config.get_text_config()))
            )
            return next(known) != next(known)
    return False


def use_settings(config: PretrainedConfig, settings: Mapping[str, Any] | None) -> PretrainedConfig:
    """Gives a config settings that were saved, and makes "ring_dilated" its implementation."""
    text_config = config.get_text_config()
    return read_patterns(settings, text_config, class_name(text_config)).set_in(config)


@lru_cache(maxsize=256)
def warn_once(text: str, level: int = logging.WARNING) -> None:
    """Logs a text the first time."""
    logger.log(level, text)


def patch_config(
    config: PretrainedConfig,
    pattern: Pattern | str | PatternsOfLayers | Sequence[Pattern | str],
    layers: Iterable[int] | None = None,
) -> PretrainedConfig:
    """Stores a pattern in a config, which saves and loads it, and makes "ring_dilated" its implementation.

    A model that has this config computes the pattern from its next forward pass on, whatever implementation it was
    loaded with; so does a saved copy, unless it is loaded with another implementation.

    Args:
        config: the config of a model; it is changed in place.
        pattern: what the layers compute, as a `Pattern` or its text; or a list with one for each layer, or a `Calibration`
            or the name of its .json file, which replace the patterns of all layers.
        layers: the numbers of the layers, while others keep their patterns; None for every layer without a window or chunks
            in the model, whatever patterns layers had before.

    Returns:
        The config.

    Raises:
        ValueError: no pattern, one for another number of key/value heads, layers that the model does not have, or a model
            that does not call the attention interface.
        NotImplementedError: a model that ring_dilated does not compute.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = ra.patch_config(LlamaConfig(num_hidden_layers=4), "pyramid:512,3")
        >>> config = ra.patch_config(config, "exact", layers=[0])  # the first layer sees all tokens
        >>> sorted(config.to_dict()["ring_dilated"])  # saved with the config, and loaded with it
        ['hint', 'layers', 'pattern']
    """
    if isinstance(pattern, str) and pattern.endswith(".json"):
        pattern = resolve_name(CALLBACKS["load_pattern"])(pattern)
    text_config = config.get_text_config()
    check_config(text_config)
    before, count = patterns_of(text_config), text_config.num_hidden_layers
    if isinstance(pattern, PatternsOfLayers):
        _check_calibration(pattern, text_config)
        patterns = Patterns(pattern.layers.items())
    elif isinstance(pattern, Sequence) and not isinstance(pattern, str):
        if len(pattern) != count:
            raise ValueError(f"patch_config: a list needs one pattern for each of {count} layers, got {len(pattern)}")
        patterns = Patterns((number, as_pattern(x, "patch_config")) for number, x in enumerate(pattern))
    else:
        pattern = as_pattern(pattern, "patch_config")
        own: dict[int | None, Pattern] = dict.fromkeys(_checked_layers(layers, count), pattern)
        patterns = Patterns({None: Pattern.exact(), **before, **own} if own else {None: pattern})
        if patterns[None] == Pattern.exact() and {*range(count)} <= patterns.keys():
            del patterns[None]  # As a list has a pattern for each layer.
    if layers is not None and not isinstance(pattern, Pattern):
        raise ValueError("patch_config: a list or a calibration already names its layers: leave layers= out")
    patterns.check(text_config)
    return patterns.set_in(config)


def _checked_layers(layers: Iterable[int] | None, count: int) -> Iterator[int]:
    """Yields the numbers of layers; it reads no further than to a layer that the model does not have."""
    number = None
    for number in () if layers is None else layers:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
            raise ValueError(f"patch_config: layers must be integers among 0..{count - 1}, got {number!r}")
        yield number
    if number is None and layers is not None:
        raise ValueError("patch_config: layers is empty: name the layers, or leave it out for all of them")


def _check_calibration(calibration: PatternsOfLayers, config: PretrainedConfig) -> None:
    """Refuses a calibration of another model: it must have a pattern for each layer without a window or chunks."""
    name, count, types = class_name(config), config.num_hidden_layers, getattr(config, "layer_types", None) or ()
    needed = {number for number, kind in enumerate(types) if kind == "full_attention"}
    if not types and config.model_type not in MIXERS and not _has_windows(config):
        needed = {*range(count)}
    windows = {number for number, kind in enumerate(types) if kind in _WINDOWS}
    found = {*calibration.layers}
    if calibration.num_hidden_layers != count or needed - found or windows & found:
        raise ValueError(
            f"patch_config: the calibration is of a model of {calibration.num_hidden_layers} layers, and {name} has {count}; "
            f"it has patterns for {sorted(found)}, needed are {sorted(needed)}: calibrate this model"
        )


def _has_windows(config: PretrainedConfig) -> bool:
    """Returns whether layers may have windows or chunks in the model."""
    types = getattr(config, "layer_types", None)
    if types:
        return any(kind in _WINDOWS for kind in types)
    return any(getattr(config, name, None) is not None for name in ("sliding_window", "attention_chunk_size"))
