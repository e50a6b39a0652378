"""Checks calls of a model over a ring before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..plan.problem import HeldKeys
from ..ring.ring import Ring
from ..transport.agreement import digest
from .cache import ShardedCache
from .documents import documents_from_mask
from .positions import first_position, places_of


def checked_step(ring: Ring, cache: ShardedCache, tokens: Tensor | None, kwargs: Mapping[str, Any]) -> HeldKeys:
    """Returns what this rank's cache holds in a step of generation; all ranks must have the same tokens, positions and mask."""
    mask, length = kwargs.get("attention_mask"), 0
    with ring.agreement("a step of generation", by_digest=True) as call:
        if tokens is None:
            raise ValueError("a forward pass needs input_ids or inputs_embeds")
        length, held = tokens.shape[1], cache.get_seq_length()
        call.same("the tokens of a step", digest(tokens))
        if tokens.shape[0] != cache.num_rows:
            raise ValueError(
                f"the cache holds {cache.num_rows} batch rows, and {tokens.shape[0]} came: for beams, call "
                f"cache.batch_repeat_interleave(beams) before generate"
            )
        call.same("position_ids of a step", digest(kwargs.get("position_ids")))
        call.same("attention_mask of a step", digest(mask))
        mask_len = mask.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else held + length
        if length == 0 or mask_len != held + length:
            raise ValueError(
                f"the cache holds {held} tokens, and {length} came, so an attention_mask has {held} + {length} = "
                f"{held + length}, not {mask_len}: call model.generate(torch.cat([document, question], 1), cache=cache)"
            )
        if isinstance(mask, Tensor):
            documents_from_mask(mask != 0)
    return cache.held(ring.rank, length)


def check_places(runner: nn.Module, last_position: int) -> None:
    """Refuses a position beyond a table of positions, on which one rank alone would fail."""
    places, first = places_of(runner), first_position(runner)
    if places is not None and last_position - first >= places:
        raise ValueError(
            f"{type(runner).__name__} has learned positions for {places} tokens, and a row has a token at position "
            f"{last_position}, counted from {first}: cut rows, or take a model with rotary positions"
        )


def sharded_without_documents(module: nn.Module) -> str:
    """Returns the error text for a layer that was not given the mask of a sharded forward pass."""
    return (
        f"{type(module).__name__} of a sharded model got no mask of ring_dilated, so its documents are unknown: call the "
        f"model, not its layers; with a cp_size, make the ring by Ring.from_accelerator before accelerator.prepare"
    )
