"""The attention implementation "ring_dilated", as Transformers calls it in every layer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..compute.private import attentions_are_collected, prompt_is_cut
from ..plan.branches import Branch, Segment, Window
from ..plan.parts import fewest_last
from ..plan.patterns import Pattern
from ..plan.problem import Documents, HeldKeys
from ..ring.attention import FORWARD, UNTRACEABLE, CheckedCall, Options, check_not_traced, checked_call
from .calls import sharded_without_documents
from .config import layer_pattern, patterns_of_layers, unpatched_pattern
from .exact import attends_exactly
from .forward_pass import ForwardPass, forward_pass_of, number_of
from .masks import Tokens, padding_first, tokens_of
from .positions import at_its_place_in_the_row
from .rings import attached_ring
from .tensor_parallel import head_shard

#: Arguments that change the scores or the keys, whoever passes them.
_REFUSED = ("position_bias", "head_mask", "block_table", "read_index", "write_index")

#: Arguments of layers without effect here: the mask describes documents and causality, and dropout is refused.
_WITHOUT_EFFECT = (
    "cu_seq_lens_k", "deterministic", "max_length_k", "max_length_q", "output_attentions", "position_ids",
)  # fmt: skip

#: Arguments of layers that are read by their names, or that the call of the model has read.
_READ = ("cu_seq_lens_q", "is_causal", "seq_idx")

#: The attribute of attention modules that holds a function of a layer's call and its output, which returns that output.
TAP = "_ring_dilated_tap"


@dataclass(frozen=True, eq=False)
class _LayerCall:
    """A layer's call of attention, which serves all layers of a forward pass that come with equal arguments.

    Attributes:
        call: the call, checked and planned; settings: what else than tensors `ring_attention` would get for it.
        tokens: what the mask describes.
        of_model: the window or chunks that the layers have in the model itself.
    """

    call: CheckedCall
    settings: dict[str, Any]
    tokens: Tokens
    of_model: Branch | None


@torch.compiler.disable(reason=UNTRACEABLE)
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

    The first layer of a kind in a forward pass checks and plans its call; the others, which differ in numbers alone, use it.

    Args:
        query: [B, H, m, D]; key: [B, Hkv, n, D]; value: [B, Hkv, n, Dv]. The queries are the last m of the n tokens.
        attention_mask: the mask of `ring_dilated_mask`, a plain [B, n] mask, or None for rows of one document.
        sliding_window: the layer's own window, in tokens, for a plain mask.
        softcap: scores s become softcap * tanh(s / softcap).
        s_aux: [H] the logits of one more column of the softmax, whose value is 0.

    Returns:
        out [B, m, H, Dv], and None for the weights that are never formed.

    Raises:
        ValueError: dropout, attention weights asked for, a mask that is not [B, n], packed rows that contradict it, a
            pattern that reaches keys which the cache has dropped, or heads that do not divide among the ranks.
        NotImplementedError: position biases, head masks, paged caches and cross-attention.
    """
    check_not_traced()
    query, key, value = _autocast(query, key, value)
    now = forward_pass_of(getattr(module, "config", None))
    key_of_call = query, key, value, attention_mask, s_aux, dropout, scaling, sliding_window, softcap
    layer = None if now is None else now.calls.get(_kind_of_call(module, now, *key_of_call, kwargs))
    if layer is None:
        layer = _layer_call(module, now, *key_of_call, kwargs)
        if now is not None and layer.tokens.causal is not None:  # Its mask alone decides the keys that it sees.
            now.calls[_kind_of_call(module, now, *key_of_call, kwargs)] = layer
    else:
        layer.call.compare()
    layout, valid = layer.tokens.layout, layer.tokens.valid
    if layout is not None and getattr(module, "attn_temperature_tuning", False):
        query = at_its_place_in_the_row(module, query, layout, layer.call.ring.rank)
    if valid is not None:
        asking = valid[:, -query.shape[2] :].to(query.device)
        rows, queries = padding_first(valid).to(query.device), padding_first(asking)
        query, key, value = _reordered(query, queries), _reordered(key, rows), _reordered(value, rows)
    out = layer.call.attend(query, key, value, s_aux)[0]
    # A calibration chooses no pattern for layers with a window or chunks of their own.
    tap = getattr(module, TAP, None) if layer.of_model is None and layer.call.problem.held is None else None
    if tap is not None:
        out = tap(module, query, key, value, out, {**layer.settings, "sinks": s_aux})
    if valid is not None:
        out = _reordered(out, queries.argsort(1)).masked_fill(~asking[:, None, :, None], 0)
    return out.transpose(1, 2).contiguous(), None


def _kind_of_call(
    module: nn.Module,
    now: ForwardPass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    *arguments: Any,
) -> Any:
    """Returns what the calls of two layers have in common if one `_LayerCall` serves both; arguments of layers last a pass."""
    *settings, kwargs = arguments
    own = None if now.own_patterns is None else now.own_patterns.get(getattr(module, "layer_idx", -1))
    return (
        (type(module), now.own_patterns is None, own, number_of(mask), torch.is_grad_enabled(), *settings),
        (query.shape, query.dtype, query.device, query.requires_grad),
        (key.shape, key.dtype, key.requires_grad, value.shape, value.dtype, value.requires_grad),
        None if sinks is None else (sinks.shape, sinks.device, sinks.requires_grad),
        *[(name, x if isinstance(x, (int, float)) else id(x)) for name, x in kwargs.items() if x is not None],
    )


def _layer_call(
    module: nn.Module,
    now: ForwardPass | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor | None,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    kwargs: dict[str, Any],
) -> _LayerCall:
    """Checks a layer's call, decides its pattern, documents and ring, and plans it.

    Raises:
        ValueError, NotImplementedError: as `ring_dilated_attention`.
    """
    config, ring = getattr(module, "config", None), attached_ring(module)
    if now is not None:
        now.attended = True
    if now is not None and now.whole:
        ring = None  # Every rank computes whole rows by itself.
    sharded = ring is not None and ring.world_size > 1
    try:
        _check_call(module, attention_mask, dropout, kwargs)
        tokens = tokens_of(attention_mask)
        if sharded and tokens.layout is None and tokens.held is None:
            raise ValueError(sharded_without_documents(module))
        if attention_mask is None and now is not None and now.documents is not None:
            raise ValueError(
                f"{type(module).__name__} was given packed rows by position_ids, but its model makes its masks itself, and "
                f"made none for these rows: pass one document a row, padded"
            )
        is_causal, causal = kwargs.get("is_causal"), tokens.causal
        if causal is None:
            causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        of_model = _branch_of_model(module, tokens, sliding_window)
        exact = attends_exactly(config)
        number = getattr(module, "layer_idx", None)
        pattern = unpatched_pattern(of_model) if exact else layer_pattern(config, number, of_model)
        held, documents = tokens.held, tokens.documents
        if held is None:
            held, documents = _held(module, query, key, tokens, causal, pattern)
            _check_padding_inside(module, tokens, of_model)
            _check_whole(module, pattern, held)
        heads = head_shard(module, query, key)
        if now is None and (kwargs.get("cu_seq_lens_q") is not None or kwargs.get("seq_idx") is not None):
            raise ValueError(
                f"{type(module).__name__} got cu_seq_lens or seq_idx, which ring_dilated reads in the call of its model: call "
                f"ra.patch_model(model), and the model rather than its layers"
            )
    except (ValueError, NotImplementedError) as refused:
        if sharded:
            assert ring is not None
            with ring.agreement(FORWARD, by_digest=True):  # The other ranks compare their calls of attention here.
                raise refused
        raise
    settings: dict[str, Any] = {
        "pattern": pattern,
        "ring": ring,
        "layout": tokens.layout,
        "causal": causal,
        "scale": scaling,
        "documents": documents,
        "softcap": softcap,
        "head_shard": heads,
    }
    try:
        call = checked_call(query, key, value, s_aux, Options(**settings, held=held))
    except ValueError as refused:
        raise ValueError(f"{_name_of(module)}: {refused}") from None
    if now is not None and now.own_patterns is None:
        now.own_patterns = {} if exact else patterns_of_layers(config)
    return _LayerCall(call, settings, tokens, of_model)


def _name_of(module: nn.Module) -> str:
    """Returns the name of a layer in errors."""
    return f"{type(module).__name__}: layer {getattr(module, 'layer_idx', None)}"


def _check_padding_inside(module: nn.Module, tokens: Tokens, of_model: Branch | None) -> None:
    """Refuses padding inside a document in layers with a window or chunks of their own, which the model counts in rows.

    Raises:
        NotImplementedError: such a layer, if its window or chunks are shorter than the row.
    """
    length = getattr(of_model, "length", None)
    if tokens.valid is not None and (tokens.dropped or (length is not None and length < tokens.valid.shape[1])):
        raise NotImplementedError(
            f"{_name_of(module)} has a window or chunks of {length} tokens, "
            f"and its row has padding inside a document: take rows of one length, or use 'sdpa'"
        )


def _reordered(x: Tensor, order: Tensor) -> Tensor:
    """Returns the first rows of x [B, heads, n, D] in the order [B, m] of each batch row, and the others as they are."""
    first, others = x.tensor_split([order.shape[1]], 2)
    return torch.cat([first.gather(2, order[:, None, :, None].expand_as(first)), others], 2)


def _branch_of_model(module: nn.Module, tokens: Tokens, sliding_window: int | None) -> Branch | None:
    """Returns the window or the chunks that a layer has in the model itself."""
    window, chunk = tokens.window, tokens.chunk
    if tokens.causal is None:  # A plain mask.
        config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
        types = getattr(config, "layer_types", None) or ()
        chunked = layer is not None and layer < len(types) and types[layer] == "chunked_attention"
        window, chunk = sliding_window, getattr(config, "attention_chunk_size", None) if chunked else None
    if chunk is not None:
        return Segment(chunk)
    return None if window is None else Window(window)


def _held(
    module: nn.Module, query: Tensor, key: Tensor, tokens: Tokens, causal: bool, pattern: Pattern
) -> tuple[HeldKeys | None, Documents | None]:
    """Returns the tokens that the cache holds, None if each key's token is a query too; and the documents of the row.

    Raises:
        NotImplementedError: queries of one sequence and keys of another.
        ValueError: a cache that lacks keys which the pattern reaches, or a mask of other tokens.
    """
    if tokens.layout is not None:
        return None, tokens.documents
    name, num_queries, num_rows = type(module).__name__, query.shape[2], key.shape[2]
    written = num_rows if tokens.written is None else tokens.written
    if not causal and num_queries != num_rows:
        raise NotImplementedError(
            f"{name}: {num_queries} query tokens for {num_rows} key tokens without causality: ring_dilated attends "
            f"within one sequence, and computes no cross-attention and no prefixes of encoders: use 'sdpa'"
        )
    if tokens.length not in (None, num_rows) or written < num_queries:
        raise ValueError(
            f"{name}: the mask has {tokens.length} tokens, for {num_queries} query and {num_rows} key tokens: pass the "
            f"attention_mask of all tokens so far, those in the cache included"
        )
    branches = [branch for one in pattern.kv_heads or (pattern,) for branch in one.branches]
    if tokens.dropped and not all(_reaches_kept_keys(branch, tokens) for branch in branches):
        own = f"chunks have {tokens.chunk}" if tokens.chunk else f"own window has {tokens.window or 'no'}"
        raise ValueError(
            f"{_name_of(module)} has the pattern {pattern}, and its cache keeps only the last tokens (the layer's {own} "
            f"tokens): pass cache=DynamicCache(), made without the config, which keeps all"
        )
    if num_queries == written == num_rows and not tokens.missing:
        return None, tokens.documents
    if not tokens.missing:
        return HeldKeys.whole(written, num_queries, num_rows), tokens.documents
    # Chunks are counted from a document's first token, so that the dropped ones count too: the row begins with them.
    before, rows = max(tokens.missing), tokens.documents or ((),) * query.shape[0]
    held = HeldKeys(before + written, num_queries, num_rows, ((0, before, before + written),))
    documents = tuple(
        tuple((before + start - missing, before + stop) for start, stop in row)
        for row, missing in zip(rows, tokens.missing)
    )
    return held, documents


def _check_whole(module: nn.Module, pattern: Pattern, held: HeldKeys | None) -> None:
    """Refuses the first piece of a prompt under a `Last`: its last queries are not the last of the prompt.

    Pieces behind a cache are refused by `Problem` if not all of their queries see every key.
    """
    begins = held is None or held.num_queries == held.row_len
    if begins and fewest_last(pattern) is not None and prompt_is_cut():
        raise ValueError(
            f"{type(module).__name__}: {pattern} shows every key to a document's last queries, and prefill_chunk_size cuts the "
            f"prompt before them: leave it out, or fill the cache with ra.prefill"
        )


def _reaches_kept_keys(branch: Branch, tokens: Tokens) -> bool:
    """Returns whether a branch shows no keys that a cache has dropped, which keeps as many as the layer's own branch shows.

    Only in layers with chunks are the positions of those keys known, on which other branches than windows depend.
    """
    if not isinstance(branch, (Segment, Window)) or branch.length is None:
        return False
    if tokens.chunk is not None:
        return branch.length <= tokens.chunk
    return (
        isinstance(branch, Window)
        and branch.dilation == 1
        and tokens.window is not None
        and branch.length <= tokens.window
    )


def _check_call(module: nn.Module, attention_mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuses dropout, a request for attention weights, and inputs that would change the scores or the keys."""
    name = type(module).__name__
    if dropout:
        raise ValueError(
            f"{name}: attention dropout {dropout} was asked for, and ring_dilated has none: set the config's attention "
            f"dropout to 0 (attention_dropout, attn_pdrop) or call model.eval()"
        )
    if kwargs.get("output_attentions") or attentions_are_collected():
        raise ValueError(
            f"{name}: output_attentions=True was asked for, but ring_dilated never forms the attention weights: "
            f"use attn_implementation='eager' to look at them"
        )
    passed = _strings_of(type(module).forward)
    for argument, present in kwargs.items():
        # Transformers passes every entry of a batch on to here. Only those that the layer's own code names have a meaning.
        known = argument in _WITHOUT_EFFECT or argument in _READ
        if present is not None and not known and (argument in passed or argument in _REFUSED):
            raise NotImplementedError(
                f"{_name_of(module)} came with {argument}, which would change the scores or the keys and which ring_dilated "
                f"does not compute: use 'eager' or 'sdpa'"
            )
    plain = isinstance(attention_mask, Tensor) and (attention_mask.dim() == 2 or number_of(attention_mask) is not None)
    if attention_mask is not None and not plain:
        got = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"{name}: ring_dilated takes padding as a mask [batch, tokens], got {got}: pass the 2-D attention_mask of "
            f"the tokenizer; patterns are set with patch_config"
        )


@functools.cache
def _strings_of(forward: Callable[..., Any]) -> frozenset[str]:
    """Returns the strings in the code of a layer's forward, the names of the arguments that it passes on among them."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    constants = () if code is None else code.co_consts
    flat = (x for constant in constants for x in (constant if isinstance(constant, tuple) else (constant,)))
    return frozenset(x for x in flat if isinstance(x, str))


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)
