"""The attention implementation "ring_dilated", as Transformers calls it in every layer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from ...plan.branches import Branch, Segment, Window
from ...plan.patterns import Pattern
from ...plan.problem import Documents, HeldKeys
from ...ring.operator import UNTRACEABLE, GraphLayer, check_not_traced
from ...ring.planned import Planned, planned_call, refusals_of_all
from ..cache.pattern_layer import layer_call
from ..forward_pass import CALL, ForwardPass, forward_pass_of, names_rows_in_graph, new_pass, number_of
from ..model.config import layer_pattern
from ..model.wrappers import MODULES, attachment_of, head_shard
from ..names import IMPLEMENTATION
from ..rows.cut import at_its_place_in_the_row
from .checks import (
    LayerSettings,
    check_call,
    check_dropped_keys,
    check_padding,
    name_of,
)
from .indexed import CHOICES, attention_by_choice, choice_of
from .masks import TOKENS, OwnBranch, Tokens, padding_first, tokens_of

#: The attribute of attention modules that holds a function of a layer's call and its output, which returns that output.
TAP = "_ring_dilated_tap"


#: Queries, keys, values and sinks.
LayerTensors = tuple[Tensor, Tensor, Tensor, Tensor | None]


class LayerFacts(NamedTuple):
    """All that the checks of a layer and its call depend on, but for the numbers in its tensors.

    If `_checked` reads something new, add a field: tests/hf/test_facts.py fails until then.
    """

    layer: type[nn.Module]
    tokens: Tokens  # what the mask says, without the tensor of padding
    padding_inside: int | None  # tokens of a row with padding inside a document; None without
    of_module: tuple[OwnBranch | None, bool] | None  # window or chunks, and causality, under a plain mask
    patterns: tuple[Any, ...]  # of all layers, and of this one; and whether others have their own
    of_pass: tuple[Any, ...]  # what all layers of the forward pass have in common
    drafts: int | None  # the number of a layer that drafts tokens
    called_alone: bool  # outside of its model's call
    settings: tuple[Any, ...]  # dropout, scaling, sliding_window and softcap
    given: tuple[tuple[str, Any], ...]  # the arguments beside them; of tensors only that they came
    head_shard: tuple[int, int] | None  # None for all heads
    recorded: bool
    in_graph: bool
    tensors: tuple[Any, ...]  # shapes, dtypes, devices, and whether they require gradients


def ring_dilated_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes a layer's attention; Transformers calls this function for "ring_dilated".

    The first layer of a kind in a forward pass checks and plans its call; the others use it.

    Args:
        query: [B, H, m, D]; key: [B, Hkv, n, D]; value: [B, Hkv, n, Dv]. The queries are the last m of the n tokens.
        attention_mask: the mask of `ring_dilated_mask`, a plain [B, n] mask, or None for rows of one document.
        sliding_window: the layer's own window, in tokens, for a plain mask.
        softcap: scores s become softcap * tanh(s / softcap).
        s_aux: [H] the logits of one more column of the softmax, whose value is 0.

    Returns:
        out [B, m, H, Dv], and None for the weights that are never formed.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    tensors, settings = (query, key, value, s_aux), (dropout, scaling, sliding_window, softcap, kwargs)
    if torch.compiler.is_dynamo_compiling():
        attachment, named = attachment_of(module), names_rows_in_graph(attention_mask)
        others = [name for name, x in kwargs.items() if x is not None and x is not False and name != CALL]
        plain = "is_causal" not in others and getattr(module, TAP, None) is None
        if attachment.in_graphs and named and plain:
            numbers = [float(torch.is_grad_enabled()), *(math.nan if x is None else float(x) for x in settings[:4])]
            text = f"{attachment.number} {' '.join(others)}"
            out, _ = torch.ops.hf_ring_attention.attend(*tensors, attention_mask, 0, text, numbers)
            return out.transpose(1, 2).contiguous(), None
        return _layer_attention_at_a_break(module, tensors, attention_mask, settings), None
    return _layer_attention(module, tensors, attention_mask, settings), None


def _layer_attention(module: nn.Module, tensors: LayerTensors, mask: Tensor | None, settings: LayerSettings) -> Tensor:
    """Returns out [B, m, H, Dv] of a layer."""
    now = forward_pass_of(getattr(module, "config", None), module) or new_pass(module)
    if now.probes:  # Some layers share keys and values, and Llama 4 scales queries by their places.
        return F.pad(F.normalize(tensors[0], dim=-1), (0, tensors[2].shape[-1] - tensors[0].shape[-1])).transpose(1, 2)
    if not CHOICES.isdisjoint(settings[4]) or (mask is not None and mask.dim() == 3):
        chosen = choice_of(mask, settings[4])
        if chosen is not None:
            return attention_by_choice(module, tensors, chosen, settings, now)
    (query, key, value, sinks), tokens = tensors, getattr(mask, TOKENS, None) or _tokens_of(module, mask, now)
    if now.kept is not None and now.kept.arrival.seen:
        return _attention_to_kept(module, tensors, tokens, settings, now)
    planned = _planned(module, tensors, tokens, settings, now)
    layout, valid = tokens.layout, tokens.valid
    if layout is not None:
        query = at_its_place_in_the_row(module, query, layout, planned.ring.rank)
    if valid is not None:
        asking = valid[:, -query.shape[2] :].to(query.device)
        rows, queries = padding_first(valid).to(query.device), padding_first(asking)
        query, key, value = _reordered(query, queries), _reordered(key, rows), _reordered(value, rows)
    out = planned(query, key, value, sinks)[0]
    # A calibration chooses no pattern for layers with the model's window or chunks.
    tap = getattr(module, TAP, None)
    if tap is not None and planned.call.held is None and _of_model(module, tokens, settings[2]) is None:
        out = tap(module, query, key, value, out, planned.arguments() | {"sinks": sinks})
    if valid is not None:
        out = _reordered(out, queries.argsort(1)).masked_fill(~asking[:, None, :, None], 0)
    if now.kept is not None:
        layer = now.kept.layer_of(module, *tensors[1:3])
        if layer.pending:
            layer.begin(layer_call(*tensors[:2], planned.arguments(), now.ring.kernel), key)
            layer.rebuild(*tensors[1:3])
            if now.kept.offloading:
                now.kept.end_layer(layer)
    return out.transpose(1, 2).contiguous()


def _attention_to_kept(
    module: nn.Module, tensors: LayerTensors, tokens: Tokens, settings: LayerSettings, now: ForwardPass
) -> Tensor:
    """Returns out [B, n, H, Dv] of a layer whose earlier keys are in a `PatternCache`."""
    cache, ring, (query, key, value, sinks) = now.kept, now.ring, tensors
    now.attended = True
    layer = cache.layer_of(module, key, value)
    new_key, new_value = layer.new_rows(key, value) if layer.shared.every else (key, value)
    if tokens.documents is not None:  # A plain mask. The cache knows positions and documents.
        tokens = Tokens(causal=tokens.causal, own=tokens.own, valid=cache.arrival.padding_inside)
    of_new = query, new_key, new_value, sinks
    facts = facts_of(module, of_new, tokens, settings, now)
    before, call = layer.checked.get(module, (None, None))
    if before != facts:
        checked = _checked(module, of_new, tokens, settings, now)
        if not checked["causal"]:
            raise NotImplementedError(
                f"{name_of(module)} is not causal, and a PatternCache holds causal rows: use 'sdpa'"
            )
        call = layer_call(query, key, checked, ring.kernel)
        layer.checked[module] = facts, call
    if layer.call is not call:
        layer.begin(call, key)
    if layer.few(query.shape[2]):
        out = layer.attend_few(ring, query, key, value, sinks)
    else:
        new = cache.arrival.positions
        asking = (new >= 0).expand(len(query), -1)
        order = padding_first(asking).to(query.device) if cache.arrival.padded else None
        if order is not None:
            query, new_key, new_value = (_reordered(x, order) for x in (query, new_key, new_value))
        keys, values, held, documents = layer.expanded(new_key, new_value, (key, value))
        layer.rebuild(key, value)
        settings_of_call = call.settings | {"documents": documents, "held": held}
        planned = planned_call(ring, query, keys, values, sinks, **settings_of_call)
        out = planned(query, keys, values, sinks)[0]
        if order is not None:
            out = _reordered(out, order.argsort(1)).masked_fill(~asking[:, None, :, None].to(out.device), 0)
    if cache.offloading:
        cache.end_layer(layer)
    return out.transpose(1, 2).contiguous()


_layer_attention_at_a_break = torch.compiler.disable(_layer_attention, reason=UNTRACEABLE)


def call_in_graph(
    now: ForwardPass, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: GraphLayer
) -> Planned:
    """Returns the planned call of a layer inside a graph."""
    module, *others = layer.text.split()
    dropout, scaling, window, softcap = (None if math.isnan(x) else x for x in layer.numbers[1:])
    of_layer = dropout or 0.0, scaling, None if window is None else int(window), softcap, dict.fromkeys(others, True)
    return _planned(MODULES[int(module)], (q, k, v, sinks), tokens, of_layer, now, layer.recorded)


def _planned(
    module: nn.Module,
    tensors: LayerTensors,
    tokens: Tokens,
    settings: LayerSettings,
    now: ForwardPass,
    recorded: bool | None = None,
) -> Planned:
    """Returns the planned call of an equal layer; if there is none yet, checks and plans the layer's call.

    Args:
        recorded: whether a graph records gradients; None outside of graphs.
    """
    check_not_traced()
    now.attended = True
    facts, ring = facts_of(module, tensors, tokens, settings, now, recorded), now.ring
    planned: Planned | None = ring.planned.find(facts)
    if planned is not None:
        return planned
    with refusals_of_all(ring):
        call = _checked(module, tensors, tokens, settings, now)
    try:
        planned = planned_call(ring, *tensors, **call, recorded_in_graph=recorded)
    except ValueError as refused:
        raise ValueError(f"{name_of(module)}: {refused}") from None
    ring.planned.keep(facts, planned)
    return planned


def facts_of(
    module: nn.Module,
    tensors: LayerTensors,
    tokens: Tokens,
    settings: LayerSettings,
    now: ForwardPass,
    recorded: bool | None = None,
) -> LayerFacts:
    """Returns the facts of a layer's call; `recorded` is whether a graph records gradients, and None outside of graphs."""
    (query, key, value, sinks), number, given = tensors, getattr(module, "layer_idx", None), settings[4]
    # `num_heads` counts the heads of all ranks.
    heads = vars(module).get("num_heads") or getattr(getattr(module, "config", None), "num_attention_heads", None)
    of_module = None
    if tokens.causal is None:
        of_module = _own_branch(module, settings[2]), bool(getattr(module, "is_causal", True))
    return LayerFacts(
        layer=type(module),
        tokens=tokens if tokens.valid is None else replace(tokens, valid=None),
        padding_inside=None if tokens.valid is None else tokens.valid.shape[1],
        of_module=of_module,
        patterns=(now.patterns.get(None), now.patterns.get(number), len(now.patterns)),
        of_pass=now.decides,
        drafts=number if now.skipped else None,
        called_alone=now.runner is module,
        settings=settings[:4],
        given=tuple([(name, x if isinstance(x, (bool, int)) else None) for name, x in given.items() if x is not None]),
        head_shard=None if query.shape[1] == heads else head_shard(module, query, key),
        recorded=torch.is_grad_enabled() if recorded is None else recorded,
        in_graph=recorded is not None,
        tensors=(
            *(query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype),
            *(query.device, key.device, value.device, query.requires_grad, key.requires_grad, value.requires_grad),
            None if sinks is None else (sinks.shape, sinks.dtype, sinks.device, sinks.requires_grad),
        ),
    )


def _checked(
    module: nn.Module, tensors: LayerTensors, tokens: Tokens, settings: LayerSettings, now: ForwardPass
) -> dict[str, Any]:
    """Checks a layer's call, and returns its arguments of `planned_call` beside tensors."""
    (query, key, *_), (_, scaling, sliding_window, softcap, given) = tensors, settings
    check_call(module, settings, now)
    continues = now.kept is not None and now.kept.arrival.seen > 0
    if now.ring.world_size > 1 and tokens.layout is None and not continues:
        raise ValueError(
            f"{type(module).__name__} of a sharded model got no mask of ring_dilated: call the model, not its layers; with a "
            f"cp_size, make the ring by Ring.from_accelerator before accelerator.prepare"
        )
    causal = tokens.causal
    if causal is None:  # A plain mask.
        is_causal = given.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    of_model = _of_model(module, tokens, sliding_window)
    skipped = now.skipped
    # Layers that draft tokens have numbers that begin at 0, as the layers of their model have, which own the patterns.
    layer = None if skipped else getattr(module, "layer_idx", None)
    if layer is None and not skipped and now.patterns.layers:
        raise ValueError(
            f"{type(module).__name__}: expected one pattern for all layers, got patterns by layer, and its layers share "
            f"attention without a number: call ra.patch_model(model, pattern)"
        )
    pattern = _pattern_of(module, layer, of_model, now.exact)
    held, documents = None, tokens.documents
    if tokens.layout is None:
        held, documents = _held(module, query.shape[2], key.shape[2], tokens, causal)
        dropped = tokens.before > (skipped[int(module.layer_idx)] if skipped else 0)  # type: ignore[arg-type]
        check_dropped_keys(module, dropped, of_model, pattern)
    check_padding(module, tokens, of_model)
    call = {"pattern": pattern, "layout": tokens.layout, "causal": causal, "scale": scaling, "documents": documents}
    return call | {"softcap": softcap, "head_shard": head_shard(module, query, key), "held": held}


def _of_model(module: nn.Module, tokens: Tokens, sliding_window: int | None) -> Branch | None:
    """Returns the window or the chunks of a layer in the model itself."""
    own = _own_branch(module, sliding_window) if tokens.causal is None else tokens.own
    return None if own is None else own[0](own[1])


def _pattern_of(module: nn.Module, layer: int | None, of_model: Branch | None, exact: bool) -> Pattern:
    """Returns the pattern of a layer; under `exact_attention`, the pattern of the layer without `patch_config`."""
    if exact and torch.is_grad_enabled():
        raise ValueError(
            "exact_attention: gradients are recorded, and a backward pass would recompute layers with the model's own pattern: "
            "compute without gradients, or patch the model with 'exact'"
        )
    return layer_pattern(None if exact else getattr(module, "config", None), layer, of_model)


def _reordered(x: Tensor, order: Tensor) -> Tensor:
    """Returns the first rows of x [B, heads, n, D] in the order [B, m] of each batch row, and the others as they are."""
    first, others = x.tensor_split([order.shape[1]], 2)
    return torch.cat([first.gather(2, order[:, None, :, None].expand_as(first)), others], 2)


def _own_branch(module: nn.Module, sliding_window: int | None) -> OwnBranch | None:
    """Returns the window or the chunks that a layer with a plain mask has in the model itself."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types, chunk = getattr(config, "layer_types", None) or (), getattr(config, "attention_chunk_size", None)
    if chunk is not None and layer is not None and layer < len(types) and types[layer] == "chunked_attention":
        return Segment, chunk
    return None if sliding_window is None else (Window, sliding_window)


def _held(
    module: nn.Module, num_queries: int, num_rows: int, tokens: Tokens, causal: bool
) -> tuple[HeldKeys | None, Documents | None]:
    """Returns the tokens that the cache holds, None if each key's token is a query too; and the documents of the row.

    Refuses keys of another sequence, and a mask of other tokens.
    """
    if not causal and num_queries != num_rows:
        raise NotImplementedError(
            f"{type(module).__name__}: {num_queries} query tokens for {num_rows} key tokens without causality: ring_dilated "
            f"computes no cross-attention and no prefixes of encoders: use 'sdpa'"
        )
    written = num_rows if tokens.written is None else tokens.written
    if tokens.length not in (None, num_rows) or written < num_queries:
        raise ValueError(
            f"{type(module).__name__}: the mask has {tokens.length} tokens, for {num_queries} query and {num_rows} key tokens: "
            f"pass the attention_mask of all tokens so far, those in the cache included"
        )
    if not tokens.missing:
        all_new = num_queries == written == num_rows
        return None if all_new else HeldKeys.whole(written, num_queries, num_rows), tokens.documents
    # Chunks are counted from a document's first token, so that the dropped ones count too: the row begins with them.
    before, rows = max(tokens.missing), tokens.documents or ((),) * len(tokens.missing)
    held = HeldKeys(before + written, num_queries, num_rows, ((0, before, before + written),))
    documents = tuple(
        tuple((before + start - missing, before + stop) for start, stop in row)
        for row, missing in zip(rows, tokens.missing)
    )
    return held, documents


def _tokens_of(module: nn.Module, mask: Tensor | None, now: ForwardPass) -> Tokens:
    """Returns the facts of a layer's mask, which is of this package, plain, or None."""
    name = type(module).__name__
    with refusals_of_all(now.ring):
        if mask is not None and (not isinstance(mask, Tensor) or (mask.dim() != 2 and number_of(mask) is None)):
            got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"{name}: ring_dilated takes padding as a mask [batch, tokens], got {got}: pass the 2-D attention_mask, and "
                f"for packed documents position_ids that restart"
            )
        if mask is None and now.layout is None and now.documents is not None:
            raise ValueError(
                f"{name} was given packed rows, and its model makes its own masks without documents: pass one document a row"
            )
    return tokens_of(mask)


AttentionInterface.register(IMPLEMENTATION, ring_dilated_attention)
