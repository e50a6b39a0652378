"""A cache over a ring, and `prefill`, which fills it: each rank holds a shard of a document, and all later tokens."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from ..plan.layouts import SequenceLayout
from ..plan.problem import HeldKeys
from ..ring.ring import Ring
from .config import layer_pattern
from .forward_pass import ForwardPass, running_with
from .model_types import hybrids_of
from .pattern_cache import PatternCache, cache_for_generate
from .wrappers import attachment_of, evaluating, signature_of, takes, tokens_in, whole_model

#: The attributes of a config that are the token of an image, a video or a sound.
_MEDIA = re.compile(r"(image|video|audio|speech)_token_(id|index)")


def cache_in(arguments: Mapping[str, Any]) -> Cache | None:
    """Returns the cache among the arguments of a call, whatever its name: releases of Transformers rename it."""
    return next((value for value in arguments.values() if isinstance(value, Cache)), None)


@functools.cache
def cache_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the parameters that hold a cache by their annotation, such as "cache" (since 5.24) or "past_key_values"."""
    parameters = signature_of(forward).parameters.values()
    return tuple(x.name for x in parameters if re.search(r"Cache\b", inspect.formatannotation(x.annotation)))


def cache_argument(cache: Cache | None) -> dict[str, Cache | None]:
    """Returns the keyword argument that gives a cache to a model or to its `generate` in this release of Transformers."""
    (name,) = cache_names(GenerationMixin.prepare_inputs_for_generation)
    return {name: cache}


def tokens_skipped(cache: Cache | None) -> tuple[int, ...]:
    """Returns how many tokens each layer of a cache skips at the start of a row; () for a cache whose layers skip none.

    Layers that draft tokens (`use_mtp` of generate) read later tokens than the model does, and never have keys of the first.
    """
    if cache is None or type(cache).get_query_offset is Cache.get_query_offset:
        return ()
    layers: Any = cache.layers
    return tuple(cache.get_mask_sizes(1, n)[1] - layer.get_mask_sizes(1)[1] for n, layer in enumerate(layers))


def begin_in_cache(now: ForwardPass, cache: Cache | None, arguments: Mapping[str, Any]) -> None:
    """Begins a call of a model in its cache; refuses tokens that do not follow those in the cache."""
    if cache is not None:
        _check_places(type(now.module).__name__, cache, arguments)
    if now.kept is not None:
        now.kept.begin_call(now, tokens_in(arguments), arguments.get("attention_mask"))


def _check_places(name: str, cache: Cache, arguments: Mapping[str, Any]) -> None:
    """Refuses position ids that go back behind the tokens of a filled cache, as a row does that is passed as a whole again."""
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    seen = int(cache.get_seq_length())
    if seen and isinstance(positions, Tensor) and positions.dim() == 3 and len(positions) == 4:
        positions = positions[0]  # of text; others count images
    if not seen or not isinstance(positions, Tensor) or positions.dim() != 2:
        return
    before, new = torch.tensor(seen), torch.ones(1, dtype=torch.bool)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape[1:] != (seen + positions.shape[1],):
            return  # Other checks know masks of other lengths.
        before, new = (mask[:, :seen] != 0).sum(1, keepdim=True), mask[:, seen:] != 0
    wrong = (positions < before.to(positions.device)) & new.to(positions.device)
    if wrong.any():
        raise ValueError(
            f"{name}: the cache holds {seen} tokens, and position_ids go back to {int(positions[wrong].min())}: pass later "
            f"tokens, to generate torch.cat([document, question], 1), without assistant_model or prompt_lookup_num_tokens"
        )


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
    With layers that have a `Last` branch, a question may have at most the number of tokens in `Last`.

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
    hybrids = hybrids_of(config)
    with ring.agreement("prefill") as agreed:
        agreed.same("cache_implementation", cache_implementation)
        if cache_implementation not in (None, "dynamic"):
            raise ValueError(f"prefill: cache_implementation must be None or 'dynamic', got {cache_implementation!r}")
        if hybrids is not None:
            hybrids.check_prefill(inner)
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
    cache: Any = None if hybrids is not None or cache_implementation else cache_for_generate(inner, caller="prefill")
    if not isinstance(cache, PatternCache):
        cache = (ShardedCache if hybrids is None else hybrids.sharded_hybrid_cache)(layout, config)
    else:
        cache.layout, cache.document = layout if ring.world_size > 1 else None, layout.seq_len
    positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
    with evaluating(inner), running_with(on_use=True):  # Nothing uses the hidden states.
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": positions}
        inner.base_model(**batch, use_cache=True, **cache_argument(cache))
    if hybrids is not None:
        cache.keep_states()
    return cache
