"""`patch_model`: makes a loaded model, or one with PEFT's adapters, compute with "ring_dilated", and gives it a ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ..compute.private import (
    implementation_of,
    make_cache_of_generate,
    remove_hooks,
    set_implementation,
    set_implementation_of_parts,
    supports_sdpa,
)
from ..hybrids.models import attach_mixers, checked_mixers
from ..plan.branches import check_choice
from ..plan.choices import KernelSetting
from ..plan.patterns import Pattern
from ..ring.operator import UNTRACEABLE
from ..ring.ring import Ring
from .cache.prefill import cache_for_generate
from .call.model_call import attach_ring, before_model
from .model.config import (
    ComputedOnCopy,
    Patterns,
    PatternsOfLayers,
    has_only_exact_attention,
    implementation_argument,
    keep_implementation,
    patch_config,
    patterns_of,
    read_patterns,
    settings_of,
    use_settings,
    warn_of_unused_pattern,
    warn_once,
)
from .model.support import attention_dropout, check_model, why_own_attention
from .model.types import INDEXED
from .model.wrappers import (
    ATTACHMENT,
    attachment_of,
    cache_in,
    check_ring,
    inner_model,
    models_inside,
    runner_of,
    share_config,
    tokens_skipped,
    wrapped_modules,
)
from .names import IMPLEMENTATION

#: The one field of all of PEFT's configs that takes any dict. PEFT itself uses it only for adapters without a task_type.
_FIELD = "auto_mapping"

Model = TypeVar("Model", bound=nn.Module)


def check_adapters(adapters: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Logs adapters that were trained under another pattern than their model computes, and has the pattern saved with them."""
    text_config = config.get_text_config()
    own, remedy = f"attention by {implementation_of(text_config)!r}", "model"
    if _computes_patterns(text_config):
        own, remedy = str(read_patterns(settings_of(text_config), text_config, "patch_model")), "model, pattern"
    for name, trained in _trained_under(adapters, text_config).items():
        if own != str(trained):
            warn_once(
                f"adapter {name!r} was trained under {trained}, and its model computes {own}: call ra.patch_model({remedy}) "
                f"for the pattern of the adapter"
            )
    _save_pattern_with(adapters, config)


def _computes_patterns(config: PretrainedConfig) -> bool:
    return settings_of(config) is not None and implementation_of(config) == IMPLEMENTATION


def _save_pattern_with(adapters: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Has the pattern that a model computes then saved with its adapters."""
    for name, adapter in adapters.items():
        if hasattr(adapter, _FIELD) and (mapping := _mapping_of(adapter)) is not None:
            setattr(adapter, _FIELD, ComputedOnCopy(_with_pattern, config, mapping))
        if adapter.task_type is None and not has_only_exact_attention(config.get_text_config()):
            warn_once(f"PEFT saves no pattern with adapter {name!r}, which has no task_type: make it with one")


def _with_pattern(config: PretrainedConfig, mapping: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the dict that PEFT saves, with the pattern that the model of this config has now."""
    text_config = config.get_text_config()
    saved = dict(mapping)
    if _computes_patterns(text_config):
        saved[IMPLEMENTATION] = None if has_only_exact_attention(text_config) else settings_of(text_config)
    return {key: value for key, value in saved.items() if key != IMPLEMENTATION or value is not None} or None


def _mapping_of(adapter: Any) -> Mapping[str, Any] | None:
    """Returns the dict in an adapter's config, as it was loaded; None if PEFT has something else there."""
    mapping = getattr(adapter, _FIELD, None) or {}
    mapping = mapping.args[1] if isinstance(mapping, ComputedOnCopy) else mapping
    return mapping if isinstance(mapping, Mapping) else None


def _trained_under(adapters: Mapping[str, Any], config: PretrainedConfig) -> dict[str, Patterns]:
    """Returns the patterns that were saved with adapters, by the adapters' names."""
    saved = {name: (_mapping_of(adapter) or {}).get(IMPLEMENTATION) for name, adapter in adapters.items()}
    return {name: read_patterns(x, config, f"adapter {name!r}") for name, x in saved.items() if x is not None}


def take_pattern_of_adapters(adapters: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Stores the pattern that was saved with adapters, if one was, in the config of their model."""
    for patterns in _trained_under(adapters, config.get_text_config()).values():
        patterns.set_in(config)


def _adapters_of(model: nn.Module) -> Mapping[str, Any]:
    """Returns PEFT's configs of a model's adapters by their names, whether PEFT or Transformers has added them."""
    found = (getattr(module, "peft_config", None) for module in wrapped_modules(model))
    return next((configs for configs in found if isinstance(configs, Mapping)), {})


def patch_model(
    model: Model,
    pattern: Pattern | str | PatternsOfLayers | Sequence[Pattern | str] | None = None,
    ring: Ring | None = None,
    kernel: KernelSetting | None = None,
) -> Model:
    """Makes a loaded model compute with "ring_dilated".

    In a model that also sees or hears, the text model is patched. If PEFT or torch.compile has wrapped a model, the
    model inside is patched. Models that share one config object share its pattern. A model that another one calls, such as a
    frozen teacher, gets the ring too, and keeps its pattern.

    Args:
        model: a model of Transformers, bare or wrapped; it is changed in place.
        pattern: passed to `patch_config`; None keeps what the config has. A model without a pattern and with an adapter of
            PEFT takes the pattern that the adapter was trained under, which is saved with it.
        ring: the ranks that compute each row together. All of them call the model with the same whole rows, and get what one
            device returns; the mean of their gradients is its gradient. Under tensor parallelism these are the ranks with the
            same heads: `ra.Ring(mesh)` for a mesh of ("cp", "tp"). None: this process computes whole rows.
        kernel: as for `Ring`, for a model without a ring; None takes the ring's, or keeps what the model has.

    Returns:
        The model.

    Raises:
        ValueError: no Transformers model, one that does not call the attention interface, a ring of ranks among which tensor
            parallelism divides the model, or a kernel that is not the ring's.
        NotImplementedError: a model that ring_dilated does not compute, or does not compute over a ring.

    Example:
        >>> model = ra.patch_model(tiny_llama(), "window:4+2")  # each token sees itself, 3 before it, and the first 2
        >>> ids = torch.arange(1, 33)[None]
        >>> logits = model(ids).logits
        >>> ids[0, 5] = 77
        >>> (model(ids).logits != logits).any(-1)[0].nonzero().flatten().tolist()  # 2 layers of windows
        [5, 6, 7, 8, 9, 10, 11]
        >>> models = [tiny_llama(), tiny_llama()]  # the same on each rank of a ring
        >>> def loss(ring):
        ...     return ra.patch_model(models[ring.rank], "window:4+2", ring=ring)(ids, labels=ids).loss.item()
        >>> alone = model(ids, labels=ids).loss.item()
        >>> [abs(of_rank - alone) < 1e-5 for of_rank in ra.run_simulated(loss, 2)]
        [True, True]
    """
    inner = inner_model(model, "patch_model")
    share_config(runner_of(inner))
    config, adapters = inner.config.get_text_config(), _adapters_of(model)
    sharded = ring is not None and ring.world_size > 1
    own_attention = why_own_attention(config, sharded)
    if own_attention is None:
        check_model(inner, sharded, checked_mixers(inner))
    if ring is not None:
        check_ring(inner, ring)
    if own_attention is None and (dropout := attention_dropout(config)) is not None:
        warn_once(
            f"{type(inner).__name__} has attention dropout ({dropout}), so a step of training is refused: set it to 0 in the "
            f"config before the model is made"
        )
    kernel_name = _kernel_of(inner, ring, kernel)
    if own_attention is not None:
        _keep_attention(inner, pattern, own_attention)
    elif pattern is not None:
        patch_config(inner.config, pattern)
    elif settings_of(config) is not None:
        use_settings(inner.config, settings_of(config))  # Settings that are not understood are refused before all else.
    else:
        trained = _trained_under(adapters, config)
        if len({*map(str, trained.values())}) > 1:
            raise ValueError(
                f"patch_model: the adapters were trained under different patterns, {trained}: pass one of them"
            )
        for patterns in trained.values():
            patterns.set_in(inner.config)
    if own_attention is None:
        set_implementation(config, IMPLEMENTATION)
        set_implementation_of_parts(inner, implementation_argument(inner.config))
    _save_pattern_with(adapters, inner.config)
    for module in inner.modules():
        remove_hooks(module, lambda hook: hook is _first_call)
    attach_ring(inner, ring, kernel_name, own_attention is not None)
    _prepare_generation(inner)
    attach_mixers(inner)
    for other in models_inside(inner) if ring is not None else ():
        patch_model(other, ring=ring)
    return model


def _keep_attention(model: PreTrainedModel, pattern: Any, reason: str) -> None:
    """Leaves a model the attention of Transformers; refuses patterns, and kernels that were not compared."""
    config, name = model.config.get_text_config(), type(model).__name__
    if not has_only_exact_attention(config) or pattern not in (None, "exact", Pattern.exact()):
        raise NotImplementedError(f"{name} computes no pattern: {reason}: leave the pattern out, for exact attention")
    if implementation_of(config) == IMPLEMENTATION:
        set_implementation(config, "sdpa" if supports_sdpa(model) else "eager")
    if implementation_of(config) not in ("eager", "sdpa"):
        raise ValueError(
            f"{name} keeps its own attention ({reason}), and {implementation_of(config)!r} was not tested for it: call "
            f"set_attn_implementation('sdpa') first"
        )


def _prepare_generation(model: Any) -> None:
    """Makes `generate` of a model use caches for its patterns, and refuses continuous batching, which may switch to flash."""
    make_cache_of_generate(model, cache_for_generate)
    if hasattr(model, "init_continuous_batching"):
        model.init_continuous_batching = partial(_continuous_batching, model)


def _continuous_batching(model: Any, *args: Any, **kwargs: Any) -> Any:
    config, ring = model.config.get_text_config(), attachment_of(runner_of(model)).ring
    if implementation_of(config) == IMPLEMENTATION and not has_only_exact_attention(config):
        raise ValueError(
            f"generate_batch computes exact attention, and {type(model).__name__} has {patterns_of(config)}: call generate, or "
            f"set_attn_implementation('sdpa') for exact attention"
        )
    if ring is not None and ring.world_size > 1:
        raise ValueError(
            f"generate_batch has a cache of its own, and {type(model).__name__} a ring of {ring.world_size} ranks: call "
            f"generate, or ra.patch_model with ring=None"
        )
    return type(model).init_continuous_batching(model, *args, **kwargs)


def _kernel_of(model: PreTrainedModel, ring: Ring | None, kernel: str | None) -> str:
    """Returns the kernel that was asked for, else the ring's, or the model's."""
    if kernel is not None:
        check_choice("patch_model", "kernel", kernel, get_args(KernelSetting))
    if ring is None:
        return kernel or attachment_of(runner_of(model)).kernel
    if kernel not in (None, ring.kernel):
        raise ValueError(
            f"patch_model: got kernel={kernel!r} and a ring with kernel={ring.kernel!r}: make the ring with it"
        )
    return ring.kernel


def check_made_model(model: PreTrainedModel) -> None:
    """Checks the config of a model that is being made, and has its first call patch it if it is made for "ring_dilated".

    A pattern does nothing under another implementation; this is logged once. One under "ring_dilated" stays so when
    the model is saved again.
    """
    text_config = model.config.get_text_config()
    settings, implementation = settings_of(text_config), implementation_of(text_config)
    if settings is not None:
        read_patterns(settings, text_config, type(model).__name__)
    if implementation == IMPLEMENTATION:
        keep_implementation(model.config)
        _prepare_generation(model)
    else:
        warn_of_unused_pattern(model.config)
    remove_hooks(model, lambda hook: hook is _first_call)
    if not hasattr(model, ATTACHMENT):  # A patched model may get another module, such as larger embeddings.
        model.register_forward_pre_hook(_first_call, with_kwargs=True)


@torch.compiler.disable(reason=UNTRACEABLE)
def _first_call(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Patches a model that was loaded with attn_implementation="ring_dilated", and begins its call."""
    config = model.config.get_text_config()
    if implementation_of(config) != IMPLEMENTATION:
        return None
    patch_model(model, ring=attachment_of(runner_of(model)).ring)  # The decoder may have been patched before.
    drafts = bool(tokens_skipped(cache_in(kwargs)))  # Transformers has made it for a model that was patched.
    takes_one = implementation_of(config) == IMPLEMENTATION and config.model_type not in INDEXED
    if settings_of(config) is None and takes_one and not drafts and not (dist.is_initialized() and dist.get_rank()):
        warn_once(
            f"a model with attn_implementation={IMPLEMENTATION!r} has no pattern, so it computes exact attention: call "
            f"ra.patch_model(model, pattern), or load it with config=ra.patch_config(config, pattern); 'exact' is a pattern too"
        )
    return before_model(model, args, kwargs)
