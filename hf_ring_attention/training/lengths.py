"""The lengths of a dataset's documents, where it tells them without being read document by document."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from ..compute.private import selected_rows
from .collators import PackingCollator, PaddingCollator, is_longer
from .fitting import REMEDY
from .tables import is_table

if TYPE_CHECKING:
    from datasets import Dataset as Table

#: The most documents that are read, of those that seem too long, to see whether they are without their padding.
_READ_AT_MOST = 100

#: Columns that say, token by token, where the documents of a row end.
_OTHER_ENDS = ("seq_idx", "position_ids")


def check_lengths(dataset: Any, collate: Any, *, warn: bool) -> ValueError | None:
    """Returns the error for documents that are longer than a row of one of this package's collators; None without any.

    Args:
        dataset: a list, a `datasets.Dataset` with input_ids, or a Subset or ConcatDataset of torch over these. Others are
            not examined, since they may have to read or tokenize each document.
        collate: the loader's collate_fn.
        warn: whether to warn of documents that the collator changes or leaves out.
    """
    collator = getattr(collate, "data_collator", collate)  # Trainer puts a collator into another object
    if not isinstance(collator, (PaddingCollator, PackingCollator)) or collator.row_length is None:
        return None
    counts = token_counts(dataset)
    longer = np.zeros(0) if counts is None else np.flatnonzero(counts > collator.row_length)
    try:
        if counts is None or not any(is_longer(dataset[int(x)], collator) for x in longer[:_READ_AT_MOST]):
            return None
    except ValueError as error:  # a document of which no row can be made
        return error
    message = (
        f"{len(longer)} of {len(counts)} documents have more tokens than a row of {collator.row_length}, the longest (document "
        f"{int(counts.argmax())}) {int(counts.max())}"
    )
    strategy = collator.excess_length_strategy
    if strategy == "raise":
        return ValueError(f"{message}: {REMEDY}")
    treatment = {"truncate": "truncated", "split": "split", "drop": "left out"}[strategy]
    if strategy == "split" and isinstance(collator, PaddingCollator):
        treatment += " into more rows than a batch has documents (ra.pack_documents(..., buffer=1) splits them before)"
    if warn:
        warnings.warn(f"{message}: they are {treatment}, as excess_length_strategy={strategy!r} asks for", stacklevel=2)
    return None


def token_counts(dataset: Any) -> np.ndarray | None:
    """Returns [documents] the lengths of their input_ids; None if the documents would have to be read."""
    return _by_row(dataset, _counts_of_table, _counts_of_list)


def sums_over_documents(dataset: Any, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray | None:
    """Returns [rows] the sums, over the documents of each row, of what a function makes of their lengths.

    It is None if the rows would have to be read, or if nothing but their positions or the numbers of their documents says
    where documents of a row end. Padding that a row has already counts as a part of its last document.

    Args:
        function: returns an integer for each of many lengths.
    """

    def of_table(table: Table) -> np.ndarray | None:
        sums = _sums(_documents_of_table(table), function)
        return None if sums is None else _selected(table, sums)

    return _by_row(dataset, of_table, lambda rows: _sums(_documents_of_list(rows), function))


#: The lengths of all documents, row after row, and how many of them each row has.
_Documents = tuple[np.ndarray, np.ndarray]


def _by_row(
    dataset: Any,
    of_table: Callable[[Table], np.ndarray | None],
    of_list: Callable[[Sequence[Any]], np.ndarray | None],
) -> np.ndarray | None:
    """Returns a number for each row of a dataset that is made of tables and lists; None for others."""
    if isinstance(dataset, Subset):
        numbers = _by_row(dataset.dataset, of_table, of_list)
        return None if numbers is None else numbers[[int(index) for index in dataset.indices]]
    if isinstance(dataset, ConcatDataset):
        parts = [_by_row(part, of_table, of_list) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]
    if is_table(dataset):
        return of_table(dataset)
    return of_list(dataset) if isinstance(dataset, (list, tuple)) else None


def _counts_of_table(table: Table) -> np.ndarray | None:
    counts = _counts_of_column(table, "input_ids")
    return None if counts is None else _selected(table, counts)


def _counts_of_column(table: Table, name: str) -> np.ndarray | None:
    """Returns [stored rows] the lengths of a column's lists from their offsets, without reading the lists."""
    if name not in table.column_names or table.format["type"] == "custom":  # a transform makes the rows
        return None
    import pyarrow
    import pyarrow.compute  # datasets brings it

    column = table.data.column(name)
    if not (pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)):
        return None
    counts: np.ndarray = pyarrow.compute.list_value_length(column).fill_null(0).to_numpy()
    return counts


def _selected(table: Table, numbers: np.ndarray) -> np.ndarray:
    """Returns the numbers of a table's rows, of those of all rows that it stores."""
    indices = selected_rows(table)  # the rows that select, filter or shuffle left
    return numbers if indices is None else numbers[indices.column(0).to_numpy()]


def _counts_of_list(rows: Sequence[Any]) -> np.ndarray:
    ids = [row.get("input_ids") if isinstance(row, Mapping) else None for row in rows]
    return np.array([len(x) if isinstance(x, Sized) else 0 for x in ids], dtype=np.int64)


def _documents_of_table(table: Table) -> _Documents | None:
    tokens, counts = _counts_of_column(table, "input_ids"), _counts_of_column(table, "seq_lengths")
    read = table.format["columns"]  # a format may hide columns from whoever reads the rows
    if tokens is None or "input_ids" not in read:
        return None
    if counts is None or "seq_lengths" not in read:
        return None if {*_OTHER_ENDS} & {*read} else (tokens, np.ones_like(tokens))
    import pyarrow.compute

    lengths = pyarrow.compute.list_flatten(table.data.column("seq_lengths")).to_numpy()
    single = np.flatnonzero(counts == 0)  # rows without the column are single documents
    lengths = np.insert(lengths, (np.cumsum(counts) - counts)[single], tokens[single])
    return lengths, np.maximum(counts, 1)


def _documents_of_list(rows: Sequence[Any]) -> _Documents | None:
    lengths: list[list[int]] = []
    for row in rows:
        ids = row.get("input_ids") if isinstance(row, Mapping) else None
        if not isinstance(ids, Sized):
            return None
        own = row.get("seq_lengths")
        if own is None and any(row.get(name) is not None for name in _OTHER_ENDS):
            return None
        lengths.append([len(ids)] if own is None else [int(length) for length in own])
    flat = np.fromiter(itertools.chain(*lengths), dtype=np.int64)
    return flat, np.array([len(own) for own in lengths], dtype=np.int64)


def _sums(documents: _Documents | None, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray | None:
    if documents is None:
        return None
    lengths, counts = documents
    before = np.concatenate([[0], np.cumsum(function(lengths))])
    ends = np.cumsum(counts)
    sums: np.ndarray = before[ends] - before[ends - counts]
    return sums
