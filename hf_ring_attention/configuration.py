"""Patterns in a model's config, where they are saved and loaded with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PretrainedConfig

from .layouts import SequenceLayout
from .patterns import Pattern, Window
from .ring import Ring

#: Of the attention implementation, and of the config's attribute that holds the patterns.
NAME = "ring_dilated"


def layer_pattern(config: Any, layer: int | None, window: int | None = None) -> Pattern:
    """The pattern of a layer: what `patch_config` set for it, its own window, or what was set for all layers."""
    settings = getattr(config, NAME, None) or {}
    own = settings.get("layers", {}).get(str(layer))
    if own is not None:
        return _pattern(own)
    if window is not None:
        return Pattern((Window(window),))
    return _pattern(settings["pattern"]) if settings.get("pattern") else Pattern.exact()


#: Patterns by their written form: layers ask for theirs at every token that is generated.
_read: dict[str, Pattern] = {}


def _pattern(written: dict[str, Any]) -> Pattern:
    key = repr(written)
    if key not in _read:
        _read[key] = Pattern.from_dict(written)
    return _read[key]


def model_layout(config: Any, ring: Ring, seq_len: int) -> SequenceLayout:
    """The layout of a model's rows: the same for all its layers, decided by the pattern set for all of them."""
    return ring.layout_for(seq_len, layer_pattern(config, None))


def patch_config(
    config: PretrainedConfig,
    pattern: Pattern | None = None,
    layers: Iterable[int] | None = None,
    *,
    segment_lengths: Sequence[int | None] | None = None,
    dilation_rates: Sequence[int] | None = None,
) -> PretrainedConfig:
    """Stores a pattern in a config, where it is saved and loaded with it.

    Args:
        pattern: what the layers compute; instead, `segment_lengths` and `dilation_rates` give `Pattern.longnet`.
        layers: numbers of the layers; None for every layer without a window of its own.

    Returns:
        The config.

    Raises:
        ValueError: no pattern, two of them, or layers the model does not have.
    """
    longnet = segment_lengths is not None or dilation_rates is not None
    if (pattern is not None) == longnet:
        raise ValueError("patch_config: pass either pattern=, or segment_lengths= and dilation_rates=")
    if longnet:
        if segment_lengths is None or dilation_rates is None:
            raise ValueError("patch_config: segment_lengths and dilation_rates go together, one is missing")
        pattern = Pattern.longnet(segment_lengths, dilation_rates)
    if not isinstance(pattern, Pattern):
        raise ValueError(f"patch_config: pattern must be a Pattern, got {pattern!r}")
    text_config = config.get_text_config()
    settings = dict(getattr(text_config, NAME, None) or {})
    if layers is None:
        settings["pattern"] = pattern.to_dict()
    else:
        count = text_config.num_hidden_layers
        numbers = list(layers)
        if not numbers:
            raise ValueError("patch_config: layers is empty: name the layers, or leave it out for all of them")
        for number in numbers:
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
                raise ValueError(f"patch_config: layers must be among 0..{count - 1}, got {number!r} in {numbers}")
        settings["layers"] = {**settings.get("layers", {}), **{str(n): pattern.to_dict() for n in numbers}}
    setattr(text_config, NAME, settings)
    return config
