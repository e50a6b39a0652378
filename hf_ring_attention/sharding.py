"""The forward passes of a patched model: what they must be given, above all where rows are sharded over a ring.

Hooks tell the masks where documents begin and end in the whole row. On a ring they compare the calls of all ranks before
anything is computed, and correct the few modules that would take a shard for a row.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import UNTRACEABLE, check_not_traced
from .caches import ShardedCache
from .communicators import digest
from .configuration import NAME, layer_pattern, model_layout
from .gate import decoder_of, runner_of, takes_shift_labels, untrainable
from .layouts import SequenceLayout
from .masks import FORWARD_PASS, ForwardPass, forward_pass_of, tokens_of
from .packing import (
    Run,
    check_beginnings,
    check_not_local,
    documents_from_mask,
    documents_of_collator,
    documents_of_row,
    documents_of_rows,
    packed_documents,
    positions_of_documents,
    runs_of_shard,
)
from .patterns import Pattern
from .plans import Documents
from .ring import Ring

#: Attribute of a model's modules that holds their ring.
_RING = "_ring_dilated_ring"
#: Attribute of a model's runner: a weak reference to the cache that `prefill` filled last.
_PREFILLED = "_ring_dilated_prefilled"
#: What models call a table of positions, and the attribute of a runner that holds how many tokens it is for.
_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "positions_embed")
_PLACES = "_ring_dilated_places"
#: What is wrong with the losses that the running call of a head asked for.
_WRONG_LOSS: ContextVar[ValueError | None] = ContextVar("ring_dilated_wrong_loss", default=None)
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def attached_ring(module: nn.Module) -> Ring | None:
    """The ring that `patch_model` gave to a model, or to one of its modules."""
    return getattr(module, _RING, None)


def attach_ring(model: PreTrainedModel, ring: Ring | None) -> None:
    """Makes this the ring of the model's attention layers; None makes its rows whole ones again."""
    runner = runner_of(model)
    served = attached_ring(model)
    if served is not None:
        served.forget(model)
    if ring is not None:
        ring.serve(model, _rows_rule, untrainable)
    for module in model.modules():
        for hooks, marks in (
            (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
            (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
        ):
            for number in [number for number, hook in hooks.items() if getattr(hook, "__module__", None) == __name__]:
                del hooks[number]
                for marked in marks:
                    marked.pop(number, None)
        setattr(module, _RING, None)
    setattr(runner, _PREFILLED, None)
    setattr(runner, _PLACES, places_of(runner))
    for module in decoder_of(model).modules():
        setattr(module, _RING, ring)
    setattr(model, _RING, ring)
    runner.register_forward_pre_hook(_before_forward, with_kwargs=True)
    runner.register_forward_hook(_after_forward, always_call=True)
    if ring is not None and model is not runner and (ring.world_size > 1 or not takes_shift_labels(model)):
        model.register_forward_pre_hook(_before_head, with_kwargs=True)
    if ring is None or ring.world_size == 1:
        return
    for name, module in model.base_model.named_modules():
        if _depends_on_length(module):
            module.register_forward_pre_hook(_with_last_position, with_kwargs=True)
            module.register_forward_hook(_without_last_position)
        if name == "pooler":
            module.register_forward_pre_hook(_with_first_token)


def remember_prefill(runner: nn.Module, cache: ShardedCache) -> None:
    """For the error of a model that gives up this cache while it generates."""
    setattr(runner, _PREFILLED, weakref.ref(cache))


def switching_length(config: Any) -> int | None:
    """The length beyond which a model rotates all keys otherwise than up to it, so that a cache is of no use; or None."""
    length = getattr(config, "original_max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    return length if isinstance(length, int) and rope.get("rope_type") == "longrope" else None


def _given_up_cache(module: nn.Module, tokens: Tensor, kwargs: Mapping[str, Any]) -> ValueError | None:
    """What to say of a whole row in place of a step: Transformers' generate came without the cache it was given."""
    length, reference = switching_length(module.config), getattr(module, _PREFILLED, None)
    cache = None if reference is None else reference()
    if length is None or cache is None or kwargs.get("use_cache") is not True:
        return None
    if not cache.get_seq_length() <= length < tokens.shape[1]:
        return None
    return ValueError(
        f"{type(module).__name__} rotates keys otherwise once a row is longer than original_max_position_embeddings = {length} "
        f"tokens, and generate gives up the sharded cache there to compute the whole row of {tokens.shape[1]} tokens again: "
        f"fill another cache with cache = ra.prefill(model, row), where row has all tokens so far, {length + 1} at least, and "
        f"go on from it"
    )


def _rows_rule(model: PreTrainedModel) -> tuple[Pattern, int]:
    """What the layout of a model's rows depends on, and the position id of their first token."""
    return layer_pattern(model.config.get_text_config(), None), first_position(runner_of(model))


def _depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    return any(kind in _LENGTH_DEPENDENT_ROPE for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


# ---- before and after a forward pass


@torch.compiler.disable(reason=UNTRACEABLE)
def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Says what the masks of a forward pass need, and checks a sharded one.

    Packed rows that come without positions are given some that count each document, which a model would number on from
    one document to the next.

    Raises:
        ValueError: on every rank, where any rank's call contradicts its layout, or the ranks' calls each other.
    """
    check_not_traced()
    if args:
        kwargs = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
    tokens = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
    ring, cache = attached_ring(module), kwargs.get("past_key_values")
    numbered: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    if ring is None or ring.world_size == 1:
        documents, told = _packed_rows(module, tokens, kwargs)
        begun = ForwardPass(module.config, documents, told)
        if tokens is not None and documents is not None and _packed(documents) and kwargs.get("position_ids") is None:
            positions = positions_of_documents(documents, tokens.shape[1], first_position(module))
            numbered = (), {**kwargs, "position_ids": positions.to(tokens.device)}
    elif isinstance(cache, ShardedCache) and cache.get_seq_length() > 0:
        begun = _checked_step(module, ring, cache, tokens, kwargs)
    else:
        begun = _checked_shard(module, ring, tokens, cache, kwargs)
    begun.outer = FORWARD_PASS.get()
    FORWARD_PASS.set(begun)
    return numbered


@torch.compiler.disable(reason="it belongs to _before_forward")
def _after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Ends what `_before_forward` began.

    Raises:
        RuntimeError: a model whose layers never attended by ring_dilated, so that each rank saw its shard alone.
    """
    forward_pass, ring = forward_pass_of(module.config), attached_ring(module)
    if forward_pass is None:
        return
    FORWARD_PASS.set(forward_pass.outer)
    if output is None:  # an error is on its way
        return
    sharded = ring is not None and ring.world_size > 1
    name, implementation = type(module).__name__, getattr(module.config, "_attn_implementation", None)
    if not forward_pass.attended and sharded:
        raise RuntimeError(
            f"no layer of {name} attended by ring_dilated ({implementation!r} is set), so each rank saw nothing but its "
            f"shard: call ra.patch_model; if that was done, {name} cannot be sharded: use one process (ring=None)"
        )
    if not forward_pass.attended and implementation == NAME:
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
    """Finds losses of a shard alone. `_before_forward` raises what is found, on every rank.

    Raises:
        ValueError: on a ring of one, of shift_labels that the model would not look at.
    """
    if args:
        kwargs = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
    ring, error = attached_ring(module), _ignored_labels(module, kwargs)
    if ring is not None and ring.world_size > 1:
        _WRONG_LOSS.set(error or _loss_of_shard(module, kwargs))
    elif error is not None:
        raise error


def _labels_given(kwargs: Mapping[str, Any]) -> str:
    return " and ".join(n for n in ("labels", "start_positions", "end_positions") if kwargs.get(n) is not None)


def _ignored_labels(module: PreTrainedModel, kwargs: Mapping[str, Any]) -> ValueError | None:
    given = _labels_given(kwargs)
    if not given or kwargs.get("shift_labels") is None or takes_shift_labels(module):
        return None
    return ValueError(
        f"{type(module).__name__} was given shift_labels, and computes a loss of its own from {given} alone, neither shifted "
        f"nor divided by num_items_in_batch: call it without labels, and compute the loss from its logits: the sum of their "
        f"cross entropy with shift_labels, divided by the number of labels of all processes (ra.count_tokens) and multiplied "
        f"by the number of processes"
    )


def _loss_of_shard(module: nn.Module, kwargs: Mapping[str, Any]) -> ValueError | None:
    name, given, routers = type(module).__name__, _labels_given(kwargs), kwargs.get("output_router_logits")
    if routers if routers is not None else getattr(module.config, "output_router_logits", False):
        return ValueError(
            f"{name} was asked for output_router_logits, and would balance its experts by the shard alone: "
            f"set config.output_router_logits = False"
        )
    if given and kwargs.get("shift_labels") is None:
        return ValueError(
            f"{name} was given {given} for a shard of each row, and would shift and average "
            f"them in the shard alone: cut batches with ring.prepare_data_loader or ra.shard_batch, which shift labels before "
            f"they cut, and compute the loss with ra.next_token_loss; or shift labels first and pass them as shift_labels too"
        )
    # TRL's forward, which this argument asks for, leaves the loss to its caller.
    if given and kwargs.get("num_items_in_batch") is None and not kwargs.get("fused_lm_head"):
        return ValueError(
            f"{name} was given labels of a shard without num_items_in_batch, and would average the shard "
            f"alone: compute the loss with ra.next_token_loss, or pass the number of labels of all processes "
            f"(ra.count_tokens) as num_items_in_batch, and multiply the loss by the number of processes"
        )
    return None


def _packed_rows(module: nn.Module, tokens: Tensor | None, kwargs: Mapping[str, Any]) -> tuple[Documents | None, bool]:
    """The documents of whole rows, where positions restart or a collator tells them, and whether it was a collator.

    Not every model looks for them itself.

    Raises:
        ValueError: packed rows for a model that numbers its tokens itself, or told in two ways that differ.
    """
    if tokens is None or kwargs.get("past_key_values") is not None:
        return None, False
    batch, length, mask = tokens.shape[0], tokens.shape[1], kwargs.get("attention_mask")
    positions, first = kwargs.get("position_ids"), first_position(module)
    ends, numbers = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
    if isinstance(mask, Mapping) and ends is None and numbers is None:
        _check_ready_masks(module, mask, batch, positions, first)
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return None, False
    told = packed_documents(batch, length, ends, numbers)
    if _packed(told) and isinstance(positions, Tensor) and positions.dim() == 2:
        assert told is not None
        check_beginnings(told, positions, first)
    documents = documents_of_rows(batch, positions, mask, first)
    if told is not None:
        by_mask = None if mask is None else documents_from_mask(mask != 0)
        documents = documents_of_collator(batch, length, ends, numbers, (documents, by_mask))
    if _packed(documents) and not _takes_positions(module):
        raise ValueError(
            f"{type(module).__name__} was given packed rows, and takes no position_ids: it numbers the tokens of a row itself, "
            f"so it would number documents wrongly: pass one document a row, padded"
        )
    return documents, told is not None


def _check_ready_masks(
    module: nn.Module, masks: Mapping[str, Any], batch: int, positions: Tensor | None, first: int
) -> None:
    """Refuses packed rows whose masks the model around this one has made already, without their documents.

    Raises:
        ValueError: documents, as the positions tell them, that the masks do not keep apart.
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


def _checked_step(
    module: nn.Module, ring: Ring, cache: ShardedCache, tokens: Tensor | None, kwargs: Mapping[str, Any]
) -> ForwardPass:
    """A step after a sharded prefill: every rank comes with the same tokens, positions and mask."""
    said: dict[str, Any] = {}
    error: Exception | None = None
    mask, length = kwargs.get("attention_mask"), 0
    try:
        if tokens is None:
            raise ValueError("a forward pass needs input_ids or inputs_embeds")
        length, held = tokens.shape[1], cache.get_seq_length()
        said["the tokens of a step"] = digest(tokens)
        said["position_ids of a step"] = digest(kwargs.get("position_ids"))
        said["attention_mask of a step"] = digest(mask)
        masked = mask.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else held + length
        if length == 0 or masked != held + length:
            raise ValueError(
                f"the cache holds {held} tokens, and {length} new ones came, so an attention_mask has {held} + {length} = "
                f"{held + length}, not {masked}, and there must be new ones: generate takes the whole row, the tokens of the "
                f"cache and those after it: model.generate(torch.cat([document, question], 1), past_key_values=cache)"
            )
        if isinstance(mask, Tensor):
            documents_from_mask(mask != 0)
    except ValueError as refused:
        error = refused
    ring.agree_cheaply(said, error, torch.device("cpu"))
    return ForwardPass(module.config, held=cache.held(ring.rank, length))


def _checked_shard(
    module: nn.Module, ring: Ring, tokens: Tensor | None, cache: Any, kwargs: Mapping[str, Any]
) -> ForwardPass:
    """Shards of whole rows: their positions say which documents there are."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    error: Exception | None = _WRONG_LOSS.get()
    _WRONG_LOSS.set(None)
    agreed: dict[str, Any] = {}
    told: tuple[list[list[Run]], int] | None = None
    # Transformers' generate, which goes on from a sharded cache, numbers the tokens of all models from 0.
    first = first_position(module) if cache is None else 0
    ends: Tensor | None = kwargs.get("cu_seq_lens_q")
    try:
        if error is not None:
            raise error
        if tokens is None:
            raise ValueError("a sharded forward pass needs input_ids or inputs_embeds")
        given_up = None if cache is not None else _given_up_cache(module, tokens, kwargs)
        if given_up is not None:
            raise given_up
        if cache is not None and not isinstance(cache, ShardedCache):
            raise ValueError(
                f"a sharded forward pass takes no {type(cache).__name__}: to generate, fill a sharded cache with "
                f"cache = ra.prefill(model, input_ids), then call model.generate(longer_input_ids, past_key_values=cache)"
            )
        layout = model_layout(module.config, ring, tokens.shape[1] * ring.world_size) if cache is None else cache.layout
        agreed = {
            "the shape of the input": tuple(tokens.shape[:2]),
            "layout": layout,
            "whether attention_mask is given": mask is not None,
            "whether the model trains": module.training,
            "output_attentions": bool(kwargs.get("output_attentions")),
        }
        if 0 in tokens.shape[:2]:
            raise ValueError(f"a sharded forward pass needs tokens, got {tuple(tokens.shape)}")
        if ends is not None:
            packed_documents(1, int(ends[-1]), ends, None)
            agreed["cu_seq_lens_q"] = tuple(ends.tolist())
        told = runs_of_shard(positions, mask, kwargs.get("seq_idx"), layout, ring.rank, tokens.shape[0], first)
    except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as refused:  # whatever one rank came with
        error = refused
    by_rank = ring.agree(agreed, error, tell=told)
    batch = len(by_rank[0][0])
    rows = [sorted(run for runs, _ in by_rank for run in runs[row]) for row in range(batch)]
    documents = tuple(documents_of_row(row, runs, mask is not None, layout, first) for row, runs in enumerate(rows))
    if ends is not None:
        _check_ends(ends, documents, layout)
        length = int(ends[-1])  # where the row ends that was padded to its layout
        documents = tuple(tuple((start, stop) for start, stop in row if start < length) for row in documents)
    elif kwargs.get("seq_idx") is None:
        check_not_local(documents, layout)
    last_position, places = max(last for _, last in by_rank), getattr(module, _PLACES)
    if places is not None and last_position - first >= places:
        raise ValueError(
            f"{type(module).__name__} has learned positions for {places} tokens, and a row has a token at position "
            f"{last_position}, where the first one is at {first}: cut rows to {places} tokens, or take a model with rotary "
            f"positions"
        )
    return ForwardPass(module.config, documents, layout=layout, last_position=last_position)


def _check_ends(ends: Tensor, documents: Documents, layout: SequenceLayout) -> None:
    """Raises ValueError if cu_seq_lens_q is not that of the whole row, as its positions describe it."""
    length = int(ends[-1])
    within = tuple(tuple((start, stop) for start, stop in row if start < length) for row in documents)
    if (
        length <= layout.padded_len - layout.num_pieces
        or length > layout.padded_len
        or packed_documents(len(documents), length, ends, None) != within
    ):
        raise ValueError(
            f"cu_seq_lens_q is {ends.tolist()}, and position_ids describe documents {documents} of the whole row of "
            f"{layout.padded_len} tokens: pass the cu_seq_lens of the whole row, not of the shard, or none"
        )


def first_position(module: nn.Module) -> int:
    """The position id of a row's first token: 0, but behind the padding's id where embeddings number them so."""
    for embeddings in (getattr(module, "embeddings", None), module):
        padding = getattr(embeddings, "padding_idx", None)
        if isinstance(padding, int) and hasattr(embeddings, "create_position_ids_from_input_ids"):
            return padding + 1
    return 0


def places_of(runner: nn.Module) -> int | None:
    """How many tokens of a row a model has positions for, where it looks them up in a table; None where it does not."""
    tables = [
        module.num_embeddings - max(int(getattr(module, "offset", 0)), first_position(runner))
        for name, module in runner.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES
    ]
    return min(tables, default=None)


# ---- modules that take a shard for a row


@torch.compiler.disable(reason="it reads what _before_forward found")
def _with_last_position(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gives RoPE that depends on the row's length one more column, with the row's last position."""
    sharded = FORWARD_PASS.get()
    if sharded is None or (sharded.layout is None and sharded.held is None):
        raise RuntimeError(
            f"{type(module).__name__} depends on the length of the whole row, and was called outside the forward pass of "
            f"the sharded model"
        )
    if sharded.last_position is None:
        return None  # a step, whose positions all ranks have
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
    """Gives a pooler, which reads the first token [B, D] of [B, n, D], that of the whole row: the first one of rank 0."""
    ring: Ring = getattr(module, _RING)
    states: Tensor = args[0]
    taken = states.dim() == 2
    first = ring.first_token(states.unsqueeze(1) if taken else states)
    return (first.squeeze(1) if taken else first, *args[1:])


def sharded_without_documents(module: nn.Module) -> str:
    """What to say of a layer that was not given a mask of a sharded forward pass."""
    return (
        f"{type(module).__name__} of a sharded model was called without the mask that ring_dilated made for it, so the "
        f"documents of the whole row are unknown: call the model, not its layers; a model that makes its masks itself "
        f"cannot be sharded"
    )
