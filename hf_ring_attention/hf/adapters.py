"""Patterns beside PEFT's adapters: an adapter is saved without its model, and was trained under the pattern of that model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from ..compute.private import implementation_of
from .config import ComputedOnCopy, check_settings, has_only_exact_attention, settings_of, use_settings, warn_once
from .registration import IMPLEMENTATION
from .wrappers import wrapped_modules

#: The one field of all of PEFT's configs that takes any dict. PEFT itself uses it for adapters without a task_type alone.
_FIELD = "auto_mapping"


def _with_pattern(config: PretrainedConfig, mapping: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the dict that PEFT saves, with the pattern that the model of this config has now."""
    text_config = config.get_text_config()
    settings, saved = settings_of(text_config), dict(mapping)
    if settings is not None and implementation_of(text_config) == IMPLEMENTATION:
        saved.pop(IMPLEMENTATION, None)
        if not has_only_exact_attention(text_config):
            saved[IMPLEMENTATION] = settings
    return saved or None


def check_adapters(adapters: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Logs adapters that were trained under another pattern than their model computes, and has the pattern saved with them."""
    text_config = config.get_text_config()
    implementation, settings = implementation_of(text_config), settings_of(text_config)
    own, remedy = f"attention by {implementation!r}", "model"
    if settings is not None and implementation == IMPLEMENTATION:
        own, remedy = check_settings(settings, text_config, "patch_model"), "model, pattern"
    for name, (_, trained) in _saved_in(adapters, text_config).items():
        if own != trained:
            warn_once(
                f"adapter {name!r} was trained under {trained}, and its model computes {own}: call ra.patch_model({remedy}) "
                f"for the pattern of the adapter"
            )
    remember_pattern(adapters, config)


def remember_pattern(adapters: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Has the pattern of a model saved with its adapters, whatever it is then."""
    for name, adapter in adapters.items():
        if hasattr(adapter, _FIELD) and (mapping := _mapping_of(adapter)) is not None:
            setattr(adapter, _FIELD, ComputedOnCopy(config, _with_pattern, mapping))
        if adapter.task_type is None and not has_only_exact_attention(config.get_text_config()):
            warn_once(
                f"PEFT saves no pattern with adapter {name!r}, which has no task_type: make it with one, such as "
                f"LoraConfig(task_type='CAUSAL_LM')"
            )


def _mapping_of(adapter: Any) -> Mapping[str, Any] | None:
    """Returns the dict in an adapter's config, as it was loaded; None if PEFT has something else there."""
    mapping = getattr(adapter, _FIELD, None) or {}
    if isinstance(mapping, ComputedOnCopy):
        mapping = mapping.arguments[0]
    return mapping if isinstance(mapping, Mapping) else None


def use_pattern_of_adapters(model: nn.Module, config: PretrainedConfig) -> None:
    """Gives a model without a pattern the one that its adapters were trained under, if they name one."""
    saved = _saved_in(adapters_of(model), config.get_text_config())
    texts = {name: text for name, (_, text) in saved.items()}
    if len({*texts.values()}) > 1:
        raise ValueError(f"patch_model: the adapters were trained under different patterns, {texts}: pass one of them")
    if saved:
        use_settings(config, next(iter(saved.values()))[0])


def adapters_of(model: nn.Module) -> Mapping[str, Any]:
    """Returns PEFT's configs of a model's adapters by their names, whether PEFT or Transformers has added them."""
    found = (getattr(module, "peft_config", None) for module in wrapped_modules(model))
    return next((configs for configs in found if isinstance(configs, Mapping)), {})


def _saved_in(adapters: Mapping[str, Any], config: PretrainedConfig) -> dict[str, tuple[Mapping[str, Any], str]]:
    """Returns the settings that were saved with adapters, and their texts, by the adapters' names."""
    saved = {}
    for name, adapter in adapters.items():
        settings = (_mapping_of(adapter) or {}).get(IMPLEMENTATION)
        if settings is not None:
            saved[name] = settings, check_settings(settings, config, f"adapter {name!r}")
    return saved
