"""One attention call in integers: the values that decide its tiles, and nothing else."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, lru_cache
from operator import index

from .layouts import RowPieces, SequenceLayout
from .patterns import Pattern


@dataclass(frozen=True)
class HeldKeys:
    """The keys of a sequence that a rank holds in a cache, for queries that are the sequence's last tokens on every rank."""

    row_len: int  # tokens of the sequence so far
    num_queries: int  # the number of its last tokens that are queries
    num_rows: int  # rows of the key tensor
    keys: tuple[tuple[int, int, int], ...]  # runs of its tokens: (first row in the key tensor, start, stop)

    @classmethod
    def whole(cls, row_len: int, num_queries: int, num_rows: int) -> HeldKeys:
        """Returns all tokens of the sequence, in the first rows of the key tensor."""
        return cls(row_len, num_queries, num_rows, ((0, 0, row_len),))

    @property
    def layout(self) -> SequenceLayout:
        """The layout of the whole sequence, whose tokens number the documents."""
        return SequenceLayout("contiguous", self.row_len, 1)


#: The (start, stop) of each document in its sequence, for each batch row.
Documents = tuple[tuple[tuple[int, int], ...], ...]


def as_documents(documents: Sequence[Sequence[tuple[int, int]]], who: str) -> Documents:
    """Returns the documents of batch rows as tuples; errors name the caller (`who`)."""
    try:
        return tuple(tuple((index(start), index(stop)) for start, stop in row) for row in documents)
    except (TypeError, ValueError):
        message = f"{who}: documents must be a list of (start, stop) for each batch row, got {documents!r}"
        raise ValueError(message) from None


def documents_of(documents: Sequence[Sequence[tuple[int, int]]] | None, seq_len: int, who: str) -> Documents | None:
    """Returns the documents of batch rows as tuples if they ascend within the sequence, and None for None.

    Errors name the caller (`who`).
    """
    if documents is None:
        return None
    spans = as_documents(documents, who)
    for row, spans_of_row in enumerate(spans):
        end = 0
        for start, stop in spans_of_row:
            if not end <= start < stop <= seq_len:
                raise ValueError(
                    f"documents of batch row {row} must be ascending, apart, not empty and within the sequence of "
                    f"{seq_len} tokens, got (start, stop) = ({start}, {stop}) after {end} tokens"
                )
            end = stop
    return spans


@lru_cache(maxsize=64)
def _check_order(layout: SequenceLayout, documents: Documents) -> None:
    """Refuses a layout that gives a rank tokens of a document out of their order."""
    for row, spans in enumerate(documents):
        starts, stops = [start for start, _ in spans], [stop for _, stop in spans]
        for rank in range(layout.world_size):
            ends: dict[int, int] = {}  # by document, the end of the last piece with a token of it
            for piece in layout.pieces(rank, row):
                first, last = bisect.bisect_right(stops, piece.start), bisect.bisect_left(starts, piece.stop)
                for number in range(first, last):
                    if piece.start < ends.get(number, 0):
                        raise ValueError(
                            f"rank {rank} holds tokens of document {spans[number]} of batch row {row} out of their order: "
                            f"tokens {piece.start} to {piece.stop - 1} behind token {ends[number] - 1}: use ascending pieces"
                        )
                    ends[number] = piece.stop


@dataclass(frozen=True)
class RingSettings:
    """How rows travel round a ring; the defaults were measured, and all ranks must have the same."""

    #: A payload with a key or value row for this many query rows, or fewer, is large: it is sent head group by head group.
    large_payload: int = 8
    #: The fewest query rows of a head group, over heads and batch rows: kernels are slower with fewer.
    rows_of_a_head_group: int = 1 << 12
    #: The most head groups; each has p - 1 separate hops.
    head_groups: int = 8
    #: Rows travel both ways round the ring if that takes at most this share of the bytes of one way.
    both_ways_below: float = 0.75
    #: The number of neighbouring ranks that exchange heads in the heads transport; None for all ranks.
    heads: int | None = None
    #: Whether transport="auto" may choose to exchange heads; graphs of torch.compile cannot hold its many results.
    may_exchange_heads: bool = True


@dataclass(frozen=True)
class Problem:
    """One attention call as all ranks see it: the values that decide the tiles, and nothing else.

    If these heads are some of the attention's, the first one has its number among all heads, since phases depend on it.
    """

    pattern: Pattern
    layout: SequenceLayout
    documents: Documents
    _: KW_ONLY
    num_heads: int
    num_kv_heads: int
    causal: bool = True
    held: HeldKeys | None = None  # keys of a cache; None if queries and keys are the same tokens, sharded alike
    settings: RingSettings = RingSettings()
    first_kv_head: int = 0

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"the number of query heads must be a multiple of the number of key/value heads, got {self.num_heads} "
                f"and {self.num_kv_heads}"
            )
        if self.pattern.num_kv_heads and self.first_kv_head + self.num_kv_heads > self.pattern.num_kv_heads:
            self.pattern.check_heads(self.first_kv_head + self.num_kv_heads, "the attention")
        if self.layout.rows and len(self.layout.rows) != len(self.documents):
            raise ValueError(
                f"the layout was made for the documents of {len(self.layout.rows)} batch rows, and there are "
                f"{len(self.documents)}: make it by ring.layout_for(seq_len, pattern, documents=...) for this batch"
            )
        if self.layout.rows:
            _check_order(self.layout, self.documents)

    @cached_property
    def row_classes(self) -> tuple[tuple[tuple[tuple[int, int], ...], tuple[int, ...]], ...]:
        """Pairs of documents and the batch rows that have them and the same pieces: such batch rows share all tiles."""
        rows_of: dict[tuple[tuple[tuple[int, int], ...], RowPieces], list[int]] = {}
        for batch_row, documents in enumerate(self.documents):
            pieces = self.layout.rows[batch_row] if self.layout.rows else ()
            rows_of.setdefault((documents, pieces), []).append(batch_row)
        return tuple((documents, tuple(rows)) for (documents, _), rows in rows_of.items())

    def in_groups(self, size: int) -> Problem:
        """Returns the problem with groups of `size` neighbours that exchange heads."""
        return replace(self, settings=replace(self.settings, heads=size))

    @property
    def group(self) -> int:
        """The number of query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads
