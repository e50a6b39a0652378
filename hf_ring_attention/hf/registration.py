"""Registers functions with Transformers and torch; the first call loads the code behind them.

Transformers is still being loaded when this module is imported, so it imports nothing that needs all of Transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from ..compute.private import check, implementation_of
from ..ring.operator import UNTRACEABLE
from .names import IMPLEMENTATION


def register() -> None:
    """Registers the attention, the mask, and a check of the config of every new model; it runs once, on import."""
    check("transformers")
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    # Transformers calls nothing before a model loads, and we must warn if a saved pattern would be ignored.
    register_module_module_registration_hook(_while_made)


@torch.compiler.disable(reason=UNTRACEABLE)
def _attention(*args: Any, **kwargs: Any) -> Any:
    from .layer.attention import ring_dilated_attention

    return ring_dilated_attention(*args, **kwargs)


@torch.compiler.disable(reason=UNTRACEABLE)
def _mask(*args: Any, **kwargs: Any) -> Any:
    from .layer.masks import ring_dilated_mask

    return ring_dilated_mask(*args, **kwargs)


def _while_made(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Checks the config of a Transformers model, and PEFT's adapters, while they are made.

    torch calls this whenever a module gets a submodule.
    """
    if isinstance(module, PreTrainedModel) and submodule is not None and _is_set(module.config):
        from .patch import check_made_model

        check_made_model(module)
    elif name in ("base_model", "prompt_encoder") and submodule is not None and hasattr(module, "get_base_model"):
        from .patch import check_adapters

        # PEFT wraps a model, which its tuner has; prompts are learned without a tuner.
        tuner: Any = submodule if name == "base_model" else module
        model = getattr(tuner, "model" if name == "base_model" else "base_model", None)
        if isinstance(model, PreTrainedModel) and getattr(tuner, "peft_config", None):
            check_adapters(tuner.peft_config, model.config)


def _is_set(config: Any) -> bool:
    """Returns whether a config, or the config of one of its parts, has settings for "ring_dilated", or names it."""
    parts = [x for x in (config, *(getattr(config, key, None) for key in config.sub_configs)) if x is not None]
    return any(getattr(x, IMPLEMENTATION, None) is not None or implementation_of(x) == IMPLEMENTATION for x in parts)


register()
