"""Reads the columns of one document as a data set has them, checks them, and cuts padding off."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .shards import ASIDE, IGNORED

#: Columns that are 0 for tokens that are not learned, as TRL names them.
_LEARNED = ("completion_mask", "assistant_masks")

#: Columns without which all tokens of a document are learned, or none is padding.
_MARKS = ("labels", "attention_mask", *_LEARNED)

#: Columns of a document that the collators interpret; other columns of tokens are only carried along.
TOKEN_COLUMNS = ("input_ids", *_MARKS, "position_ids", "seq_idx", "seq_lengths")


def is_integer(x: Any) -> bool:
    return isinstance(x, Integral) and not isinstance(x, (bool, np.bool_))


# ---- reading documents


@dataclass(frozen=True)
class Document:
    """A document as it was read, or a row of several documents that was packed before.

    Attributes:
        columns: values for each token. position_ids are among them only where they do not count each document from 0.
        lengths: the tokens of each document; several for a row that was packed before.
    """

    columns: dict[str, Tensor]
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def cut(self, start: int, stop: int) -> Document:
        """Returns the document of the tokens [start, stop)."""
        ends = [min(max(end, start), stop) for end in itertools.accumulate(self.lengths, initial=0)]
        lengths = tuple(b - a for a, b in itertools.pairwise(ends) if b > a)
        return Document({name: x[start:stop] for name, x in self.columns.items()}, lengths)

    def positions(self) -> Tensor:
        """Returns the position of each token."""
        own = self.columns.get("position_ids")
        return torch.cat([torch.arange(length) for length in self.lengths]) if own is None else own

    def numbers(self) -> Tensor:
        """Returns the number of each token's document, from 0."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))


def read_all(documents: Any, collator: str) -> list[Document]:
    """Reads the documents of a batch; `collator` is the name that an error gives the collator.

    Raises:
        ValueError: no documents, one that cannot be read, or one that lacks a column of `_MARKS` that another has.
    """
    iterable = isinstance(documents, Iterable) and not isinstance(documents, (Mapping, str, Tensor))
    parsed = (
        [read_document(x, f"document {number} of a batch") for number, x in enumerate(documents)] if iterable else []
    )
    if not parsed:
        got = "none" if iterable else type(documents).__name__
        raise ValueError(f"{collator} expected a list of documents, mappings that have input_ids, got {got}")
    for name in _MARKS:
        having = [name in document for document in documents]
        if len({*having}) > 1:
            raise ValueError(
                f"document {having.index(False)} of a batch has no {name}, which document {having.index(True)} has, so that "
                f"its every token would count: give all documents of the data set this column, or none"
            )
    return parsed


def read_document(document: Any, who: str) -> Document:
    """Reads one document; `who` is what an error calls it.

    Raises:
        ValueError: no mapping that has input_ids, no tokens, or columns that contradict each other.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"{who} must be a mapping that has input_ids, got {type(document).__name__}")
    if document.get("input_ids") is None:
        raise ValueError(
            f"{who} has no input_ids, only the columns {sorted(map(str, document))}: tokenize documents first"
        )
    check_marks(document, who)
    columns = token_columns(document, who)
    mask = columns.pop("attention_mask", None)
    start, stop = (0, len(columns["input_ids"])) if mask is None else unpadded(mask, who)
    columns = {name: x[start:stop] for name, x in columns.items()}
    ids = columns["input_ids"] = _integers(columns["input_ids"], "input_ids", who)
    if len(ids) == 0:
        raise ValueError(f"{who} has no tokens: leave such documents out of the dataset")
    if int(ids.min()) < 0:
        raise ValueError(f"{who} has input_ids below 0, which are no tokens, such as {int(ids.min())}")
    columns["labels"] = _labels(columns, who)
    uncut_length = len(ids) if mask is None else len(mask)
    return Document(columns, _lengths(columns, document.get("seq_lengths"), (start, stop, uncut_length), who))


def check_marks(document: Mapping[str, Any], who: str) -> None:
    """Refuses None for labels or a mask: a data set has it for what is missing, and every token would count.

    Raises:
        ValueError: the column, and the document by the name `who`.
    """
    for name in _MARKS:
        if name in document and document[name] is None:
            raise ValueError(
                f"{who} has None for {name}, so that every token would count: give each token a value, or remove the column "
                f"from the data set"
            )


def token_columns(document: Mapping[str, Any], who: str) -> dict[str, Tensor]:
    """Returns the columns that have a value for each token; `who` is what an error calls the document.

    Raises:
        ValueError: no input_ids, or numbers that are fewer or more than the tokens.
    """
    if "shift_labels" in document:
        raise ValueError(
            f"{who} has shift_labels: pass labels instead, which are shifted when rows are cut into shards"
        )
    ids = _tensor(document["input_ids"], "input_ids", who)
    if ids is None or ids.dim() != 1:
        got = type(document["input_ids"]).__name__ if ids is None else f"{tuple(ids.shape)}"
        raise ValueError(
            f"{who} needs input_ids [tokens], a list of integers, got {got}: leave out a tokenizer's return_tensors='pt', "
            f"which adds a dimension"
        )
    columns = {"input_ids": ids}
    for name, value in document.items():
        if value is None or name in ("input_ids", "seq_lengths", *ASIDE):
            continue
        x, known = _tensor(value, name, who), name in TOKEN_COLUMNS
        if (x is None and known) or (x is not None and (x.shape[:1] != ids.shape or (known and x.dim() != 1))):
            if x is not None and x.dim() == 0 and not known:  # a single number belongs to no token
                continue
            got = f"of type {type(value).__name__}" if x is None else f"of shape {tuple(x.shape)}"
            raise ValueError(
                f"{who} has {name} {got}, and needs one value for each of its {len(ids)} tokens"
                + ("" if known else ": leave out columns that are not of tokens, by dataset.remove_columns")
            )
        if x is not None:
            columns[str(name)] = x
    return columns


def _tensor(value: Any, name: str, who: str) -> Tensor | None:
    """Returns numbers as a tensor, and None for a value that is not made of numbers."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    leaf = value
    while isinstance(leaf, (list, tuple)) and leaf:
        leaf = leaf[0]
    if isinstance(leaf, np.ndarray) and leaf is value:
        unsigned = value.dtype.kind == "u"  # torch has few operations for unsigned integers
        return torch.as_tensor(value.astype(np.int64) if unsigned else value) if value.dtype.kind in "biuf" else None
    if not isinstance(value, (list, tuple)) or not isinstance(
        leaf, (Number, np.bool_, Tensor, np.ndarray, list, tuple)
    ):
        return None
    if leaf is value or isinstance(leaf, (list, tuple)):  # an empty list
        return torch.zeros(0, dtype=torch.int64) if name in TOKEN_COLUMNS else None
    try:
        return torch.as_tensor(np.asarray(value) if isinstance(leaf, np.ndarray) else value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{who} has {name} of which no tensor can be made: {error}") from error


def _integers(x: Tensor, name: str, who: str) -> Tensor:
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        raise ValueError(f"{who} has {name} of {x.dtype}, where integers are expected")
    return x.to(torch.int64)


def _marked(mask: Tensor, name: str, who: str) -> Tensor:
    """Returns where a mask is 1, as booleans."""
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"{who} has {name} with the values {mask.unique().tolist()}, and may have only 0 or 1")
    return mask == 1


def unpadded(mask: Tensor, who: str) -> tuple[int, int]:
    """Returns (start, stop) of the tokens that are no padding."""
    tokens = torch.nonzero(_marked(mask, "attention_mask", who)).flatten()
    start, stop = (int(tokens[0]), int(tokens[-1]) + 1) if len(tokens) else (0, 0)
    if stop - start != len(tokens):
        raise ValueError(
            f"{who} has an attention_mask with padding inside: from token {start} to {stop - 1} it is 1 for {len(tokens)} of "
            f"{stop - start} tokens, and only padding at the ends of a document can be cut off: for tokens that are seen but "
            f"not learned, set labels to -100"
        )
    return start, stop


def _labels(columns: dict[str, Tensor], who: str) -> Tensor:
    """Returns the labels, -100 where a mask excludes a token, and takes these masks out of the columns."""
    masks = {name: _marked(columns.pop(name), name, who) for name in _LEARNED if name in columns}
    if "labels" not in columns:
        labels = columns["input_ids"].clone()
        for mask in masks.values():
            labels[~mask] = IGNORED
        return labels
    labels = _integers(columns["labels"], "labels", who)
    wrong = labels[(labels < 0) & (labels != IGNORED)]
    if len(wrong):
        raise ValueError(f"{who} has labels that are neither tokens nor {IGNORED}, such as {int(wrong[0])}")
    for name, mask in masks.items():
        contradictions = int(((labels != IGNORED) & ~mask).sum())
        if contradictions:
            raise ValueError(
                f"{who} has a {name} that is 0 for {contradictions} tokens with labels other than {IGNORED}: leave one of the "
                f"columns out, or make these labels {IGNORED}"
            )
    return labels


def _lengths(columns: dict[str, Tensor], seq_lengths: Any, cut: tuple[int, int, int], who: str) -> tuple[int, ...]:
    """Returns the lengths of the documents in a row; removes position_ids that count each of them from 0.

    Args:
        seq_lengths: the lengths before padding was cut off, or None.
        cut: start and stop of the tokens that the cut left, and how many there were.
    """
    count, ends_by_column = len(columns["input_ids"]), {}
    if seq_lengths is not None:
        start, stop, tokens = cut
        lengths_before = _integers(torch.as_tensor(seq_lengths), "seq_lengths", who).tolist()
        ends_before = list(itertools.accumulate(lengths_before, initial=0))
        if ends_before != sorted(set(ends_before)) or ends_before[-1] != tokens:
            raise ValueError(
                f"{who} has seq_lengths {list(seq_lengths)}, which make {ends_before[-1]} tokens together, and {tokens} "
                f"input_ids: lengths must be positive, and their sum the number of tokens"
            )
        ends_by_column["seq_lengths"] = [min(max(end, start), stop) - start for end in ends_before[1:]]
    numbers, positions = columns.pop("seq_idx", None), columns.get("position_ids")
    if numbers is not None:
        ends_by_column["seq_idx"] = _ends_at(numbers[1:] != numbers[:-1], count)
    if positions is not None:
        positions = columns["position_ids"] = _integers(positions, "position_ids", who)
        # Packing makes positions restart: a document's first token has position 0, or one below its neighbour's.
        ends_by_column["position_ids"] = _ends_at((positions[1:] == 0) | (positions[1:] < positions[:-1]), count)
    distinct: dict[str, tuple[int, ...]] = {
        name: tuple(sorted(set(ends) - {0})) for name, ends in ends_by_column.items()
    }
    if len(set(distinct.values())) > 1:
        raise ValueError(
            f"{who} has documents that end at other tokens by {' than by '.join(distinct)}: {distinct}: leave out the "
            f"columns that are wrong"
        )
    borders = (0, *next(iter(distinct.values()), (count,)))
    lengths = tuple(b - a for a, b in itertools.pairwise(borders))
    if positions is not None and torch.equal(positions, torch.cat([torch.arange(length) for length in lengths])):
        del columns["position_ids"]
    return lengths


def _ends_at(borders: Tensor, count: int) -> list[int]:
    """Returns where documents of `count` tokens end; borders[i] says whether one ends behind token i."""
    return [*(torch.nonzero(borders).flatten() + 1).tolist(), count]
