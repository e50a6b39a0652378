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
from ..ring.ring import Ring
from ..transport.agreement import digest
from .cache import ShardedCache, cache_in
from .calls import checked_step
from .cut import rows_of_call, rows_to_cut, tokens_in
from .forward_pass import (
    CALL,
    Call,
    ForwardPass,
    WholeRows,
    running,
    set_forward_pass,
)
from .lm_loss import LossInSlices, cross_entropy, fields_of, loss_in_slices, shifted, way_of_loss
from .positions import warn_of_temperatures
from .recomputation import remember_for_recomputation
from .registration import IMPLEMENTATION
from .rings import attached_ring
from .wrappers import runner_of

logger = logging.getLogger(__name__)

#: Logits of whole rows that are larger than this are warned of, in bytes.
_LARGE_LOGITS = 1 << 30


def begin_call(module: PreTrainedModel, runner: PreTrainedModel, kwargs: dict[str, Any]) -> ForwardPass:
    """Begins a call: finds its rows, decides how its results are joined, and compares the calls of all ranks.

    Args:
        kwargs: the arguments of the call, which change with the decision.

    Raises:
        ValueError: on every rank, if the ranks' calls differ, or a call cannot be cut.
    """
    call: Call = kwargs.pop(CALL, None) or Call()
    remember_for_recomputation(module)
    ring = attached_ring(runner)
    now = ForwardPass(runner.config, module=module, call=call, outer=running().forward_pass)
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
    return now


def _begin_alone(now: ForwardPass, runner: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Finds the rows of a call that this process computes by itself.

    Raises:
        ValueError: packed rows for a model that numbers its tokens itself, or two descriptions of documents that differ.
    """
    tokens = tokens_in(kwargs)
    if tokens is None or tokens.dim() < 2:
        return
    if cache_in(kwargs) is not None:
        if kwargs.get("cu_seq_lens_q") is not None or kwargs.get("seq_idx") is not None:
            raise ValueError("cu_seq_lens and seq_idx describe packed rows, which have no cache: pass use_cache=False")
        return
    now.rows = rows_of_call(runner, tokens, kwargs)
    if now.rows.packed and "position_ids" not in inspect.signature(runner.forward).parameters:
        raise ValueError(
            f"{type(runner).__name__} was given packed rows, and takes no position_ids: it numbers the tokens of a row itself, "
            f"so it would number documents wrongly: pass one document a row, padded"
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
        _log_once(
            ring,
            logging.INFO,
            f"{type(runner).__name__} was called with a cache of its own (generate), so every rank computes whole rows: "
            f"ra.prefill fills a sharded cache",
        )
        if not own_cache:
            _begin_alone(now, runner, kwargs)
        return
    with ring.agreement("a forward pass of a model", by_digest=True) as agreed:
        layout = cache.layout if isinstance(cache, ShardedCache) else None
        now.rows = call.rows or rows_to_cut(runner, ring, kwargs, layout=layout)
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


def _log_once(ring: Ring, level: int, text: str) -> None:
    """Logs a text the first time, on the first rank of a ring."""
    if ring.rank == 0:
        _log_first(level, text)


_log_first = lru_cache(maxsize=256)(logger.log)


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
    if labels is not None and ring is not None:
        where = "in slices, on each rank's part of the rows" if decision.choice == "slices" else "from whole rows"
        _log_once(ring, logging.INFO, f"{type(module).__name__} computes its loss {where}, because {decision.reason}")
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
        _log_first(
            logging.WARNING,
            f"{type(module).__name__} was called without labels, so every rank forms the logits of whole rows, "
            f"{size / 2**30:.1f} GiB in float32: pass labels for a loss in slices, or logits_to_keep for a few tokens",
        )


def end_call(now: ForwardPass, runner: nn.Module, kwargs: dict[str, Any], output: Any) -> Any:
    """Ends the call that `begin_call` began, and returns its output as of whole rows; None for no change.

    Raises:
        RuntimeError: no layer attended by ring_dilated.
        NotImplementedError: an output that the model made from a token of its part alone.
    """
    set_forward_pass(now.outer)
    now.frame = None
    if output is None:  # The forward pass raised an error, which must not be replaced.
        return None
    _check_attended(now, now.module, runner, output)
    if now.head is None:
        return output
    result = now.head.joined_result(output)
    return result if result is not None else now.module(**kwargs, **{CALL: now.call})


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
            f"{name} makes its pooler_output from a token that it looks for in the row, and each rank has only a part: "
            f"use one process (ring=None)"
        )
