"""A cache over a ring: each rank holds its shard of the prefilled row's keys and values, and all tokens that came after it.

The states of recurrent layers are small, and every rank holds all of them.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionAndFullAttentionLayer

from ..plan.layouts import SequenceLayout
from ..plan.problem import HeldKeys
from .hybrid_types import MIXERS


def cache_in(arguments: Mapping[str, Any]) -> Cache | None:
    """Returns the cache among the arguments of a call, whatever its name: releases of Transformers rename it."""
    return next((value for value in arguments.values() if isinstance(value, Cache)), None)


@functools.cache
def cache_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the parameters that hold a cache by their annotation, such as "cache" (since 5.24) or "past_key_values"."""
    parameters = inspect.signature(forward).parameters.values()
    return tuple(x.name for x in parameters if re.search(r"Cache\b", inspect.formatannotation(x.annotation)))


def cache_argument(cache: Cache | None) -> dict[str, Cache | None]:
    """Returns the keyword argument that gives a cache to a model or to its `generate` in this release of Transformers."""
    (name,) = cache_names(GenerationMixin.prepare_inputs_for_generation)
    return {name: cache}


class _ShardedLayer(DynamicLayer):
    """One layer's keys and values: first a shard of the prefilled row, then all later tokens."""

    def __init__(self, layout: SequenceLayout, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layout = layout

    @property
    def later(self) -> int:
        """The number of tokens after the prefilled row."""
        return 0 if self.keys is None else max(0, self.keys.shape[-2] - self.layout.local_len)

    def get_seq_length(self) -> int:
        """Returns the number of tokens of the whole sequence."""
        return 0 if self.keys is None else self.layout.seq_len + self.later

    def reset(self) -> None:
        raise ValueError("a sharded cache cannot be filled again: make another one with ra.prefill")

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens. A positive number is the length to keep, as in earlier Transformers."""
        if self.keys is None:  # This layer takes the keys of another one.
            return
        count = -tokens_to_remove if tokens_to_remove <= 0 else self.get_seq_length() - tokens_to_remove
        if count > self.later:
            raise ValueError(
                f"a sharded cache keeps the {self.layout.seq_len} tokens it was filled with: {count} tokens cannot be "
                f"removed, because only {self.later} came after them"
            )
        if count > 0 and self.values is not None:
            self.keys, self.values = self.keys[..., :-count, :], self.values[..., :-count, :]


class _ShardedHybridLayer(LinearAttentionAndFullAttentionLayer, _ShardedLayer):  # type: ignore[misc, override]
    """One layer's keys and values, which are sharded, and its state."""

    def __init__(self, layout: SequenceLayout) -> None:
        super().__init__()
        self.layout = layout


def _layers_of_cache(layout: SequenceLayout, config: PretrainedConfig) -> list[Any]:
    """Returns a layer of the cache for each layer of a model: keys and values are sharded, states of others are not."""
    if config.model_type not in MIXERS:
        return [_ShardedLayer(layout) for _ in range(config.num_hidden_layers)]
    layers: list[Any] = []
    for layer in DynamicCache(config=config).layers:
        if isinstance(layer, LinearAttentionAndFullAttentionLayer):
            layers.append(_ShardedHybridLayer(layout))
        else:
            layers.append(_ShardedLayer(layout) if isinstance(layer, DynamicLayer) else layer)
    return layers


def _states_of(layer: Any) -> list[Tensor | None]:
    return [x for kind in ("conv_states", "recurrent_states") for x in getattr(layer, kind, {}).values()]


class ShardedCache(Cache):
    """The cache that `prefill` returns. Its length is that of the whole sequence; `crop` goes back to it.

    Attributes:
        layout: the layout of the prefilled row.
    """

    def __init__(self, layout: SequenceLayout, config: PretrainedConfig) -> None:
        Cache.__init__(self, layers=_layers_of_cache(layout, config))
        self.layout = layout
        self._states: list[Any] = []

    def keep_states(self) -> None:
        """Keeps a copy of the states of recurrent layers, to which `crop` goes back."""
        self._states = [copy.deepcopy((layer.conv_states, layer.recurrent_states)) for layer in self._recurrent()]

    def _recurrent(self) -> list[Any]:
        return [layer for layer in self.layers if hasattr(layer, "recurrent_states")]

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens. A positive number is the length to keep, as in earlier Transformers.

        Raises:
            ValueError: tokens of the row that was prefilled; or, where layers have states, another number than that of all
                tokens after it.
        """
        length = self.get_seq_length()
        kept = length + tokens_to_remove if tokens_to_remove <= 0 else min(length, tokens_to_remove)
        if self._states and kept not in (length, self.layout.seq_len):
            raise ValueError(
                f"a sharded cache with states of recurrent layers goes back to the {self.layout.seq_len} tokens it was filled "
                f"with, and to no other length: {kept} tokens were to stay of {length}"
            )
        for layer in self.layers:
            if isinstance(layer, _ShardedLayer):
                _ShardedLayer.crop(layer, tokens_to_remove)
        if kept < length:
            for layer, states in zip(self._recurrent(), copy.deepcopy(self._states)):
                layer.conv_states, layer.recurrent_states = states

    @property
    def num_rows(self) -> int:
        """The number of batch rows."""
        tensors = (x for layer in self.layers for x in (getattr(layer, "keys", None), *_states_of(layer)))
        return next(len(x) for x in tensors if x is not None)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes the batch rows of these numbers [rows], also of the states that `crop` goes back to."""
        Cache.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        self._states = [
            tuple({k: x if x is None else x[beam_idx.to(x.device)] for k, x in kind.items()} for kind in kinds)
            for kinds in self._states
        ]

    # Layers with states have no such methods in Transformers.
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each batch row, as beams of `generate` need it."""
        self.reorder_cache(torch.arange(self.num_rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the batch rows of these numbers."""
        self.reorder_cache(indices)

    def held(self, rank: int, new_tokens: int) -> HeldKeys:
        """Returns what `rank` holds after a step of `new_tokens` tokens: its shard, and on the last rank all later tokens.

        All ranks store the later tokens, but only the last rank computes with them.
        """
        layout, first = self.layout, 0
        row_len = self.get_seq_length() + new_tokens
        keys = []
        for piece in layout.pieces(rank):
            stop = min(piece.stop, layout.seq_len)
            if piece.start < stop:
                keys.append((first, piece.start, stop))
            first += len(piece)
        if rank == layout.world_size - 1:
            keys.append((layout.local_len, layout.seq_len, row_len))
        num_rows = layout.local_len + row_len - layout.seq_len
        return HeldKeys(row_len, new_tokens, num_rows, tuple(keys))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self.get_seq_length(layer_idx) == 0 and key_states.shape[-2] != self.layout.local_len:
            raise ValueError(
                f"a sharded cache is filled by prefill, with {self.layout.local_len} tokens on each rank, got "
                f"{key_states.shape[-2]}: call ra.prefill(model, input_ids)"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class _LinearStates(ShardedCache):
    """A sharded cache for MiniMax, whose mixers ask for their states by other names, and whose model for a class of its own."""

    __len__ = Cache.__len__  # That class keeps states in a list.

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Returns the state of a layer; None for an empty one."""
        layer: Any = self.layers[layer_idx]
        state: Tensor | None = layer.recurrent_states[0]
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keeps the state of a layer."""
        self.update_recurrent_state(linear_cache, layer_idx)
        layer: Any = self.layers[layer_idx]
        layer.has_previous_state[0] = True  # Only convolutions set it.


def sharded_cache(layout: SequenceLayout, config: PretrainedConfig) -> ShardedCache:
    """Returns an empty sharded cache for models of this config."""
    if config.model_type != "minimax":
        return ShardedCache(layout, config)
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    kind: type[ShardedCache] = type("ShardedMiniMaxCache", (_LinearStates, MiniMaxCache), {})
    return kind(layout, config)
