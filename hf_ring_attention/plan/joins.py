"""Which tiles of unequal lengths share a kernel call, as integers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from .plans import TileBatch
from .tiles import Shape


class Joining(NamedTuple):
    """How a kernel takes tiles of unequal lengths in one call: padded to the longest.

    A call costs as much time as copying `rows` query and key rows, in forward and backward, or as computing `pairs`
    query-key pairs. At most `most_rows` rows, with padding, share a call, since they are copied all at once.
    """

    rows: int
    pairs: int
    most_rows: int


#: On a CPU with two cores, a call with next to no work takes 340 microseconds in forward and backward. In this time the CPU
#: copies 2000 rows of 64 float32 numbers, or computes 40,000 pairs of them in large tiles.
PADDED = Joining(rows=2000, pairs=40_000, most_rows=1 << 14)


class InPlace(NamedTuple):
    """How a kernel takes documents of unequal lengths in one call: in place, and bands without folds.

    The kernel takes at most `most_documents`, and pads its sums by `padding` rows for each: by no more rows than the sums have.
    """

    most_documents: int
    padding: int


#: FlashAttention's batches have 16 bits, and it pads the sums of each document to blocks of 128 rows.
FLASH_IN_PLACE = InPlace(most_documents=65_535, padding=128)
#: In any case, so many documents are taken in place. Padding is cut into sequences of so many tokens, which take no time.
FEW_DOCUMENTS, PADDING_LENGTH = 64, 256


def sequences_in_place(
    batches: Sequence[TileBatch], joining: InPlace, num_batch_rows: int, num_rows: int, kv_heads: range
) -> tuple[list[int], list[bool], Shape] | None:
    """Returns 0 and the ends of sequences in the tokens of all batch rows, which of them are padding, and their shape.

    Returns None if some tile is not a document, a square of rows of all heads, or if each row is a single document.
    """
    documents, total = [], num_batch_rows * num_rows
    for batch in batches:
        simple = batch.query_stride == batch.key_stride == batch.fold_size == 1
        if batch.shape == "band" or batch.num_queries != batch.num_keys or not simple:
            return None
        for rows, heads, query_row, key_row, copies in batch.items:
            if query_row != key_row or heads != tuple(kv_heads) or copies > 1:
                return None
            documents += [(row * num_rows + query_row, batch.num_queries) for row in rows]
    ends, are_padding = [0], list[bool]()
    for start, length in (*sorted(documents), (total, 0)):
        if start < ends[-1]:  # Its pairs count twice.
            return None
        while ends[-1] < start:
            ends.append(min(start, ends[-1] + PADDING_LENGTH))
            are_padding.append(True)
        ends += [start + length] * (length > 0)
        are_padding += [False] * (length > 0)
    shapes: set[Shape] = {batch.shape for batch in batches if batch.num_queries > 1}
    most = min(joining.most_documents, max(FEW_DOCUMENTS, total // joining.padding))
    if len(shapes) > 1 or len(are_padding) > most or are_padding == [False] * num_batch_rows:
        return None
    return ends, are_padding, shapes.pop() if shapes else "full"


def joined(
    batches: Sequence[TileBatch], group: int, joining: Hashable, is_view: Callable[[TileBatch], bool]
) -> Iterator[list[TileBatch]]:
    """Yields the batches of each call: several if copies and padding of rows cost less than another call.

    A batch for which `is_view` holds needs no copies in a separate call.
    """
    if not isinstance(joining, Joining):
        yield from ([batch] for batch in batches)
        return
    kinds: dict[tuple[object, ...], list[TileBatch]] = {}
    for batch in batches:
        kinds.setdefault(_kind(batch), []).append(batch)
    for alike in kinds.values():
        call: list[TileBatch] = []
        for batch in sorted(alike, key=lambda batch: (batch.num_keys, batch.num_queries), reverse=True):
            if call and _is_cheaper(call, batch, group, joining, is_view):
                call.append(batch)
                continue
            if call:
                yield call
            call = [batch]
        yield call


def _kind(batch: TileBatch) -> tuple[object, ...]:
    """Returns the common values of batches that may share a call; these include the visit, so no two share a query row."""
    if batch.shape == "full":  # Rows of folds are queries like others, and only keys are padded.
        return batch.visit, batch.num_queries * batch.fold_size
    # In triangles and bands, padding of queries and of keys depend on each other.
    width = batch.num_keys - batch.num_queries if batch.shape == "band" else 0
    return batch.visit, batch.shape, batch.fold_size, width


def _is_cheaper(
    call: list[TileBatch], batch: TileBatch, group: int, joining: Joining, is_view: Callable[[TileBatch], bool]
) -> bool:
    """Returns whether adding a batch to a call is cheaper than a separate call; the first batch of a call is the longest."""
    longest = call[0]
    padded = batch.like(longest)
    if sum(x.like(longest).rows(group) for x in call) + padded.rows(group) > joining.most_rows:
        return False
    views = [x for x in ((longest, batch) if len(call) == 1 else (batch,)) if is_view(x)]
    rows = sum(x.rows(group) for x in views) + padded.rows(group) - batch.rows(group)
    return rows / joining.rows + (padded.pairs(group) - batch.pairs(group)) / joining.pairs < 1
