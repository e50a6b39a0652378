"""Collators of tokenized documents: a row each, padded; or several packed into a row, none of which sees another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .batches import IGNORED


@dataclass(frozen=True)
class PaddingCollator:
    """Makes a row of each document, padded to the longest, or to `row_length`.

    Args:
        pad_token_id: what padding is; it is never seen, nor learned from.
        row_length: tokens of a row; None for those of the longest document.
        padding_side: "right" or "left".

    A document is a mapping with input_ids and, where they differ from these, labels; lists or tensors [n]. Labels of
    tokens that equal `pad_token_id`, such as an end token, are kept.
    """

    pad_token_id: int = 0
    row_length: int | None = None
    padding_side: str = "right"

    def __post_init__(self) -> None:
        if self.padding_side not in ("right", "left"):
            raise ValueError(f"PaddingCollator: padding_side must be 'right' or 'left', got {self.padding_side!r}")
        _check_row_length("PaddingCollator", self.row_length)

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """[B, n] input_ids, attention_mask and labels of B documents.

        Raises:
            ValueError: a document longer than a row, or without tokens.
        """
        read = [_read(document, self.row_length) for document in documents]
        length = self.row_length or max(len(ids) for ids, _ in read)
        rows = _empty_rows(len(read), length, self.pad_token_id)
        for row, (ids, labels) in enumerate(read):
            start = length - len(ids) if self.padding_side == "left" else 0
            _put(rows, row, start, ids, labels)
        return rows


@dataclass(frozen=True)
class PackingCollator:
    """Packs documents into rows of `row_length` tokens, each into the first row that has room for it.

    Args:
        row_length: tokens of a row; None for a single row as long as all documents together.
        pad_token_id: what fills the end of a row.

    Documents are those of `PaddingCollator`. Their borders are told by position_ids that restart and by seq_idx, the
    number of each token's document in its row.
    """

    row_length: int | None = None
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        _check_row_length("PackingCollator", self.row_length)

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """[rows, n] input_ids, attention_mask, labels, position_ids and seq_idx (-1 for padding).

        Raises:
            ValueError: a document longer than a row, or without tokens.
        """
        read = [_read(document, self.row_length) for document in documents]
        length = self.row_length or sum(len(ids) for ids, _ in read)
        packed: list[list[tuple[Tensor, Tensor]]] = []
        room: list[int] = []
        for ids, labels in read:
            row = next((row for row, left in enumerate(room) if left >= len(ids)), len(room))
            if row == len(room):
                packed.append([])
                room.append(length)
            packed[row].append((ids, labels))
            room[row] -= len(ids)
        rows = _empty_rows(len(packed), length, self.pad_token_id)
        rows["position_ids"] = torch.zeros(len(packed), length, dtype=torch.int64)
        rows["seq_idx"] = torch.full((len(packed), length), -1)
        for row, contents in enumerate(packed):
            start = 0
            for number, (ids, labels) in enumerate(contents):
                _put(rows, row, start, ids, labels)
                rows["position_ids"][row, start : start + len(ids)] = torch.arange(len(ids))
                rows["seq_idx"][row, start : start + len(ids)] = number
                start += len(ids)
        return rows


def _check_row_length(name: str, row_length: int | None) -> None:
    if row_length is not None and (not isinstance(row_length, int) or row_length < 1):
        raise ValueError(f"{name}: row_length must be a number of tokens of at least 1, or None, got {row_length!r}")


def _read(document: Mapping[str, Any], row_length: int | None) -> tuple[Tensor, Tensor]:
    ids = torch.as_tensor(document["input_ids"])
    labels = ids if document.get("labels") is None else torch.as_tensor(document["labels"])
    if ids.dim() != 1 or len(ids) == 0 or labels.shape != ids.shape:
        raise ValueError(
            f"a document needs input_ids [tokens] and labels like them, or none; got input_ids {tuple(ids.shape)} and "
            f"labels {tuple(labels.shape)}"
        )
    if row_length is not None and len(ids) > row_length:
        raise ValueError(
            f"a document of {len(ids)} tokens does not fit a row of {row_length}: cut documents when you tokenize them, or "
            f"make rows longer"
        )
    return ids, labels


def _empty_rows(count: int, length: int, pad_token_id: int) -> dict[str, Tensor]:
    shape = (count, length)
    return {
        "input_ids": torch.full(shape, pad_token_id),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
        "labels": torch.full(shape, IGNORED),
    }


def _put(rows: dict[str, Tensor], row: int, start: int, ids: Tensor, labels: Tensor) -> None:
    span = slice(start, start + len(ids))
    rows["input_ids"][row, span] = ids
    rows["attention_mask"][row, span] = 1
    rows["labels"][row, span] = labels
