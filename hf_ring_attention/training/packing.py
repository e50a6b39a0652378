"""Packs documents ahead of time, those of a whole data set or of a stream's buffer, into rows that are nearly full.

A collator can pack only the documents of its batch. Here the best row is chosen for the documents of a buffer, and a loader
then reads a fixed number of rows a step.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from .collators import REMEDY, Strategy

#: Columns of documents that were packed before, or that have positions of their own.
_OF_ROWS = ("seq_lengths", "seq_idx", "position_ids")


def best_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Packs documents, longest first, each into the fullest row that has room for it.

    Args:
        lengths: tokens of each document; none is longer than a row.
        row_length: tokens of a row.

    Returns:
        The document numbers of each row. Rows are in the order of their first documents, and the documents of a row in
        their own order, so that the order of the documents is kept as far as packing allows.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, number of the row), in ascending order
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = bisect.bisect_left(rooms, (lengths[number], -1))
        if place < len(rooms):
            room, row = rooms.pop(place)
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(number)
        bisect.insort(rooms, (room - lengths[number], row))
    return sorted(sorted(row) for row in rows)


def pack_documents(
    columns: Mapping[str, Sequence[Any]], row_length: int, *, excess_length_strategy: Strategy = "split"
) -> dict[str, list[list[Any]]]:
    """Packs tokenized documents into rows that `PaddingCollator` reads; documents of a row never see each other.

        pack = functools.partial(ra.pack_documents, row_length=4096)
        rows = dataset.map(pack, batched=True, batch_size=1000, remove_columns=dataset.column_names)

    `batch_size` is the number of documents among which the best fit is looked for. A streamed data set is packed by the same
    call, as it is read.

    Args:
        columns: input_ids, a list of tokens for each document, and other columns with a value for each token, such as
            labels or assistant_masks. A column that has no list for each document, such as its text, is left out.
        row_length: tokens of a row.
        excess_length_strategy: the treatment of a document longer than a row, as in `PaddingCollator`.

    Returns:
        The same columns for rows, each of `row_length` tokens or fewer, and seq_lengths, the lengths of the documents in
        each row, as TRL's `pack_dataset` has them.

    Raises:
        ValueError: a document longer than a row under "raise", a column that is not as long as its tokens, or documents
            that were packed before.

    Example:
        >>> columns = {"input_ids": [[1, 2, 3, 4], [5, 6, 7], [8, 9]]}
        >>> ra.pack_documents(columns, row_length=6)
        {'input_ids': [[1, 2, 3, 4, 8, 9], [5, 6, 7]], 'seq_lengths': [[4, 2], [3]]}
    """
    if "input_ids" not in columns:
        raise ValueError(f"pack_documents: documents need input_ids, got the columns {', '.join(columns)}")
    row_columns = [name for name in _OF_ROWS if name in columns]
    if row_columns:
        raise ValueError(
            f"pack_documents: the column {row_columns[0]} says that these documents were packed before, or have positions of "
            f"their own: leave it out, or give the rows to a PaddingCollator as they are"
        )
    names = [name for name, values in columns.items() if len(values) and isinstance(values[0], (list, tuple))]
    documents: list[dict[str, Sequence[Any]]] = []
    for number in range(len(columns["input_ids"])):
        document = {name: columns[name][number] for name in names}
        length = len(document["input_ids"])
        for name, values in document.items():
            if len(values) != length:
                raise ValueError(
                    f"pack_documents: document {number} has {length} tokens and {len(values)} values of {name}: each "
                    f"token needs one"
                )
        documents += _pieces(document, number, row_length, excess_length_strategy)
    rows = best_fit([len(document["input_ids"]) for document in documents], row_length)
    packed = {name: [list(itertools.chain(*(documents[x][name] for x in row))) for row in rows] for name in names}
    return packed | {"seq_lengths": [[len(documents[x]["input_ids"]) for x in row] for row in rows]}


def _pieces(
    document: dict[str, Sequence[Any]], number: int, row_length: int, strategy: Strategy
) -> list[dict[str, Sequence[Any]]]:
    """Returns the pieces of a document that fit into rows; a document without tokens has none."""
    length = len(document["input_ids"])
    if strategy == "raise" and length > row_length:
        raise ValueError(
            f"pack_documents: document {number} has {length} tokens, and does not fit a row of {row_length}: {REMEDY}"
        )
    if strategy == "drop" and length > row_length:
        return []
    stop = min(length, row_length) if strategy == "truncate" else length
    return [
        {name: values[start : min(start + row_length, stop)] for name, values in document.items()}
        for start in range(0, stop, row_length)
    ]
