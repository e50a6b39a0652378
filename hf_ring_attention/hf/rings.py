"""Remembers which ring a model has, and which models a ring has."""

from __future__ import annotations

import weakref

from torch import nn
from transformers import PreTrainedModel

from ..ring.ring import Ring
from .wrappers import decoder_of

#: The attribute of a model's modules that holds their ring.
_RING = "_ring_dilated_ring"
#: The models that `patch_model` was called for; it keeps none of them alive.
_PATCHED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


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
