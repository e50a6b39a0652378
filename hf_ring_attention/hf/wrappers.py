"""Finds the Transformers model inside its wrappers, its parts and its ring, and sets evaluation mode."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from ..compute.private import compiled_module
from ..ring.ring import Ring

#: The attribute of a model's modules that holds their ring.
_RING = "_ring_dilated_ring"
#: The models that `patch_model` was called for; it keeps none of them alive.
_PATCHED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def wrapped_modules(model: Any) -> list[Any]:
    """Returns a model with all that torch.compile, PEFT, DDP, FSDP and DeepSpeed put around it, from the outside in."""
    modules = [model]
    while not isinstance(model, PreTrainedModel):
        if compiled_module(model) is not None:
            model = compiled_module(model)
        elif isinstance(getattr(model, "module", None), nn.Module):
            model = model.module
        elif hasattr(model, "get_base_model"):
            tuner, model = getattr(model, "base_model", None), model.get_base_model()
            if tuner is not model and isinstance(tuner, nn.Module):
                modules.append(tuner)
        else:
            break
        modules.append(model)
    return modules


def unwrapped(model: Any) -> Any:
    """Returns the innermost of the `wrapped_modules`: the Transformers model."""
    return wrapped_modules(model)[-1]


def inner_model(model: Any, caller: str) -> PreTrainedModel:
    """Returns the `unwrapped` model; refuses other things than models of Transformers."""
    inner = unwrapped(model)
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(f"{caller}: expected a Transformers model, or a wrapper of one, got {type(model).__name__}")
    return inner


def whole_model(model: Any, caller: str) -> PreTrainedModel:
    """Returns the `inner_model`, for a caller that runs it alone; refuses models to which PEFT adds tokens of its own."""
    inner, peft_config = inner_model(model, caller), cast(Any, getattr(model, "active_peft_config", None))
    if getattr(peft_config, "is_prompt_learning", False):
        raise ValueError(
            f"{caller}: PEFT adds {peft_config.num_virtual_tokens} virtual tokens without positions to each row of "
            f"{type(inner).__name__}: use an adapter without prompts, such as LoRA"
        )
    return inner


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode; afterwards each module returns to its own mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def runner_of(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the module that every forward pass over tokens runs and that makes the masks; some heads skip the base model."""
    base: Any = model.base_model
    runner: PreTrainedModel = base.get_decoder() if hasattr(base, "get_decoder") else base
    return runner


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Returns the part of a model whose rows are tokens: all of it, or the text model of one that also sees or hears."""
    config = model.config.get_text_config()
    if config is model.config:
        return model
    parts = (module for module in model.modules() if getattr(module, "config", None) is config)
    return next(parts, model)


def class_of_transformers(module: nn.Module) -> type:
    """Returns the class of a module as Transformers defines it, or its own; FSDP 2 makes a class for each module it shards."""
    kinds = type(module).__mro__
    return next((kind for kind in kinds if kind.__module__.startswith("transformers.")), kinds[0])


def attached_ring(module: nn.Module) -> Ring | None:
    """Returns the ring that `patch_model` gave to a model, or to one of its modules."""
    return getattr(module, _RING, None)


def is_patched(module: nn.Module) -> bool:
    """Returns whether `patch_model` was called for the model of a module, with a ring or without one."""
    return hasattr(module, _RING)


def set_ring(model: PreTrainedModel, ring: Ring | None) -> None:
    """Makes this the ring of a model and of the modules of its decoder."""
    _PATCHED.add(model)
    of_ring = {model, *decoder_of(model).modules()}
    for module in model.modules():
        setattr(module, _RING, ring if module in of_ring else None)


def models_of(ring: Ring) -> list[PreTrainedModel]:
    """Returns the models that were patched with this ring and still exist."""
    return [model for model in _PATCHED if attached_ring(model) is ring]
