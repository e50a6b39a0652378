"""Which tiles of unequal lengths share a kernel call, from integers alone."""

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


#: The visit and the shape of a batch of tiles: batches of one kind share no query row.
Kind = tuple[tuple[int, int], Shape]


def fresh_kinds(batches: Sequence[TileBatch], group: int, num_rows: int) -> tuple[set[Kind], bool]:
    """Returns kinds of batches that share no query row with each other, and whether they have all `num_rows` of all heads."""
    kinds: dict[Kind, list[TileBatch]] = {}
    for batch in batches:
        kinds.setdefault((batch.visit, batch.shape), []).append(batch)
    fresh: set[Kind] = set()
    chosen: list[TileBatch] = []
    for kind, alike in kinds.items():
        count = sum(batch._replace(num_keys=0).rows(group) for batch in alike)
        if count <= num_rows and _are_apart(chosen, alike):
            fresh.add(kind)
            chosen += alike
            num_rows -= count
        if not num_rows:
            break
    return fresh, not num_rows


def _are_apart(some: list[TileBatch], others: list[TileBatch]) -> bool:
    """Returns whether no stretch of rows that has a tile of `some` meets one of `others`; folds may lie between others."""
    if not some:
        return True
    if len({batch.per_query_head for batch in (*some, *others)}) > 1:
        return False
    alike = len({item.heads for batch in (*some, *others) for item in batch.items}) == 1
    stretches = []
    for number, batches in enumerate((some, others)):
        for batch in batches:
            beyond = (batch.num_queries - 1) * batch.query_stride
            low, high = min(beyond, 0), max(beyond, 0) + batch.fold_size - 1
            for rows, heads, row, _, copies in batch.items:
                of_heads = (rows, row + low, row + high + copies, number)
                stretches += [(0, *of_heads)] if alike else [(head, *of_heads) for head in heads]
    ends: dict[tuple[object, ...], int] = {}
    for head, rows, start, stop, number in sorted(stretches):
        if ends.get((head, rows, 1 - number), 0) > start:
            return False
        ends[head, rows, number] = max(stop, ends.get((head, rows, number), 0))
    return True


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
