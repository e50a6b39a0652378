"""The hooks around the forward passes of a patched model.

They tell the masks where documents begin and end in the whole sequence. On a ring they also compare the calls of all ranks
before anything is computed, and correct the few modules that would take a shard for a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..compute.private import calling_frame, implementation_of, remove_hooks
from ..plan.problem import Documents
from ..ring.attention import UNTRACEABLE, check_not_traced
from ..ring.ring import Ring
from .cache import ShardedCache, cache_in
from .documents import (
    check_beginnings,
    documents_from_mask,
    documents_of_collator,
    documents_of_rows,
    packed_documents,
    positions_of_documents,
)
from .forward_pass import FORWARD_PASS, ForwardPass, drop_broken_passes, forward_pass_of
from .masks import tokens_of
from .mixers import attach_mixers
from .positions import first_position, remember_places, warn_of_temperatures
from .recomputation import remember_for_recomputation
from .registration import IMPLEMENTATION
from .rings import attached_ring, serve, set_ring
from .routers import ROUTING, begin_routing, tell_routing
from .shard_checks import WRONG_LOSS, checked_shard, checked_step, ignored_labels, loss_of_shard, remember_prefill
from .support import takes_shift_labels
from .wrappers import decoder_of, runner_of

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def attach_ring(model: PreTrainedModel, ring: Ring | None) -> None:
    """Makes this the ring of the model's attention layers; None makes its rows whole ones again."""
    runner = runner_of(model)
    serve(ring, model)
    for module in model.modules():
        remove_hooks(module, lambda hook: getattr(hook, "__module__", None) == __name__)
        set_ring(module, None)
    remember_prefill(runner, None)
    remember_places(runner)
    for module in decoder_of(model).modules():
        set_ring(module, ring)
    set_ring(model, ring)
    attach_mixers(model)
    runner.register_forward_pre_hook(_before_forward, with_kwargs=True)
    runner.register_forward_hook(_after_forward, always_call=True)
    if ring is not None and model is not runner and (ring.world_size > 1 or not takes_shift_labels(model)):
        model.register_forward_pre_hook(_before_head, with_kwargs=True)
        model.register_forward_hook(_after_head, always_call=True)
    if ring is None or ring.world_size == 1:
        return
    for name, module in model.base_model.named_modules():
        if _depends_on_length(module):
            module.register_forward_pre_hook(_with_last_position, with_kwargs=True)
            module.register_forward_hook(_without_last_position)
        if name == "pooler":
            module.register_forward_pre_hook(_with_first_token)


def _depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    return any(kind in _LENGTH_DEPENDENT_ROPE for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


# ---- before and after a forward pass


@torch.compiler.disable(reason=UNTRACEABLE)
def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sets the `ForwardPass` that the masks read, and checks the calls of a sharded model.

    Packed rows without positions get positions that count each document; the model itself would count on from one
    document to the next.

    Raises:
        ValueError: on every rank, if the call of any rank contradicts its layout or the calls of other ranks.
    """
    check_not_traced()
    remember_for_recomputation(module)  # type: ignore[arg-type]
    if args:
        kwargs = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
    tokens = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
    ring, cache = attached_ring(module), cache_in(kwargs)
    new_arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    if ring is None or ring.world_size == 1:
        documents, from_collator = _packed_rows(module, tokens, kwargs)
        forward_pass = ForwardPass(module.config, documents=documents, from_collator=from_collator)
        if tokens is not None and documents is not None and _packed(documents) and kwargs.get("position_ids") is None:
            positions = positions_of_documents(documents, tokens.shape[1], first_position(module))
            new_arguments = (), {**kwargs, "position_ids": positions.to(tokens.device)}
    elif isinstance(cache, ShardedCache) and cache.get_seq_length() > 0:
        forward_pass = checked_step(module, ring, cache, tokens, kwargs)
    else:
        forward_pass = checked_shard(module, ring, tokens, cache, kwargs)
    if _packed(forward_pass.documents):
        assert forward_pass.documents is not None
        warn_of_temperatures(module.config, max(stop for row in forward_pass.documents for _, stop in row))
    drop_broken_passes()
    forward_pass.outer, forward_pass.frame = FORWARD_PASS.get(), calling_frame(module)
    FORWARD_PASS.set(forward_pass)
    return new_arguments


@torch.compiler.disable(reason="it belongs to _before_forward")
def _after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Takes back the `ForwardPass` that `_before_forward` set, and checks that ring_dilated took part.

    Raises:
        RuntimeError: no layer attended by ring_dilated, so that each rank saw its shard alone.
        NotImplementedError: an output that the model made from a token of its shard alone.
    """
    forward_pass, ring = forward_pass_of(module.config), attached_ring(module)
    if forward_pass is None:
        return
    FORWARD_PASS.set(forward_pass.outer)
    forward_pass.frame = None
    tell_routing(forward_pass)
    if output is None:  # The forward pass raised an error, which must not be replaced.
        return
    sharded = ring is not None and ring.world_size > 1
    name, implementation = type(module).__name__, implementation_of(module.config)
    if not forward_pass.attended and sharded:
        raise RuntimeError(
            f"no layer of {name} attended by ring_dilated ({implementation!r} is set), so each rank saw nothing but its "
            f"shard: call ra.patch_model; if that was done, {name} cannot be sharded: use one process (ring=None)"
        )
    if not forward_pass.attended and implementation == IMPLEMENTATION:
        raise RuntimeError(
            f"no layer of {name} attended by ring_dilated: it computes attention of its own, and would ignore the pattern: "
            f"use 'eager'"
        )
    if sharded and getattr(output, "pooler_output", None) is not None and not hasattr(module, "pooler"):
        raise NotImplementedError(
            f"{name} makes its pooler_output from a token that it looks for in the row, of which each rank "
            f"has a shard: use one process (ring=None)"
        )


def _before_head(module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Looks for a loss of the shard alone, whose error `_before_forward` raises on every rank.

    Raises:
        ValueError: on a ring of one rank, if the model would ignore its shift_labels.
    """
    if args:
        kwargs = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
    ring, error = attached_ring(module), ignored_labels(module, kwargs)
    if ring is not None and ring.world_size > 1:
        asked = kwargs.get("output_router_logits")
        asked = getattr(module.config, "output_router_logits", False) if asked is None else asked
        error = begin_routing(module, ring, bool(asked)) or error
        WRONG_LOSS.set(error or loss_of_shard(module, kwargs))
    elif error is not None:
        raise error


def _after_head(module: PreTrainedModel, args: tuple[Any, ...], output: Any) -> None:
    """Ends the call that `_before_head` began."""
    ROUTING.set(None)


def _packed_rows(module: nn.Module, tokens: Tensor | None, kwargs: Mapping[str, Any]) -> tuple[Documents | None, bool]:
    """Returns the documents of whole sequences, where positions restart or a collator tells them, and whether one does.

    Not every model looks for documents itself.

    Raises:
        ValueError: packed rows for a model that numbers its tokens itself, or documents told in two ways that differ.
    """
    if tokens is None or cache_in(kwargs) is not None:
        return None, False
    batch, length, mask = tokens.shape[0], tokens.shape[1], kwargs.get("attention_mask")
    positions, first = kwargs.get("position_ids"), first_position(module)
    ends, numbers = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
    if isinstance(mask, Mapping) and ends is None and numbers is None:
        _check_ready_masks(module, mask, batch, positions, first)
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return None, False
    by_collator = packed_documents(batch, length, ends, numbers)
    if _packed(by_collator) and isinstance(positions, Tensor) and positions.dim() == 2:
        assert by_collator is not None
        check_beginnings(by_collator, positions, first)
    documents = documents_of_rows(batch, positions, mask, first)
    if by_collator is not None:
        by_mask = None if mask is None else documents_from_mask(mask != 0)
        documents = documents_of_collator(batch, length, ends, numbers, (documents, by_mask))
    if _packed(documents) and not _takes_positions(module):
        raise ValueError(
            f"{type(module).__name__} was given packed rows, and takes no position_ids: it numbers the tokens of a row itself, "
            f"so it would number documents wrongly: pass one document a row, padded"
        )
    return documents, by_collator is not None


def _check_ready_masks(
    module: nn.Module, masks: Mapping[str, Any], batch: int, positions: Tensor | None, first: int
) -> None:
    """Refuses packed rows if the model around this one has made their masks already, without their documents.

    Raises:
        ValueError: masks that do not keep the documents apart that positions tell.
    """
    for mask in masks.values():
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            continue
        documents = documents_of_rows(batch, positions, mask, first)
        if _packed(documents) and tokens_of(mask).documents != documents:
            raise ValueError(
                f"{type(module).__name__} was given packed rows by position_ids that restart, and masks that were made "
                f"without them, under which documents would see each other: tell the documents by seq_idx or cu_seq_lens_q, "
                f"or leave attention_mask out"
            )


def _packed(documents: Documents | None) -> bool:
    return documents is not None and any(len(row) > 1 for row in documents)


def _takes_positions(module: nn.Module) -> bool:
    return "position_ids" in inspect.signature(module.forward).parameters


# ---- modules that take a shard for a row


@torch.compiler.disable(reason="it reads what _before_forward found")
def _with_last_position(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gives RoPE that depends on the row's length one more column, with the row's last position."""
    sharded = FORWARD_PASS.get()
    if sharded is None or (sharded.layout is None and sharded.held is None):
        raise RuntimeError(
            f"{type(module).__name__} depends on the length of the whole sequence, and was called outside the forward pass of "
            f"the sharded model: call the model, not its parts"
        )
    if sharded.last_position is None:
        return None  # In a step after a prefill, all ranks have all positions.
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    column = torch.full_like(positions[..., :1], sharded.last_position)
    positions = torch.cat([positions, column], -1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": positions}
    return (args[0], positions, *args[2:]), kwargs


@torch.compiler.disable(reason="it belongs to _with_last_position")
def _without_last_position(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    sharded = FORWARD_PASS.get()
    if sharded is None or sharded.last_position is None:
        return output
    return tuple(x[:, :-1] for x in output) if isinstance(output, tuple) else output[:, :-1]


@torch.compiler.disable(reason="it asks another rank")
def _with_first_token(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gives a pooler, which reads the first token [B, D] of [B, n, D], that of the whole sequence."""
    ring = attached_ring(module)
    assert ring is not None  # This hook is registered on rings only.
    states: Tensor = args[0]
    one_token = states.dim() == 2
    sharded = FORWARD_PASS.get()
    layout = None if sharded is None else sharded.layout
    first = ring.first_token(states.unsqueeze(1) if one_token else states, layout)
    return (first.squeeze(1) if one_token else first, *args[1:])
