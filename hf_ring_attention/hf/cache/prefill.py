"""`prefill`, which fills a cache over a ring with a document, and the cache of `generate`."""

from __future__ import annotations

import logging
import re

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ...compute.private import implementation_of
from ...plan.kept import keeps_all
from ...ring.ring import Ring
from ..forward_pass import running, running_with
from ..model.config import layer_pattern, patterns_of, warn_once
from ..model.support import why_no_pattern
from ..model.wrappers import attachment_of, cache_argument, evaluating, takes, whole_model
from ..names import IMPLEMENTATION
from .every_row import why_every_row
from .pattern_cache import PatternCache, why_refused

#: The attributes of a config that are the token of an image, a video or a sound.
_MEDIA = re.compile(r"(image|video|audio|speech)_token_(id|index)")


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    cache_implementation: str | None = None,
) -> PatternCache:
    """Computes the keys and values of whole sequences on all ranks of the model's ring; each rank keeps its shard of them.

    Each rank keeps the rows of its shard that later tokens can still see, and the last rank keeps the later tokens.

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
        # The forward pass compares the mask with the other ranks' mask.
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        _check_rows(inner, input_ids, mask)
    layout = ring.layout_for(input_ids.shape[1], layer_pattern(config, None))
    made = None if cache_implementation is not None else cache_for_generate(inner, caller="prefill")
    cache = made if isinstance(made, PatternCache) else PatternCache(inner, every_row=True)
    cache.layout, cache.document = layout if ring.world_size > 1 else None, layout.seq_len
    positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
    with evaluating(inner), running_with(on_use=True):  # Nothing uses the hidden states.
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": positions}
        inner.base_model(**batch, use_cache=True, **cache_argument(cache))
    cache.keep_states()
    return cache


def _check_rows(model: PreTrainedModel, input_ids: Tensor, mask: Tensor) -> None:
    """Refuses models and rows that `prefill` does not take."""
    if refused := why_refused(model):
        raise NotImplementedError(
            f"prefill: {type(model).__name__}: {refused}: generate on one process (ring=None) without prefill"
        )
    if input_ids.dim() != 2 or 0 in input_ids.shape or mask.shape != input_ids.shape:
        got = f"{tuple(input_ids.shape)} and a mask {tuple(mask.shape)}"
        raise ValueError(f"prefill: input_ids must be [batch, tokens], like the mask, got {got}")
    media = [x for name, x in vars(model.config).items() if _MEDIA.fullmatch(name) and isinstance(x, int)]
    only_text = model.config is model.config.get_text_config()
    if not only_text and bool(torch.isin(input_ids, torch.tensor(media, device=input_ids.device)).any()):
        raise ValueError(
            f"prefill: input_ids hold tokens of images or sounds ({media}), and prefill takes none: call the model with "
            f"them and cache=ra.PatternCache(model)"
        )
    if not bool(mask.all()) and not takes(model, "position_ids"):
        raise ValueError(
            f"prefill: {type(model).__name__} takes no position_ids, so its generate would number padded rows differently"
        )


def cache_for_generate(model: PreTrainedModel, drafts: bool = False, caller: str = "generate") -> Cache | None:
    """Returns a cache for a caller that was given none, and logs it once; None for the one that Transformers makes.

    Args:
        drafts: whether the model drafts tokens for another, which may remove any of them again.
    """
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    exact = any(x is config for x in running().exact)
    if implementation_of(config) != IMPLEMENTATION or exact:
        return None
    if why_no_pattern(config) is not None:
        return None
    if refused := why_refused(model):
        warn_once(f"{caller} keeps all rows of {name}: {refused}", logging.INFO)
        cache = DynamicCache(config=config)  # Patterns of layers may reach beyond the windows of the model.
        cache.layers = [DynamicLayer() if type(x) is DynamicSlidingWindowLayer else x for x in cache.layers]
        return cache
    # Latent keys take fewer bytes than the keys of all heads that are made of them.
    every_row = drafts or getattr(config, "kv_lora_rank", None) is not None
    if not (every_row or why_every_row(config) or all(map(keeps_all, patterns_of(config).values()))):
        warn_once(
            f"{caller} keeps only the rows that the pattern of {name} can still see (ra.PatternCache): pass "
            f"cache_implementation='dynamic' to keep all rows",
            logging.INFO,
        )
    return PatternCache(model, every_row=every_row)
