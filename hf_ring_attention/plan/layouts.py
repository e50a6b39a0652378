"""Sequence layouts: the tokens of a sequence that each rank holds, and their order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from .branches import check_choice, check_count

LayoutKind = Literal["contiguous", "zigzag", "documents"]

#: The pieces of each rank in one batch row.
RowPieces = tuple[tuple[range, ...], ...]


@dataclass(frozen=True)
class SequenceLayout:
    """The division of a sequence of `seq_len` tokens among p = `world_size` ranks.

    In "contiguous", rank i holds the i-th of p equal pieces. In "zigzag" it holds pieces i and 2p-1-i of 2p equal pieces,
    in this order, which gives every rank the same causal work. The sequence is padded at its end to `padded_len`, a
    multiple of p (or 2p); the padding belongs to no document.

    In "documents", `rows` has the pieces of each batch row: every rank holds equally many tokens of a row, and has about the
    same work in all rows together. `Ring.layout_for` finds them.

    Args:
        kind: "contiguous", "zigzag" or "documents".
        seq_len: tokens of a sequence, without padding.
        world_size: the number of ranks.
        rows: for "documents", the pieces of each rank in each batch row, ascending.

    Raises:
        ValueError: an unknown kind, a length or world size below 1, or pieces that do not cover all tokens.

    Example:
        >>> layout = ra.SequenceLayout("zigzag", seq_len=7, world_size=2)
        >>> layout.positions(0), layout.positions(1)
        ([0, 1, 6, 7], [2, 3, 4, 5])
        >>> layout.padded_len, layout.local_len
        (8, 4)
    """

    kind: LayoutKind
    seq_len: int
    world_size: int
    rows: tuple[RowPieces, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_choice("SequenceLayout", "kind", self.kind, get_args(LayoutKind))
        check_count("SequenceLayout", "seq_len", self.seq_len)
        check_count("SequenceLayout", "world_size", self.world_size)
        if (self.kind == "documents") != bool(self.rows):
            raise ValueError(
                f"SequenceLayout: {self.kind!r} {'needs' if not self.rows else 'has no'} pieces of rows: make a layout of "
                f"documents by ring.layout_for(seq_len, pattern, documents=...)"
            )
        for row in self.rows:
            self._check_pieces(row)

    def _check_pieces(self, row: RowPieces) -> None:
        sizes = [sum(map(len, own)) for own in row]
        pieces = sorted(itertools.chain(*row), key=lambda piece: piece.start)
        ends, tokens = [0, *(end for piece in pieces for end in (piece.start, piece.stop))], self.padded_len
        if sizes != [self.local_len] * self.world_size or ends[::2] != [*ends[1::2], tokens]:
            raise ValueError(
                f"SequenceLayout: the pieces of a row must cover its {tokens} tokens, {self.local_len} on each of "
                f"{self.world_size} ranks, got {sizes}"
            )

    @cached_property
    def num_pieces(self) -> int:
        """The number of equal pieces that padding completes: p, or 2p for zigzag."""
        return self.world_size * (2 if self.kind == "zigzag" else 1)

    @cached_property
    def piece_len(self) -> int:
        """The number of tokens in one of these pieces."""
        return -(-self.seq_len // self.num_pieces)

    @cached_property
    def padded_len(self) -> int:
        """The number of tokens of the sequence with its padding."""
        return self.piece_len * self.num_pieces

    @cached_property
    def local_len(self) -> int:
        """The number of tokens that a rank holds, with padding."""
        return self.padded_len // self.world_size

    def pieces(self, rank: int, row: int = 0) -> tuple[range, ...]:
        """Returns the runs of a batch row's tokens that `rank` holds, in its order.

        Raises:
            ValueError: a rank outside the layout.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"SequenceLayout: rank must be in 0..{self.world_size - 1}, got {rank!r}")
        if self.rows:
            return self.rows[row][rank]
        length, first = self.piece_len, rank * self.piece_len
        if self.kind == "contiguous":
            return (range(first, first + length),)
        last = self.padded_len - first
        return range(first, first + length), range(last - length, last)

    def placed_pieces(self, rank: int, row: int = 0) -> list[tuple[int, range]]:
        """Returns `pieces`, each behind the place of its first token among the rank's tokens."""
        pieces = self.pieces(rank, row)
        return list(zip(itertools.accumulate(map(len, pieces), initial=0), pieces))

    def positions(self, rank: int, row: int = 0) -> list[int]:
        """Returns the index in a batch row of each of the rank's `local_len` tokens; `seq_len` and above is padding."""
        return [index for piece in self.pieces(rank, row) for index in piece]


def merged_pieces(pieces: Iterable[range]) -> tuple[range, ...]:
    """Returns pieces in ascending order; neighbouring pieces become one."""
    merged: list[range] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if merged and merged[-1].stop == piece.start:
            merged[-1] = range(merged[-1].start, piece.stop)
        else:
            merged.append(piece)
    return tuple(merged)
