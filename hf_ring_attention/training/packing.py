"""Packs tokenized documents into rows of one length, which Transformers' collators and Trainers take as they are."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ..hf.loss.lm_loss import IGNORED
from ..hf.model.config import warn_once
from ..plan.branches import check_choice, check_count

if TYPE_CHECKING:
    from datasets import Dataset as Table
    from datasets import IterableDataset as StreamedTable

#: The treatment of documents longer than a row; the name and three of the words are axolotl's.
Strategy = Literal["raise", "truncate", "split", "drop"]

#: Columns that are 0 for tokens that are not learned, as TRL names them; and columns of rows that were packed before.
_LEARNED, _OF_ROWS = ("assistant_masks", "completion_mask"), ("position_ids", "seq_lengths", "seq_idx")

#: The columns of rows, and their types in a data set.
_PACKED_COLUMNS = {"input_ids": "int32", "labels": "int32", "position_ids": "int32", "attention_mask": "int8"}


def pack_documents(
    documents: Table | StreamedTable | Mapping[str, Sequence[Any]],
    row_length: int,
    *,
    buffer: int = 1000,
    excess_length_strategy: Strategy = "split",
) -> Any:
    """Packs tokenized documents into rows of `row_length` tokens; under "ring_dilated" documents of a row never see each other.

    The longest document of a buffer comes first, and each goes into the fullest row that has room for it. About half a row
    of each buffer stays empty: 10,000 documents whose lengths are log-normal, with a mean of an eighth of a row, fill their
    rows to more than 99 %. Long rows of short documents need a larger buffer: one that fills 50 rows or more.

    Args:
        documents: a `datasets.Dataset`, a stream of it, which is packed as it is read, or columns, as `map(batched=True)`
            passes them, which make one buffer. Documents have input_ids, and optionally labels, or assistant_masks or
            completion_mask, which are 1 for the tokens to learn, and attention_mask, whose padding is left out. Other
            columns are left out.
        row_length: tokens of a row.
        buffer: the number of documents that are packed together. With 1, each row is a document, or a piece of a longer one.
        excess_length_strategy: whether a document longer than a row is refused ("raise"), cut to its first tokens
            ("truncate"), made several documents ("split") or left out ("drop").

    Returns:
        Rows as a data set, a stream or columns, like `documents`, for `transformers.default_data_collator`: input_ids, 0
        behind the documents; labels, -100 for padding and for the first token of each document, which no token before it
        predicts; position_ids, which count each document from 0, and are 0 for padding; and attention_mask.

    Raises:
        ValueError: a document that is too long under "raise", columns that contradict each other, or a setting that cannot
            be. A stream raises it when it is read.

    Example:
        >>> rows = ra.pack_documents({"input_ids": [[5, 6, 7, 8], [1, 2, 3], [9, 4]]}, row_length=7)
        >>> rows["input_ids"], rows["position_ids"]
        ([[5, 6, 7, 8, 1, 2, 3], [9, 4, 0, 0, 0, 0, 0]], [[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 0, 0, 0, 0]])
        >>> rows["labels"]
        [[-100, 6, 7, 8, -100, 2, 3], [-100, 4, -100, -100, -100, -100, -100]]
    """
    check_count("pack_documents", "row_length", row_length)
    check_count("pack_documents", "buffer", buffer)
    check_choice("pack_documents", "excess_length_strategy", excess_length_strategy, get_args(Strategy))
    into_rows = partial(_pack_buffer, row_length=row_length, strategy=excess_length_strategy)
    if isinstance(documents, Mapping):
        return into_rows(documents)
    library = sys.modules.get("datasets")  # Whoever has a data set has imported it.
    if library is None or not isinstance(documents, (library.Dataset, library.IterableDataset)):
        raise ValueError(
            f"pack_documents expected a datasets.Dataset, a stream or columns, got {type(documents).__name__}: "
            f"datasets.Dataset.from_list makes a data set of a list of documents"
        )
    # A stream may not know its columns: its first document names them.
    names = documents.column_names or list(next(iter(documents), {}))
    features = library.Features({name: library.List(library.Value(kind)) for name, kind in _PACKED_COLUMNS.items()})
    how = {"with_indices": True, "batched": True, "batch_size": buffer, "remove_columns": names, "features": features}
    return documents.with_format(None).map(into_rows, **how)


def warn_of_cuts(documents: Any, longest: int, lengths: np.ndarray | None = None) -> Any:
    """Returns tokenized documents; warns of the tokens beyond `longest`, in a stream of those of its first such document."""
    if lengths is None:
        if not hasattr(documents, "__len__"):
            return documents.map(
                lambda document: warn_of_cuts(document, longest, np.array([len(document["input_ids"])]))
            )
        columns = documents.select_columns("input_ids").with_format("arrow").iter(1000)
        lengths = np.concatenate([x.value_lengths().to_numpy() for part in columns for x in part["input_ids"].chunks])
    cut = int(np.maximum(lengths - longest, 0).sum())
    if cut:
        warn_once(
            f"{cut} of {lengths.sum()} tokens will be cut off, since documents are longer than max_length={longest}: set "
            f"packing=True and packing_strategy='bfd_split', or a larger max_length"
        )
    return documents


def _pack_buffer(
    columns: Mapping[str, Sequence[Any]], numbers: Sequence[int] | None = None, *, row_length: int, strategy: Strategy
) -> dict[str, list[list[int]]]:
    """Returns the rows of one buffer of documents, whose numbers in the data set name them in errors."""
    packed_before = [name for name in _OF_ROWS if name in columns]
    if "input_ids" not in columns or packed_before:
        problem = f"the column {packed_before[0]} is of packed rows" if packed_before else "documents need input_ids"
        raise ValueError(f"pack_documents: {problem}, got the columns {', '.join(map(str, columns))}")
    pieces = [*_pieces(columns, numbers, row_length, strategy)]
    packed: dict[str, list[list[int]]] = {name: [] for name in _PACKED_COLUMNS}
    for row in best_fit([len(ids) for ids, _ in pieces], row_length):
        tokens, labels = zip(*(pieces[number] for number in row), strict=True)
        ids = np.concatenate(tokens)
        parts = {
            "input_ids": ids,
            "labels": np.concatenate([x for part in labels for x in ([IGNORED], part[1:])]),
            "position_ids": np.concatenate([np.arange(len(part)) for part in tokens]),
            "attention_mask": np.ones(len(ids), np.int64),
        }
        for name, part in parts.items():
            padding = IGNORED if name == "labels" else 0
            packed[name].append(np.pad(part, (0, row_length - len(ids)), constant_values=padding).tolist())
    return packed


def _pieces(
    columns: Mapping[str, Sequence[Any]], numbers: Sequence[int] | None, row_length: int, strategy: Strategy
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the tokens and labels of documents, in pieces that fit into a row."""
    for place in range(len(columns["input_ids"])):
        who = f"pack_documents: document {place if numbers is None else numbers[place]}"
        ids, labels = _tokens_and_labels({name: column[place] for name, column in columns.items()}, who)
        if len(ids) > row_length and strategy == "raise":
            raise ValueError(
                f"{who} has {len(ids)} tokens, and a row {row_length}: choose another excess_length_strategy"
            )
        stop = {"truncate": row_length, "drop": 0}.get(strategy) if len(ids) > row_length else None
        for start in range(0, len(ids[:stop]), row_length):
            yield ids[start : start + row_length], labels[start : start + row_length]


def _tokens_and_labels(document: Mapping[str, Any], who: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens and the labels of a document without its padding; `who` is its name in errors."""
    read: dict[str, np.ndarray] = {}
    for name in ("input_ids", "labels", "attention_mask", *_LEARNED):
        if name not in document:
            continue
        x = np.asarray(document[name])
        x = x.astype(np.int64) if x.size == 0 else x
        if x.ndim != 1 or x.dtype.kind not in "biu" or len(x) != len(read.get("input_ids", x)):
            raise ValueError(
                f"{who} has {name} {type(document[name]).__name__} of shape {x.shape}: expected an integer for each token"
            )
        read[name] = x.astype(np.int64)
    ids, labels = read["input_ids"], read.get("labels", read["input_ids"])
    for name in _LEARNED:
        labels = np.where(read.get(name, 1) == 0, IGNORED, labels)
    kept = np.flatnonzero(read.get("attention_mask", np.ones(len(ids))))
    if len(kept) and kept[-1] - kept[0] != len(kept) - 1:
        raise ValueError(f"{who} has padding inside, by its attention_mask: set labels of such tokens to {IGNORED}")
    return ids[kept], labels[kept]


def best_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Returns the numbers of the documents of each row: longest first, each into the fullest row that has room for it.

    Rows are in the order of their first documents, and the documents of a row keep their order.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, number of the row) of rows that are not full, in ascending order
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = bisect.bisect_left(rooms, (lengths[number], -1))
        if place < len(rooms):
            room, row = rooms.pop(place)
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(number)
        if room > lengths[number]:
            bisect.insort(rooms, (room - lengths[number], row))
    return sorted(sorted(row) for row in rows)
