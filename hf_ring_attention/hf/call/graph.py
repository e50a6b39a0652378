"""The call of a patched model inside a graph of torch.compile: operators find its rows, and cut and join them.

A graph holds only tensors and constants. So the operator `begin` finds the rows of a call when the graph runs, and returns
their number, which takes the place of the mask; `attend` looks up the rest by it. Calls that need more than this (a cache,
images, recurrent layers, a user's loss, the heads transport) break the graph, and run as they do without one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ...compute.foreign_code import strings_in
from ...compute.private import implementation_of
from ...ring.attention import CallsInGraph
from ...ring.operator import CALLS, check_not_traced, define
from ...ring.ring import Ring
from ...ring.shards import RINGS, shard_of, whole_of
from ..forward_pass import CALL, NUMBER_IN_GRAPHS, ForwardPass, drop_broken_passes, names_rows_in_graph, new_pass
from ..layer.attention import call_in_graph
from ..layer.masks import Tokens, masks_follow_positions, tokens_of
from ..loss.lm_loss import IGNORED, next_labels
from ..model.types import INDEXED, MIXERS
from ..model.wrappers import MODULES, attachment_of, runner_of
from ..names import IMPLEMENTATION
from ..rows.cut import find_rows, places_of
from ..rows.documents import documents_from_mask, first_position, rows_of_call
from ..rows.join import LOGITS_NOT_FORMED
from .probe import check_tokens_apart

#: The value of `CALL` for a decoder whose last hidden states stay parts in a graph.
_PARTS = "parts"

#: Arguments of a call that a graph can hold.
_ARGUMENTS = (
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "logits_to_keep", "num_items_in_batch",
    "use_cache", "return_dict",
)  # fmt: skip


def fits_a_graph(model: PreTrainedModel, ring: Ring | None) -> bool:
    """Returns whether a graph can hold calls of a model: of a decoder of text with rotary positions or none."""
    runner, config = runner_of(model), runner_of(model).config
    is_decoder = config.get_text_config() is model.config and all(
        getattr(x, "is_causal", True) for x in runner.modules()
    )
    # A window that only the mask function has is lost with its mask.
    in_mask = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    named = any("sliding_window" in strings_in(type(module).forward) for module in runner.modules())
    counts_tokens = places_of(runner) is not None or first_position(runner) > 0
    looks_at_rows = getattr(config, "attn_temperature_tuning", False) or getattr(config, "output_router_logits", False)
    takes_positions = "position_ids" in inspect.signature(runner.forward).parameters
    exchanges_heads = ring is not None and ring.transport == "heads"
    return (
        is_decoder
        and takes_positions
        and config.model_type not in (*MIXERS, *INDEXED)
        and (named or not in_mask)
        and not (counts_tokens or looks_at_rows or exchanges_heads)
    )


# ---- operators


class RowsInGraph(CallsInGraph):
    """The rows of a call inside a graph, and the calls of its layers; a number in place of the mask names them."""

    def __init__(self, now: ForwardPass, tokens: Tokens) -> None:
        super().__init__(partial(call_in_graph, now, tokens))
        self.tokens = tokens


def _begin(
    tokens: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    labels: Tensor | None,
    count: Tensor | None,
    model: str,
    recorded: bool,
) -> Tensor:
    """Finds the rows of a call, once all ranks have come with equal calls; returns their number as a mask."""
    module: Any = MODULES[int(model)]
    runner: Any = runner_of(module)
    name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
    kwargs = {name: tokens, "attention_mask": mask, "position_ids": positions}
    kwargs |= {"labels": labels, "num_items_in_batch": count}
    now = new_pass(runner, module)
    with torch.set_grad_enabled(recorded):
        find_rows(now, kwargs, multiple=2 * now.ring.world_size)
    if now.rows is not None and now.rows.packed and positions is None:
        raise NotImplementedError(
            f"{type(runner).__name__} in one graph got packed rows without positions: pass position_ids that restart, or call "
            f"the model without torch.compile"
        )
    found = Tokens(now.documents) if now.documents is not None else tokens_of(None if mask is None else mask != 0)
    if now.layout is None and mask is None and positions is not None:
        follow = masks_follow_positions(type(runner).forward)
        if follow is None:
            rows_of_call(runner, tokens, kwargs, divided=True)  # This refuses positions that skip or repeat.
        elif follow:
            numbers = F.pad((positions.diff(dim=1) != 1).cumsum(1), (1, 0)) + 1
            found = Tokens(documents_from_mask(numbers.expand(tokens.shape[0], -1)))
    if found.valid is not None:
        raise NotImplementedError(
            f"{type(runner).__name__} in one graph got padding inside a document: pad before or after it, or call the model "
            f"without torch.compile"
        )
    if now.layout is not None:
        check_tokens_apart(now, kwargs)
    now.runner = now.module = None  # Facts that wait for a backward pass keep no model alive.
    rows = RowsInGraph(now, replace(found, layout=now.layout))
    return torch.tensor([[[[CALLS.add(rows, keep=True)]]]], dtype=NUMBER_IN_GRAPHS)


def _tokens_of_ranks(call: Tensor, ring: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Returns the numbers [B, n local] of a rank's tokens, and the places [B, n] of tokens in the parts of all ranks.

    Numbers of padding are `length` or more.
    """
    layout, of_ring = CALLS[int(call)].tokens.layout, RINGS[ring]
    numbers = torch.arange(layout.seq_len).expand(batch, -1)
    places = torch.arange(layout.padded_len).expand(batch, -1)
    own = shard_of(numbers, layout, of_ring.rank, 1, layout.seq_len)
    return own.contiguous(), whole_of(places, layout, 1)[:, :length].contiguous()


def _fake_begin(tokens: Tensor, *others: Any) -> Tensor:
    check_not_traced()
    return torch.empty(1, 1, 1, 1, dtype=NUMBER_IN_GRAPHS, device="cpu")


def _fake_tokens_of_ranks(call: Tensor, ring: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    pieces = 2 * RINGS[ring].world_size
    local = 2 * ((length + pieces - 1) // pieces)
    return call.new_empty(batch, local), call.new_empty(batch, length)


define(
    "begin(Tensor tokens, Tensor? mask, Tensor? positions, Tensor? labels, Tensor? count, str model, bool recorded) -> Tensor",
    _begin,
    _fake_begin,
)
define(
    "tokens_of_ranks(Tensor call, int ring, SymInt batch, SymInt length) -> (Tensor, Tensor)",
    _tokens_of_ranks,
    _fake_tokens_of_ranks,
)


# ---- hooks, as they are traced


def in_graph(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a graph can hold a call that begins, and is traced."""
    attachment = attachment_of(module)
    drop_broken_passes()
    alone = attachment.ring is None or attachment.ring.world_size == 1
    known = (*_ARGUMENTS, "shift_labels") if alone else _ARGUMENTS
    tokens = [x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None]
    if len(tokens) != 1 or not isinstance(tokens[0], Tensor) or tokens[0].dim() < 2:
        return False
    described = all(x is None or x.dim() == 2 for x in (kwargs.get("attention_mask"), kwargs.get("position_ids")))
    ours = attachment.in_graphs and not attachment.runs and implementation_of(module.config) == IMPLEMENTATION
    given = [name for name, x in kwargs.items() if x is not None and x is not False]
    fits = ours and described and all(name in known for name in given)
    return fits and (alone or _can_be_cut(module, tokens[0], kwargs))


def _can_be_cut(module: nn.Module, tokens: Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a graph can cut the rows of a call and join its results, by their names.

    With a new cache, every rank would compute whole rows.
    """
    whole = kwargs.get("use_cache") is True or kwargs.get("return_dict") is False
    labels, embeds = kwargs.get("labels"), kwargs.get("inputs_embeds")
    of_tokens = labels is None or labels.shape == tokens.shape[:2]
    no_gradient = not getattr(embeds, "requires_grad", False)
    return of_tokens and no_gradient and not whole and bool(getattr(module.config, "return_dict", True))


def begin_in_graph(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a model or of its decoder: the number of its rows in place of the mask, and its part of them."""
    if args:
        kwargs = {"input_ids": args[0], **kwargs}
    attachment = attachment_of(module)
    ring, mask, is_decoder = attachment.ring, kwargs.get("attention_mask"), attachment.is_decoder
    if ring is not None and ring.world_size == 1:
        ring = None
    if not is_decoder and ring is None:
        return kwargs
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    tokens: Any = ids if embeds is None else embeds
    if not names_rows_in_graph(mask):
        labels, count = kwargs.get("labels"), kwargs.get("num_items_in_batch")
        if count is not None and not isinstance(count, Tensor):
            count = torch.full((1,), count)
        mask = torch.ops.hf_ring_attention.begin(
            tokens, mask, kwargs.get("position_ids"), labels, count, attachment.number, torch.is_grad_enabled()
        )
        kwargs = {**kwargs, "attention_mask": mask}
    if ring is None or not (is_decoder or _has_loss_of_part(module, kwargs)):
        return kwargs
    batch, length = tokens.shape[:2]
    own, places = torch.ops.hf_ring_attention.tokens_of_ranks(mask, ring.number, batch, length)
    own, places = own.to(tokens.device), places.to(tokens.device)
    if not is_decoder:
        return _with_loss_of_part(kwargs, own)
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=tokens.device)[None]
    kwargs = {**kwargs, "position_ids": _part(positions.expand(batch, -1), own), "use_cache": False}
    kwargs["input_ids" if embeds is None else "inputs_embeds"] = _part(tokens, own)
    if kwargs.get(CALL) is None:
        kwargs[CALL] = places
    return kwargs


def _has_loss_of_part(module: Any, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether the loss of a call is a cross entropy of next tokens, which each rank can compute for its part.

    A forward of the user's own may do anything with labels: it gets the hidden states of whole rows.
    """
    labels, keep = kwargs.get("labels"), kwargs.get("logits_to_keep")
    computed = attachment_of(module).loss_in_parts and module.loss_function is ForCausalLMLoss
    return labels is not None and computed and (keep is None or (isinstance(keep, int) and keep == 0))


def _part(x: Tensor, own: Tensor, fill: int = 0) -> Tensor:
    """Returns the tokens [B, n local, ...] of x [B, n, ...] with these numbers; those beyond its end are padding."""
    index, inside = own.clamp(max=x.shape[1] - 1), own < x.shape[1]
    if x.dim() == 3:
        index, inside = index[..., None].expand(-1, -1, x.shape[2]), inside[..., None]
    return torch.where(inside, x.gather(1, index), fill)


def _with_loss_of_part(kwargs: dict[str, Any], own: Tensor) -> dict[str, Any]:
    """Returns the arguments of a model that computes the loss of its part of the rows, as a share of the whole loss."""
    following, count = next_labels(kwargs), kwargs.get("num_items_in_batch")
    labels = _part(following, own, IGNORED)
    if count is None:
        count = (following != IGNORED).sum()
    return {**kwargs, "labels": labels, "shift_labels": labels, "num_items_in_batch": count, CALL: _PARTS}


def end_in_graph(module: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    """Returns the output of a model or of its decoder with whole rows in place of parts."""
    attachment, places = attachment_of(module), kwargs.get(CALL)
    ring = attachment.ring
    if ring is None or ring.world_size == 1 or places is None:
        return output
    if isinstance(places, Tensor):
        if attachment.is_decoder:
            hidden = output["last_hidden_state"]
            shards = torch.ops.hf_ring_attention.side_by_side(hidden, ring.number, 1)
            output["last_hidden_state"] = shards.gather(1, places[..., None].expand(-1, -1, hidden.shape[2]))
    elif not attachment.is_decoder:
        share = output["loss"].reshape(1)
        output["loss"] = torch.ops.hf_ring_attention.side_by_side(share, ring.number, 0).sum()
        output["logits"] = LOGITS_NOT_FORMED
    return output
