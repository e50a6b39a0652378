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
    """How a kernel takes documents of unequal lengths in one call: in place, at most `most_documents`; bands have no folds."""

    most_documents: int


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
