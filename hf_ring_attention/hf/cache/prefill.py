"""`prefill`, which fills a cache over a ring with a document."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...ring.ring import Ring
from ..forward_pass import running_with
from ..model.config import layer_pattern
from ..model.types import MIXERS
from ..model.wrappers import attachment_of, cache_argument, evaluating, takes, whole_model
from .pattern_cache import PatternCache, cache_for_generate
from .sharded_cache import ShardedCache
from .state_layers import ShardedHybridCache, sharded_cache, state_inside

#: The attributes of a config that are the token of an image, a video or a sound.
_MEDIA = re.compile(r"(image|video|audio|speech)_token_(id|index)")


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    cache_implementation: str | None = None,
) -> PatternCache | ShardedCache:
    """Computes the keys and values of whole sequences on all ranks of the model's ring; each rank keeps its shard of them.

    Where patterns drop keys, the cache is a `PatternCache`: each rank keeps the rows of its shard that later tokens can still
    see, and the last rank keeps the later tokens. Models with recurrent states keep every row.

    The cache then serves `generate`, which every rank must call alike (with equal seeds, if it samples), with these tokens and
    at least one more. Afterwards `cache.crop(document.shape[1] - cache.get_seq_length())` makes it ready for another question.

    Args:
        model: a model with the ring of `patch_model(model, ring=ring)`; without a ring, this process computes whole sequences.
        input_ids: [B, n], the same on every rank.
        attention_mask: [B, n], 0 for padding; None for rows without padding. `generate` needs it too.
        cache_implementation: "dynamic" keeps every row, as in `generate`; None keeps what later tokens can see.

    Returns:
        The cache, for `cache` of `generate` on this rank (before Transformers 5.24: `past_key_values`).

    Raises:
        ValueError: a model with virtual tokens of PEFT, tokens or a mask that are not [B, n] or differ between ranks, tokens
            of images or sounds, padding for a model that numbers its tokens itself, or another cache implementation.
        NotImplementedError: a model that keeps states outside of its cache.

    Example:
        >>> row = torch.arange(1, 43)[None]  # a document of 40 tokens, and a question of 2
        >>> models = [tiny_llama(), tiny_llama()]  # the same on each rank
        >>> def answer(ring):
        ...     cache = ra.prefill(ra.patch_model(models[ring.rank], ring=ring), row[:, :40])
        ...     return models[ring.rank].generate(row, cache=cache, max_new_tokens=3, do_sample=False)
        >>> whole = tiny_llama().generate(row, max_new_tokens=3, do_sample=False)  # on one device
        >>> [torch.equal(answer_of_rank, whole) for answer_of_rank in ra.run_simulated(answer, 2)]
        [True, True]
    """
    inner = whole_model(model, "prefill")
    config, ring = inner.config.get_text_config(), attachment_of(inner).ring or Ring.alone()
    with ring.agreement("prefill") as agreed:
        agreed.same("cache_implementation", cache_implementation)
        if cache_implementation not in (None, "dynamic"):
            raise ValueError(f"prefill: cache_implementation must be None or 'dynamic', got {cache_implementation!r}")
        inside = state_inside(inner)
        if inside is not None:
            raise NotImplementedError(
                f"prefill: {inside} keeps its state in the model, and no cache can go on from there: generate on one process "
                f"(ring=None) without prefill"
            )
        # The forward pass compares the mask with the other ranks' mask.
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if input_ids.dim() != 2 or 0 in input_ids.shape or mask.shape != input_ids.shape:
            got = f"{tuple(input_ids.shape)} and a mask {tuple(mask.shape)}"
            raise ValueError(f"prefill: input_ids must be [batch, tokens], like the mask, got {got}")
        media = [x for name, x in vars(inner.config).items() if _MEDIA.fullmatch(name) and isinstance(x, int)]
        if inner.config is not config and bool(
            torch.isin(input_ids, torch.tensor(media, device=input_ids.device)).any()
        ):
            raise ValueError(
                f"prefill: input_ids hold tokens of images or sounds ({media}), and prefill takes none: call the model with "
                f"them and cache=ra.PatternCache(model)"
            )
        if not bool(mask.all()) and not takes(inner, "position_ids"):
            raise ValueError(
                f"prefill: {type(inner).__name__} takes no position_ids, so its generate would number padded rows differently"
            )
    layout = ring.layout_for(input_ids.shape[1], layer_pattern(config, None))
    whole = cache_implementation is not None or config.model_type in MIXERS
    cache: Any = None if whole else cache_for_generate(inner, caller="prefill")
    if not isinstance(cache, PatternCache):
        cache = sharded_cache(layout, config)
    else:
        cache.layout, cache.document = layout if ring.world_size > 1 else None, layout.seq_len
    positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
    with evaluating(inner), running_with(on_use=True):  # Nothing uses the hidden states.
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": positions}
        inner.base_model(**batch, use_cache=True, **cache_argument(cache))
    if isinstance(cache, ShardedHybridCache):
        cache.keep_states()
    return cache
