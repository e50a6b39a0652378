"""A cache over a ring: each rank holds a shard of a document, and all later tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from ...plan.layouts import SequenceLayout
from ...plan.problem import HeldKeys


class ShardedLayer(DynamicLayer):
    """One layer's keys and values: first a shard of the prefilled row, then all later tokens."""

    def __init__(self, layout: SequenceLayout) -> None:
        super().__init__()
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
        """Removes the last `-tokens_to_remove` tokens."""
        if self.keys is not None and -tokens_to_remove > self.later:  # Without keys, the layer takes those of another.
            kept = f"a sharded cache keeps the {self.layout.seq_len} tokens it was filled with"
            raise ValueError(f"{kept}: {self.later} came after them, and {-tokens_to_remove} cannot be removed")
        DynamicLayer.crop(self, tokens_to_remove)


class ShardedCache(Cache):
    """The cache that `prefill` returns. Its length is the length of the whole sequence; `crop` goes back to it."""

    def __init__(self, layout: SequenceLayout, config: PretrainedConfig) -> None:
        Cache.__init__(self, layers=self.layers_of(layout, config))
        self.layout = layout  # of the prefilled row

    @staticmethod
    def layers_of(layout: SequenceLayout, config: PretrainedConfig) -> list[Any]:
        """Returns an empty layer of the cache for each layer of a model."""
        return [ShardedLayer(layout) for _ in range(config.num_hidden_layers)]

    @property
    def num_rows(self) -> int:
        """The number of batch rows."""
        layers: list[Any] = self.layers
        return next(len(layer.keys) for layer in layers if layer.keys is not None)

    def held(self, rank: int, new_tokens: int) -> HeldKeys:
        """Returns what `rank` holds after a step of `new_tokens` tokens: its shard, and on the last rank all later tokens.

        All ranks store the later tokens, but only the last rank computes with them.
        """
        layout, row_len = self.layout, self.get_seq_length() + new_tokens
        pieces = ((first, p.start, min(p.stop, layout.seq_len)) for first, p in layout.placed_pieces(rank))
        keys = [(first, start, stop) for first, start, stop in pieces if start < stop]
        if rank == layout.world_size - 1:
            keys.append((layout.local_len, layout.seq_len, row_len))
        num_rows = layout.local_len + row_len - layout.seq_len
        return HeldKeys(row_len, new_tokens, num_rows, tuple(keys))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self.get_seq_length(layer_idx) == 0 and key_states.shape[-2] != self.layout.local_len:
            expected, got = self.layout.local_len, key_states.shape[-2]
            raise ValueError(f"ra.prefill fills a sharded cache, with {expected} tokens on each rank, got {got}")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
