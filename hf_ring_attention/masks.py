"""Masks as ring_dilated knows them: which tokens are documents, never a square.

Transformers calls `ring_dilated_mask` once for each kind of layer, and hands what it returns to every attention layer
of that kind. It carries everything that eager attention would read from a square mask: documents, causality, the
window, and which slots of a static cache are written.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .gate import check_config, class_name
from .layouts import HeldKeys, SequenceLayout
from .plans import Documents

#: Attribute of a mask that keeps what was read from it: one reading serves all layers, and recomputation.
_READ = "_ring_dilated_tokens"
#: Slots of a static cache that hold no token yet. Padding is 0; other tokens have their document's number in the low
#: 32 bits and, above, what is true of the whole mask, so that a copied or moved mask says what it said.
_UNWRITTEN = -1
_KNOWN, _CAUSAL, _DROPPED, _SHARDED = (1 << bit for bit in (32, 33, 34, 35))
_WINDOW_BIT = 36


@dataclass(frozen=True)
class Tokens:
    """What a mask says of the keys of a layer.

    Attributes:
        documents: per batch row its documents; in the whole row, where the row is sharded. None: of all tokens, one.
        length: key rows; None where there is no mask.
        written: those that hold a token.
        causal: None where the mask does not say.
        window: of the layer, in tokens, as `Window` counts them.
        dropped: the cache has dropped keys before these.
        layout: how the row is sharded.
        held: what a rank's cache holds of the row.
    """

    documents: Documents | None = None
    length: int | None = None
    written: int | None = None
    causal: bool | None = None
    window: int | None = None
    dropped: bool = False
    layout: SequenceLayout | None = None
    held: HeldKeys | None = None


@dataclass
class ForwardPass:
    """What the forward pass of a patched model knows before its masks are made.

    Either `documents`, and for shards of a row also `layout` and `last_position`, the greatest position id of all ranks;
    or `held`, for a row's last tokens against a sharded cache. `attended`: a layer has attended by ring_dilated.
    """

    documents: Documents | None = None
    layout: SequenceLayout | None = None
    held: HeldKeys | None = None
    last_position: int | None = None
    attended: bool = False


#: The one that runs in this thread; None outside of patched models, and where it has nothing to say.
FORWARD_PASS: ContextVar[ForwardPass | None] = ContextVar("ring_dilated_forward_pass", default=None)


@torch.compiler.disable(reason="it reads masks")
def ring_dilated_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | None = None,
    **kwargs: Any,
) -> Tensor:
    """The mask function that Transformers calls for "ring_dilated".

    Returns:
        [B, kv_length] int64, for `tokens_of`.

    Raises:
        ValueError: a mask that only a square could express.
        NotImplementedError: a model that `gate.check_config` refuses.
    """
    if config is not None:
        check_config(config)
    if use_vmap:
        raise ValueError(
            f"{class_name(config)}: ring_dilated cannot apply or_mask_function and and_mask_function, which only a square "
            f"mask could express: use 'eager' or 'sdpa'"
        )
    causal, window, packed = True, None, None
    for kind, part in _mask_parts(mask_function):
        if kind == "packed_sequence_mask_function":
            packed = _closure(part, "packed_sequence_mask")
        elif kind == "bidirectional_mask_function":
            causal = False
        elif kind == "sliding_window_overlay":
            window = _closure(part, "sliding_window")
        elif kind == "sliding_window_bidirectional_overlay":
            window = _closure(part, "sliding_window") + 1
        elif kind != "causal_mask_function":
            raise ValueError(
                f"{class_name(config)}: ring_dilated cannot express this mask ({kind}): its tiles know causal and "
                f"bidirectional attention, windows, padding and packing: use 'eager' or 'sdpa'"
            )
    known = FORWARD_PASS.get() or ForwardPass()
    sharded = known.layout is not None or known.held is not None
    flags = _KNOWN | causal * _CAUSAL | (kv_offset > 0) * _DROPPED | sharded * _SHARDED
    flags |= (window or 0) << _WINDOW_BIT
    if known.documents is not None and not sharded:
        numbers = _numbers(known.documents, kv_length).to(device)  # a mask of ones, if any, is the model's own
    elif attention_mask is not None:
        # `generate` with a static cache comes with what this function returned for it, where the cut is made.
        cut = kv_offset if attention_mask.shape[1] > kv_length else 0
        numbers = attention_mask[:, cut : cut + kv_length].to(torch.int64)
    elif packed is not None and not sharded:
        numbers = (packed + 1).expand(batch_size, -1)
    else:
        numbers = torch.ones(batch_size, kv_length, dtype=torch.int64, device=device)
    # Causal queries are the last tokens that are written.
    written = int(q_offset) + q_length - kv_offset if causal else kv_length
    numbers = torch.nn.functional.pad(numbers, (0, kv_length - numbers.shape[1]))
    mask = torch.where(numbers == 0, 0, numbers | flags)
    mask[:, written:] = _UNWRITTEN
    if sharded:
        documents = known.documents if known.held is None else documents_from_mask(numbers)
        setattr(mask, _READ, Tokens(documents, kv_length, written, causal, window, False, known.layout, known.held))
    return mask


def _numbers(documents: Documents, length: int) -> Tensor:
    """[B, length] number of each token's document, from 1; 0 for padding."""
    numbers = torch.zeros(len(documents), length, dtype=torch.int64)
    for row, runs in enumerate(documents):
        for number, (start, stop) in enumerate(runs, 1):
            numbers[row, start:stop] = number
    return numbers


def _mask_parts(mask_function: Callable[..., Any] | None) -> Iterable[tuple[str, Callable[..., Any]]]:
    """The simple mask functions that Transformers combined into this one, each with the name of its maker."""
    if mask_function is None:
        return
    kind = mask_function.__qualname__.partition(".")[0]
    if kind == "and_masks":
        for part in _closure(mask_function, "mask_functions"):
            yield from _mask_parts(part)
    elif kind == "remap_positions_for_packed_sequence":
        yield from _mask_parts(_closure(mask_function, "mask_function"))
    else:
        yield kind, mask_function


def _closure(function: Callable[..., Any], name: str) -> Any:
    return inspect.getclosurevars(function).nonlocals[name]


def tokens_of(mask: Tensor | None) -> Tokens:
    """What a mask [B, n] says: one of `ring_dilated_mask`, or a plain one of zeros for padding and ones.

    Raises:
        ValueError: a document with a gap.
        RuntimeError: the mask of a sharded model that was copied on its way to the layer.
    """
    if mask is None:
        return Tokens()
    tokens = getattr(mask, _READ, None)
    if tokens is None:
        numbers = mask.to(torch.int64).cpu()
        flags = int(numbers.max()) >> 32 << 32
        if flags & _SHARDED:
            raise RuntimeError(
                "the mask of a sharded model was copied between the model and its attention layer, and what it knew of "
                "the other ranks is lost: keep the layers of a rank on one device"
            )
        unwritten = int((numbers[0] == _UNWRITTEN).sum())
        written = numbers.shape[1] - unwritten
        tokens = Tokens(
            documents=documents_from_mask(numbers[:, :written] & (1 << 32) - 1),
            length=numbers.shape[1],
            written=written,
            causal=bool(flags & _CAUSAL) if flags & _KNOWN else None,
            window=flags >> _WINDOW_BIT or None,
            dropped=bool(flags & _DROPPED),
        )
        setattr(mask, _READ, tokens)
    assert isinstance(tokens, Tokens)
    return tokens


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


def packed_documents(batch: int, tokens: int, cu_seq_lens: Tensor | None, seq_idx: Tensor | None) -> Documents | None:
    """The documents that Transformers' collators describe beside the tokens; None where they do not.

    Args:
        cu_seq_lens: [documents + 1] ends of the documents of one batch row (`DataCollatorWithFlattening`).
        seq_idx: [B, n] number of each token's document, from 0.

    Raises:
        ValueError: ends that are not those of `tokens` tokens, or that contradict the numbers.
    """
    by_ends = by_number = None
    if cu_seq_lens is not None:
        by_ends = getattr(cu_seq_lens, _READ, None)
        if by_ends is None:
            ends = cu_seq_lens.flatten().tolist()
            rising = all(a < b for a, b in itertools.pairwise(ends))
            if batch != 1 or ends[0] != 0 or ends[-1] != tokens or not rising:
                raise ValueError(
                    f"cu_seq_lens must rise from 0 to the {tokens} tokens of one batch row, got {ends} for {batch} rows: "
                    f"pass those of the collator, with the input_ids it made"
                )
            by_ends = (tuple(itertools.pairwise(ends)),)
            setattr(cu_seq_lens, _READ, by_ends)
    if seq_idx is not None:
        if tuple(seq_idx.shape) != (batch, tokens):
            raise ValueError(f"seq_idx must be [{batch}, {tokens}] as input_ids, got {tuple(seq_idx.shape)}")
        by_number = getattr(seq_idx, _READ, None)
        if by_number is None:
            by_number = documents_from_mask(seq_idx + 1)
            setattr(seq_idx, _READ, by_number)
    if by_ends is not None and by_number is not None and by_ends != by_number:
        raise ValueError(f"cu_seq_lens and seq_idx contradict each other: {by_ends} and {by_number}")
    return by_number if by_ends is None else by_ends
