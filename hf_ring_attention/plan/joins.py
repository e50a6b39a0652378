"""Which tiles of unequal lengths share a kernel call, from integers alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from .plans import TileBatch


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
    """How a kernel takes documents of unequal lengths in one call: in place. Its bands have no folds.

    The kernel takes at most `most_documents`, and pads its sums by `padding` rows a document, which must not take more memory
    than the sums.
    """

    most_documents: int
    padding: int

    def most_of(self, tokens: int) -> int:
        """Returns the most documents among so many tokens; a few in any case."""
        return min(self.most_documents, max(64, tokens // self.padding))


#: Padding is cut into sequences of at most so many tokens, whose pairs then take no time.
PADDING_LENGTH = 256


class Sequences(NamedTuple):
    """Sequences that follow each other in the tokens of all batch rows: documents, and padding between them."""

    ends: tuple[int, ...]  # 0, and the end of each sequence
    are_padding: tuple[bool, ...]
    causal: bool


def sequences_in_place(
    batches: Sequence[TileBatch], num_batch_rows: int, heads: range, num_rows: int, joining: InPlace
) -> Sequences | None:
    """Returns the tiles as sequences of `num_batch_rows` x `num_rows` tokens.

    Returns None if some tile is no document, in which a query sees all keys of its document or the earlier ones, with its rows
    of all heads; and if each row is one document, which needs no ends.
    """
    documents, shapes = [], set()
    for batch in batches:
        length, strides = batch.num_queries, (batch.query_stride, batch.key_stride)
        is_square = batch.shape != "band" and length == batch.num_keys and (strides == (1, 1) or length == 1)
        if not is_square or batch.per_query_head or batch.fold_size > 1:
            return None
        shapes |= {batch.shape} if length > 1 else set()
        for item in batch.items:
            if item.query_row != item.key_row or item.heads != tuple(heads) or item.copies > 1:
                return None
            documents += [(row * num_rows + item.query_row, length) for row in item.batch_rows]
    if len(shapes) > 1:
        return None
    ends, are_padding, total = [0], [], num_batch_rows * num_rows
    for start, length in [*sorted(documents), (total, 0)]:
        if start < ends[-1]:  # Documents that are counted twice.
            return None
        padding = range(ends[-1] + PADDING_LENGTH, start, PADDING_LENGTH) if start > ends[-1] else ()
        pieces = [*padding, *[start] * (start > ends[-1])]
        ends += [*pieces, *[start + length] * (length > 0)]
        are_padding += [True] * len(pieces) + [False] * (length > 0)
    if len(are_padding) > joining.most_of(total) or (len(are_padding) == num_batch_rows and not any(are_padding)):
        return None
    return Sequences(tuple(ends), tuple(are_padding), "causal" in shapes)


def joined(
    batches: Sequence[TileBatch], group: int, joining: Hashable, is_view: Callable[[TileBatch], bool]
) -> Iterator[list[TileBatch]]:
    """Yields the batches of each call: several if copies and padding of rows cost less than another call.

    A batch for which `is_view` holds needs no copies in a call of its own.
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
        return batch.visit, batch.per_query_head, batch.num_queries * batch.fold_size
    # In triangles and bands, padding of queries and of keys depend on each other.
    width = batch.num_keys - batch.num_queries if batch.shape == "band" else 0
    return batch.visit, batch.per_query_head, batch.shape, batch.fold_size, width


def _is_cheaper(
    call: list[TileBatch], batch: TileBatch, group: int, joining: Joining, is_view: Callable[[TileBatch], bool]
) -> bool:
    """Returns whether adding a batch to a call is cheaper than a call of its own; the first batch of a call is the longest."""
    longest = call[0]
    padded = batch.like(longest)
    if sum(x.like(longest).rows(group) for x in call) + padded.rows(group) > joining.most_rows:
        return False
    views = [x for x in ((longest, batch) if len(call) == 1 else (batch,)) if is_view(x)]
    rows = sum(x.rows(group) for x in views) + padded.rows(group) - batch.rows(group)
    return rows / joining.rows + (padded.pairs(group) - batch.pairs(group)) / joining.pairs < 1
