"""Fits documents into rows: cuts those that are longer than a row, and chooses the row of each."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Literal

from .columns import is_integer

#: The treatment of documents longer than a row; the name and three of the words are axolotl's.
Strategy = Literal["raise", "truncate", "split", "drop"]

_STRATEGIES = ("raise", "truncate", "split", "drop")

#: The remedies for a document that is longer than a row.
REMEDY = (
    "make rows longer, or choose an excess_length_strategy: 'truncate' keeps the first tokens, 'split' makes several "
    "documents, 'drop' leaves it out"
)


def check_rows(who: str, row_length: int | None, strategy: str) -> None:
    """Refuses a length of rows, or a treatment of longer documents, that cannot be; `who` is what an error begins with.

    Raises:
        ValueError: no positive whole number, no strategy, or a strategy for rows that are as long as their documents.
    """
    if row_length is not None and (not is_integer(row_length) or row_length < 1):
        raise ValueError(f"{who}: row_length must be a number of tokens of at least 1, or None, got {row_length!r}")
    if strategy not in _STRATEGIES:
        raise ValueError(f"{who}: excess_length_strategy must be one of {_STRATEGIES}, got {strategy!r}")
    if row_length is None and strategy != "raise":
        raise ValueError(
            f"{who}: excess_length_strategy={strategy!r} needs a row_length: without one, no document is too long"
        )


def pieces_that_fit(length: int, row_length: int | None, strategy: Strategy, who: str) -> list[tuple[int, int]]:
    """Returns (start, stop) of the pieces of a document that fit into rows; `who` is what an error calls the document.

    A document that is not longer than a row is a single piece.

    Raises:
        ValueError: a document longer than a row, under "raise".
    """
    if row_length is None or length <= row_length:
        return [(0, length)]
    if strategy == "raise":
        raise ValueError(f"{who} has {length} tokens, and does not fit a row of {row_length}: {REMEDY}")
    if strategy == "truncate":
        return [(0, row_length)]
    if strategy == "drop":
        return []
    return [(start, min(start + row_length, length)) for start in range(0, length, row_length)]


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
