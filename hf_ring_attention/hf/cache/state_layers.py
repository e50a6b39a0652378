"""The states of recurrent layers in a `PatternCache`. Over a ring, every rank holds all states, which are small."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from ..model.types import STATES_INSIDE
from .every_row import EveryRowLayer
from .kept_rows import Shared
from .pattern_layer import PatternLayer

#: The attributes of a layer that are its state.
_PARTS_OF_STATE = (
    "conv_states",
    "recurrent_states",
    "has_previous_state",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
)


class _StateLayer(LinearAttentionLayer):
    """One layer's state, and copies of it, which `go_back` makes the state again."""

    def __init__(self, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.copies: dict[int, dict[str, Any]] = {}  # by the tokens before them

    def keep(self, length: int) -> None:
        """Keeps a copy of the state behind `length` tokens."""
        self.copies[length] = copy.deepcopy({name: getattr(self, name) for name in _PARTS_OF_STATE})

    def forget(self, document: int | None) -> None:
        """Drops all copies but the one behind a document."""
        self.copies = {length: x for length, x in self.copies.items() if length == document}

    def end_recording(self) -> None:
        if any(self.is_conv_states_initialized.values()):
            LinearAttentionLayer.crop(self, 0)
        self.record_past = False

    def goes_back(self, length: int, recorded: int) -> bool:
        """Returns whether `go_back` leads to this length, if all is recorded from `recorded` tokens on."""
        every = self.record_past and not any(self.is_recurrent_states_initialized.values())
        return length in self.copies or (every and length >= recorded)

    def go_back(self, length: int, tokens_to_remove: int) -> None:
        """Goes back to `length` tokens."""
        if tokens_to_remove and length in self.copies:
            vars(self).update(copy.deepcopy(self.copies[length]))
        elif self.record_past and any(self.is_conv_states_initialized.values()):
            LinearAttentionLayer.crop(self, -tokens_to_remove)

    def reset(self) -> None:
        self.__init__(self.number_of_states)  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes the batch rows of these numbers, also of the copies."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        for kept in self.copies.values():
            for name in _PARTS_OF_STATE[:2]:
                kept[name] = {k: x if x is None else x[beam_idx.to(x.device)] for k, x in kept[name].items()}


class _HybridLayer(_StateLayer, PatternLayer):  # type: ignore[misc, override]
    """One layer's rows of keys and values, and its state."""

    is_compileable = False
    crop = PatternLayer.crop

    def __init__(self, shared: Shared, number_of_states: int) -> None:
        PatternLayer.__init__(self, shared)
        _StateLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        (LinearAttentionLayer if kwargs else PatternLayer).lazy_initialization(self, *args, **kwargs)

    def offload(self) -> None:
        PatternLayer.offload(self)
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        PatternLayer.prefetch(self)
        LinearAttentionLayer.prefetch(self)

    def reset(self) -> None:
        self.__init__(self.shared, self.number_of_states)  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        PatternLayer.reorder_cache(self, beam_idx)
        _StateLayer.reorder_cache(self, beam_idx)


class _EveryHybridLayer(_HybridLayer, EveryRowLayer):  # type: ignore[misc, override]
    """One layer with every row, and its state."""

    def __init__(self, shared: Shared, number_of_states: int) -> None:
        EveryRowLayer.__init__(self, shared)
        _StateLayer.__init__(self, number_of_states)


def pattern_layers(layers: list[Any], shared: Shared) -> list[Any]:
    """Returns the layers of a `PatternCache` in place of the layers of a whole cache."""
    attends, both = (EveryRowLayer, _EveryHybridLayer) if shared.every else (PatternLayer, _HybridLayer)
    made: list[Any] = []
    for layer in layers:
        if isinstance(layer, LinearAttentionLayer):
            of_states = layer.number_of_states
            made.append(both(shared, of_states) if isinstance(layer, DynamicLayer) else _StateLayer(of_states))
        else:
            made.append(attends(shared) if isinstance(layer, DynamicLayer) else layer)
    return made


def state_inside(model: nn.Module) -> str | None:
    """Returns the class of mixers that keep their state in themselves; None without any."""
    return next((name for module in model.modules() if (name := type(module).__name__) in STATES_INSIDE), None)
