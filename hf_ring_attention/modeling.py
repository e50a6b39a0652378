"""Transformers: the attention implementation "ring_dilated", its mask, and what a config and a model need for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.utils import output_capturing

from .attention import ring_attention
from .layouts import SequenceLayout
from .patterns import Pattern, Window
from .plans import Documents
from .ring import Ring

NAME = "ring_dilated"
#: Attribute of a model's modules that holds their ring.
_RING = "_ring_dilated_ring"
#: Attribute of a base model that holds the handle of its check of positions.
_CHECK = "_ring_dilated_check"
#: Attribute of a mask tensor that holds the documents read from it: one reading serves all layers, and recomputation.
_DOCUMENTS = "_ring_dilated_documents"


@torch.compiler.disable(reason="it reads masks and talks to other ranks")
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
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls for "ring_dilated".

    Args:
        query: [B, H, n, D]; key: [B, Hkv, n, D]; value: [B, Hkv, n, Dv].
        attention_mask: what `ring_dilated_mask` returned: [B, n], 0 for padding and otherwise the document's number;
            None for rows that are one document.
        sliding_window: the layer's own window, in tokens.

    Returns:
        out [B, n, H, Dv], and None for the weights that are never formed.

    Raises:
        ValueError: dropout, attention weights asked for, or a mask that is not [B, n].
        NotImplementedError: what is still to come: softcap, sinks with logits of their own, position biases, and
            queries that are not all the keys' tokens (decoding with a cache, cross-attention).
    """
    config, ring = getattr(module, "config", None), getattr(module, _RING, None)
    try:
        _check_call(module, query, key, attention_mask, dropout, softcap, kwargs)
    except (ValueError, NotImplementedError) as refused:
        if ring is not None and ring.world_size > 1:
            ring.agree_cheaply({}, refused, query.device)  # the other ranks compare calls there
        raise
    query, key, value = _autocast(query, key, value)

    layout = None if ring is None else model_layout(config, ring, query.shape[2])
    out = ring_attention(
        query,
        key,
        value,
        pattern=layer_pattern(config, getattr(module, "layer_idx", None), sliding_window),
        ring=ring,
        layout=layout,
        causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        scale=scaling,
        documents=_documents(attention_mask, ring, layout),
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


def _check_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    softcap: float | None,
    kwargs: dict[str, Any],
) -> None:
    """Refuses what `ring_dilated_attention` says it refuses."""
    name = type(module).__name__
    if dropout:
        raise ValueError(
            f"{name}: attention dropout {dropout} was asked for, and ring_dilated has none: set the config's attention "
            f"dropout to 0 (attention_dropout, attn_pdrop) or call model.eval()"
        )
    if kwargs.get("output_attentions") or _collects_attentions():
        raise ValueError(
            f"{name}: output_attentions=True was asked for, but ring_dilated never forms the attention weights: "
            f"use attn_implementation='eager' to look at them"
        )
    for feature, given in {
        "softcap": softcap is not None,
        "s_aux (sinks with logits of their own)": kwargs.get("s_aux") is not None,
        "position_bias": kwargs.get("position_bias") is not None,
        "head_mask": kwargs.get("head_mask") is not None,
        "a paged cache": kwargs.get("cache") is not None,
    }.items():
        if given:
            raise NotImplementedError(f"{name}: ring_dilated does not compute {feature} yet: use 'eager' or 'sdpa'")
    if query.shape[2] != key.shape[2]:
        raise NotImplementedError(
            f"{name}: {query.shape[2]} query tokens for {key.shape[2]} key tokens: ring_dilated does not decode with a "
            f"cache or attend to other sequences yet: pass use_cache=False, or use 'sdpa' to generate"
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"{name}: ring_dilated takes padding as a mask [batch, tokens], got {tuple(attention_mask.shape)}: pass the "
            f"2-D attention_mask of the tokenizer; patterns are set with patch_config"
        )


def _collects_attentions() -> bool:
    """Whether the running forward pass was called with output_attentions=True, where a model does not pass that on."""
    collector = getattr(output_capturing, "_active_collector", None)
    return bool(collector is not None and "attentions" in (collector.get() or ()))


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


def ring_dilated_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function that Transformers calls for "ring_dilated": padding and packing, never a square.

    Returns:
        None, the 2-D padding mask, or [B, n] document numbers where Transformers found a packed row.

    Raises:
        ValueError: a mask that only a square could express.
    """
    if use_vmap:
        raise ValueError("ring_dilated cannot apply or_mask_function and and_mask_function: use 'eager' or 'sdpa'")
    packed = None
    for part in _mask_parts(mask_function):
        kind = part.__qualname__.partition(".")[0]
        if kind == "packed_sequence_mask_function":
            packed = inspect.getclosurevars(part).nonlocals["packed_sequence_mask"]
        elif kind not in (
            "causal_mask_function",
            "bidirectional_mask_function",
            "sliding_window_overlay",
            "sliding_window_bidirectional_overlay",
        ):
            raise ValueError(
                f"ring_dilated cannot express this model's mask ({kind}): its tiles know causal and bidirectional "
                f"attention, windows, padding and packing: use 'eager' or 'sdpa'"
            )
    if attention_mask is not None:
        # A tensor of this forward pass alone: what is read from it is kept with it, and callers may edit theirs.
        return attention_mask.clone()
    return None if packed is None else (packed + 1).expand(batch_size, -1)


def _mask_parts(mask_function: Callable[..., Any] | None) -> Iterable[Callable[..., Any]]:
    """The simple mask functions that Transformers combined into this one."""
    if mask_function is None:
        return
    kind = mask_function.__qualname__.partition(".")[0]
    if kind == "and_masks":
        for part in inspect.getclosurevars(mask_function).nonlocals["mask_functions"]:
            yield from _mask_parts(part)
    elif kind == "remap_positions_for_packed_sequence":
        yield from _mask_parts(inspect.getclosurevars(mask_function).nonlocals["mask_function"])
    else:
        yield mask_function


def _documents(mask: Tensor | None, ring: Ring | None, layout: SequenceLayout | None) -> Documents | None:
    """The documents of whole rows that a mask, or its shards on the ranks of a ring, describes."""
    if mask is None:
        return None
    sharded = ring is not None and ring.world_size > 1
    if sharded and mask.dtype != torch.bool:
        return None  # zigzag positions look packed to Transformers; `_check_positions` has seen that they are not
    documents = getattr(mask, _DOCUMENTS, None)
    if documents is None:
        whole = mask
        if sharded:
            assert ring is not None
            assert layout is not None
            # A rank that refused the call is at its comparison, not here.
            ring.agree_cheaply({"the shape of the mask": tuple(mask.shape)}, None, mask.device)
            whole = ring.unshard(mask.to(torch.uint8), layout, dim=1)
        documents = documents_from_mask(whole)
        setattr(mask, _DOCUMENTS, documents)
    return documents


def documents_from_mask(mask: Tensor) -> Documents:
    """Per batch row the (start, stop) of its documents.

    Args:
        mask: [B, n]: 0 for padding, otherwise a number of the token's document (a padding mask has 1 everywhere else).

    Raises:
        ValueError: a document with a gap.
    """
    documents = []
    for row, numbers in enumerate(mask.to(torch.int64).cpu()):
        borders = (torch.nonzero(numbers[1:] != numbers[:-1]).flatten() + 1).tolist()
        starts = [0, *borders]
        runs = [run for run in zip(starts, [*borders, len(numbers)]) if numbers[run[0]] != 0]
        seen = [int(numbers[start]) for start, _ in runs]
        if len(set(seen)) < len(seen):
            raise ValueError(
                f"batch row {row} of the attention mask has padding inside a document: tokens {runs} are marked as "
                f"{seen}; ring_dilated takes padding before and after a document"
            )
        documents.append(tuple(runs))
    return tuple(documents)


def layer_pattern(config: Any, layer: int | None, sliding_window: int | None = None) -> Pattern:
    """The pattern of a layer: what `patch_config` set for it, its own window, or what was set for all layers."""
    settings = getattr(config, NAME, None) or {}
    own = settings.get("layers", {}).get(str(layer))
    if own is not None:
        return Pattern.from_dict(own)
    if sliding_window is not None:
        return Pattern((Window(sliding_window),))
    return Pattern.from_dict(settings["pattern"]) if settings.get("pattern") else Pattern.exact()


def model_layout(config: Any, ring: Ring, local_len: int) -> SequenceLayout:
    """The layout of a model's rows: the same for all its layers, decided by the pattern set for all of them."""
    return ring.layout_for(local_len * ring.world_size, layer_pattern(config, None))


def patch_config(
    config: PretrainedConfig,
    pattern: Pattern | None = None,
    layers: Iterable[int] | None = None,
    *,
    segment_lengths: Sequence[int | None] | None = None,
    dilation_rates: Sequence[int] | None = None,
) -> PretrainedConfig:
    """Stores a pattern in a config, where it is saved and loaded with it.

    Args:
        pattern: what the layers compute; instead, `segment_lengths` and `dilation_rates` give `Pattern.longnet`.
        layers: numbers of the layers; None for every layer without a window of its own.

    Returns:
        The config.

    Raises:
        ValueError: no pattern, two of them, or layers the model does not have.
    """
    longnet = segment_lengths is not None or dilation_rates is not None
    if (pattern is not None) == longnet:
        raise ValueError("patch_config: pass either pattern=, or segment_lengths= and dilation_rates=")
    if longnet:
        if segment_lengths is None or dilation_rates is None:
            raise ValueError("patch_config: segment_lengths and dilation_rates go together, one is missing")
        pattern = Pattern.longnet(segment_lengths, dilation_rates)
    if not isinstance(pattern, Pattern):
        raise ValueError(f"patch_config: pattern must be a Pattern, got {pattern!r}")
    text_config = config.get_text_config()
    settings = dict(getattr(text_config, NAME, None) or {})
    if layers is None:
        settings["pattern"] = pattern.to_dict()
    else:
        count = text_config.num_hidden_layers
        numbers = list(layers)
        if not numbers:
            raise ValueError("patch_config: layers is empty: name the layers, or leave it out for all of them")
        for number in numbers:
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
                raise ValueError(f"patch_config: layers must be among 0..{count - 1}, got {number!r} in {numbers}")
        settings["layers"] = {**settings.get("layers", {}), **{str(n): pattern.to_dict() for n in numbers}}
    setattr(text_config, NAME, settings)
    return config


def patch_model(model: PreTrainedModel, pattern: Pattern | None = None, ring: Ring | None = None) -> PreTrainedModel:
    """Makes a loaded model compute with "ring_dilated".

    Args:
        pattern: for `patch_config`; None keeps what the config has.
        ring: the ranks over which the model's rows will be sharded; each forward pass then takes this rank's shard and
            its `position_ids`. None for whole rows on this process.

    Returns:
        The model.

    Raises:
        ValueError: a model that does not call the attention interface, and would ignore the implementation.
        NotImplementedError: models with attention that ring_dilated does not compute yet.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"patch_model: expected a Transformers model, got {name}")
    config = model.config.get_text_config()
    if not type(model)._can_set_attn_implementation():
        raise ValueError(
            f"patch_model: {name} does not call Transformers' attention interface, so it would ignore ring_dilated and "
            f"compute its own attention: use it as it is, or a model class that calls the interface"
        )
    if model.config.is_encoder_decoder:
        raise NotImplementedError(
            f"patch_model: {name} is an encoder-decoder, which ring_dilated does not compute yet: use 'sdpa'"
        )
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if others:
        raise NotImplementedError(
            f"patch_model: {name} has layers of types {others}, which ring_dilated does not compute"
        )
    if ring is not None and ring.world_size > 1:
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in ("dynamic", "longrope"):
            raise NotImplementedError(
                f"patch_model: {name} has {rope} RoPE, which takes the length of a shard for that of the row: "
                f"ring_dilated does not shard it yet"
            )
    if pattern is not None:
        patch_config(model.config, pattern)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        setattr(module, _RING, ring)
    base = model.base_model
    handle = getattr(base, _CHECK, None)
    if handle is not None:
        handle.remove()
    sharded = ring is not None and ring.world_size > 1
    setattr(base, _CHECK, base.register_forward_pre_hook(_check_positions, with_kwargs=True) if sharded else None)
    return model


def attached_ring(model: PreTrainedModel) -> Ring | None:
    """The ring that `patch_model` gave to a model."""
    return getattr(model, _RING, None)


@torch.compiler.disable(reason="it compares positions with other ranks")
def _check_positions(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a sharded forward pass: position_ids are there and are those of this rank's shard; all ranks agree.

    Where the layout padded the row and no mask says so, a mask is added: a bidirectional model would see the padding.

    Raises:
        ValueError: on every rank, where any rank's positions are missing or contradict the layout.
    """
    ring: Ring = getattr(module, _RING)
    tokens = next((x for x in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None), None)
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    error: Exception | None = None
    agreed: dict[str, Any] = {}
    offsets: list[int | None] = []
    valid = None
    try:
        if tokens is None:
            raise ValueError("a sharded forward pass needs input_ids or inputs_embeds")
        layout = model_layout(module.config, ring, tokens.shape[1])
        agreed = {
            "the shape of the input": tuple(tokens.shape[:2]),
            "layout": layout,
            "whether attention_mask is given": mask is not None,
            "whether the model trains": module.training,
            "output_attentions": bool(kwargs.get("output_attentions")),
        }
        valid, offsets = _check_shard_positions(positions, mask, layout, ring.rank)
    except ValueError as refused:
        error = refused
    told = ring.agree(agreed, error, tell=(offsets, valid is not None and not bool(valid.all())))
    for row, by_rank in enumerate(zip(*(offsets for offsets, _ in told))):
        if len({offset for offset in by_rank if offset is not None}) > 1:
            listed = ", ".join(f"rank {rank}: {offset}" for rank, offset in enumerate(by_rank) if offset is not None)
            raise ValueError(
                f"position_ids contradict the layout: position minus index in the row must be the same on all ranks, in "
                f"batch row {row} it is {listed}: {_remedy(layout)}"
            )
    if mask is None and any(padded for _, padded in told):
        assert valid is not None and tokens is not None
        return args, {**kwargs, "attention_mask": valid.expand(tokens.shape[:2])}
    return None


def _remedy(layout: SequenceLayout) -> str:
    return (
        f"pass position_ids=ring.shard(torch.arange(seq_len)[None], layout), input_ids sharded likewise, with the layout "
        f"of ring.layout_for(seq_len, pattern) for the model's pattern ({layout.kind} here)"
    )


def _check_shard_positions(
    positions: Tensor | None, mask: Tensor | None, layout: SequenceLayout, rank: int
) -> tuple[Tensor, list[int | None]]:
    """Which tokens of a shard are no padding, [B, n], and, per row, its positions minus its indices in the whole row.

    Raises:
        ValueError: positions that are missing or of another shape, or whose difference from the index varies.
    """
    if positions is None:
        raise ValueError(
            f"position_ids are missing, and a model would number the tokens of every shard from 0: {_remedy(layout)}"
        )
    if positions.shape[-1] != layout.local_len:
        raise ValueError(
            f"position_ids have {positions.shape[-1]} tokens, the shard has {layout.local_len}: {_remedy(layout)}"
        )
    expected = torch.tensor(layout.positions(rank), device=positions.device)
    offset = positions.reshape(-1, layout.local_len) - expected
    if mask is None:
        # The layout pads by fewer tokens than it has pieces, and those are filled as the user likes.
        may_be_padding = expected > layout.padded_len - layout.num_pieces
        valid = (offset == 0) | ~may_be_padding
        start = torch.zeros_like(offset[:, :1])
    else:
        if mask.dim() != 2:
            raise ValueError(f"a sharded forward pass takes a mask [batch, tokens], got {tuple(mask.shape)}")
        valid = mask.bool()
        # Rows with padding on the left may number their first token 0: one offset a row, never positive.
        start = torch.where(valid, offset, torch.iinfo(offset.dtype).min).amax(-1, keepdim=True)
    wrong = valid & ((offset != start) | (offset > 0))
    if wrong.any():
        row, token = (int(x) for x in torch.nonzero(wrong)[0])
        got = int(positions.reshape(-1, layout.local_len)[min(row, offset.shape[0] - 1), token])
        raise ValueError(
            f"position_ids contradict the layout: token {token} of rank {rank} is token {int(expected[token])} of the "
            f"row, but its position is {got} (batch row {row}): {_remedy(layout)}"
        )
    starts = start.expand(valid.shape[0], 1).flatten().tolist()
    return valid, [int(s) if some else None for s, some in zip(starts, valid.any(-1).tolist())]


AttentionInterface.register(NAME, ring_dilated_attention)
AttentionMaskInterface.register(NAME, ring_dilated_mask)
