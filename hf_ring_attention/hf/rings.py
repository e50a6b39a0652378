"""Remembers which ring a model has, and which models a ring has."""

from __future__ import annotations

import weakref

from torch import nn
from transformers import PreTrainedModel

from ..ring.ring import Ring

#: The attribute of a model's modules that holds their ring.
_RING = "_ring_dilated_ring"
#: The models of each ring; it keeps neither of them alive.
_MODELS: weakref.WeakKeyDictionary[Ring, weakref.WeakSet[PreTrainedModel]] = weakref.WeakKeyDictionary()


def attached_ring(module: nn.Module) -> Ring | None:
    """Returns the ring that `patch_model` gave to a model, or to one of its modules."""
    return getattr(module, _RING, None)


def is_patched(module: nn.Module) -> bool:
    """Returns whether `patch_model` was called for the model of a module, with a ring or without one."""
    return hasattr(module, _RING)


def set_ring(module: nn.Module, ring: Ring | None) -> None:
    """Makes `attached_ring` answer with this ring, for one module."""
    setattr(module, _RING, ring)


def serve(ring: Ring | None, model: PreTrainedModel) -> None:
    """Makes this the ring that divides the model's rows in place of the attached one; None for rows that stay whole."""
    before = attached_ring(model)
    if before is not None and before in _MODELS:
        _MODELS[before].discard(model)
    if ring is not None:
        _MODELS.setdefault(ring, weakref.WeakSet()).add(model)


def models_of(ring: Ring) -> list[PreTrainedModel]:
    """Returns the models that were patched with this ring and still exist."""
    return list(_MODELS.get(ring, ()))
