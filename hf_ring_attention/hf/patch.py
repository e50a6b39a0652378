"""`patch_model`: makes a loaded model compute with "ring_dilated", and gives it a ring."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from ..plan.patterns import Pattern
from ..ring.ring import Ring
from .config import keep_implementation, layer_pattern, patch_config
from .hooks import attach_ring
from .registration import IMPLEMENTATION
from .support import check_model
from .wrappers import unwrapped

Model = TypeVar("Model", bound=nn.Module)


def patch_model(model: Model, pattern: Pattern | str | None = None, ring: Ring | None = None) -> Model:
    """Makes a loaded model compute with "ring_dilated".

    Of a model that also sees or hears, the text model is patched. A model that PEFT or torch.compile has wrapped is
    patched inside. Models that share one config object share its pattern.

    Args:
        pattern: for `patch_config`; None keeps what the config has.
        ring: the ranks over which the model's rows will be sharded; each forward pass then takes this rank's shard and
            its `position_ids`. None for whole rows on this process.

    Returns:
        The model.

    Raises:
        ValueError: no Transformers model, or one that does not call the attention interface.
        NotImplementedError: a model that ring_dilated does not compute, or not over a ring.
    """
    inner = unwrapped(model)
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(f"patch_model: expected a Transformers model, got {type(model).__name__}")
    check_model(inner, sharded=ring is not None and ring.world_size > 1)
    if pattern is not None:
        patch_config(inner.config, pattern)
    config = inner.config.get_text_config()
    layer_pattern(config, None)  # A config that is not understood is refused before the model is changed.
    keys = [key for key in inner.config.sub_configs if getattr(inner.config, key, None) is config]
    inner.set_attn_implementation({keys[0]: IMPLEMENTATION} if keys else IMPLEMENTATION)
    if getattr(config, IMPLEMENTATION, None) is not None:
        keep_implementation(inner.config)
    attach_ring(inner, ring)
    return model
