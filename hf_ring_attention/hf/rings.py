"""Remembers which ring a model has, and finds how the models of a ring divide their rows."""

from __future__ import annotations

import weakref

from torch import nn
from transformers import PreTrainedModel

from ..plan.layouts import SequenceLayout
from ..plan.patterns import Pattern, as_pattern
from ..plan.problem import Documents
from ..ring.ring import Ring
from .config import layer_pattern
from .positions import first_position
from .support import untrainable
from .wrappers import runner_of

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


def untrainable_model(ring: Ring) -> ValueError | None:
    """Returns the error of a model that was patched with this ring and cannot be trained; None if all can."""
    errors = (untrainable(model) for model in models_of(ring))
    return next((error for error in errors if error is not None), None)


def layout_of_rows(
    ring: Ring, seq_len: int, pattern: Pattern | str | None = None, documents: Documents | None = None
) -> tuple[SequenceLayout, int]:
    """Returns the layout of rows of `seq_len` tokens, and the position id of their first token.

    Args:
        pattern: the pattern that decides the layout; None for that of the model that was patched with this ring.
        documents: those of each batch row, for a layout that knows them; None for one document a row.

    Raises:
        ValueError: no pattern where the layout depends on one, or models whose layouts differ.
    """
    rules = {
        (layer_pattern(model.config.get_text_config(), None), first_position(runner_of(model)))
        for model in models_of(ring)
    }
    if pattern is not None:
        chosen = as_pattern(pattern, "the pattern of rows")
        rules = {(chosen, first) for _, first in rules} or {(chosen, 0)}
    if not rules and (ring.layout in ("contiguous", "zigzag") or ring.world_size == 1):
        rules = {(Pattern.exact(), 0)}
    if not rules:
        raise ValueError(
            "the layout of rows depends on the model's pattern, and no model was patched with this ring: call "
            "ra.patch_model(model, ring=ring) first, or pass the pattern, or make the ring with layout='contiguous' "
            "or 'zigzag'"
        )
    layouts = {(ring.layout_for(seq_len, pattern, documents), first) for pattern, first in rules}
    if len(layouts) > 1:
        raise ValueError(
            f"models of one ring divide rows of {seq_len} tokens in different ways: {sorted(map(str, layouts))}: "
            f"patch each of them with a ring of its own"
        )
    return layouts.pop()
