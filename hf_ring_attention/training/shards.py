"""Cuts batches of whole sequences into the ranks' shards, with their positions and documents, and with shifted labels."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
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
from ..hf.numbered_documents import layout_of_runs, layout_of_shards, runs_of_layout, tells_its_layout
from ..hf.rings import layout_of_rows
from ..plan.layouts import SequenceLayout
from ..plan.patterns import Pattern
from ..plan.problem import Documents
from ..ring.ring import Ring
from ..transport.agreement import digest

#: Label of tokens that are not predicted, as in Transformers.
IGNORED = -100

#: Columns in which tokenizers describe a text, and not its tokens.
ASIDE = ("length", "overflow_to_sample_mapping", "num_truncated_tokens", "overflowing_tokens")

#: Keys by which collators describe documents to flash kernels; a shard has position_ids and seq_idx instead.
_KERNEL_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

#: The values of padding that are not 0.
_FILL = {"labels": IGNORED, "shift_labels": IGNORED, "seq_idx": -1, "special_tokens_mask": 1}


def fill_of(name: str, dtype: torch.dtype) -> int:
    """Returns the value of padding in a tensor of tokens: by `_FILL`, else -100 in integers called "...labels", else 0."""
    labels = name.endswith("labels") and dtype != torch.bool and not dtype.is_floating_point
    return _FILL.get(name, IGNORED if labels else 0)


def shard_batch(
    batch: Mapping[str, Any], ring: Ring, pattern: Pattern | str | None = None, *, device: torch.device | None = None
) -> dict[str, Any]:
    """Returns this rank's part of a batch of whole sequences, for `model(**shard, num_items_in_batch=...)`.

    Args:
        batch: what a collator makes, the same on every rank of the ring. It has input_ids [B, n] and labels [B, n] (-100
            for tokens that are not learned), or shift_labels instead of labels. It may have attention_mask [B, n], 0 for
            padding, and position_ids, seq_idx or cu_seq_lens_q, which say where packed documents begin. Other tensors
            [B, n, ...] are cut but not shifted: a value of a label, such as its weight, must stand where shift_labels has
            the label, one token earlier. Values of other shapes are passed on.
        pattern: the model's, which decides an "auto" layout; None for that of the model that was patched with this ring. The
            layout is then that of `ring.layout_for(n, pattern)`; "documents", which knows what a batch packs, is taken where
            the ring has it, and by loaders.
        device: where the shard goes; None leaves it where the batch is.

    Returns:
        input_ids, position_ids that count each document from 0, labels and shift_labels [B, n local]; attention_mask if
        the batch has one, or if rows are filled up to their layout; seq_idx, the number of each token's document, if a
        row has several. Labels are shifted before the row is cut, so that the last token of a shard predicts the first
        of the next; the last token of a document predicts nothing.

    Raises:
        ValueError: no labels, rows shorter than the ring, tensors that contradict each other, or padding inside a
            document.

    Example:
        >>> ids = torch.arange(1, 9)[None]
        >>> batch = {"input_ids": ids, "labels": ids}
        >>> for shard in ra.run_simulated(lambda ring: ra.shard_batch(batch, ring, "exact"), 2):
        ...     print(shard["input_ids"].tolist(), shard["position_ids"].tolist(), shard["shift_labels"].tolist())
        [[1, 2, 7, 8]] [[0, 1, 6, 7]] [[2, 3, 8, -100]]
        [[3, 4, 5, 6]] [[2, 3, 4, 5]] [[4, 5, 6, 7]]
    """
    return cut_batch(batch, ring, pattern, device, by_documents=ring.layout == "documents").shard


class CutBatch(NamedTuple):
    """This rank's part of a batch, and the layout and the documents that a model will find in the shards."""

    shard: dict[str, Any]
    layout: SequenceLayout
    documents: Documents


def cut_batch(
    batch: Mapping[str, Any],
    ring: Ring,
    pattern: Pattern | str | None,
    device: torch.device | None,
    by_documents: bool = True,
) -> CutBatch:
    """Returns what `shard_batch` describes, with what it found out about the rows.

    Args:
        by_documents: whether the documents of the batch may decide its layout.
    """
    tokens = _tokens(batch)
    batch = {name: x for name, x in batch.items() if x is not None}
    size, length = tokens.shape[:2]
    layout, first, documents = rows_of_batch(batch, ring, pattern, by_documents)
    if layout.kind == "documents":
        ring.cut_by_documents.add(layout.local_len)
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
    if _is_numbered(layout, documents):
        whole["seq_idx"] = numbers.to(tokens.device)
    shard = {name: ring.shard(x, layout, fill=fill_of(name, x.dtype)) for name, x in whole.items()} | rest
    shard = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in shard.items()}
    return CutBatch(shard, *_as_models_find(layout, documents, ring))


def expect_batch(batch: Any, ring: Ring, pattern: Pattern | str | None) -> None:
    """Has the ring plan its calls over a batch that a loader has read, some time before its turn to be cut."""
    with suppress(Exception):  # of a batch that `cut_batch` refuses as well, when it is its turn
        layout, _, documents = rows_of_batch(batch, ring, pattern)
        ring.planner.expect(*_as_models_find(layout, documents, ring))


def _is_numbered(layout: SequenceLayout, documents: Documents) -> bool:
    """Returns whether shards have seq_idx: where a row has several documents, or its layout is told by them."""
    return layout.kind == "documents" or any(len(row) > 1 for row in documents)


def _as_models_find(layout: SequenceLayout, documents: Documents, ring: Ring) -> tuple[SequenceLayout, Documents]:
    """Returns the layout and the documents that models read from the shards of a batch."""
    if not _is_numbered(layout, documents) or not tells_its_layout(ring):
        return layout, documents
    return layout_of_runs([runs_of_layout(layout, documents, rank) for rank in range(ring.world_size)])


def rows_of_batch(
    batch: Mapping[str, Any], ring: Ring, pattern: Pattern | str | None, by_documents: bool = True
) -> tuple[SequenceLayout, int, Documents]:
    """Returns the layout of a batch's rows, the position id of their first tokens, and their documents.

    Raises:
        ValueError: rows shorter than the ring, or entries that contradict each other.
    """
    size, length = _tokens(batch).shape[:2]
    if length < ring.world_size:
        raise ValueError(
            f"rows of {length} tokens cannot be sharded over a ring of {ring.world_size}: each rank needs one token at "
            f"least: use longer rows, a smaller ring, or pad rows to {ring.world_size} tokens"
        )
    # How a model numbers tokens says where documents begin, and these divide the row.
    layout, first = layout_of_rows(ring, length, pattern)
    documents = _documents_of_batch(batch, size, length, first)
    if by_documents:
        layout, _ = layout_of_rows(ring, length, pattern, documents)
    return layout, first, documents


def _tokens(batch: Mapping[str, Any]) -> Tensor:
    """Returns the tokens of a batch, once its labels and the shapes of its tensors are checked."""
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
            got = f"{tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(f"{name} of a batch must be a tensor of the shape of its tokens {expected}, got {got}")
    return tokens


def _documents_of_batch(batch: Mapping[str, Any], size: int, length: int, first: int) -> Documents:
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    by_positions = documents_of_rows(size, positions, mask, first)
    by_mask = None if mask is None else documents_from_mask(mask != 0)
    by_collator = documents_of_collator(
        size, length, batch.get("cu_seq_lens_q"), batch.get("seq_idx"), (by_positions, by_mask)
    )
    for documents in (by_collator, by_positions, by_mask):
        if documents is not None:
            return documents
    return (((0, length),),) * size


def _check_counting(positions: Tensor, numbers: Tensor) -> None:
    """Refuses positions with a gap or a repeat inside a document, from which ranks would read other documents."""
    positions = positions.cpu().expand(numbers.shape)
    within = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, :-1] >= 0)
    wrong = within & (positions[:, 1:] != positions[:, :-1] + 1)
    if wrong.any():
        row, token = (int(x) for x in torch.nonzero(wrong)[0])
        raise ValueError(
            f"position_ids of batch row {row} go from {int(positions[row, token])} to {int(positions[row, token + 1])} at "
            f"token {token + 1}, inside a document: on a ring positions must rise by 1 inside a document, since they tell the "
            f"ranks where documents begin: leave position_ids out, or train such rows on one process"
        )


def _shifted(labels: Tensor, numbers: Tensor) -> Tensor:
    """Returns for each token the label of the next token of its document, -100 for a document's last token."""
    within = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, :-1] >= 0)
    return F.pad(labels[:, 1:].masked_fill(~within, IGNORED), (0, 1), value=IGNORED)


def layout_of_shard(shard: Mapping[str, Any], ring: Ring) -> SequenceLayout:
    """Returns the layout of a batch, for `ring.unshard` of what a model makes of its shards; every rank calls it.

    Where a loader has divided rows by their documents, whole rows have these one behind the other, and padding at the end.

    Args:
        shard: this rank's part of a batch, as a loader of the ring or `shard_batch` gives it.

    Raises:
        ValueError: on every rank, for shards that contradict each other.

    Example:
        >>> ids = torch.arange(1, 9)[None]
        >>> batch = {"input_ids": ids, "labels": ids, "seq_idx": torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])}
        >>> def round_trip(ring):
        ...     shard = ra.shard_batch(batch, ring, "exact")
        ...     return ring.unshard(shard["input_ids"], ra.layout_of_shard(shard, ring)).tolist()
        >>> ra.run_simulated(round_trip, 2, layout="documents")
        [[[1, 2, 3, 4, 5, 6, 7, 8]], [[1, 2, 3, 4, 5, 6, 7, 8]]]
    """
    if shard.get("seq_idx") is not None and tells_its_layout(ring):
        return layout_of_shards(ring, shard.get("position_ids"), shard.get("attention_mask"), shard["seq_idx"])
    return layout_of_rows(ring, shard["position_ids"].shape[1] * ring.world_size)[0]


class Entry(NamedTuple):
    """A tensor of a batch: its type, its shape, and how many of its first sizes are those of [rows, tokens]."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    of_batch: int


def outline(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Describes a batch to a ring without rows, which makes a batch of padding with the same entries (`blank`)."""
    size, length = _tokens(batch).shape[:2]
    entries: dict[str, Any] = {}
    for name, x in batch.items():
        if isinstance(x, Tensor) and name not in _KERNEL_KEYS:
            shape = tuple(x.shape)
            of_tokens = shape[:2] == (size, length) or name == "position_ids"
            entries[name] = Entry(x.dtype, shape, 2 if of_tokens else 1 if shape[:1] == (size,) else 0)
        elif isinstance(x, (str, int, float)):
            entries[name] = x
        elif x is not None and name not in _KERNEL_KEYS:
            entries[name] = {} if isinstance(x, Mapping) else [] if isinstance(x, (list, tuple)) else None
    return entries


def blank(world_size: int, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the smallest batch for a ring of this size, of nothing but padding, for a ring that has no rows left.

    Args:
        entries: those of `outline`, of another ring's batch. A tensor of tokens or of rows becomes one row of padding,
            and another tensor keeps its shape and has zeros.
    """
    batch = {
        name: torch.full((1, world_size)[: x.of_batch] + x.shape[x.of_batch :], fill_of(name, x.dtype), dtype=x.dtype)
        if isinstance(x, Entry)
        else x
        for name, x in entries.items()
    }
    padding = torch.zeros(1, world_size, dtype=torch.int64)
    if "inputs_embeds" not in batch:
        batch.setdefault("input_ids", padding)
    batch["attention_mask"] = padding
    batch["labels"] = torch.full_like(padding, IGNORED)
    return batch


def digests(batch: Any) -> dict[str, str]:
    """Returns a digest of each entry of a batch, by its name; ranks compare these instead of the batch."""
    named = sorted(batch.items()) if isinstance(batch, Mapping) else [("batch", batch)]
    return {str(name): digest(x) for name, x in named}
