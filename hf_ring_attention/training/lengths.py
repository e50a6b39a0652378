"""The lengths of a dataset's documents, where it tells them without being read document by document."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sized
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
from datasets import Dataset as Table
from torch.utils.data import ConcatDataset, Subset

from ..compute.private import selected_rows
from .collators import PackingCollator, PaddingCollator, is_longer
from .fitting import REMEDY

#: The most documents that are read, of those that seem too long, to see whether they are without their padding.
_READ_AT_MOST = 100


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
    if warn:
        warnings.warn(f"{message}: they are {treatment}, as excess_length_strategy={strategy!r} asks for", stacklevel=2)
    return None


def token_counts(dataset: Any) -> np.ndarray | None:
    """Returns [documents] the lengths of their input_ids; None if the documents would have to be read."""
    if isinstance(dataset, Subset):
        counts = token_counts(dataset.dataset)
        return None if counts is None else counts[[int(index) for index in dataset.indices]]
    if isinstance(dataset, ConcatDataset):
        parts = [token_counts(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]
    if isinstance(dataset, Table):
        return _counts_of_table(dataset)
    if isinstance(dataset, (list, tuple)):
        ids = [row.get("input_ids") if isinstance(row, Mapping) else None for row in dataset]
        return np.array([len(x) if isinstance(x, Sized) else 0 for x in ids], dtype=np.int64)
    return None


def _counts_of_table(table: Table) -> np.ndarray | None:
    """Returns `token_counts` of a table from the offsets of its lists, without reading the lists."""
    if "input_ids" not in table.column_names or table.format["type"] == "custom":  # a transform makes the rows
        return None
    column = table.data.column("input_ids")
    if not (pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)):
        return None
    counts = pyarrow.compute.list_value_length(column).fill_null(0).to_numpy()
    indices = selected_rows(table)  # the rows that select, filter or shuffle left
    return counts if indices is None else counts[indices.column(0).to_numpy()]
