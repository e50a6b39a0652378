"""The call of a patched model: finds its rows, decides how they are cut and joined, and compares the calls of all ranks.

Hooks around the model begin and end its call, and hooks around its decoder cut the rows and join the results. Further hooks
correct the few modules that would take a rank's part for a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...compute.private import (
    calling_frame,
    checkpointing_of,
    implementation_of,
    may_checkpoint,
    remove_hooks,
    set_checkpointing,
)
from ...plan.problem import Documents
from ...ring.operator import UNTRACEABLE, check_not_traced
from ...ring.ring import Ring
from ..cache.ring_cache import attach_ring_cache, in_ring_cache
from ..forward_pass import (
    CALL,
    ForwardPass,
    RingCall,
    WholeRows,
    drop_broken_passes,
    names_rows_in_graph,
    new_pass,
    pass_of_decoder,
    running,
    running_with,
    set_forward_pass,
)
from ..layer.indexed import attach_indexers
from ..layer.whole_layers import attach_whole_layers, with_whole_mask
from ..loss.lm_loss import join_of_fields
from ..loss.on_use import OnUse
from ..loss.output_layer import wrap_head
from ..loss.values import Origin
from ..model.config import warn_of_unused_pattern, warn_once
from ..model.support import has_next_token_loss
from ..model.types import WHOLE_LAYERS
from ..model.wrappers import Attachment, attachment_of, by_name, cache_in, decoder_of, runner_of, set_attachments, takes
from ..names import IMPLEMENTATION
from ..rows.cut import cut, find_rows, whole_positions
from ..rows.join import joined_output, kept
from .graph import begin_in_graph, end_in_graph, fits_a_graph, in_graph
from .probe import check_tokens_apart

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def attach_ring(model: PreTrainedModel, ring: Ring | None, kernel: str, own_attention: bool = False) -> None:
    """Makes these the ring and the kernel of the model's attention layers; ring=None makes its rows whole ones again.

    Args:
        own_attention: whether its layers attend as in Transformers, and not by ring_dilated.
    """
    ours = __name__, attach_ring_cache.__module__, attach_whole_layers.__module__
    for module in model.modules():
        remove_hooks(module, lambda hook: getattr(hook, "__module__", None) in ours)
    # Any of these may be called: a model with its head, its base model, and the decoder of this.
    for called in dict.fromkeys((model, model.base_model, runner_of(model))):
        called.register_forward_pre_hook(before_model, with_kwargs=True)
        called.register_forward_hook(after_model, with_kwargs=True, always_call=True)
    _wrap_decoder(runner_of(model))
    sharded = ring is not None and ring.world_size > 1
    corrected = _correct_modules(model.base_model, sharded)
    in_graphs = fits_a_graph(model, ring) and not corrected and not own_attention
    loss_in_parts = has_next_token_loss(model)
    attachment = Attachment(ring, kernel, in_graphs=in_graphs, loss_in_parts=loss_in_parts, own_attention=own_attention)
    set_attachments(model, attachment)
    if sharded:
        attach_ring_cache(runner_of(model))
        attach_whole_layers(runner_of(model))
    attach_indexers(decoder_of(model))


class DecoderForward:
    """The forward of a decoder, which also begins and ends its call where somebody calls `forward` itself, not the module."""

    def __init__(self, module: PreTrainedModel, own: Callable[..., Any] | None) -> None:
        self.module, self.own = module, own

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._of(self.module))

    def _of(self, module: Any) -> Callable[..., Any]:
        return partial(type(module).forward, module) if self.own is None else self.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or names_rows_in_graph(kwargs.get("attention_mask")):
            return self._of(self.module)(*args, **kwargs)
        now = running().forward_pass
        begun = None if now is None else now.decoder  # or a replica, whose attributes are the same
        ours = begun is not None and vars(begun).get("forward") is self
        return self._of(begun)(*args, **kwargs) if ours else self.module(*args, **kwargs)


def _wrap_decoder(runner: PreTrainedModel) -> None:
    """Has hooks of a decoder run however it is called; one with an output layer keeps the forward that its loss is known by."""
    own = vars(runner).get("forward")
    if runner_of(runner) is runner and runner.get_output_embeddings() is None and not isinstance(own, DecoderForward):
        runner.forward = DecoderForward(runner, own)


def _correct_modules(base: nn.Module, sharded: bool) -> bool:
    """Corrects the modules that would take a row for a document, or a rank's part for a row; returns whether there are any."""
    corrected = False
    for name, module in base.named_modules():
        kinds = getattr(module, "rope_type", None)
        if any(kind in _LENGTH_DEPENDENT_ROPE for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
            module.register_forward_hook(_by_document, with_kwargs=True)
            corrected = True
        if sharded and name == "pooler":
            module.register_forward_pre_hook(_with_first_token)
            corrected = True
    return corrected


# ---- hooks of the model and its decoder


def before_model(module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begins the call of a model, and gives its decoder this rank's part of the rows."""
    # After a graph break, a call that began in a graph continues eagerly.
    traced = torch.compiler.is_dynamo_compiling()
    if names_rows_in_graph(kwargs.get("attention_mask")) or (traced and in_graph(module, args, kwargs)):
        return (), begin_in_graph(module, args, kwargs)
    return _before_model(module, args, kwargs)


@torch.compiler.disable(reason=UNTRACEABLE)
def _before_model(module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    check_not_traced()
    drop_broken_passes()
    runner = runner_of(module)
    now = pass_of_decoder(runner)
    # TRL puts a function of the model in place of its forward, which calls the model with tokens.
    if (now is not None and module is not runner) or any(isinstance(x, nn.Module) for x in args):
        return None
    kwargs = by_name(module, args, kwargs)
    if now is None:
        warn_of_unused_pattern(module.config)
        now = begin_call(module, runner, kwargs)
    now.decoder = module if module is runner else None
    return (), kwargs if module is not runner or now.rows is None else _of_decoder(now, now.rows, kwargs)


def _of_decoder(now: ForwardPass, rows: WholeRows, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the decoder: this rank's part of the rows, and positions that count each packed document."""
    runner = now.runner
    if rows.layout is None:
        return {**kwargs, "position_ids": whole_positions(runner, rows, kwargs)} if rows.packed else kwargs
    if now.call.rows is None:  # Otherwise a loader has cut them.
        kwargs, now.rows = cut(runner, kwargs, rows, now.ring)
    if attachment_of(runner).own_attention:
        of_whole = runner.config.model_type in WHOLE_LAYERS
        return with_whole_mask(now, kwargs) if of_whole else in_ring_cache(now, kwargs)
    check_tokens_apart(now, kwargs)
    cacheless = takes(runner, "use_cache") and getattr(cache_in(kwargs), "layout", None) is None
    return {**kwargs, "use_cache": False} if cacheless else kwargs


def after_model(module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Joins the results of the decoder, and ends the call of a model."""
    if names_rows_in_graph(kwargs.get("attention_mask")):
        return end_in_graph(module, kwargs, output)
    if torch.compiler.is_dynamo_compiling() and not attachment_of(module).runs:
        return output
    return _after_model(module, output)


@torch.compiler.disable(reason="it belongs to before_model")
def _after_model(module: PreTrainedModel, output: Any) -> Any:
    """Returns the output as of whole rows; None for no change."""
    runner = runner_of(module)
    now = pass_of_decoder(runner)
    if now is None:
        return None
    now.decoder = None
    if module is runner and now.rows is not None and output is not None:
        output = joined_output(now, output)
    if now.module is not module:
        return output
    set_forward_pass(now.outer)
    now.mark_running(False)
    now.frame = None
    if output is None:  # The forward pass raised an error, which must not be replaced.
        return None
    _check_attended(now, output)
    if now.call.of_slice is not None and not (now.origin is not None and now.origin.sliced):
        raise NotImplementedError(
            f"{type(module).__name__} computes no cross entropy of its logits, so a loss in slices of tokens cannot take its "
            f"place"
        )
    if now.kept is not None:
        now.kept.end_call()
    return output if now.join_result is None else now.join_result(output)


def _check_attended(now: ForwardPass, output: Any) -> None:
    """Refuses results of layers that did not attend by ring_dilated, and of a pooler that saw only a part of the row."""
    name, implementation = type(now.module).__name__, implementation_of(now.runner.config)
    sharded = now.layout is not None or getattr(now.kept, "layout", None) is not None
    if not now.attended and (sharded or implementation == IMPLEMENTATION):
        raise RuntimeError(
            f"no layer of {name} attended by ring_dilated ({implementation!r} is set), so patterns and rings have no effect: "
            f"call ra.patch_model; after that, use 'eager' on one process (ring=None)"
        )
    if sharded and getattr(output, "pooler_output", None) is not None and not hasattr(now.runner, "pooler"):
        raise NotImplementedError(
            f"{name} makes its pooler_output from any token of the row, and a rank has only a part: use one process (ring=None)"
        )


# ---- the beginning of a call


def begin_call(module: PreTrainedModel, runner: PreTrainedModel, kwargs: dict[str, Any]) -> ForwardPass:
    """Begins a call: finds its rows, decides how its results are joined, which changes kwargs, and compares all ranks."""
    _remember_for_recomputation(module)
    now = new_pass(runner, module, kwargs.pop(CALL, None) or RingCall())
    find_rows(now, kwargs)
    if now.rows is not None and now.rows.packed:
        if isinstance(mask := kwargs.get("attention_mask"), Tensor):
            kwargs["attention_mask"] = (mask != 0).to(mask.dtype)  # Models take its numbers for padding only.
        _warn_of_temperatures(runner.config, max(stop for row in now.documents or () for _, stop in row))
    if not now.whole:
        _decide(now, kwargs)
    now.frame = calling_frame(module)
    now.mark_running(True)
    set_forward_pass(now)
    return now


def _warn_of_temperatures(config: Any, seq_len: int) -> None:
    """Logs once that a model scales queries by their places in the row, so packed documents differ from single ones."""
    floor = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and isinstance(floor, (int, float)) and seq_len >= floor:
        warn_once(
            f"{type(config).__name__} has attn_temperature_tuning, so packed documents are scaled by their places in the row "
            f"of {seq_len} tokens: pack rows of fewer than {floor} tokens, pad documents, or set it to False in the "
            f"config before the model is made"
        )


def _remember_for_recomputation(model: PreTrainedModel) -> None:
    """Makes layers that recompute their forward pass in backward find the documents of the pass that they repeat."""
    if not torch.is_grad_enabled():  # There will be no backward.
        return
    for module in may_checkpoint(model):
        checkpoint = checkpointing_of(module)
        if checkpoint is not None and getattr(checkpoint, "func", None) is not _checkpointed:
            set_checkpointing(module, partial(_checkpointed, checkpoint))


def _checkpointed(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Checkpoints a function, and sets the `ForwardPass` of its first run for its recomputation."""
    if torch.compiler.is_dynamo_compiling():
        return checkpoint(function, *args, **kwargs)
    return checkpoint(running_with(forward_pass=running().forward_pass)(function), *args, **kwargs)


def _decide(now: ForwardPass, kwargs: dict[str, Any]) -> None:
    """Decides how the results of a call are joined, and changes its arguments for it."""
    module, rows, of_slice = now.module, now.rows, now.call.of_slice
    labels = any(kwargs.get(name) is not None for name in ("labels", "shift_labels"))
    if kwargs.get("fused_lm_head"):
        if labels and now.layout is not None:
            assert rows is not None
            now.join_last, now.join_result = lambda part: part, join_of_fields(rows, now.ring, kwargs)
        return
    head = module.get_output_embeddings()
    if rows is None or (head is None and not running().on_use):
        return
    for_loss = labels and (attachment_of(now.runner).ring is not None or of_slice is not None)
    keeps_logits = running().on_use or for_loss
    if keeps_logits or now.layout is not None:
        now.origin = Origin(type(module).__name__, rows, now.ring, keeps_logits, of_slice)
        now.join_last = partial(OnUse.of_hidden, origin=now.origin)
        if head is not None:
            wrap_head(head)


# ---- modules that take a part for a row


@torch.compiler.disable(reason="it reads what before_model found")
def _by_document(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Computes RoPE that depends on the length of the row by the length of each document, as if it were alone."""
    now = running().forward_pass
    if now is None:
        return output
    given = {name: x for name, x in (*enumerate(args), *kwargs.items()) if isinstance(x, Tensor)}
    # Code of others gives positions another name.
    name, positions = next((name, x) for name, x in given.items() if not x.is_floating_point())
    documents = now.documents or next((x.documents for x in now.tokens if x.valid is None), None)
    if now.rows is None:  # A step of generation, where all ranks have all positions.
        _warn_of_lengths(positions, module.config)
    if now.rows is None or documents is None:
        return output
    spans = spans_of_documents(documents, positions if now.rows.positions is None else now.rows.positions)
    spans[..., 1].clamp_(min=_shortest_scaled(module.config))
    kinds = spans[..., 1].unique().tolist()
    if now.layout is not None:
        spans = now.ring.shard(spans, now.layout)
    elif kinds == [max(kinds[0], int(positions.max()) + 1)]:
        return output

    def rope(positions: Tensor) -> tuple[Tensor, ...]:
        others = [positions if number == name else x for number, x in enumerate(args)]
        found = module.forward(*others, **{key: positions if key == name else x for key, x in kwargs.items()})
        return found if isinstance(found, tuple) else (found,)

    results = _rope_of_lengths(rope, positions, spans.to(positions.device), kinds)
    return tuple(results) if isinstance(output, tuple) else results[0]


def _rope_of_lengths(
    rope: Callable[[Tensor], tuple[Tensor, ...]], positions: Tensor, spans: Tensor, lengths: list[int]
) -> list[Tensor]:
    """Returns the results of RoPE in which each token, with its document's span, is scaled by the length of its document."""
    results: list[Tensor] = []
    first, of_tokens = spans.unbind(-1)
    for length in lengths:
        inside = of_tokens == length
        rope(torch.zeros_like(positions[..., :1]))  # Dynamic RoPE keeps a longer row's scale until a short one comes.
        last = torch.full_like(inside[:, :1], length - 1, dtype=positions.dtype)
        row = torch.where(inside, positions - first, 0).clamp(0, length - 1)  # Padding may lie beyond it.
        found = [x[:, :-1] for x in rope(torch.cat([row, last.expand_as(row[..., :1])], -1))]
        results = [torch.where(inside[..., None], *pair) for pair in zip(found, results or found)]
    return results


def spans_of_documents(documents: Documents, positions: Tensor) -> Tensor:
    """Returns [B, n, 2]: the first position of each token's document, and how many it spans; padding has the longest span."""
    positions = positions.amax(0) if positions.dim() == 3 else positions
    spans = torch.zeros(len(documents), positions.shape[1], 2, dtype=torch.int64, device=positions.device)
    for row, runs in enumerate(documents):
        for start, stop in runs:
            first, last = positions[row % len(positions), start:stop].aminmax()
            spans[row, start:stop] = torch.stack([first, last - first + 1])
    spans[..., 1].masked_fill_(spans[..., 1] == 0, int(spans[..., 1].max()))
    return spans


def _warn_of_lengths(positions: Tensor, config: Any) -> None:
    """Logs once that RoPE of all rows that are generated has the scale of the longest one."""
    ends = positions.reshape(-1, positions.shape[-1]).amax(1) + 1
    if len(ends) > 1 and ends.min() < ends.max() > _shortest_scaled(config):
        warn_once(
            f"{type(config).__name__} scales RoPE by the length of the longest row, so shorter rows generated beside it "
            f"change: generate one row at a time"
        )


def _shortest_scaled(config: Any) -> int:
    """Returns a number of positions up to which RoPE that depends on the length of the row is not scaled."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = (parameters, *(x for x in parameters.values() if isinstance(x, dict)))
    found = [config.max_position_embeddings, *(x.get("original_max_position_embeddings") for x in kinds)]
    return min(x for x in found if x is not None)


@torch.compiler.disable(reason="it asks another rank")
def _with_first_token(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Gives a pooler the first token of the whole sequence; it reads the first token [B, D] of [B, n, D]."""
    now = running().forward_pass
    if now is None or now.layout is None:
        return None
    assert now.rows is not None
    one_token = args[0].dim() == 2
    # The token at the beginning of the row is the first one of its rank.
    states: Tensor = args[0].unsqueeze(1).expand(-1, now.layout.local_len, -1) if one_token else args[0]
    numbers = torch.arange(now.rows.batch, device=states.device)[:, None] * now.rows.length
    first = kept(states, now.rows, now.ring, numbers)
    return (first.squeeze(1) if one_token else first, *args[1:])
