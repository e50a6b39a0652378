"""Collators of tokenized documents: a row each, padded; or several packed into a row, none of which sees another."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .columns import Document, is_integer, read_all, read_document
from .shards import IGNORED, fill_of

#: What becomes of documents longer than a row; the name and three of the words are axolotl's.
Strategy = Literal["raise", "truncate", "split", "drop"]

_STRATEGIES = ("raise", "truncate", "split", "drop")


@dataclass(frozen=True)
class PaddingCollator:
    """Makes a row of each document, padded to the longest, or to `row_length`.

    Args:
        pad_token_id: what padding is; it is never seen, nor learned from.
        row_length: tokens of a row; None for those of the longest document.
        padding_side: "right" or "left".
        excess_length_strategy: what becomes of a document longer than `row_length`. "raise" refuses it, when a loader is
            prepared where the dataset tells its lengths (a list, a `datasets.Dataset`; see `Ring.prepare_data_loader`).
            "truncate" keeps its first tokens. "split" makes documents of its pieces: each counts its positions from 0,
            and nothing predicts its first token. "drop" leaves it out; a batch of which nothing is left is padding.

    A document is a mapping of columns, lists or arrays with a value for each token:

    - input_ids.
    - labels, where they differ from these; -100 is not learned. Labels of tokens that equal `pad_token_id`, such as an
      end token, are kept.
    - attention_mask, 0 for padding at its ends, which is cut off.
    - completion_mask and assistant_masks, 0 for tokens that are not learned, as TRL makes them.
    - position_ids, where they do not count the tokens from 0.
    - seq_lengths (TRL's packing), seq_idx, or position_ids that restart: a row that was packed before, of several
      documents.
    - others, such as weights, token_type_ids or special_tokens_mask: they are columns of the batch, [B, n, ...].

    What is not of tokens, such as a text, a number, or what a tokenizer tells of a text (length), is left out; but a
    list of numbers, fewer or more than the tokens, is refused, since it may be a column of tokens that went wrong.
    """

    pad_token_id: int = 0
    row_length: int | None = None
    padding_side: str = "right"
    _: KW_ONLY
    excess_length_strategy: Strategy = "raise"

    def __post_init__(self) -> None:
        if self.padding_side not in ("right", "left"):
            raise ValueError(f"PaddingCollator: padding_side must be 'right' or 'left', got {self.padding_side!r}")
        _check_settings(self)

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """[B, n] input_ids, attention_mask and labels of B documents, and what they have besides.

        Several documents in a row are told by position_ids that restart and by seq_idx, the number of each token's
        document in its row (-1 for padding).

        Raises:
            ValueError: a document longer than a row, or without tokens; a column that is not as the others.
        """
        read = read_all(documents, type(self).__name__)
        fitting = _as_short_as_rows(read, self.row_length, self.excess_length_strategy)
        length = self.row_length or max(map(len, fitting))
        rows = [[(length - len(x) if self.padding_side == "left" else 0, x)] for x in fitting] or [[]]
        several = any(len(x.lengths) > 1 for x in read)
        own = any("position_ids" in x.columns for x in read)
        return _batch(rows, length, self.pad_token_id, _carried(read), positions=several or own, numbers=several)


@dataclass(frozen=True)
class PackingCollator:
    """Packs documents into rows of `row_length` tokens, each into the first row that has room for it.

    It packs the documents of a batch: with a batch size of few short documents, rows stay mostly empty, and the number of
    rows changes from step to step. `pack_documents` packs a whole data set ahead of time, into rows that are nearly full.

    Args:
        row_length: tokens of a row; None for a single row as long as all documents together.
        pad_token_id: what fills the end of a row.
        excess_length_strategy: see `PaddingCollator`; "split" packs pieces as documents.

    Documents are those of `PaddingCollator`. Their borders are told by position_ids that restart and by seq_idx, the
    number of each token's document in its row.
    """

    row_length: int | None = None
    pad_token_id: int = 0
    _: KW_ONLY
    excess_length_strategy: Strategy = "raise"

    def __post_init__(self) -> None:
        _check_settings(self)

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """[rows, n] input_ids, attention_mask, labels, position_ids and seq_idx (-1 for padding), and what they have besides.

        Raises:
            ValueError: a document longer than a row, or without tokens; a column that is not as the others.
        """
        read = read_all(documents, type(self).__name__)
        fitting = _as_short_as_rows(read, self.row_length, self.excess_length_strategy)
        length = self.row_length or sum(map(len, fitting))
        rows: list[list[tuple[int, Document]]] = [[]]
        taken = [0]
        for document in fitting:
            row = next((row for row, stop in enumerate(taken) if stop + len(document) <= length), len(taken))
            if row == len(taken):
                rows.append([])
                taken.append(0)
            rows[row].append((taken[row], document))
            taken[row] += len(document)
        return _batch(rows, length, self.pad_token_id, _carried(read), positions=True, numbers=True)


def _check_settings(collator: PaddingCollator | PackingCollator) -> None:
    name = type(collator).__name__
    row_length, pad, strategy = collator.row_length, collator.pad_token_id, collator.excess_length_strategy
    if row_length is not None and (not is_integer(row_length) or row_length < 1):
        raise ValueError(f"{name}: row_length must be a number of tokens of at least 1, or None, got {row_length!r}")
    if not is_integer(pad) or pad < 0:
        raise ValueError(
            f"{name}: pad_token_id must be the id of a token, got {pad!r}: a tokenizer without a padding token has None; "
            f"padding is never seen, so any token will do, such as tokenizer.eos_token_id"
        )
    if strategy not in _STRATEGIES:
        raise ValueError(f"{name}: excess_length_strategy must be one of {_STRATEGIES}, got {strategy!r}")
    if row_length is None and strategy != "raise":
        raise ValueError(f"{name}: excess_length_strategy={strategy!r} needs a row_length, without which all fits")


# ---- making rows


def _as_short_as_rows(documents: list[Document], row_length: int | None, strategy: Strategy) -> list[Document]:
    """Documents that fit into a row."""
    fitting = []
    for number, document in enumerate(documents):
        if row_length is None or len(document) <= row_length:
            fitting.append(document)
        elif strategy == "raise":
            raise ValueError(
                f"document {number} has {len(document)} tokens, and does not fit a row of {row_length}: {REMEDY}"
            )
        elif strategy == "truncate":
            first = document.cut(0, row_length)
            if bool((first.columns["labels"] == IGNORED).all()) and bool((document.columns["labels"] != IGNORED).any()):
                warnings.warn(
                    "documents that were truncated to the length of a row have nothing to learn in what is left: their "
                    "labels come later; make rows longer, or leave such documents out",
                    stacklevel=2,
                )
            fitting.append(first)
        elif strategy == "split":
            if "position_ids" in document.columns:
                raise ValueError(
                    f"document {number} has {len(document)} tokens with position_ids of its own, and pieces of {row_length} "
                    f"tokens would count from 0: make rows longer, or truncate or drop such documents"
                )
            fitting += [
                document.cut(x, min(x + row_length, len(document))) for x in range(0, len(document), row_length)
            ]
    return fitting


def is_longer(document: Any, collator: PaddingCollator | PackingCollator) -> bool:
    """Whether a document, without its padding, is longer than a row."""
    return (
        collator.row_length is not None
        and len(read_document(document, "a document of the dataset")) > collator.row_length
    )


#: What can be done about a document that is longer than a row.
REMEDY = (
    "make rows longer, or choose the collator's excess_length_strategy: 'truncate' keeps the first tokens, 'split' makes "
    "several documents, 'drop' leaves it out"
)


def _carried(documents: list[Document]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Type and shape, per token, of the columns that all documents have besides those of every batch.

    Raises:
        ValueError: documents that differ in them.
    """
    own = ("input_ids", "labels", "position_ids")
    kinds = {name: (x.dtype, x.shape[1:]) for name, x in documents[0].columns.items() if name not in own}
    for number, document in enumerate(documents):
        names = document.columns.keys() - {*own}
        if names != kinds.keys():
            name = min(names ^ kinds.keys())
            which = (f"document {number}", "document 0") if name in kinds else ("document 0", f"document {number}")
            raise ValueError(f"{which[0]} of a batch has no {name}, which {which[1]} has: all need the same columns")
        for name, (dtype, shape) in kinds.items():
            x = document.columns[name]
            if x.shape[1:] != shape:
                raise ValueError(
                    f"document {number} of a batch has {name} of {tuple(x.shape[1:])} for each token, document 0 of "
                    f"{tuple(shape)}"
                )
            kinds[name] = torch.promote_types(dtype, x.dtype), shape
    return kinds


def _batch(
    rows: list[list[tuple[int, Document]]],
    length: int,
    pad_token_id: int,
    carried: dict[str, tuple[torch.dtype, torch.Size]],
    *,
    positions: bool,
    numbers: bool,
) -> dict[str, Tensor]:
    """Rows of (start, document)."""
    shape = (len(rows), length)
    batch = {
        "input_ids": torch.full(shape, int(pad_token_id)),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
        "labels": torch.full(shape, IGNORED),
    }
    for name, (dtype, trailing) in carried.items():
        batch[name] = torch.full((*shape, *trailing), fill_of(name, dtype), dtype=dtype)
    if positions:
        batch["position_ids"] = torch.zeros(shape, dtype=torch.int64)
    if numbers:
        batch["seq_idx"] = torch.full(shape, -1)
    for row, contents in enumerate(rows):
        number = 0
        for start, document in contents:
            columns = {**document.columns, "attention_mask": torch.ones(len(document), dtype=torch.int64)}
            if positions:
                columns["position_ids"] = document.positions()
            if numbers:
                columns["seq_idx"] = document.numbers() + number
            for name, x in columns.items():
                batch[name][row, start : start + len(document)] = x
            number += len(document.lengths)
    return batch
