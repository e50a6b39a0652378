"""The mixers of hybrid models, as the folder `hf` asks for them, and a sharded cache that holds their states.

The states are small, and every rank holds all of them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from ..hf.cache import ShardedCache, ShardedLayer
from ..hf.kept_rows import Shared
from ..hf.model_types import MIXERS
from ..hf.pattern_layer import PatternLayer
from ..hf.wrappers import decoder_of
from ..plan.layouts import SequenceLayout
from .mixers import STATES_INSIDE, attach, check_parameters


def mixers_of(model: nn.Module, config: PretrainedConfig) -> list[tuple[str, nn.Module]]:
    """Returns the mixers of a text model with their paths."""
    name = MIXERS.get(config.model_type)
    # FSDP 2 makes a new class for each module that it shards.
    return [(path, x) for path, x in model.named_modules() if any(kind.__name__ == name for kind in type(x).__mro__)]


def checked_mixers(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns the paths of a model's mixers in its text model; refuses releases of Transformers with other mixers."""
    config = model.config.get_text_config()
    mixers = mixers_of(decoder_of(model), config)
    if not mixers:
        raise NotImplementedError(
            f"{type(model).__name__} has no module of the class {MIXERS[config.model_type]}, whose name this release of "
            f"Transformers may have changed: use 'sdpa' or 'eager', or a tested release"
        )
    for path, module in mixers:
        check_parameters(path, module)
    return tuple(path for path, _ in mixers)


def attach_mixers(model: PreTrainedModel) -> None:
    """Makes the mixers of a model keep documents apart, and pass their states over the model's ring."""
    config = model.config.get_text_config()
    for _, module in mixers_of(decoder_of(model), config):
        attach(module, config)


def _state_inside(model: nn.Module) -> str | None:
    """Returns the class of mixers that keep their state in themselves; None without any."""
    return next((name for module in model.modules() if (name := type(module).__name__) in STATES_INSIDE), None)


def check_prefill(model: nn.Module) -> None:
    """Refuses a model whose mixers keep their state in themselves."""
    inside = _state_inside(model)
    if inside is not None:
        raise NotImplementedError(
            f"prefill: {inside} keeps its state in the model itself, from which no cache can go on: generate on one process "
            f"(ring=None) without prefill"
        )


def why_no_pattern_cache(model: nn.Module) -> str | None:
    """Returns why a `PatternCache` cannot serve a model; None if it can."""
    inside = _state_inside(model)
    if inside is not None:
        return f"{inside} keeps its state in the model itself"
    config: Any = model.config
    if config.get_text_config().model_type == "minimax":
        return "its states are in a cache of another class"
    return None


class _PatternHybridLayer(LinearAttentionLayer, PatternLayer):  # type: ignore[misc, override]
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
        LinearAttentionLayer.crop(self, tokens_to_remove)
        PatternLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        PatternLayer.reorder_cache(self, beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]


def pattern_layers(layers: list[Any], shared: Shared) -> list[Any]:
    """Returns the layers of a `PatternCache` in place of the layers of a whole cache."""
    made = []
    for layer in layers:
        both = isinstance(layer, LinearAttentionLayer) and isinstance(layer, DynamicLayer)
        kept = PatternLayer(shared) if isinstance(layer, DynamicLayer) else layer
        made.append(_PatternHybridLayer(shared, layer.number_of_states) if both else kept)
    return made


class _ShardedHybridLayer(LinearAttentionAndFullAttentionLayer, ShardedLayer):  # type: ignore[misc, override]
    """One layer's keys and values, which are sharded, and its state."""

    def __init__(self, layout: SequenceLayout) -> None:
        super().__init__()
        self.layout = layout


class ShardedHybridCache(ShardedCache):
    """A sharded cache of keys, values and states. Its length is that of the whole sequence; `crop` goes back to it."""

    def __init__(self, layout: SequenceLayout, config: PretrainedConfig) -> None:
        super().__init__(layout, config)
        self._kept: list[Any] = []

    @staticmethod
    def layers_of(layout: SequenceLayout, config: PretrainedConfig) -> list[Any]:
        """Returns an empty layer of the cache for each layer of a model: keys and values are sharded, states are not."""
        layers: list[Any] = []
        for layer in DynamicCache(config=config).layers:
            if isinstance(layer, LinearAttentionAndFullAttentionLayer):
                layers.append(_ShardedHybridLayer(layout))
            else:
                layers.append(ShardedLayer(layout) if isinstance(layer, DynamicLayer) else layer)
        return layers

    def _recurrent(self) -> list[Any]:
        return [layer for layer in self.layers if hasattr(layer, "recurrent_states")]

    def keep_states(self) -> None:
        """Keeps a copy of the states, which `crop` restores."""
        self._kept = [copy.deepcopy((layer.conv_states, layer.recurrent_states)) for layer in self._recurrent()]

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
            for layer, states in zip(self._recurrent(), copy.deepcopy(self._kept), strict=True):
                layer.conv_states, layer.recurrent_states = states

    @property
    def num_rows(self) -> int:
        """The number of batch rows."""
        kinds = [kind for layer in self._recurrent() for kind in (layer.conv_states, layer.recurrent_states)]
        return next(len(x) for kind in kinds for x in kind.values() if x is not None)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes the batch rows of these numbers [rows], also of the states that `crop` goes back to."""
        Cache.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        self._kept = [
            tuple({k: x if x is None else x[beam_idx.to(x.device)] for k, x in kind.items()} for kind in kinds)
            for kinds in self._kept
        ]

    # Layers with states have no such methods in Transformers.
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each batch row, as beams of `generate` need it."""
        self.reorder_cache(torch.arange(self.num_rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the batch rows of these numbers."""
        self.reorder_cache(indices)


class _LinearStates(ShardedHybridCache):
    """A sharded cache for MiniMax, whose mixers ask for their states by other names, and whose model asks for another class."""

    __len__ = Cache.__len__  # That class keeps states in a list.

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Returns the state of a layer; None for an empty one."""
        state: Tensor | None = self.layers[layer_idx].recurrent_states[0]  # type: ignore[union-attr]
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keeps the state of a layer."""
        self.update_recurrent_state(linear_cache, layer_idx)
        self.layers[layer_idx].has_previous_state[0] = True  # type: ignore[union-attr]  # Only convolutions set it.


def sharded_hybrid_cache(layout: SequenceLayout, config: PretrainedConfig) -> ShardedHybridCache:
    """Returns an empty sharded cache for hybrids of this config."""
    if config.model_type != "minimax":
        return ShardedHybridCache(layout, config)
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    kind: type[ShardedHybridCache] = type("ShardedMiniMaxCache", (_LinearStates, MiniMaxCache), {})
    return kind(layout, config)
