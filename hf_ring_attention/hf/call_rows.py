"""Finds the rows of a model's call, and compares the calls of all ranks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ..plan.problem import HeldKeys
from ..ring.ring import Ring
from ..transport.agreement import digest
from .cache import ShardedCache, cache_in, tokens_skipped
from .config import warn_once
from .forward_pass import ForwardPass
from .rows import documents_from_mask, rows_of_call, rows_to_cut, tokens_in

#: Ranks compare 32 to 63 trained weights and as many frozen ones, and 32 to 63 numbers of each.
_FEW = 32
_REPLICAS = "use one seed, and train under DDP, FSDP or ZeRO"


def find_rows(now: ForwardPass, kwargs: Mapping[str, Any], multiple: int = 1) -> None:
    """Finds the rows of a call once all ranks have come with equal calls, and divides a `multiple` of so many tokens."""
    ring, runner, cut_rows, cache = now.ring, now.runner, now.call.rows, cache_in(kwargs)
    now.skipped = tokens_skipped(cache)
    now.cacheless = kwargs.get("use_cache") is False
    own_cache = not isinstance(cache, ShardedCache) and (cache is not None or kwargs.get("use_cache") is True)
    if ring.world_size == 1 or own_cache:
        now.whole = ring.world_size > 1
        if now.whole and ring.rank == 0:
            warn_once(
                f"{type(runner).__name__} has its own cache, so all ranks compute whole rows: ra.prefill fills a sharded one",
                logging.INFO,
            )
        _find_rows_alone(now, kwargs)
        return
    if isinstance(cache, ShardedCache) and cache.get_seq_length() > 0:
        now.held = _checked_step(ring, cache, tokens_in(kwargs), kwargs)
        return
    with ring.agreement("a forward pass of a model", by_digest=True) as agreed:
        layout = getattr(cache, "layout", None)
        now.rows = cut_rows or rows_to_cut(runner, ring, kwargs, layout=layout, multiple=multiple)
        part = None if cut_rows is None or cut_rows.layout is None else cut_rows.layout.local_len
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and (part is None or value.shape[1:2] != (part,)):
                agreed.same(name, digest(value))
            elif value is None or isinstance(value, (bool, int, float, str)):
                agreed.same(name, value)
        agreed.same("the tokens of a cut batch", now.rows.checksum)
        agreed.same("the division of the rows", digest(now.rows))
        agreed.same("whether the model trains", runner.training)
        agreed.same("whether gradients are recorded", torch.is_grad_enabled())
        agreed.same("the model's weights", digest(_some_weights(now.module)), _REPLICAS)


def _some_weights(model: nn.Module) -> Tensor:
    """Returns a few numbers of some weights, trained and frozen, which are equal on ranks that start and train alike.

    DDP, ZeRO 1 and 2 keep replicas equal to the last bit. FSDP and ZeRO 3 divide weights, which are left out.
    """
    divided = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    weights = [] if divided else [*model.parameters()]
    numbers: list[Tensor] = []
    for some in ([x for x in weights if x.requires_grad], [x for x in weights if not x.requires_grad]):
        for weight in some[:: -max(1, len(some) // _FEW)]:  # from the last one, which may be a new head
            plain = type(weight) is nn.Parameter and not hasattr(weight, "ds_id") and weight.device.type != "meta"
            if plain and weight.is_contiguous() and weight.is_floating_point() and weight.element_size() > 1:
                flat = weight.detach().view(-1)
                step = max(1, len(flat) // _FEW)
                numbers.append(flat[(len(flat) - 1) % step :: step])
    return torch.cat([x for x in numbers if x.device == numbers[0].device]) if numbers else torch.empty(0)


def _find_rows_alone(now: ForwardPass, kwargs: Mapping[str, Any]) -> None:
    """Finds the rows of a call that this process computes by itself."""
    tokens = tokens_in(kwargs)
    if tokens is None or tokens.dim() < 2:
        return
    if cache_in(kwargs) is not None:
        ends, numbers = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
        if (ends is not None and len(ends) > 2) or (numbers is not None and bool(numbers.diff(dim=-1).any())):
            raise ValueError("cu_seq_lens and seq_idx describe packed rows, which have no cache: pass use_cache=False")
        return
    now.rows = rows_of_call(now.runner, tokens, kwargs)
    if now.rows.packed and "position_ids" not in inspect.signature(now.runner.forward).parameters:
        raise ValueError(
            f"{type(now.runner).__name__} was given packed rows, and takes no position_ids: pass one document a row, padded"
        )


def _checked_step(ring: Ring, cache: ShardedCache, tokens: Tensor | None, kwargs: Mapping[str, Any]) -> HeldKeys:
    """Returns what this rank's cache holds in a step of generation; all ranks must have the same tokens, positions and mask."""
    mask, held = kwargs.get("attention_mask"), cache.get_seq_length()
    with ring.agreement("a step of generation", by_digest=True) as call:
        if tokens is None:
            raise ValueError("a forward pass needs input_ids or inputs_embeds")
        length = tokens.shape[1]
        call.same("the tokens of a step", digest(tokens))
        if tokens.shape[0] != cache.num_rows:
            came = f"{tokens.shape[0]} came: for beams, call cache.batch_repeat_interleave(beams)"
            raise ValueError(f"the cache holds {cache.num_rows} batch rows, and {came}")
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
