"""Finds the rows of a call with all ranks, and cuts each rank's part of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers.cache_utils import Cache

from ...plan.layouts import SequenceLayout
from ...ring.ring import Ring, ring_alone
from ...transport.agreement import digest
from ..cache.pattern_cache import PatternCache
from ..forward_pass import ForwardPass, WholeRows
from ..model.config import layer_pattern, warn_once
from ..model.types import COUNT_BY_MASK
from ..model.wrappers import attachment_of, cache_in, numbers_documents, takes, tokens_in, tokens_skipped
from .documents import first_position, rows_of_call
from .join import PartOfRows

#: The names that models give to a table of positions.
_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "positions_embed")


#: Ranks compare 32 to 63 trained weights, as many frozen ones, and 32 to 63 numbers of each.
_FEW = 32
_REPLICAS = "use one seed, and train under DDP, FSDP or ZeRO"

#: Arguments that describe the documents of whole rows; the parts of rows do without them.
_DESCRIPTIONS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def places_of(runner: nn.Module) -> int | None:
    """Returns how many tokens of a row a model has positions for, if it looks them up in a table; else None."""
    tables = [
        module.num_embeddings - max(int(getattr(module, "offset", 0)), first_position(runner))
        for name, module in runner.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES
    ]
    return min(tables, default=None)


def at_its_place_in_the_row(module: nn.Module, query: Tensor, layout: SequenceLayout, rank: int) -> Tensor:
    """Returns the queries [B, H, n, D] of a shard, scaled by their places in the row instead of their places in the shard.

    Llama 4 scales the queries of layers without RoPE by their places in the row (arXiv 2501.19399), which it counts itself,
    padding and packed documents included. All other layers' queries are returned as they are.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    places = torch.tensor([[*layout.positions(rank, row)] for row in range(len(layout.rows) or 1)], device=query.device)

    def scale(place: Tensor) -> Tensor:  # [B or 1, n]
        blocks = torch.floor((place.float() + 1.0) / module.floor_scale)  # type: ignore[operator]
        return (torch.log1p(blocks) * module.attn_scale + 1.0).double()  # type: ignore[operator]

    ratio = scale(places) / scale(torch.arange(query.shape[2], device=query.device))
    return (query * ratio[:, None, :, None]).to(query.dtype)


def rows_to_cut(
    runner: nn.Module,
    ring: Ring,
    arguments: Mapping[str, Any],
    pattern: Any = None,
    layout: SequenceLayout | None = None,
    multiple: int = 1,
) -> WholeRows:
    """Returns the rows of a call, and how the ring divides them; refuses padding and unclear borders inside documents.

    Args:
        arguments: the arguments of a model, or the entries of a batch.
        pattern: the pattern that decides the layout; None for the pattern of the decoder's config.
        layout: the layout of a sharded cache that these rows fill.
        multiple: the ranks divide a multiple of this number of tokens, with padding.
    """
    tokens = tokens_in(arguments)
    if tokens is None or tokens.dim() < 2 or 0 in tokens.shape[:2]:
        got = "neither input_ids nor inputs_embeds" if tokens is None else f"{tuple(tokens.shape)}"
        raise ValueError(f"a ring cuts rows of tokens [batch, tokens], got {got}: pass input_ids or inputs_embeds")
    rows = rows_of_call(runner, tokens, arguments, divided=True)
    if layout is None and attachment_of(runner).own_attention:
        _check_own_masks(runner, rows)
        layout = SequenceLayout("contiguous", rows.length, ring.world_size)
    elif layout is None:
        pattern = pattern or layer_pattern(runner.config.get_text_config(), None)  # type: ignore[union-attr, operator]
        layout = ring.division(-(-rows.length // multiple) * multiple, pattern, rows.documents)
    return replace(rows, layout=layout)


def whole_positions(runner: nn.Module, rows: WholeRows, arguments: Mapping[str, Any]) -> Tensor:
    """Returns the positions [B or 1, n] of whole rows: the caller's, or those that the decoder would count itself."""
    positions, tokens = arguments.get("position_ids"), tokens_in(arguments)
    assert tokens is not None
    if isinstance(positions, Tensor):
        return positions
    ids, mask, first = arguments.get("input_ids"), arguments.get("attention_mask"), first_position(runner)
    if rows.packed:  # A collator has described it.
        counted = torch.zeros(rows.batch, rows.length, dtype=torch.int64)
        for row, runs in enumerate(rows.documents or ()):
            for start, stop in runs:
                counted[row, start:stop] = torch.arange(first, first + stop - start)
        return counted.to(tokens.device)
    if first and ids is not None:  # RoBERTa and its relatives count the tokens that are not padding, by their ids.
        valid = (ids != first - 1).long()
    elif getattr(runner.config, "model_type", None) in COUNT_BY_MASK and isinstance(mask, Tensor) and mask.dim() == 2:
        valid = mask.long()
    else:
        return torch.arange(first, first + rows.length, device=tokens.device)[None]
    return valid.cumsum(1) * valid + first - 1


def cut(
    runner: nn.Module, arguments: Mapping[str, Any], rows: WholeRows, ring: Ring
) -> tuple[dict[str, Any], WholeRows]:
    """Returns the arguments of a decoder with this rank's part of each tensor that has a value for each token.

    Those are tensors [B or 1, n, ...], positions [axes, B, n], and the features that a decoder adds at visual tokens
    (`deepstack_visual_embeds`), picked by `visual_pos_masks`. The second result are the rows with their positions.
    """
    layout, tokens = rows.layout, tokens_in(arguments)
    assert layout is not None and tokens is not None
    if tuple(tokens.shape[:2]) != (rows.batch, rows.length):
        raise NotImplementedError(
            f"{type(runner).__name__} got {list(tokens.shape[:2])} tokens, and its model {[rows.batch, rows.length]}: rows "
            f"that change before the decoder cannot be cut: use one process (ring=None)"
        )
    positions = whole_positions(runner, rows, arguments)
    last, places, first = int(positions.max()), places_of(runner), first_position(runner)
    if places is not None and last - first >= places:  # Only one rank would fail, and the others wait.
        raise ValueError(
            f"{type(runner).__name__} has learned positions for {places} tokens, and a row has a token at position {last}, "
            f"counted from {first}: cut rows, or take a model with rotary positions"
        )
    parts = {name: x for name, x in arguments.items() if name not in _DESCRIPTIONS} | {"position_ids": positions}
    for name, x in parts.items():
        if name == "position_ids" and x.dim() == 3:
            parts[name] = ring.shard(x.movedim(0, -1).expand(rows.batch, -1, -1), layout).movedim(-1, 0)
        elif isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == rows.length and x.shape[0] in (1, rows.batch):
            shard = PartOfRows.apply if name == "inputs_embeds" else Ring.shard
            parts[name] = shard(ring, x.expand(rows.batch, *x.shape[1:]), layout)
    seen, features = arguments.get("visual_pos_masks"), arguments.get("deepstack_visual_embeds")
    if isinstance(seen, Tensor) and features is not None:
        numbers = (seen.flatten().cumsum(0) - 1).view(seen.shape)
        chosen = ring.shard(numbers, layout)[ring.shard(seen, layout)]
        parts["deepstack_visual_embeds"] = [x[chosen.to(x.device)] for x in features]
    return parts, replace(rows, positions=positions)


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
            f"{name}: the cache holds {seen} tokens, and position_ids go back to {int(positions[wrong].min())}: pass "
            f"generate all tokens, those in the cache first, without assistant_model or prompt_lookup_num_tokens"
        )


def find_rows(now: ForwardPass, kwargs: Mapping[str, Any], multiple: int = 1) -> None:
    """Finds the rows of a call once all ranks have come with equal calls, and divides a multiple of `multiple` tokens."""
    ring, runner, cut_rows = now.ring, now.runner, now.call.rows
    tokens, cache = tokens_in(kwargs), cache_in(kwargs)
    now.skipped, now.cacheless = tokens_skipped(cache), kwargs.get("use_cache") is False
    layout = getattr(cache, "layout", None)  # of a sharded cache
    now.whole = ring.world_size > 1 and layout is None and (cache is not None or kwargs.get("use_cache") is True)
    now.kept = cache if isinstance(cache, PatternCache) else None
    if now.whole and ring.rank == 0:
        remedy = "" if attachment_of(runner).own_attention else ": ra.prefill fills a sharded one"
        warn_once(f"{type(runner).__name__} has its own cache, so all ranks compute whole rows{remedy}", logging.INFO)
    if ring.world_size == 1 or now.whole:
        now.ring = ring_alone(ring.kernel) if now.whole else ring
        now.rows = _rows_alone(runner, tokens, kwargs)
        begin_in_cache(now, cache, kwargs)
        return
    with ring.agreement("a forward pass of a model", by_digest=True) as agreed:
        begin_in_cache(now, cache, kwargs)
        if cache is None or cache.get_seq_length() == 0:
            now.rows = cut_rows or rows_to_cut(runner, ring, kwargs, layout=layout, multiple=multiple)
        agreed.values = _shared_values(now, kwargs)
        if now.rows is not None:
            agreed.same("the tokens of a cut batch", now.rows.checksum)
            agreed.same("the model's weights", digest(_some_weights(now.module)), _REPLICAS)


def _shared_values(now: ForwardPass, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what all ranks of a ring must have in common in a call, by its names in an error."""
    cut_rows = now.call.rows
    part = None if cut_rows is None or cut_rows.layout is None else cut_rows.layout.local_len
    values: dict[str, Any] = {}
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.shape[1:2] != (part,):
            values[name] = digest(value)
        elif value is None or isinstance(value, (bool, int, float, str)):
            values[name] = value
    values |= {"the division of the rows": digest(now.rows), "whether the model trains": now.runner.training}
    return values | {"whether gradients are recorded": torch.is_grad_enabled()}


def _some_weights(model: nn.Module) -> Tensor:
    """Returns a few numbers of some weights, trained and frozen, which are equal on ranks that start and train alike.

    DDP, ZeRO 1 and 2 keep replicas equal to the last bit. FSDP and ZeRO 3 divide weights, which are left out.
    """
    divided = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
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


def _rows_alone(runner: nn.Module, tokens: Tensor | None, arguments: Mapping[str, Any]) -> WholeRows | None:
    """Returns the rows of a call that this process computes by itself; None in a step of generation."""
    if tokens is None or tokens.dim() < 2:
        return None
    if cache_in(arguments) is not None:
        ends, numbers, mask = arguments.get("cu_seq_lens_q"), arguments.get("seq_idx"), arguments.get("attention_mask")
        of_collator = (ends is not None and len(ends) > 2) or (numbers is not None and bool(numbers.diff(dim=-1).any()))
        if of_collator or numbers_documents(mask):
            raise ValueError("packed rows (by cu_seq_lens, seq_idx or the mask) have no cache: pass use_cache=False")
        return None
    rows = rows_of_call(runner, tokens, arguments)
    if rows.packed and not takes(runner, "position_ids"):
        raise ValueError(
            f"{type(runner).__name__} was given packed rows, and takes no position_ids: pass one document a row, padded"
        )
    _check_own_masks(runner, rows)
    return rows


def _check_own_masks(runner: nn.Module, rows: WholeRows) -> None:
    """Refuses packed rows for a model that keeps the attention of Transformers, whose masks may not know documents."""
    if rows.packed and attachment_of(runner).own_attention:
        raise ValueError(
            f"{type(runner).__name__} keeps its own attention, which does not keep packed documents apart: pass one document a "
            f"row, padded"
        )
