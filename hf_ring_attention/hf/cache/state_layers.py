"""The states of recurrent layers in caches, also in a sharded one. Every rank holds all states, which are small."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from ...plan.layouts import SequenceLayout
from ..model.types import MIXERS, STATES_INSIDE
from .kept_rows import Shared
from .pattern_layer import PatternLayer
from .sharded_cache import ShardedCache, ShardedLayer

#: The attributes of a layer that are its state.
_PARTS_OF_STATE = (
    "conv_states",
    "recurrent_states",
    "has_previous_state",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
)


class _StateLayer(LinearAttentionLayer):
    """One layer's state, and a copy of it, which `crop` goes back to."""

    kept: dict[str, Any] | None = None

    def keep(self) -> None:
        """Keeps a copy of the state."""
        self.kept = copy.deepcopy({name: getattr(self, name) for name in _PARTS_OF_STATE})

    def restore(self) -> None:
        """Makes the copy the state again."""
        vars(self).update(copy.deepcopy(self.kept or {}))

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self.keep()

    def end_recording(self) -> None:
        if any(self.is_conv_states_initialized.values()):
            LinearAttentionLayer.crop(self, 0)
        self.record_past, self.kept = False, None

    def goes_back(self, to_kept: bool) -> bool:
        """Returns whether `crop` may remove tokens; `to_kept`: all tokens since the copy."""
        return self.record_past and (to_kept or not any(self.is_recurrent_states_initialized.values()))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and any(self.is_recurrent_states_initialized.values()):
            self.restore()
        elif self.record_past and any(self.is_conv_states_initialized.values()):
            LinearAttentionLayer.crop(self, tokens_to_remove)
        if self.record_past:
            self.keep()

    def reset(self) -> None:
        self.__init__(number_of_states=self.number_of_states)  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes the batch rows of these numbers, also of the copy."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        kept = self.kept or {}
        for name in _PARTS_OF_STATE[:2] if kept else ():
            kept[name] = {k: x if x is None else x[beam_idx.to(x.device)] for k, x in kept[name].items()}


class _PatternHybridLayer(_StateLayer, PatternLayer):  # type: ignore[misc, override]
    """One layer's rows that later queries see, and its state."""

    is_compileable = False

    def __init__(self, shared: Shared, number_of_states: int) -> None:
        PatternLayer.__init__(self, shared)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

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

    def crop(self, tokens_to_remove: int) -> None:
        _StateLayer.crop(self, tokens_to_remove)
        PatternLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        PatternLayer.reorder_cache(self, beam_idx)
        _StateLayer.reorder_cache(self, beam_idx)


def pattern_layers(layers: list[Any], shared: Shared) -> list[Any]:
    """Returns the layers of a `PatternCache` in place of the layers of a whole cache."""
    made = []
    for layer in layers:
        both = isinstance(layer, LinearAttentionLayer) and isinstance(layer, DynamicLayer)
        kept = PatternLayer(shared) if isinstance(layer, DynamicLayer) else _of_states(layer)
        made.append(_PatternHybridLayer(shared, layer.number_of_states) if both else kept)
    return made


def _of_states(layer: Any) -> Any:
    """Returns a layer that can keep a copy of its states in place of one of Transformers; other layers as they are."""
    return _StateLayer(layer.number_of_states) if isinstance(layer, LinearAttentionLayer) else layer


class _ShardedHybridLayer(_StateLayer, LinearAttentionAndFullAttentionLayer, ShardedLayer):  # type: ignore[misc, override]
    """One layer's keys and values, which are sharded, and its state."""

    reset = ShardedLayer.reset

    def __init__(self, layout: SequenceLayout) -> None:
        super().__init__()
        self.layout = layout


class ShardedHybridCache(ShardedCache):
    """A sharded cache of keys, values and states. Its length is that of the whole sequence; `crop` goes back to it."""

    @staticmethod
    def layers_of(layout: SequenceLayout, config: PretrainedConfig) -> list[Any]:
        """Returns an empty layer of the cache for each layer of a model: keys and values are sharded, states are not."""
        layers: list[Any] = []
        for layer in DynamicCache(config=config).layers:
            if isinstance(layer, LinearAttentionAndFullAttentionLayer):
                layers.append(_ShardedHybridLayer(layout))
            else:
                layers.append(ShardedLayer(layout) if isinstance(layer, DynamicLayer) else _of_states(layer))
        return layers

    def _recurrent(self) -> list[Any]:
        return [layer for layer in self.layers if isinstance(layer, _StateLayer)]

    def keep_states(self) -> None:
        """Keeps a copy of the states, which `crop` restores."""
        for layer in self._recurrent():
            layer.keep()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens, which are all tokens after the prefilled row, or none."""
        length = self.get_seq_length()
        remaining = length + tokens_to_remove
        if remaining not in (length, self.layout.seq_len):
            raise ValueError(
                f"a sharded cache with states of recurrent layers goes back to the {self.layout.seq_len} tokens it was filled "
                f"with, and to no other length: {remaining} tokens were to stay of {length}"
            )
        for layer in self.layers:
            if isinstance(layer, ShardedLayer):
                ShardedLayer.crop(layer, tokens_to_remove)
        if remaining < length:
            for layer in self._recurrent():
                layer.restore()

    @property
    def num_rows(self) -> int:
        """The number of batch rows."""
        kinds = [kind for layer in self._recurrent() for kind in (layer.conv_states, layer.recurrent_states)]
        return next(len(x) for kind in kinds for x in kind.values() if x is not None)

    # Layers with states have no such methods in Transformers.
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each batch row, as beams of `generate` need it."""
        self.reorder_cache(torch.arange(self.num_rows).repeat_interleave(repeats))  # type: ignore[arg-type]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the batch rows of these numbers."""
        self.reorder_cache(indices)  # type: ignore[arg-type]


class _LinearStates(ShardedHybridCache):
    """MiniMax names its states differently and expects its own cache class."""

    __len__ = Cache.__len__  # That class keeps states in a list.

    def __reduce__(self) -> Any:
        return _empty_linear_states, (), vars(self)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Returns the state of a layer; None for an empty one."""
        state: Tensor | None = self.layers[layer_idx].recurrent_states[0]  # type: ignore[union-attr]
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keeps the state of a layer."""
        self.update_recurrent_state(linear_cache, layer_idx)
        self.layers[layer_idx].has_previous_state[0] = True  # type: ignore[union-attr]  # Only convolutions set it.


def sharded_cache(layout: SequenceLayout, config: PretrainedConfig) -> ShardedCache:
    """Returns an empty sharded cache for models of this config."""
    hybrid = _linear_states() if config.model_type == "minimax" else ShardedHybridCache
    kind = hybrid if config.model_type in MIXERS else ShardedCache
    return kind(layout, config)


def state_inside(model: nn.Module) -> str | None:
    """Returns the class of mixers that keep their state in themselves; None without any."""
    return next((name for module in model.modules() if (name := type(module).__name__) in STATES_INSIDE), None)


@functools.cache
def _linear_states() -> type[ShardedHybridCache]:
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    return type("ShardedMiniMaxCache", (_LinearStates, MiniMaxCache), {})


def _empty_linear_states() -> ShardedHybridCache:
    """Returns a cache to be filled with the attributes of one that was copied or pickled."""
    kind = _linear_states()
    return kind.__new__(kind)
