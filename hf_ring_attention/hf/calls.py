"""Checks calls of a model over a ring before anything is computed, and remembers the cache that generation goes on from."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..plan.problem import HeldKeys
from ..ring.ring import Ring
from ..transport.agreement import digest
from .cache import ShardedCache
from .documents import documents_from_mask
from .positions import first_position, places_of

#: The attribute of a model's runner that holds a weak reference to the cache that `prefill` filled last.
_PREFILLED = "_ring_dilated_prefilled"


def remember_prefill(runner: nn.Module, cache: ShardedCache | None) -> None:
    """Keeps a weak reference to a cache, for the error of a model that gives it up while it generates; None forgets it."""
    setattr(runner, _PREFILLED, None if cache is None else weakref.ref(cache))


def switching_length(config: Any) -> int | None:
    """Returns the row length beyond which a model rotates all keys differently, so that no cache serves; None if none."""
    length = getattr(config, "original_max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    return length if isinstance(length, int) and rope.get("rope_type") == "longrope" else None


def check_given_up_cache(runner: nn.Module, tokens: Tensor, kwargs: Mapping[str, Any]) -> None:
    """Refuses a call in place of a step, if Transformers' generate has given up its sharded cache.

    Transformers 5.24 passes the whole sequence, and 5.17 the last token alone, under a mask of the whole sequence.

    Raises:
        ValueError: such a call.
    """
    mask = kwargs.get("attention_mask")
    row = max(tokens.shape[1], mask.shape[-1] if isinstance(mask, Tensor) else 0)
    length, reference = switching_length(runner.config), getattr(runner, _PREFILLED, None)
    cache = None if reference is None else reference()
    if length is None or cache is None or kwargs.get("use_cache") is not True:
        return
    if not cache.get_seq_length() <= length < row:
        return
    raise ValueError(
        f"{type(runner).__name__} rotates keys differently once a row is longer than original_max_position_embeddings = "
        f"{length} tokens, and generate gives up the sharded cache there to compute the whole sequence of "
        f"{row} tokens again: fill another cache with cache = ra.prefill(model, row), where row has all tokens so "
        f"far, {length + 1} at least, and go on from it"
    )


def checked_step(ring: Ring, cache: ShardedCache, tokens: Tensor | None, kwargs: Mapping[str, Any]) -> HeldKeys:
    """Checks a step after a sharded prefill: all ranks must have the same tokens, positions and mask.

    Returns:
        What the cache of this rank holds.
    """
    mask, length = kwargs.get("attention_mask"), 0
    with ring.agreement("a step of generation", by_digest=True) as call:
        if tokens is None:
            raise ValueError("a forward pass needs input_ids or inputs_embeds")
        length, held = tokens.shape[1], cache.get_seq_length()
        call.same("the tokens of a step", digest(tokens))
        if tokens.shape[0] != cache.num_rows:
            raise ValueError(
                f"the cache holds {cache.num_rows} batch rows, and {tokens.shape[0]} came: for beams or several answers, call "
                f"cache.batch_repeat_interleave(beams) before generate"
            )
        call.same("position_ids of a step", digest(kwargs.get("position_ids")))
        call.same("attention_mask of a step", digest(mask))
        mask_len = mask.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else held + length
        if length == 0 or mask_len != held + length:
            raise ValueError(
                f"the cache holds {held} tokens, and {length} new ones came, so an attention_mask has {held} + {length} = "
                f"{held + length}, not {mask_len}, and there must be new ones: generate takes the whole sequence, the tokens "
                f"of the cache and those after it: model.generate(torch.cat([document, question], 1), cache=cache)"
            )
        if isinstance(mask, Tensor):
            documents_from_mask(mask != 0)
    return cache.held(ring.rank, length)


def check_places(runner: nn.Module, last_position: int) -> None:
    """Refuses a position beyond a table of positions, on which one rank alone would fail.

    Raises:
        ValueError: such a position.
    """
    places, first = places_of(runner), first_position(runner)
    if places is not None and last_position - first >= places:
        raise ValueError(
            f"{type(runner).__name__} has learned positions for {places} tokens, and a row has a token at position "
            f"{last_position}, where the first one is at {first}: cut rows to {places} tokens, or take a model with rotary "
            f"positions"
        )


def sharded_without_documents(module: nn.Module) -> str:
    """Returns the error text for a layer that was not given the mask of a sharded forward pass."""
    return (
        f"{type(module).__name__} of a sharded model was called without the mask that ring_dilated made for it, so the "
        f"documents of the whole sequence are unknown: call the model, not its layers; a model that makes its masks itself "
        f"cannot be sharded; if Accelerate has a cp_size, make the ring by Ring.from_accelerator before accelerator.prepare, "
        f"which would otherwise drop the masks"
    )
