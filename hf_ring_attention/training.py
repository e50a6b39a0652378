"""Training on sharded sequences: a rank's part of a batch, and a loss that equals one device's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .patterns import Pattern
from .perplexity import IGNORED
from .ring import Ring


def shard_batch(
    input_ids: Tensor,
    ring: Ring,
    pattern: Pattern,
    *,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """This rank's part of a batch of whole rows.

    Args:
        input_ids: [B, n], the same on every rank of the ring.
        pattern: the model's pattern, which decides the layout.
        attention_mask: [B, n], 0 for padding.
        labels: [B, n], -100 where no loss is wanted; None for the input_ids of all tokens that are not padding.

    Returns:
        input_ids, position_ids and shift_labels [B, n local], and attention_mask if one was given. Labels are shifted
        before the row is cut, so that the last token of a shard learns from the first of the next.
    """
    layout = ring.layout_for(input_ids.shape[1], pattern)
    labels = input_ids if labels is None else labels
    positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    if attention_mask is not None:
        labels = labels.masked_fill(attention_mask == 0, IGNORED)
        positions = (attention_mask.cumsum(-1) - 1).clamp_min(0)
        # Nothing is predicted from padding.
        labels = torch.cat([labels[:, :1], labels[:, 1:].masked_fill(attention_mask[:, :-1] == 0, IGNORED)], 1)
    shard = {
        "input_ids": ring.shard(input_ids, layout),
        "position_ids": ring.shard(positions, layout),
        "shift_labels": ring.shard(F.pad(labels[:, 1:], (0, 1), value=IGNORED), layout, fill=IGNORED),
    }
    if attention_mask is not None:
        shard["attention_mask"] = ring.shard(attention_mask, layout)
    return {name: tensor.to(device) for name, tensor in shard.items()}


def count_tokens(shards: Iterable[Mapping[str, Tensor]]) -> Tensor:
    """How many labels the shards of all processes of the world have together: the divisor of an optimizer step's loss."""
    counts = [(shard["shift_labels"] != IGNORED).sum() for shard in shards]
    total = torch.stack(counts).sum()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return total


def next_token_loss(logits: Tensor, shard: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """This rank's share of the mean loss over all `tokens`, for gradients that are averaged over the world.

    DDP and FSDP average gradients over all processes, so a share is (sum of its losses / tokens) * world size.

    Args:
        logits: [B, n, vocabulary] of the shard.
        shard: what `shard_batch` returned.
        tokens: what `count_tokens` returned for the whole optimizer step.
    """
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    labels = shard["shift_labels"]
    total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / tokens * world_size
