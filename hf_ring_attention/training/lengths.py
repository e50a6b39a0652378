"""How long the documents of a dataset are, where it tells without reading them one by one."""

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
from .collators import REMEDY, PackingCollator, PaddingCollator, is_longer

#: Documents that seem too long are read to see what their attention_mask leaves of them; so many at most.
_READ_AT_MOST = 100


def check_lengths(dataset: Any, collate: Any, *, warn: bool) -> ValueError | None:
    """What is wrong with documents that are longer than a row of one of this package's collators, if there are any.

    Args:
        warn: where the collator changes or leaves out such documents, says so.
        dataset: looked at if it is a list, a `datasets.Dataset` with input_ids, or made of these by torch's Subset and
            ConcatDataset. Any other could have to read or tokenize each document, and is not.
    """
    collator = getattr(collate, "data_collator", collate)  # in what Trainer makes of it
    if not isinstance(collator, (PaddingCollator, PackingCollator)) or collator.row_length is None:
        return None
    counts = token_counts(dataset)
    longer = np.zeros(0) if counts is None else np.flatnonzero(counts > collator.row_length)
    try:
        if counts is None or not any(is_longer(dataset[int(x)], collator) for x in longer[:_READ_AT_MOST]):
            return None
    except ValueError as error:  # of a document that makes no row at all
        return error
    said = (
        f"{len(longer)} of {len(counts)} documents have more tokens than a row of {collator.row_length}, the longest (document "
        f"{int(counts.argmax())}) {int(counts.max())}"
    )
    strategy = collator.excess_length_strategy
    if strategy == "raise":
        return ValueError(f"{said}: {REMEDY}")
    done = {"truncate": "truncated", "split": "split", "drop": "left out"}[strategy]
    if warn:
        warnings.warn(f"{said}: they are {done}, as excess_length_strategy={strategy!r} asks for", stacklevel=2)
    return None


def token_counts(dataset: Any) -> np.ndarray | None:
    """[documents] lengths of their input_ids; None where they would have to be read."""
    if isinstance(dataset, Subset):
        counts = token_counts(dataset.dataset)
        return None if counts is None else counts[[int(index) for index in dataset.indices]]
    if isinstance(dataset, ConcatDataset):
        parts = [token_counts(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]
    if isinstance(dataset, Table):
        return _of_table(dataset)
    if isinstance(dataset, (list, tuple)):
        ids = [row.get("input_ids") if isinstance(row, Mapping) else None for row in dataset]
        return np.array([len(x) if isinstance(x, Sized) else 0 for x in ids], dtype=np.int64)
    return None


def _of_table(table: Table) -> np.ndarray | None:
    """From the offsets of its lists, which are all that is read."""
    if "input_ids" not in table.column_names or table.format["type"] == "custom":  # a transform makes them
        return None
    column = table.data.column("input_ids")
    if not (pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)):
        return None
    counts = pyarrow.compute.list_value_length(column).fill_null(0).to_numpy()
    indices = selected_rows(table)  # of what select, filter or shuffle left
    return counts if indices is None else counts[indices.column(0).to_numpy()]
