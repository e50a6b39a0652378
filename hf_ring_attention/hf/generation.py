"""Generation after a sharded prefill: a document longer than one device, and questions about it."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..ring.ring import Ring
from ..transport.agreement import digest
from .cache import ShardedCache, cache_argument
from .config import layer_pattern
from .heads import watched
from .hybrid_types import hybrids_of
from .wrappers import attached_ring, evaluating, whole_model


@torch.no_grad()
def prefill(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None = None) -> ShardedCache:
    """Computes the keys and values of whole sequences on all ranks of the model's ring; each rank keeps its shard of them.

    The cache then serves `generate`, which every rank must call alike (with equal seeds, if it samples). The `input_ids`
    of that call are these tokens and at least one more. Afterwards
    `cache.crop(document.shape[1] - cache.get_seq_length())` makes the cache ready for another question.

    Layers with a `Last` branch show every key to the last tokens of a document: first to the last tokens of `input_ids`, and
    later to each new token. So a question may have at most the number of tokens in `Last`.

    Args:
        model: a model with the ring of `patch_model(model, ring=ring)`; without a ring, this process computes whole sequences.
        input_ids: [B, n], the same on every rank.
        attention_mask: [B, n], 0 for padding; None for rows without padding. `generate` needs it too.

    Returns:
        The cache, for `cache` of `generate` on this rank (before Transformers 5.24: `past_key_values`).

    Raises:
        ValueError: a model with virtual tokens of PEFT, tokens that are not [B, n] or differ between ranks, or a mask of
            another shape, or with padding for a model that numbers its tokens itself.
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
    config, ring = inner.config.get_text_config(), attached_ring(inner) or Ring.alone()
    hybrids = hybrids_of(config)
    with ring.agreement("prefill") as call:
        if hybrids is not None:
            hybrids.check_prefill(inner)
        mask = _checked_mask(inner, input_ids, attention_mask)
        call.same("the shape of input_ids", tuple(input_ids.shape))
        call.same("a checksum of input_ids", digest(input_ids))
        call.same("whether attention_mask is given", attention_mask is not None)
    layout = ring.layout_for(input_ids.shape[1], layer_pattern(config, None))
    cache: ShardedCache = (ShardedCache if hybrids is None else hybrids.sharded_hybrid_cache)(layout, config)
    positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
    # Nothing reads the hidden states, so they are not joined.
    with evaluating(inner), watched(None):
        inner.base_model(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=attention_mask,
            use_cache=True,
            **cache_argument(cache),
        )
    if hybrids is not None:
        cache.keep_states()  # type: ignore[attr-defined]
    return cache


def _checked_mask(model: PreTrainedModel, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the mask [B, n] of tokens; refuses rows that `generate` would not go on from."""
    if ids.dim() != 2 or 0 in ids.shape:
        raise ValueError(f"prefill: input_ids must be [batch, tokens], got {tuple(ids.shape)}")
    mask = torch.ones_like(ids) if mask is None else mask
    if mask.shape != ids.shape:
        raise ValueError(f"prefill: input_ids are {tuple(ids.shape)}, and the mask {tuple(mask.shape)}")
    if not bool(mask.all()) and "position_ids" not in inspect.signature(model.forward).parameters:
        name = type(model).__name__
        raise ValueError(f"prefill: {name} takes no position_ids, so its generate would number padded rows differently")
    return mask
