"""A key/value cache of which every rank of a ring holds its shard, and each the tokens that came after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..plan.layouts import SequenceLayout
from ..plan.problem import HeldKeys


class _ShardedLayer(DynamicLayer):
    """One layer's keys and values: first a shard of the prefilled row, then all later tokens."""

    def __init__(self, layout: SequenceLayout, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layout = layout

    @property
    def later(self) -> int:
        """Tokens after the prefilled row."""
        return 0 if self.keys is None else max(0, self.keys.shape[-2] - self.layout.local_len)

    def get_seq_length(self) -> int:
        """Tokens of the whole row."""
        return 0 if self.keys is None else self.layout.seq_len + self.later

    def reset(self) -> None:
        raise ValueError("a sharded cache cannot be filled again: make another one with ra.prefill")

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens: so many if negative; down to so many, if positive, as earlier Transformers had it."""
        if self.keys is None:  # a layer that takes the keys of another
            return
        count = -tokens_to_remove if tokens_to_remove <= 0 else self.get_seq_length() - tokens_to_remove
        if count > self.later:
            raise ValueError(
                f"a sharded cache keeps the {self.layout.seq_len} tokens it was filled with: {count} tokens cannot be "
                f"removed, {self.later} came after them"
            )
        if count > 0 and self.values is not None:
            self.keys, self.values = self.keys[..., :-count, :], self.values[..., :-count, :]


class ShardedCache(Cache):
    """The cache that `prefill` returns. Its length is that of the whole row; `crop` goes back to it.

    Attributes:
        layout: of the prefilled row.
    """

    def __init__(self, layout: SequenceLayout, num_layers: int) -> None:
        super().__init__(layers=[_ShardedLayer(layout) for _ in range(num_layers)])
        self.layout = layout

    def held(self, rank: int, new_tokens: int) -> HeldKeys:
        """What `rank` holds once a step of `new_tokens` tokens has come: its shard, and the last rank what came later.

        All ranks store later tokens, and one computes with them.
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
                f"a sharded cache is filled by prefill, with {self.layout.local_len} tokens a rank, got "
                f"{key_states.shape[-2]}"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
