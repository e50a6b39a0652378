"""Collators of tokenized documents: one pads each to a row, the other packs several into a row, unseen by each other."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from .columns import Document, is_integer, read_all, read_document
from .fitting import Strategy, best_fit, check_rows, pieces_that_fit
from .shards import IGNORED, fill_of


@dataclass(frozen=True)
class PaddingCollator:
    """Makes a row of each document, padded to the longest, or to `row_length`.

    Args:
        pad_token_id: the token that fills rows up; it is never seen, nor learned from.
        row_length: tokens of a row; None for the length of the batch's longest document.
        padding_side: "right" or "left".
        excess_length_strategy: the treatment of a document longer than `row_length`. "raise" refuses it, as early as a
            loader is prepared if the dataset tells its lengths (a list, a `datasets.Dataset`; see
            `Ring.prepare_data_loader`). "truncate" keeps its first tokens. "split" makes documents of its pieces: each
            counts its positions from 0, and nothing predicts its first token. "drop" leaves it out; a batch whose
            documents are all left out is a row of padding.

    A document is a mapping of columns, lists or arrays with a value for each token:

    - input_ids: the tokens.
    - labels: needed where they differ from input_ids; a token with label -100 is not learned. Labels that equal
      `pad_token_id`, such as an end token, are kept.
    - attention_mask: 0 for padding at the ends, which is cut off.
    - completion_mask and assistant_masks: 0 for tokens that are not learned, as TRL makes them.
    - position_ids: needed where they do not count the tokens from 0.
    - seq_lengths (TRL's packing), seq_idx, or position_ids that restart: they mark the documents of a row that was
      packed before.
    - others, such as weights, token_type_ids or special_tokens_mask: they become columns of the batch, [B, n, ...].

    Columns that are not of tokens, such as a text, a number, or a tokenizer's `length` of a text, are left out. A list of
    numbers that is shorter or longer than the tokens is refused, since it may be a column of tokens that went wrong.

    All documents of a data set need labels and masks if one has them, since without them every token counts. A document that
    lacks one is refused beside others that have it, and so is None, which a data set has for what is missing.

    Example:
        >>> collate = ra.PaddingCollator(row_length=4)
        >>> batch = collate([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}])
        >>> batch["input_ids"].tolist()
        [[5, 6, 7, 0], [8, 9, 0, 0]]
        >>> batch["labels"].tolist()
        [[5, 6, 7, -100], [-100, 9, -100, -100]]
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
        """Returns input_ids, attention_mask and labels [B, n] of B documents, and their other columns of tokens.

        A row of several documents also has position_ids, which restart with each document, and seq_idx, the number of
        each token's document in its row (-1 for padding).

        Raises:
            ValueError: a document longer than a row or without tokens, a column that is not as long as its tokens, or
                documents whose columns differ.
        """
        uncut = read_all(documents, type(self).__name__)
        fitting = _as_short_as_rows(uncut, self.row_length, self.excess_length_strategy)
        length = self.row_length or max(map(len, fitting))
        rows = [[(length - len(x) if self.padding_side == "left" else 0, x)] for x in fitting] or [[]]
        several = any(len(x.lengths) > 1 for x in uncut)
        own_positions = any("position_ids" in x.columns for x in uncut)
        return _batch(
            rows, length, self.pad_token_id, _other_columns(uncut), positions=several or own_positions, numbers=several
        )


@dataclass(frozen=True)
class PackingCollator:
    """Packs the documents of a batch into rows of `row_length` tokens, each into the fullest row that has room for it.

    With a batch size of few short documents, rows stay mostly empty, and the number of rows changes from step to step.
    `pack_documents` packs a data set or a stream before it is read in batches, into rows that are nearly full, of which a
    loader reads the same number at each step.

    Args:
        row_length: tokens of a row; None for a single row as long as all documents together.
        pad_token_id: the token that fills the end of a row.
        excess_length_strategy: as in `PaddingCollator`; "split" packs the pieces as documents.

    Documents are mappings as for `PaddingCollator`. A batch marks their borders by position_ids, which restart with each
    document, and by seq_idx, the number of each token's document in its row.

    Example:
        >>> documents = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6, 7, 8]}]
        >>> batch = ra.PackingCollator(row_length=6)(documents)
        >>> batch["input_ids"].tolist()
        [[1, 2, 3, 6, 7, 8], [4, 5, 0, 0, 0, 0]]
        >>> batch["position_ids"].tolist()
        [[0, 1, 2, 0, 1, 2], [0, 1, 0, 0, 0, 0]]
    """

    row_length: int | None = None
    pad_token_id: int = 0
    _: KW_ONLY
    excess_length_strategy: Strategy = "raise"

    def __post_init__(self) -> None:
        _check_settings(self)

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Returns input_ids, attention_mask, labels, position_ids and seq_idx [rows, n], and other columns of tokens.

        Raises:
            ValueError: a document longer than a row or without tokens, a column that is not as long as its tokens, or
                documents whose columns differ.
        """
        uncut = read_all(documents, type(self).__name__)
        fitting = _as_short_as_rows(uncut, self.row_length, self.excess_length_strategy)
        length = self.row_length or sum(map(len, fitting))
        rows: list[list[tuple[int, Document]]] = []
        for numbers in best_fit([len(document) for document in fitting], length) or [[]]:
            starts = itertools.accumulate((len(fitting[x]) for x in numbers), initial=0)
            rows.append([(start, fitting[x]) for start, x in zip(starts, numbers)])
        return _batch(rows, length, self.pad_token_id, _other_columns(uncut), positions=True, numbers=True)


def _check_settings(collator: PaddingCollator | PackingCollator) -> None:
    name = type(collator).__name__
    check_rows(name, collator.row_length, collator.excess_length_strategy)
    pad = collator.pad_token_id
    if not is_integer(pad) or pad < 0:
        raise ValueError(
            f"{name}: pad_token_id must be the id of a token, got {pad!r}: a tokenizer without a padding token has None; "
            f"padding is never seen, so any token will do, such as tokenizer.eos_token_id"
        )


# ---- making rows


def _as_short_as_rows(documents: list[Document], row_length: int | None, strategy: Strategy) -> list[Document]:
    """Returns documents that fit into a row, made from longer ones by the strategy."""
    fitting = []
    for number, document in enumerate(documents):
        spans = pieces_that_fit(len(document), row_length, strategy, f"document {number}")
        if len(spans) > 1 and "position_ids" in document.columns:
            raise ValueError(
                f"document {number} has {len(document)} tokens with position_ids of its own, and a row has {row_length}: "
                f"pieces would count from 0: make rows longer, or truncate or drop such documents"
            )
        pieces = [document.cut(start, stop) for start, stop in spans]
        if strategy == "truncate" and _learns(document) and not _learns(pieces[0]):
            warnings.warn(
                "documents that were truncated to the length of a row have nothing to learn: all their labels stood "
                "behind the cut; make rows longer, or leave such documents out",
                stacklevel=2,
            )
        fitting += pieces
    return fitting


def _learns(document: Document) -> bool:
    """Returns whether a document has a token to be learned."""
    return bool((document.columns["labels"] != IGNORED).any())


def is_longer(document: Any, collator: PaddingCollator | PackingCollator) -> bool:
    """Returns whether a document, without its padding, is longer than a row of the collator."""
    return (
        collator.row_length is not None
        and len(read_document(document, "a document of the dataset")) > collator.row_length
    )


def _other_columns(documents: list[Document]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Returns type and shape, per token, of the columns that all documents have besides the collators' own.

    Raises:
        ValueError: documents with different columns, or columns of different shapes.
    """
    collators_own = ("input_ids", "labels", "position_ids")
    kinds = {name: (x.dtype, x.shape[1:]) for name, x in documents[0].columns.items() if name not in collators_own}
    for number, document in enumerate(documents):
        names = document.columns.keys() - {*collators_own}
        if names != kinds.keys():
            name = min(names ^ kinds.keys())
            without, other = (number, 0) if name in kinds else (0, number)
            raise ValueError(
                f"document {without} of a batch has no {name}, which document {other} has: all need the same columns"
            )
        for name, (dtype, shape) in kinds.items():
            x = document.columns[name]
            if x.shape[1:] != shape:
                raise ValueError(
                    f"document {number} of a batch has {name} of shape {tuple(x.shape[1:])} for each token, and document 0 "
                    f"of shape {tuple(shape)}: all need the same shape"
                )
            kinds[name] = torch.promote_types(dtype, x.dtype), shape
    return kinds


def _batch(
    rows: list[list[tuple[int, Document]]],
    length: int,
    pad_token_id: int,
    other_columns: dict[str, tuple[torch.dtype, torch.Size]],
    *,
    positions: bool,
    numbers: bool,
) -> dict[str, Tensor]:
    """Returns a batch of rows, each of which is a list of (start, document)."""
    shape = (len(rows), length)
    batch = {
        "input_ids": torch.full(shape, int(pad_token_id)),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
        "labels": torch.full(shape, IGNORED),
    }
    for name, (dtype, trailing) in other_columns.items():
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
