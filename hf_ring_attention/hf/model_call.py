"""The call of a patched model: finds its rows, decides how they are cut and joined, and compares the calls of all ranks.

Every rank of a ring calls the model with the same whole rows, and gets what one device would return.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..compute.private import calling_frame, checkpointing_of, implementation_of, set_checkpointing
from ..plan.problem import HeldKeys
from ..ring.ring import Ring
from ..transport.agreement import digest
from .cache import ShardedCache, cache_in
from .config import patterns_of_layers, warn_once
from .cut import rows_of_call, rows_to_cut, tokens_in
from .documents import documents_from_mask
from .forward_pass import CALL, Call, ForwardPass, WholeRows, running, running_with, set_forward_pass
from .lm_loss import LossInSlices, cross_entropy, join_of_fields, loss_in_slices, shifted, way_of_loss
from .positions import warn_of_temperatures
from .registration import IMPLEMENTATION
from .rings import attached_ring

logger = logging.getLogger(__name__)

#: Logits of whole rows that are larger than this are warned of, in bytes.
_LARGE_LOGITS = 1 << 30


def begin_call(module: PreTrainedModel, runner: PreTrainedModel, kwargs: dict[str, Any]) -> ForwardPass:
    """Begins a call: finds its rows, decides how its results are joined, and compares the calls of all ranks.

    Args:
        kwargs: the arguments of the call, which change with the decision.
    """
    call: Call = kwargs.pop(CALL, None) or Call()
    _remember_for_recomputation(module)
    own, outer = patterns_of_layers(runner.config), running().forward_pass
    now = ForwardPass(runner, module, attached_ring(runner), call, own_patterns=own, outer=outer)
    _find_rows(now, kwargs)
    if now.rows is not None and now.rows.packed:
        warn_of_temperatures(runner.config, max(stop for row in now.documents or () for _, stop in row))
    if not now.whole and now.held is None:
        _decide(now, kwargs)
    now.frame = calling_frame(module)
    set_forward_pass(now)
    return now


def _remember_for_recomputation(model: PreTrainedModel) -> None:
    """Makes layers that recompute their forward pass in backward find the documents of the pass that they repeat."""
    if not torch.is_grad_enabled():  # There will be no backward.
        return
    for module in model.modules():
        checkpoint = checkpointing_of(module)
        if checkpoint is not None and not isinstance(checkpoint, _Remembering):
            set_checkpointing(module, _Remembering(checkpoint))


class _Remembering:
    """A function that checkpoints others, and sets for their recomputation the `ForwardPass` in which they ran first."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        now = running().forward_pass

        def run(*args: Any, **kwargs: Any) -> Any:
            with running_with(forward_pass=now):
                return function(*args, **kwargs)

        return self.checkpoint(run, *args, **kwargs)


def _find_rows(now: ForwardPass, kwargs: Mapping[str, Any]) -> None:
    """Finds the rows of a call, and the part of each rank, once all ranks have come with equal calls."""
    ring, runner, cut_rows = now.ring, now.runner, now.call.rows
    cache, tokens = cache_in(kwargs), tokens_in(kwargs)
    if ring is None or ring.world_size == 1:
        _find_rows_alone(now, kwargs)
        return
    sharded_cache = cache if isinstance(cache, ShardedCache) else None
    if sharded_cache is not None and sharded_cache.get_seq_length() > 0:
        now.held = _checked_step(ring, sharded_cache, tokens, kwargs)
        return
    if sharded_cache is None and (cache is not None or kwargs.get("use_cache") is True):
        now.whole = True
        if ring.rank == 0:
            _log_once(
                f"{type(runner).__name__} was called with a cache of its own (generate), so every rank computes whole rows: "
                f"ra.prefill fills a sharded cache"
            )
        _find_rows_alone(now, kwargs)
        return
    with ring.agreement("a forward pass of a model", by_digest=True) as agreed:
        layout = None if sharded_cache is None else sharded_cache.layout
        now.rows = cut_rows or rows_to_cut(runner, ring, kwargs, layout=layout)
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


def _find_rows_alone(now: ForwardPass, kwargs: Mapping[str, Any]) -> None:
    """Finds the rows of a call that this process computes by itself."""
    tokens, name = tokens_in(kwargs), type(now.runner).__name__
    if tokens is None or tokens.dim() < 2:
        return
    if cache_in(kwargs) is not None:
        if kwargs.get("cu_seq_lens_q") is not None or kwargs.get("seq_idx") is not None:
            raise ValueError("cu_seq_lens and seq_idx describe packed rows, which have no cache: pass use_cache=False")
        return
    now.rows = rows_of_call(now.runner, tokens, kwargs)
    if now.rows.packed and "position_ids" not in inspect.signature(now.runner.forward).parameters:
        raise ValueError(
            f"{name} was given packed rows, and takes no position_ids: it numbers the tokens of a row itself, so it would "
            f"number documents wrongly: pass one document a row, padded"
        )


def _checked_step(ring: Ring, cache: ShardedCache, tokens: Tensor | None, kwargs: Mapping[str, Any]) -> HeldKeys:
    """Returns what this rank's cache holds in a step of generation; all ranks must have the same tokens, positions and mask."""
    mask, length = kwargs.get("attention_mask"), 0
    with ring.agreement("a step of generation", by_digest=True) as call:
        if tokens is None:
            raise ValueError("a forward pass needs input_ids or inputs_embeds")
        length, held = tokens.shape[1], cache.get_seq_length()
        call.same("the tokens of a step", digest(tokens))
        if tokens.shape[0] != cache.num_rows:
            raise ValueError(
                f"the cache holds {cache.num_rows} batch rows, and {tokens.shape[0]} came: for beams, call "
                f"cache.batch_repeat_interleave(beams) before generate"
            )
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


@lru_cache(maxsize=256)
def _log_once(text: str) -> None:
    """Logs a text the first time."""
    logger.info(text)


def _decide(now: ForwardPass, kwargs: dict[str, Any]) -> None:
    """Decides how the results of a call are joined, and changes its arguments for it."""
    module, ring, rows, of_slice = now.module, now.ring, now.rows, now.call.of_slice
    labels, fused = kwargs.get("labels"), kwargs.get("fused_lm_head")
    if running().head is not None:
        now.parts = True  # The caller watches the head, and computes with the parts.
        return
    if fused and now.layout is not None and labels is not None:
        assert ring is not None and rows is not None
        now.parts, now.join_result = True, join_of_fields(rows, ring, kwargs)
        return
    if (ring is None and of_slice is None) or rows is None or fused:
        return
    decision = way_of_loss(module, kwargs, (rows.batch, rows.length))
    if labels is not None and ring is not None and ring.rank == 0:
        where = "in slices, on each rank's part of the rows" if decision.choice == "slices" else "from whole rows"
        _log_once(f"{type(module).__name__} computes its loss {where}, because {decision.reason}")
    if decision.choice == "slices":
        shifted_labels = kwargs.get("shift_labels")
        if shifted_labels is None:
            assert isinstance(labels, Tensor)
            shifted_labels = shifted(labels)
        loss = LossInSlices(module, shifted_labels, rows, ring, of_slice or cross_entropy)
        loss.watch()
        module.loss_function = loss_in_slices
        now.parts, now.head, now.join_result = True, loss, loss.joined_result
    elif of_slice is not None:
        raise NotImplementedError(f"a loss in slices of tokens cannot be computed: {decision.reason}")
    elif now.layout is not None and labels is None and module.get_output_embeddings() is not None:
        _keep_few(now, rows, kwargs)


def _keep_few(now: ForwardPass, rows: WholeRows, kwargs: dict[str, Any]) -> None:
    """Has the hidden states joined only at tokens whose logits are kept, and warns of large logits."""
    keep, count = kwargs.get("logits_to_keep"), rows.length
    if "logits_to_keep" in inspect.signature(now.module.forward).parameters:
        numbers = torch.arange(rows.length)
        if isinstance(keep, int) and not isinstance(keep, bool) and keep > 0:
            now.keep = numbers[-keep:]
        elif isinstance(keep, Tensor) and keep.dim() == 1 and keep.dtype in (torch.int32, torch.int64):
            now.keep = numbers[keep.cpu()]
        if now.keep is not None:
            kwargs["logits_to_keep"], count = 0, len(now.keep)
    size = rows.batch * count * getattr(now.runner.config, "vocab_size", 0) * 4
    if size > _LARGE_LOGITS:
        warn_once(
            f"{type(now.module).__name__} was called without labels, so every rank forms the logits of whole rows, "
            f"{size / 2**30:.1f} GiB in float32: pass labels for a loss in slices, or logits_to_keep for a few tokens"
        )


def end_call(now: ForwardPass, kwargs: dict[str, Any], output: Any) -> Any:
    """Ends the call that `begin_call` began, and returns its output as of whole rows; None for no change."""
    set_forward_pass(now.outer)
    now.frame = None
    if now.head is not None:
        now.head.unwatch()
    if output is None:  # The forward pass raised an error, which must not be replaced.
        return None
    _check_attended(now, output)
    if now.join_result is None:
        return output
    result = now.join_result(output)
    return result if result is not None else now.module(**kwargs, **{CALL: now.call})


def _check_attended(now: ForwardPass, output: Any) -> None:
    """Refuses results of layers that did not attend by ring_dilated, and of a pooler that saw a part of the row alone."""
    name, implementation = type(now.module).__name__, implementation_of(now.runner.config)
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
    if sharded and getattr(output, "pooler_output", None) is not None and not hasattr(now.runner, "pooler"):
        raise NotImplementedError(
            f"{name} makes its pooler_output from a token that it looks for in the row, and each rank has only a part: "
            f"use one process (ring=None)"
        )
