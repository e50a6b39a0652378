"""Packs documents, before they are read in batches, into rows that are nearly full.

A collator can pack only the documents of its batch. Here the best row is chosen for the documents of a buffer, and a loader
then reads a fixed number of rows a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .columns import check_marks, is_integer, token_columns, unpadded
from .fitting import Strategy, best_fit, check_rows, pieces_that_fit
from .tables import is_streamed, is_table

if TYPE_CHECKING:
    from datasets import Dataset as Table
    from datasets import IterableDataset as StreamedTable

#: Columns of documents that were packed before, or that have positions of their own.
_OF_ROWS = ("seq_lengths", "seq_idx", "position_ids")

#: A buffer of fewer rows is warned of where their fill is lower: half a row of 50 is a hundredth.
_ROWS_OF_A_BUFFER, _WELL_FILLED = 50, 0.97


def pack_documents(
    documents: Table | StreamedTable | Mapping[str, Sequence[Any]],
    row_length: int,
    *,
    buffer: int = 1000,
    excess_length_strategy: Strategy = "split",
) -> Any:
    """Packs tokenized documents into rows that `PaddingCollator` reads; documents of a row never see each other.

    The longest document of a buffer comes first, and each goes into the fullest row that has room for it. About half a row
    of each buffer stays empty: 10,000 documents whose lengths are log-normal, with a mean of an eighth of a row, fill their
    rows to more than 99 %. Long rows of short documents need a larger buffer, which a warning names: 50 rows or more.

    Args:
        documents: a data set of the datasets library, or a stream of it, which is packed as it is read; its order is that
            of the data set, and so is what a loader needs to go on after a checkpoint. Or columns, as `map(batched=True)`
            passes them, all of which make one buffer. The documents have input_ids, and may have other columns with a value
            for each token, such as labels or assistant_masks. A column that is not of tokens, such as a text, is left out,
            and so are attention_mask and the padding that it marks.
        row_length: tokens of a row.
        buffer: the number of documents that are packed together. With 1, each row is a document, or a piece of a longer one,
            so that long documents are split before a loader draws its batches of rows.
        excess_length_strategy: the treatment of a document longer than a row, as in `PaddingCollator`.

    Returns:
        Rows as a data set, a stream or columns, like `documents`. They have the same columns of tokens, each of `row_length`
        tokens or fewer, and seq_lengths, the lengths of the documents in each row, as TRL's `pack_dataset` has them.

    Raises:
        ValueError: a document longer than a row under "raise", a column that is not as long as its tokens, documents whose
            columns differ or that were packed before, or a setting that cannot be. A stream raises it when it is read.

    Example:
        >>> columns = {"input_ids": [[1, 2, 3, 4], [5, 6, 7], [8, 9]]}
        >>> ra.pack_documents(columns, row_length=6)
        {'input_ids': [[1, 2, 3, 4, 8, 9], [5, 6, 7]], 'seq_lengths': [[4, 2], [3]]}
        >>> from datasets import Dataset
        >>> stream = Dataset.from_dict(columns).to_iterable_dataset()
        >>> batch = ra.PaddingCollator(row_length=6)(list(ra.pack_documents(stream, row_length=6)))
        >>> batch["position_ids"].tolist()
        [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]]
    """
    if row_length is None:
        raise ValueError("pack_documents: row_length must be a number of tokens of at least 1, got None")
    check_rows("pack_documents", row_length, excess_length_strategy)
    if not is_integer(buffer) or buffer < 1:
        raise ValueError(f"pack_documents: buffer must be a number of documents of at least 1, got {buffer!r}")
    into_rows = partial(_pack_buffer, row_length=row_length, strategy=excess_length_strategy, buffer=buffer)
    if isinstance(documents, Mapping):
        return into_rows(documents)
    if not (is_table(documents) or is_streamed(documents)):
        raise ValueError(
            f"pack_documents expected a data set of the datasets library, or columns, got {type(documents).__name__}: "
            f"datasets.Dataset.from_list makes a data set of a list of documents"
        )
    # A stream may not know its columns, which only its first document tells then.
    names = documents.column_names or list(next(iter(documents), {}))
    return documents.with_format(None).map(
        into_rows, with_indices=True, batched=True, batch_size=buffer, remove_columns=names
    )


def _pack_buffer(
    columns: Mapping[str, Sequence[Any]],
    numbers: Sequence[int] | None = None,
    *,
    row_length: int,
    strategy: Strategy,
    buffer: int,
) -> dict[str, list[list[Any]]]:
    """Returns the columns of the rows that the documents of one buffer make.

    Args:
        numbers: the number of each document in its data set, by which an error names it; None for columns, which are a
            buffer of their own.
        buffer: the most documents that are packed together.
    """
    if "input_ids" not in columns:
        raise ValueError(f"pack_documents: documents need input_ids, got the columns {', '.join(map(str, columns))}")
    row_columns = [name for name in _OF_ROWS if name in columns]
    if row_columns:
        raise ValueError(
            f"pack_documents: the column {row_columns[0]} says that these documents were packed before, or have positions of "
            f"their own: leave it out, or give the rows to a PaddingCollator as they are"
        )
    pieces: list[dict[str, Tensor]] = []
    packable: list[tuple[dict[str, Any], str]] = []
    names: list[str] | None = None
    for place in range(len(columns["input_ids"])):
        who = f"pack_documents: document {place if numbers is None else numbers[place]}"
        values = {name: column[place] for name, column in columns.items()}
        document = token_columns(values, who)
        mask = document.pop("attention_mask", None)
        start, stop = (0, len(document["input_ids"])) if mask is None else unpadded(mask, who)
        if start == stop:
            continue  # a document without tokens
        names = list(document) if names is None else names
        if document.keys() != {*names}:
            name = min(document.keys() ^ {*names})
            has, others = ("has", "do not have") if name in document else ("has no", "have")
            raise ValueError(f"{who} {has} {name}, which the documents before it {others}: all need the same columns")
        packable.append((values, who))
        tokens = {name: x[start:stop] for name, x in document.items()}
        for first, last in pieces_that_fit(stop - start, row_length, strategy, who):
            pieces.append({name: x[first:last] for name, x in tokens.items()})
    for values, who in packable:
        check_marks(values, who)
    lengths = [len(piece["input_ids"]) for piece in pieces]
    rows = best_fit(lengths, row_length)
    # The first buffer speaks for the others; that of a single document is not there to fill rows.
    if numbers is not None and numbers[0] == 0 and len(numbers) == buffer > 1:
        _warn_of_few_rows(len(rows), sum(lengths), row_length, buffer)
    packed = {
        name: [torch.cat([pieces[x][name] for x in row]).tolist() for row in rows] for name in names or ["input_ids"]
    }
    return packed | {"seq_lengths": [[lengths[x] for x in row] for row in rows]}


def _warn_of_few_rows(rows: int, tokens: int, row_length: int, buffer: int) -> None:
    """Warns of a buffer whose last row, which is filled in part, is a large share of its rows."""
    if 0 < rows < _ROWS_OF_A_BUFFER and tokens < _WELL_FILLED * rows * row_length:
        warnings.warn(
            f"the {buffer} documents of a buffer have {tokens} tokens in {rows} rows of {row_length}, which are "
            f"{tokens / (rows * row_length):.0%} full: for {_ROWS_OF_A_BUFFER} rows, where the last one hardly counts, take "
            f"buffer={-(-buffer * _ROWS_OF_A_BUFFER // rows)}",
            stacklevel=2,
        )
