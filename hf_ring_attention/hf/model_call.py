"""The call of a patched model: finds its rows, decides how they are cut and joined, and compares the calls of all ranks.

Every rank of a ring calls the model with the same whole rows, and gets what one device would return.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..compute.private import calling_frame, implementation_of
from ..ring.attention import UNTRACEABLE, check_not_traced
from ..ring.ring import Ring
from ..transport.agreement import digest
from .cache import ShardedCache, cache_in
from .calls import checked_step
from .cut import by_name, documents_of_call, rows_to_cut, tokens_in
from .documents import documents_of_rows
from .forward_pass import (
    CALL,
    Call,
    ForwardPass,
    WholeRows,
    drop_broken_passes,
    running,
    set_forward_pass,
)
from .lm_loss import LossInSlices, cross_entropy, fields_of, loss_in_slices, shifted, way_of_loss
from .masks import tokens_of
from .positions import first_position, warn_of_temperatures
from .recomputation import remember_for_recomputation
from .registration import IMPLEMENTATION
from .rings import attached_ring
from .wrappers import runner_of

logger = logging.getLogger(__name__)

#: Logits of whole rows that are larger than this are warned of, in bytes.
_LARGE_LOGITS = 1 << 30


@torch.compiler.disable(reason=UNTRACEABLE)
def before_model(module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begins a call: finds its rows, decides how its results are joined, and compares the calls of all ranks.

    Raises:
        ValueError: on every rank, if the ranks' calls differ, or a call cannot be cut.
    """
    check_not_traced()
    drop_broken_passes()
    runner, outer = runner_of(module), running().forward_pass
    if outer is not None and outer.config is runner.config:
        return None  # The module is a part of the model that was called.
    if any(isinstance(x, nn.Module) for x in args):
        return (
            None  # TRL has put a function of the model in place of its forward, and that calls the model with tokens.
        )
    kwargs = by_name(module, args, kwargs)
    call: Call = kwargs.pop(CALL, None) or Call()
    remember_for_recomputation(module)
    ring = attached_ring(runner)
    now = ForwardPass(runner.config, module=module, call=call, outer=outer)
    if ring is not None and ring.world_size > 1:
        _begin_over_ring(now, runner, ring, call, kwargs)
    else:
        _begin_alone(now, runner, kwargs)
    if now.rows is not None and now.rows.packed:
        assert now.rows.documents is not None
        warn_of_temperatures(runner.config, max(stop for row in now.rows.documents for _, stop in row))
    if not now.whole and now.held is None:
        _decide(now, module, ring, call, kwargs)
    now.frame = calling_frame(module)
    set_forward_pass(now)
    return (), kwargs


def _begin_alone(now: ForwardPass, runner: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Finds the rows of a call that this process computes by itself.

    Raises:
        ValueError: packed rows for a model that numbers its tokens itself, or documents told in two ways that differ.
    """
    tokens = tokens_in(kwargs)
    if tokens is None or tokens.dim() < 2:
        return
    batch, length = tokens.shape[:2]
    if cache_in(kwargs) is not None:
        return
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Mapping) and kwargs.get("cu_seq_lens_q") is None and kwargs.get("seq_idx") is None:
        _check_ready_masks(runner, mask, batch, kwargs.get("position_ids"))
    now.rows = WholeRows(batch, length, *documents_of_call(runner, tokens, kwargs))
    if now.rows.packed and "position_ids" not in inspect.signature(runner.forward).parameters:
        raise ValueError(
            f"{type(runner).__name__} was given packed rows, and takes no position_ids: it numbers the tokens of a row itself, "
            f"so it would number documents wrongly: pass one document a row, padded"
        )


def _check_ready_masks(runner: nn.Module, masks: Mapping[str, Any], batch: int, positions: Tensor | None) -> None:
    """Refuses packed rows whose masks the caller has made already, without their documents.

    Raises:
        ValueError: masks that do not keep the documents apart that positions tell.
    """
    for mask in masks.values():
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            continue
        documents = documents_of_rows(batch, positions, mask, first_position(runner))
        packed = documents is not None and any(len(row) > 1 for row in documents)
        if packed and tokens_of(mask).documents != documents:
            raise ValueError(
                f"{type(runner).__name__} was given packed rows by position_ids that restart, and masks that were made "
                f"without them, under which documents would see each other: tell the documents by seq_idx or cu_seq_lens_q, "
                f"or leave attention_mask out"
            )


def _begin_over_ring(now: ForwardPass, runner: PreTrainedModel, ring: Ring, call: Call, kwargs: dict[str, Any]) -> None:
    """Decides which part of a call each rank computes, once all ranks have come with equal calls.

    Raises:
        ValueError: on every rank, if the calls differ, or cannot be cut.
    """
    cache, tokens = cache_in(kwargs), tokens_in(kwargs)
    if isinstance(cache, ShardedCache) and cache.get_seq_length() > 0:
        now.held = checked_step(ring, cache, tokens, kwargs)
        return
    own_cache = cache is not None and not isinstance(cache, ShardedCache)
    if own_cache or (cache is None and kwargs.get("use_cache") is True):
        now.whole = True
        if ring.rank == 0:
            _log_whole(type(runner).__name__)
        if not own_cache:
            _begin_alone(now, runner, kwargs)
        return
    with ring.agreement("a forward pass of a model", by_digest=True) as agreed:
        layout = cache.layout if isinstance(cache, ShardedCache) else None
        now.rows = call.rows or rows_to_cut(runner, ring, kwargs, layout=layout)
        now.cut_before = call.rows is not None
        part = None if call.rows is None or call.rows.layout is None else call.rows.layout.local_len
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and (part is None or value.shape[1:2] != (part,)):
                agreed.same(name, digest(value))
            elif value is None or isinstance(value, (bool, int, float, str)):
                agreed.same(name, value)
        agreed.same("the tokens of a cut batch", now.rows.checksum)
        agreed.same("the division of the rows", digest(now.rows))
        agreed.same("whether the model trains", runner.training)
        agreed.same("whether gradients are recorded", torch.is_grad_enabled())


@lru_cache(maxsize=256)
def _log_whole(name: str) -> None:
    logger.info(
        "%s was called with a cache of its own (generate), so every rank computes whole rows: ra.prefill fills a sharded cache",
        name,
    )


def _decide(now: ForwardPass, module: PreTrainedModel, ring: Ring | None, call: Call, kwargs: dict[str, Any]) -> None:
    """Decides how the results of a call are joined, and changes its arguments for it."""
    rows, labels = now.rows, kwargs.get("labels")
    sharded = rows is not None and rows.layout is not None
    if running().head is not None:
        now.parts = True  # The caller watches the head, and computes with the parts.
        return
    if kwargs.get("fused_lm_head") and sharded and labels is not None:
        assert ring is not None and rows is not None
        now.parts, now.head = True, fields_of(rows, ring, kwargs)
        return
    if (ring is None and call.of_slice is None) or rows is None or kwargs.get("fused_lm_head"):
        return
    decision = way_of_loss(module, kwargs, (rows.batch, rows.length))
    if labels is not None and ring is not None and ring.rank == 0:
        _log_decision(type(module).__name__, decision.choice, decision.reason)
    if decision.choice == "slices":
        assert isinstance(labels, Tensor)
        given = kwargs.get("shift_labels")
        loss = LossInSlices(
            module, shifted(labels) if given is None else given, rows, ring, call.of_slice or cross_entropy
        )
        loss.watch()
        module.loss_function = loss_in_slices
        now.parts, now.head = True, loss
    elif call.of_slice is not None:
        raise NotImplementedError(f"a loss in slices of tokens cannot be computed: {decision.reason}")
    elif sharded and labels is None and module.get_output_embeddings() is not None:
        _keep_few(now, module, rows, kwargs)


@lru_cache(maxsize=256)
def _log_decision(name: str, choice: str, reason: str) -> None:
    how = "in slices, on each rank's part of the rows" if choice == "slices" else "from whole rows, on every rank"
    logger.info("%s computes its loss %s, because %s", name, how, reason)


def _keep_few(now: ForwardPass, module: PreTrainedModel, rows: WholeRows, kwargs: dict[str, Any]) -> None:
    """Has the hidden states joined only at tokens whose logits are kept, and warns of large logits."""
    keep, count = kwargs.get("logits_to_keep"), rows.length
    if "logits_to_keep" in inspect.signature(module.forward).parameters:
        numbers = torch.arange(rows.length)
        if isinstance(keep, int) and not isinstance(keep, bool) and keep > 0:
            now.keep = numbers[-keep:]
        elif isinstance(keep, Tensor) and keep.dim() == 1 and keep.dtype in (torch.int32, torch.int64):
            now.keep = numbers[keep.cpu()]
        if now.keep is not None:
            kwargs["logits_to_keep"], count = 0, len(now.keep)
    vocabulary = getattr(runner_of(module).config, "vocab_size", 0)
    size = rows.batch * count * vocabulary * 4
    if size > _LARGE_LOGITS:
        _warn_of_logits(type(module).__name__, round(size / 2**30, 1))


@lru_cache(maxsize=64)
def _warn_of_logits(name: str, gib: float) -> None:
    logger.warning(
        "%s was called without labels, so every rank forms the logits of whole rows, %s GiB in float32: pass labels for a loss "
        "in slices, or logits_to_keep for the logits of a few tokens",
        name,
        gib,
    )


@torch.compiler.disable(reason="it belongs to before_model")
def after_model(module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Ends the call that `before_model` began, and checks that ring_dilated took part.

    Raises:
        RuntimeError: no layer attended by ring_dilated.
        NotImplementedError: an output that the model made from a token of its part alone.
    """
    now, runner = running().forward_pass, runner_of(module)
    if now is None or now.module is not module or now.config is not runner.config:
        return None
    set_forward_pass(now.outer)
    now.frame = None
    if output is None:  # The forward pass raised an error, which must not be replaced.
        return None
    _check_attended(now, module, runner, output)
    if now.head is None:
        return None
    result = now.head.joined_result(output)
    return result if result is not None else module(*args, **kwargs, **{CALL: now.call})


def _check_attended(now: ForwardPass, module: PreTrainedModel, runner: nn.Module, output: Any) -> None:
    name, implementation = type(module).__name__, implementation_of(runner.config)
    sharded = now.layout is not None or now.held is not None
    if not now.attended and sharded:
        raise RuntimeError(
            f"no layer of {name} attended by ring_dilated ({implementation!r} is set), so each rank saw nothing but its "
            f"part: call ra.patch_model; if that was done, {name} cannot be sharded: use one process (ring=None)"
        )
    if not now.attended and implementation == IMPLEMENTATION:
        raise RuntimeError(
            f"no layer of {name} attended by ring_dilated: it computes attention of its own, and would ignore the pattern: "
            f"use 'eager'"
        )
    if sharded and getattr(output, "pooler_output", None) is not None and not hasattr(runner, "pooler"):
        raise NotImplementedError(
            f"{name} makes its pooler_output from a token that it looks for in the row, of which each rank "
            f"has a part: use one process (ring=None)"
        )
