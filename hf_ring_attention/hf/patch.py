"""`patch_model`: makes a loaded model compute with "ring_dilated", and gives it a ring."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ..compute.private import implementation_of, remove_hooks
from ..plan.patterns import Pattern
from ..ring.attention import UNTRACEABLE
from ..ring.ring import Ring
from .adapters import adapters_of, remember_pattern, use_pattern_of_adapters
from .config import (
    PatternsOfLayers,
    check_settings,
    has_only_exact_attention,
    implementation_argument,
    keep_implementation,
    layer_pattern,
    patch_config,
    settings_of,
    warn_once,
)
from .hybrid_types import hybrids_of
from .model_call import attach_ring, before_model
from .registration import IMPLEMENTATION
from .support import check_model, class_name
from .tensor_parallel import check_ring
from .wrappers import attached_ring, inner_model, is_patched, runner_of

Model = TypeVar("Model", bound=nn.Module)


def patch_model(
    model: Model, pattern: Pattern | str | PatternsOfLayers | None = None, ring: Ring | None = None
) -> Model:
    """Makes a loaded model compute with "ring_dilated".

    In a model that also sees or hears, the text model is patched. If PEFT or torch.compile has wrapped a model, the
    model inside is patched. Models that share one config object share its pattern.

    Args:
        pattern: passed to `patch_config`; None keeps what the config has. A model without a pattern and with an adapter of
            PEFT takes the pattern that the adapter was trained under, which is saved with it.
        ring: the ranks that compute each row together. All of them call the model with the same whole rows, as one device
            would, and get what one device returns: the same loss, logits and hidden states; the mean of their gradients is
            the gradient of one device. Under tensor parallelism these are the ranks with the same heads: `ra.Ring(mesh)` for
            a mesh of ("cp", "tp"). None: this process computes whole rows alone.

    Returns:
        The model.

    Raises:
        ValueError: no Transformers model, one that does not call the attention interface, or a ring of ranks among which
            tensor parallelism divides the model.
        NotImplementedError: a model that ring_dilated does not compute, or does not compute over a ring.

    Example:
        >>> model = ra.patch_model(tiny_llama(), "window:4+2")  # each token sees itself, 3 before it, and the first 2
        >>> ids = torch.arange(1, 33)[None]
        >>> logits = model(ids).logits
        >>> ids[0, 5] = 77
        >>> changed = (model(ids).logits != logits).any(-1)[0]  # through 2 layers, token 5 reaches 6 tokens after it
        >>> changed.nonzero().flatten().tolist()
        [5, 6, 7, 8, 9, 10, 11]
        >>> models = [tiny_llama(), tiny_llama()]  # the same on each rank of a ring
        >>> def loss(ring):
        ...     return ra.patch_model(models[ring.rank], "window:4+2", ring=ring)(ids, labels=ids).loss.item()
        >>> alone = model(ids, labels=ids).loss.item()
        >>> [abs(of_rank - alone) < 1e-5 for of_rank in ra.run_simulated(loss, 2)]
        [True, True]
    """
    inner = inner_model(model, "patch_model")
    check_model(inner, sharded=ring is not None and ring.world_size > 1)
    if ring is not None:
        check_ring(inner, ring)
    config = inner.config.get_text_config()
    if pattern is not None:
        patch_config(inner.config, pattern)
    elif settings_of(config) is None:
        use_pattern_of_adapters(model, inner.config)
    layer_pattern(config, None)  # A config that is not understood is refused before the model is changed.
    inner.set_attn_implementation(implementation_argument(inner.config))
    if settings_of(config) is not None:
        keep_implementation(inner.config)
    remember_pattern(adapters_of(model), inner.config)
    attach_ring(inner, ring)
    hybrids = hybrids_of(config)
    if hybrids is not None:
        hybrids.attach_mixers(inner)
    return model


def check_made_model(model: PreTrainedModel) -> None:
    """Checks the config of a model that is being made, and has its first call patch it if it is made for "ring_dilated".

    A pattern does nothing under another implementation; this is logged once. One under "ring_dilated" stays so when
    the model is saved again.
    """
    text_config = model.config.get_text_config()
    settings, implementation = settings_of(text_config), implementation_of(text_config)
    if settings is not None:
        check_settings(settings, text_config, type(model).__name__)
    if implementation == IMPLEMENTATION:
        keep_implementation(model.config)
    elif not has_only_exact_attention(text_config):
        warn_once(
            f"the config of {class_name(model.config)} has a pattern for {IMPLEMENTATION!r}, and the model computes attention "
            f"by {implementation!r}, where the pattern has no effect: load it with attn_implementation={IMPLEMENTATION!r}, or "
            f"call ra.patch_model(model)"
        )
    remove_hooks(model, lambda hook: hook is _first_call)
    if not is_patched(model):  # A patched model may get another module, such as larger embeddings.
        model.register_forward_pre_hook(_first_call, with_kwargs=True)


@torch.compiler.disable(reason=UNTRACEABLE)
def _first_call(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Patches a model that was loaded with attn_implementation="ring_dilated", and begins its call."""
    config = model.config.get_text_config()
    if implementation_of(config) != IMPLEMENTATION:
        return None
    patch_model(model, ring=attached_ring(runner_of(model)))  # The decoder may have been patched before.
    if settings_of(config) is None and not (dist.is_initialized() and dist.get_rank()):
        warn_once(
            f"a model with attn_implementation={IMPLEMENTATION!r} has no pattern, so it computes exact attention: call "
            f"ra.patch_model(model, pattern), or load it with config=ra.patch_config(config, pattern); 'exact' is a pattern too"
        )
    return before_model(model, args, kwargs)
