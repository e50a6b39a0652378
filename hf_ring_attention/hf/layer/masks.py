"""The masks of ring_dilated: each holds nothing but the number of its `Tokens`, the facts that a layer needs about its keys.

Transformers calls `ring_dilated_mask` once for each kind of layer, and passes the result to every attention layer of that kind.
Other implementations read documents, causality, windows and the written slots of a cache from a square. A mask of one number
does the same, and survives every copy on its way to a layer, even on another device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, and_masks

from ...compute.foreign_code import keywords_in
from ...plan.branches import Segment, Window
from ...plan.layouts import SequenceLayout
from ...plan.problem import Documents
from ...ring.operator import CALLS, UNTRACEABLE, check_not_traced
from ...ring.planned import refusals_of_all
from ..forward_pass import ForwardPass, drop_broken_passes, forward_pass_of, number_of
from ..model.config import warn_once
from ..model.support import check_config, class_name
from ..names import IMPLEMENTATION
from ..rows.documents import documents_from_mask

#: Arguments of the mask functions of other implementations, which make squares and may leave them out.
_OPTIONS_OF_SQUARES = ("allow_is_bidirectional_skip", "allow_is_causal_skip", "dtype", "local_size", "use_vmap")

#: A kind of branch, and its length in tokens.
OwnBranch = tuple[type[Segment] | type[Window], int]

#: The mask functions of windows and chunks: their kind of branch, the variable with its length, and what is added to this.
#: Chunks are counted from the first token that is not padding, as in documents.
_LIMITS: dict[str, tuple[type[Segment] | type[Window], str, int]] = {
    "sliding_window_overlay": (Window, "sliding_window", 0),
    "sliding_window_bidirectional_overlay": (Window, "sliding_window", 1),
    "chunked_overlay": (Segment, "chunk_size", 0),
}

#: The mask functions that keep packed documents apart, and count their positions, in Transformers.
_PACKED = {"packed_sequence_mask_function", "remap_positions_for_packed_sequence"}

#: The attribute of a mask that keeps its `Tokens` alive; so does the forward pass, for the layers that backward recomputes.
TOKENS = "_ring_dilated_tokens"


@dataclass(frozen=True)
class Tokens:
    """The keys of a layer, as its mask describes them."""

    documents: Documents | None = None  # of each batch row, in the whole sequence; None if all tokens are one
    length: int | None = None  # the number of key rows; None without a mask
    written: int | None = None  # the number of key rows that hold a token; a static cache has more rows
    causal: bool | None = None  # whether queries see no later keys; None for a plain mask
    #: The window or chunks of the layer in the model itself. Models make masks with a window of 0 for layers that they lack.
    own: OwnBranch | None = None
    before: int = 0  # the number of tokens of the row before the first key
    missing: tuple[int, ...] = ()  # the number of tokens of each batch row that it has dropped, in a layer with chunks
    layout: SequenceLayout | None = None  # how the sequence is sharded; None if it is whole
    #: [B, written], False for padding, if a document has padding inside, as behind a cached prefix; else None. `documents` then
    #: describes rows whose padding was moved to the front.
    valid: Tensor | None = field(default=None, compare=False)


@torch.compiler.disable(reason=UNTRACEABLE)
def ring_dilated_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    config: Any = None,
    device: torch.device | None = None,
    **kwargs: Any,
) -> Tensor:
    """Makes the mask of one kind of layer; Transformers calls this function for "ring_dilated".

    It is [1, 1, 1, 1] int64 on the CPU, which `tokens_of` reads: Transformers hands masks of four dimensions on as they are.
    """
    check_not_traced()
    drop_broken_passes()  # generate makes masks before it calls the model.
    now = forward_pass_of(config)
    goes_on = now is not None and now.kept is not None and now.kept.arrival.seen > 0
    if config is not None and now is None:  # `patch_model` checks the config of a model.
        check_config(config)
    _check_options(config, kwargs)
    with nullcontext() if now is None else refusals_of_all(now.ring):
        causal, own, packed = _read_mask_function(mask_function, config)  # Other ranks may have no block.
    layout = None if now is None else now.layout
    # Causal queries are the last tokens that are written.
    written = int(q_offset) + q_length - kv_offset if causal else kv_length
    if goes_on:
        assert now is not None  # The cache knows the documents.
        return _mask_of(Tokens(causal=causal, own=own, valid=now.kept.arrival.padding_inside), now)
    if packed is not None and layout is None and not (now and now.rows and now.rows.from_collator):
        # Without a mask, Transformers reads documents from positions by another rule, which other implementations follow.
        documents, valid = documents_from_mask((packed + 1).expand(batch_size, -1)), None
    elif now is not None and now.documents is not None:
        documents, valid = now.documents, None
    elif attention_mask is not None:
        first = kv_offset if attention_mask.shape[1] > kv_length else 0  # It is a mask of all tokens, or of the keys.
        documents, valid = _documents_and_padding(attention_mask[:, first:], written)
    else:
        documents, valid = (((0, written),),) * batch_size, None
    missing: tuple[int, ...] = ()
    if own is not None and own[0] is Segment and kv_offset:
        dropped = torch.ones(batch_size, kv_offset) if attention_mask is None else attention_mask[:, :kv_offset]
        missing = tuple((dropped != 0).sum(1).tolist())
    tokens = Tokens(documents, kv_length, written, causal, own, kv_offset, missing, layout, valid)
    if now is not None:
        _warn_of_padding(now, documents, causal, written if now.rows is None else now.rows.length)
    return _mask_of(tokens, now)


def _check_options(config: Any, options: Mapping[str, Any]) -> None:
    """Refuses arguments of a mask that may change it."""
    unknown = [name for name, value in options.items() if value is not None and name not in _OPTIONS_OF_SQUARES]
    if unknown:
        raise NotImplementedError(
            f"{class_name(config)}: ring_dilated does not know the mask argument {', '.join(unknown)}: use 'eager' or 'sdpa'"
        )


def _mask_of(tokens: Tokens, now: ForwardPass | None) -> Tensor:
    """Returns the mask that names these facts."""
    if now is not None:
        now.tokens.append(tokens)
    mask = torch.tensor([[[[CALLS.add(tokens)]]]])
    setattr(mask, TOKENS, tokens)
    return mask


def _warn_of_padding(now: ForwardPass, documents: Documents, causal: bool, length: int) -> None:
    """Logs once that a head reads padding: its attention output is 0 here, and other implementations do not agree on it."""
    name, zero = type(now.module).__name__, "padding, whose attention output is 0 under ring_dilated"
    if now.ring.rank > 0:
        return
    if now.module.loss_type == "ForQuestionAnswering" and any(sum(b - a for a, b in row) < length for row in documents):
        warn_once(
            f"{name} chooses among all tokens of a row, and some are {zero}, so its loss differs from that under 'eager': take "
            f"one row at a time, or rows of one length"
        )
    elif not causal and any(row and row[0][0] > 0 for row in documents):
        warn_once(f"{name} got rows that begin with {zero}: pad on the right, if its head reads the first token")


def _read_mask_function(
    mask_function: Callable[..., Any] | None, config: Any
) -> tuple[bool, OwnBranch | None, Tensor | None]:
    """Returns causality, the window or chunks, and the numbers of packed documents of a mask function."""
    parts = _makers(mask_function)
    by_kind = dict(parts)
    causal = "bidirectional_mask_function" not in by_kind
    limit = next((x for x in _LIMITS if x in by_kind and (causal or x != "sliding_window_overlay")), None)
    known = {"causal_mask_function" if causal else "bidirectional_mask_function", limit}
    if by_kind.keys() >= _PACKED:  # Numbers of documents without new positions are those of another caller.
        known |= _PACKED
    if len(by_kind) < len(parts) or not by_kind.keys() <= known:
        kinds = ", ".join(kind for kind, _ in parts)
        raise ValueError(
            f"{class_name(config)}: ring_dilated cannot express this mask ({kinds}), only causal and two-sided attention, "
            f"windows, chunks, padding and packing: use 'eager' or 'sdpa'"
        )
    own: OwnBranch | None = None
    if limit is not None:
        branch, name, more = _LIMITS[limit]
        own = branch, by_kind[limit][name] + more
    return causal, own, by_kind.get("packed_sequence_mask_function", {}).get("packed_sequence_mask")


def masks_follow_positions(forward: Callable[..., Any]) -> bool | None:
    """Returns whether a decoder's forward hands positions to the functions that make its masks; None if its code hides it.

    Then Transformers begins a document of a row without a mask wherever positions do not count on.
    """
    calls = [x for x in keywords_in(forward) if {"config", "attention_mask"} <= {*x}]
    return any("position_ids" in names for names in calls) if calls else None


def _documents_and_padding(mask: Tensor, written: int) -> tuple[Documents, Tensor | None]:
    """Returns `documents` and `valid` of `written` tokens, whose mask has the numbers of documents, and 0 for padding."""
    numbers = mask[:, :written].to(torch.int64).cpu()
    numbers = F.pad(numbers, (0, written - numbers.shape[1]))
    valid = numbers != 0
    inside = ~valid & (valid.cumsum(1) > 0) & (valid.flip(1).cumsum(1).flip(1) > 0)
    if not inside.any() or not (numbers == numbers.amax(1, keepdim=True))[valid].all():  # or a row of several documents
        return documents_from_mask(numbers), None
    return documents_from_mask(numbers.gather(1, padding_first(valid))), valid


def _makers(mask_function: Callable[..., Any] | None) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the makers of the simple mask functions that Transformers combined, each with the variables of its function.

    The name of a maker outside of Transformers has its module.
    """
    if mask_function is None:
        return []
    module, name = mask_function.__module__, getattr(mask_function, "__qualname__", type(mask_function).__name__)
    if module != and_masks.__module__:
        return [(f"{module}.{name}", {})]
    kind, variables = name.partition(".")[0], inspect.getclosurevars(mask_function).nonlocals
    parts = [_makers(part) for part in variables.get("mask_functions", ())]
    if kind == "or_masks":
        # Blocks of tokens that see each other show nothing if no token is in a block, as in rows of text.
        blocks = [
            next((x["block_sequence_ids"] for name, x in part if name == "blockwise_overlay"), None) for part in parts
        ]
        parts = [part for part, numbers in zip(parts, blocks) if numbers is None or (numbers >= 0).any()]
    if kind == "and_masks" or len(parts) == 1:
        return [maker for part in parts for maker in part]
    return [(kind, variables), *_makers(variables.get("mask_function"))]


def tokens_of(mask: Tensor | None) -> Tokens:
    """Reads a mask that `ring_dilated_mask` made, or a plain one [B, n] with 0 for padding and 1 for tokens."""
    if mask is None:
        return Tokens()
    number = number_of(mask)
    if number is not None:
        named = CALLS[number]
        tokens: Tokens = getattr(named, "tokens", named)  # A graph names its rows together with its calls.
        return tokens
    length = mask.shape[1]
    documents, valid = _documents_and_padding(mask != 0 if mask.is_floating_point() else mask, length)
    return Tokens(documents, length, length, valid=valid)


def padding_first(valid: Tensor) -> Tensor:
    """Returns the order [B, n] of tokens that brings padding to the front of each row, and changes nothing else."""
    return torch.argsort(valid.to(torch.int8), dim=1, stable=True)


AttentionMaskInterface.register(IMPLEMENTATION, ring_dilated_mask)
