"""The masks of ring_dilated, which say what document each token is in, and are never squares.

Transformers calls `ring_dilated_mask` once for each kind of layer, and hands what it returns to every attention layer
of that kind. This mask carries everything that eager attention would read from a square mask: documents, causality,
the window, and which slots of a static cache are written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compute.private import version_of
from ..plan.layouts import SequenceLayout
from ..plan.problem import Documents, HeldKeys
from ..ring.attention import UNTRACEABLE, check_not_traced
from .documents import document_numbers, documents_from_mask, has_padding_inside
from .forward_pass import ForwardPass, drop_broken_passes, forward_pass_of
from .hybrid_types import MIXERS
from .support import check_config, class_name

#: The attribute of a mask that caches its `Tokens`, for all layers and for recomputation in backward, and its version then.
_TOKENS = "_ring_dilated_tokens"

#: The entry for a slot of a static cache that holds no token yet. All other entries of a mask are laid out in bits:
#:
#:     bit    62        37   36        35        34        33       32       31            0
#:            [ length   ]   chunks    sharded   dropped   causal   known    [ document    ]
#:
#: A padding token is 0. Any other token has the number of its document, from 1, in the low 32 bits. The bits
#: above say what is true of the whole mask, so that a copied or moved mask still says it. For example, the entry
#: 2 | 1 << 32 | 1 << 33 | 512 << 37 is a token of the second document of a batch row, in a causal layer with a window of
#: 512 tokens; with 1 << 36 too, the layer has chunks of 512 tokens instead.
#:
#: Where chunks begin depends on how many of a document's tokens the cache has dropped. A row with a cache is one document, so
#: that its number is free: in such a mask it is one more than the tokens dropped.
_UNWRITTEN = -1

_KNOWN, _CAUSAL, _DROPPED, _SHARDED, _CHUNKS = (1 << bit for bit in (32, 33, 34, 35, 36))

_LENGTH_BIT = 37
_DOCUMENT = (1 << 32) - 1

#: The longest window or chunk that fits into its bits. In rows that are no longer than this, longer ones show the same keys.
_LONGEST = (1 << 63 - _LENGTH_BIT) - 1


#: Arguments of the mask functions of other implementations, which make squares and may leave them out.
_OPTIONS_OF_SQUARES = ("allow_is_bidirectional_skip", "allow_is_causal_skip", "dtype", "local_size")


@dataclass(frozen=True)
class Tokens:
    """The keys of a layer, as its mask describes them.

    Attributes:
        documents: the documents of each batch row, in the whole sequence where it is sharded; None if all tokens are one.
        length: the number of key rows; None where there is no mask.
        written: the number of key rows that hold a token.
        causal: whether queries see no later keys; None where the mask does not say.
        window: the window of the layer, in tokens, as `Window` counts them.
        chunk: the length of the layer's chunks, in tokens, as `Segment` counts them.
        dropped: whether the cache has dropped keys before these.
        missing: where it has, in a layer with chunks, how many tokens of each batch row's document.
        layout: how the sequence is sharded; None if it is whole.
        held: what the cache of this rank holds of the sequence; None if it holds all.
        valid: [B, written], False for padding, if a document has padding inside, as behind a cached prefix; else None.
            The documents are those of rows whose padding stands in front then.
    """

    documents: Documents | None = None
    length: int | None = None
    written: int | None = None
    causal: bool | None = None
    window: int | None = None
    chunk: int | None = None
    dropped: bool = False
    missing: tuple[int, ...] = ()
    layout: SequenceLayout | None = None
    held: HeldKeys | None = None
    valid: Tensor | None = None


@torch.compiler.disable(reason=UNTRACEABLE)
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
    """Makes the mask of one kind of layer; Transformers calls this function for "ring_dilated".

    Returns:
        [B, kv_length] int64, which `tokens_of` reads.

    Raises:
        ValueError: a mask that only a square could express.
        NotImplementedError: a model that `support.check_config` refuses.
    """
    check_not_traced()
    if config is not None:
        check_config(config)
    unknown = [name for name, value in kwargs.items() if value is not None and name not in _OPTIONS_OF_SQUARES]
    if unknown:
        raise NotImplementedError(
            f"{class_name(config)}: ring_dilated does not know what {', '.join(unknown)} would do to this mask: use 'eager' or "
            f"'sdpa', or a release of Transformers that was tested"
        )
    if use_vmap:
        raise ValueError(
            f"{class_name(config)}: ring_dilated cannot apply or_mask_function and and_mask_function, which only a square "
            f"mask could express: use 'eager' or 'sdpa'"
        )
    causal, window, chunk, packed = True, None, None, None
    for kind, part in _mask_parts(mask_function):
        if kind == "packed_sequence_mask_function":
            packed = _closure(part, "packed_sequence_mask")
        elif kind == "bidirectional_mask_function":
            causal = False
        elif kind == "sliding_window_overlay":
            window = _closure(part, "sliding_window")
        elif kind == "sliding_window_bidirectional_overlay":
            window = _closure(part, "sliding_window") + 1
        elif kind == "chunked_overlay":  # It counts chunks from the first token that is no padding, as documents do.
            chunk = _closure(part, "chunk_size")
        elif kind != "causal_mask_function":
            raise ValueError(
                f"{class_name(config)}: ring_dilated cannot express this mask ({kind}): its tiles know causal and "
                f"bidirectional attention, windows, chunks, padding and packing: use 'eager' or 'sdpa'"
            )
    drop_broken_passes()  # generate makes masks before it calls the model.
    forward_pass = forward_pass_of(config) or ForwardPass(config)
    sharded = forward_pass.layout is not None or forward_pass.held is not None
    flags = _KNOWN | causal * _CAUSAL | (kv_offset > 0) * _DROPPED | sharded * _SHARDED
    flags |= (chunk is not None) * _CHUNKS | _length_bits(chunk or window, kv_offset + kv_length) << _LENGTH_BIT
    # For some models without a mask, Transformers reads documents from positions by a rule of its own (`packed`). It wins
    # over documents that were read here, since the model computes it under any other implementation.
    if forward_pass.documents is not None and not sharded and (forward_pass.from_collator or packed is None):
        # An attention_mask adds nothing here: the documents were read from it too, or the model itself made it of ones.
        numbers = (document_numbers(forward_pass.documents, kv_length) + 1).to(device)
    elif attention_mask is not None:
        # With a static cache, `generate` passes a mask that this function returned before, and that is cut already.
        cut = kv_offset if attention_mask.shape[1] > kv_length else 0
        numbers = attention_mask[:, cut : cut + kv_length].to(torch.int64)
    elif packed is not None and not sharded:
        numbers = (packed + 1).expand(batch_size, -1)
    else:
        numbers = torch.ones(batch_size, kv_length, dtype=torch.int64, device=device)
    if config is not None and forward_pass_of(config) is None:
        check_unpatched(config, bool((numbers > 1).any()), bool((numbers == 0).any()))
    if chunk is not None and kv_offset:
        numbers = _numbers_with_missing(numbers, attention_mask, kv_offset)
    # Causal queries are the last tokens that are written.
    written = int(q_offset) + q_length - kv_offset if causal else kv_length
    numbers = torch.nn.functional.pad(numbers, (0, kv_length - numbers.shape[1]))
    mask = torch.where(numbers == 0, 0, numbers | flags)
    mask[:, written:] = _UNWRITTEN
    if sharded:
        tokens = Tokens(
            documents=forward_pass.documents if forward_pass.held is None else documents_from_mask(numbers),
            length=kv_length,
            written=written,
            causal=causal,
            window=window,
            chunk=chunk,
            layout=forward_pass.layout,
            held=forward_pass.held,
        )
        setattr(mask, _TOKENS, (version_of(mask), tokens))
    return mask


def check_unpatched(config: Any, packed: bool, padded: bool) -> None:
    """Refuses rows whose states only a patched model keeps apart.

    Args:
        packed, padded: whether a row has several documents, or padding.

    Raises:
        ValueError: packed rows of a hybrid model, or padded ones of a model that lets padding into its states.
    """
    if config.model_type not in MIXERS:
        return
    if packed or (padded and config.model_type == "recurrent_gemma"):
        raise ValueError(
            f"{class_name(config)} was given {'packed' if packed else 'padded'} rows, and its recurrent layers would pass "
            f"their states from {'document to document' if packed else 'padding to tokens'}: call ra.patch_model(model), which "
            f"keeps them apart"
        )


def _length_bits(length: int | None, tokens: int) -> int:
    """Returns the length of a window or a chunk as the bits of a mask hold it, in rows of so many tokens; 0 for none."""
    if length is None or length <= _LONGEST:
        return length or 0
    if tokens > _LONGEST:
        raise ValueError(
            f"a mask cannot hold a sliding window or chunks of {length} tokens in rows of {tokens} tokens: where rows are "
            f"longer than {_LONGEST} tokens, these can have {_LONGEST} at most"
        )
    return _LONGEST


def _numbers_with_missing(numbers: Tensor, attention_mask: Tensor | None, kv_offset: int) -> Tensor:
    """Returns the numbers of tokens [B, kv_length] as a mask with chunks has them behind `kv_offset` dropped keys.

    Args:
        attention_mask: [B, n] of all tokens so far; or a mask that has these numbers already, and is no longer than they.

    Raises:
        ValueError: several documents in a row.
    """
    if attention_mask is not None and attention_mask.shape[1] <= numbers.shape[1]:
        return numbers
    if int(numbers.max()) > 1:
        raise ValueError(
            "chunked layers with a cache compute rows of one document, got an attention_mask that numbers several"
        )
    missing = kv_offset if attention_mask is None else (attention_mask[:, :kv_offset] != 0).sum(1, keepdim=True)
    return torch.where(numbers == 0, 0, missing + 1)


def _mask_parts(mask_function: Callable[..., Any] | None) -> Iterable[tuple[str, Callable[..., Any]]]:
    """Yields the simple mask functions that Transformers combined into this one, each with the name of its maker."""
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
    """Reads a mask [B, n]: one that `ring_dilated_mask` made, or a plain one with 0 for padding and 1 for tokens.

    Raises:
        ValueError: padding inside a document.
        RuntimeError: a mask of a sharded model that was copied on its way to the layer.
    """
    if mask is None:
        return Tokens()
    version, tokens = getattr(mask, _TOKENS, (None, None))
    if version != version_of(mask):
        numbers = (mask != 0 if mask.is_floating_point() else mask).to(torch.int64).cpu()
        flags = int(numbers.max()) >> 32 << 32
        if flags & _SHARDED:
            raise RuntimeError(
                "the mask of a sharded model was copied between the model and its attention layer, and what it knew of "
                "the other ranks is lost: keep the layers of a rank on one device"
            )
        unwritten = int((numbers[0] == _UNWRITTEN).sum())
        written = numbers.shape[1] - unwritten
        length, chunks, dropped = flags >> _LENGTH_BIT or None, bool(flags & _CHUNKS), bool(flags & _DROPPED)
        of_documents, valid = numbers[:, :written] & _DOCUMENT, None
        if has_padding_inside(of_documents):
            valid = of_documents != 0
            of_documents = of_documents.gather(1, padding_first(valid))
        tokens = Tokens(
            documents=documents_from_mask(of_documents),
            length=numbers.shape[1],
            written=written,
            causal=bool(flags & _CAUSAL) if flags & _KNOWN else None,
            window=None if chunks else length,
            chunk=length if chunks else None,
            dropped=dropped,
            missing=tuple((of_documents.amax(1) - 1).clamp_min(0).tolist()) if chunks and dropped else (),
            valid=valid,
        )
        if flags & _KNOWN or not mask.is_inference():  # A plain mask in inference mode may change without a trace.
            setattr(mask, _TOKENS, (version_of(mask), tokens))
    assert isinstance(tokens, Tokens)
    return tokens


def padding_first(valid: Tensor) -> Tensor:
    """Returns the order [B, n] of tokens that brings padding to the front of each row, and changes nothing else."""
    return torch.argsort(valid.to(torch.int8), dim=1, stable=True)


def tell_copy(mask: Any, copy: Any) -> None:
    """Tells a copy of a mask what is known of the mask; other objects are left alone."""
    version, tokens = getattr(mask, _TOKENS, (None, None))
    if tokens is not None and version == version_of(mask) and isinstance(copy, Tensor):
        setattr(copy, _TOKENS, (version_of(copy), tokens))
