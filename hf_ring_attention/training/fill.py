"""Tells how full the rows of a step are: what is not filled costs memory and time, and teaches nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .next_tokens import shift_labels_of, sum_over_processes


def row_fill(shards: Iterable[Mapping[str, Any]] | Mapping[str, Any]) -> float:
    """Returns the share of tokens in the rows of all processes; the rest of them is padding.

    Args:
        shards: all shards of this process, such as those that an optimizer step accumulates, or a single one.

    Raises:
        ValueError: on every process: no shards, or shards without shift_labels.

    Example:
        >>> batch = ra.PaddingCollator(row_length=8)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10]}])
        >>> shard = ra.shard_batch(batch, ra.Ring.alone())
        >>> ra.row_fill(shard)
        0.375
    """
    tokens, slots = sum_over_processes(shards, tokens_and_slots, 2, "row_fill").tolist()
    return float(tokens / slots)


def tokens_and_slots(shard: Mapping[str, Any]) -> Tensor:
    """Returns [2] the number of tokens of a shard, and that of its slots, which are tokens and padding.

    Raises:
        ValueError: the shard has no shift_labels, so that no ring's loader has made it.
    """
    slots, mask = shift_labels_of(shard, "row_fill"), shard.get("attention_mask")
    # A shard without a mask has no padding.
    tokens = torch.tensor(slots.numel(), device=slots.device) if mask is None else (mask != 0).sum()
    return torch.stack([tokens, torch.full_like(tokens, slots.numel())])
