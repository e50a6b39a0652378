"""Batches of whole rows, and a rank's shard of them: tokens, global positions, documents, and labels shifted before the cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..hf.documents import (
    document_numbers,
    documents_from_mask,
    documents_of_collator,
    documents_of_rows,
    positions_of_documents,
)
from ..hf.rings import layout_of_rows
from ..plan.patterns import Pattern
from ..plan.problem import Documents
from ..ring.ring import Ring
from ..transport.agreement import digest

#: Label of tokens that are not predicted, as in Transformers.
IGNORED = -100

#: What tokenizers tell of a text that is not of its tokens.
ASIDE = ("length", "overflow_to_sample_mapping", "num_truncated_tokens", "overflowing_tokens")

#: How collators describe documents to flash kernels; the shard says it by positions and seq_idx.
_KERNEL_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

#: What padding has, where it is not 0.
_FILL = {"labels": IGNORED, "shift_labels": IGNORED, "seq_idx": -1, "special_tokens_mask": 1}


def fill_of(name: str, dtype: torch.dtype) -> int:
    """What padding has in a tensor of tokens: nothing to learn in all that is called labels, 0 in what is unknown."""
    labels = name.endswith("labels") and dtype != torch.bool and not dtype.is_floating_point
    return _FILL.get(name, IGNORED if labels else 0)


def shard_batch(
    batch: Mapping[str, Any], ring: Ring, pattern: Pattern | str | None = None, *, device: torch.device | None = None
) -> dict[str, Any]:
    """This rank's part of a batch of whole rows, for `model(**shard, num_items_in_batch=...)`.

    Args:
        batch: as a collator makes it, the same on every rank of the ring: input_ids [B, n] and labels [B, n] (-100 where
            nothing is to be learned), and what it may have besides: attention_mask [B, n] with 0 for padding;
            position_ids, seq_idx or cu_seq_lens_q that say where packed documents begin; shift_labels instead of labels;
            other tensors [B, n, ...], which are cut too, but not shifted: what belongs to a label, such as its weight,
            must stand where shift_labels have it, one token earlier. What is not of that shape is passed on.
        pattern: the model's, which decides an "auto" layout; None for that of the model that was patched with this ring.
        device: where the shard goes; None leaves it.

    Returns:
        input_ids, position_ids that count each document from 0, labels and shift_labels [B, n local]; attention_mask
        where the batch has one, or rows are filled up to their layout; seq_idx, the number of each token's document, where a
        row has several. Labels are shifted before the row is cut, so that the last token of a shard predicts the first
        of the next; the last token of a document predicts nothing.

    Raises:
        ValueError: no labels, rows shorter than the ring, tensors that contradict each other, or padding inside a
            document.
    """
    tokens = _tokens(batch)
    batch = {name: x for name, x in batch.items() if x is not None}
    size, length = tokens.shape[:2]
    if length < ring.world_size:
        raise ValueError(
            f"rows of {length} tokens cannot be sharded over a ring of {ring.world_size}: each rank needs one token at "
            f"least: use longer rows, a smaller ring, or pad to {ring.world_size}"
        )
    layout, first = layout_of_rows(ring, length, pattern)
    documents = _documents_of_batch(batch, size, length, first)
    whole = {
        name: x
        for name, x in batch.items()
        if name not in _KERNEL_KEYS and isinstance(x, Tensor) and tuple(x.shape[:2]) == (size, length)
    }
    rest = {name: x for name, x in batch.items() if name not in whole and name not in (*_KERNEL_KEYS, "position_ids")}
    numbers = document_numbers(documents, length)
    positions = batch.get("position_ids")
    if positions is None:
        positions = positions_of_documents(documents, length, first).to(tokens.device)
    elif ring.world_size > 1:
        _check_counting(positions, numbers)
    whole["position_ids"] = positions.expand(size, -1)
    if "shift_labels" not in whole:
        whole["shift_labels"] = _shifted(whole["labels"], numbers.to(tokens.device))
    # A model computes no loss from shift_labels alone.
    whole.setdefault("labels", whole["shift_labels"])
    if "attention_mask" not in whole and layout.padded_len > length:
        whole["attention_mask"] = torch.ones(size, length, dtype=torch.int64, device=tokens.device)
    if any(len(row) > 1 for row in documents):
        whole["seq_idx"] = numbers.to(tokens.device)
    shard = {name: ring.shard(x, layout, fill=fill_of(name, x.dtype)) for name, x in whole.items()} | rest
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in shard.items()}


def _tokens(batch: Mapping[str, Any]) -> Tensor:
    """The tokens of a batch that has what it needs."""
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch must be a mapping of tensors, as collators make it, got {type(batch).__name__}")
    tokens = next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)
    if not isinstance(tokens, Tensor) or tokens.dim() < 2 or 0 in tokens.shape[:2]:
        if tokens is None:
            raise ValueError(f"a batch needs input_ids [rows, tokens], or inputs_embeds, got {sorted(map(str, batch))}")
        got = f"{tuple(tokens.shape)}" if isinstance(tokens, Tensor) else f"a {type(tokens).__name__}"
        raise ValueError(
            f"a batch needs input_ids [rows, tokens], or inputs_embeds, as a tensor, got {got}: rows of lists need a "
            f"collate_fn that makes tensors, such as ra.PaddingCollator"
        )
    if batch.get("labels") is None and batch.get("shift_labels") is None:
        raise ValueError(
            f"a batch has no labels, only {sorted(batch)}: a loss over shards needs labels [rows, tokens], -100 where "
            f"nothing is to be learned; for language modelling labels=input_ids.clone(), or a collator that adds them, "
            f"such as ra.PaddingCollator; batches of preference or reward training have none, and are not supported"
        )
    expected = tuple(tokens.shape[:2])
    for name in ("labels", "shift_labels", "attention_mask", "position_ids", "seq_idx"):
        x = batch.get(name)
        shapes = (expected, (1, expected[1])) if name == "position_ids" else (expected,)
        if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) not in shapes):
            seen: Any = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} of a batch must be a tensor of the shape of its tokens {expected}, got {seen}")
    return tokens


def _documents_of_batch(batch: Mapping[str, Any], size: int, length: int, first: int) -> Documents:
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    by_positions = documents_of_rows(size, positions, mask, first)
    by_mask = None if mask is None else documents_from_mask(mask != 0)
    said = documents_of_collator(
        size, length, batch.get("cu_seq_lens_q"), batch.get("seq_idx"), (by_positions, by_mask)
    )
    for documents in (said, by_positions, by_mask):
        if documents is not None:
            return documents
    return (((0, length),),) * size


def _check_counting(positions: Tensor, numbers: Tensor) -> None:
    """Refuses positions with a gap or a repeat inside a document, by which the shards of a ring could not be told."""
    positions = positions.cpu().expand(numbers.shape)
    within = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, :-1] >= 0)
    wrong = within & (positions[:, 1:] != positions[:, :-1] + 1)
    if wrong.any():
        row, token = (int(x) for x in torch.nonzero(wrong)[0])
        raise ValueError(
            f"position_ids of batch row {row} go from {int(positions[row, token])} to {int(positions[row, token + 1])} at "
            f"token {token + 1}, inside a document: on a ring positions must count each document by ones, since they tell "
            f"the ranks where documents begin: leave position_ids out, or train such rows on one process"
        )


def _shifted(labels: Tensor, numbers: Tensor) -> Tensor:
    """Of each token the label of the next one of its document."""
    within = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, :-1] >= 0)
    return F.pad(labels[:, 1:].masked_fill(~within, IGNORED), (0, 1), value=IGNORED)


class Entry(NamedTuple):
    """What is told of a batch's tensor: its type, its sizes, and how many of these, the first ones, are [rows, tokens]."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    of_batch: int


def outline(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What another ring must know of a batch that a shard could be made of, for one of nothing but padding to be like it."""
    size, length = _tokens(batch).shape[:2]
    told: dict[str, Any] = {}
    for name, x in batch.items():
        if isinstance(x, Tensor) and name not in _KERNEL_KEYS:
            shape = tuple(x.shape)
            of_tokens = shape[:2] == (size, length) or name == "position_ids"
            told[name] = Entry(x.dtype, shape, 2 if of_tokens else 1 if shape[:1] == (size,) else 0)
        elif isinstance(x, (str, int, float)):
            told[name] = x
        elif x is not None and name not in _KERNEL_KEYS:
            told[name] = {} if isinstance(x, Mapping) else [] if isinstance(x, (list, tuple)) else None
    return told


def blank(world_size: int, outlined: Mapping[str, Any]) -> dict[str, Any]:
    """The smallest batch for a ring of this size, of nothing but padding: for a ring without rows when others have some.

    It has what `outline` tells of their batch: a row of tensors of tokens and of rows, and zeros in the place of others.
    """
    batch = {
        name: torch.full((1, world_size)[: x.of_batch] + x.shape[x.of_batch :], fill_of(name, x.dtype), dtype=x.dtype)
        if isinstance(x, Entry)
        else x
        for name, x in outlined.items()
    }
    nothing = torch.zeros(1, world_size, dtype=torch.int64)
    if "inputs_embeds" not in batch:
        batch.setdefault("input_ids", nothing)
    batch["attention_mask"] = nothing
    batch["labels"] = torch.full_like(nothing, IGNORED)
    return batch


def digests(batch: Any) -> dict[str, str]:
    """What ranks compare instead of a batch, by name."""
    named = sorted(batch.items()) if isinstance(batch, Mapping) else [("batch", batch)]
    return {str(name): digest(x) for name, x in named}
