"""Sequence layouts: which tokens of a sequence each rank holds, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayoutKind = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class SequenceLayout:
    """The division of a sequence of `seq_len` tokens among p = `world_size` ranks.

    In "contiguous", rank i holds the i-th of p equal pieces. In "zigzag" it holds pieces i and 2p-1-i of 2p equal pieces,
    in this order, which gives every rank the same causal work. The sequence is padded at its end to `padded_len`, a
    multiple of p (or 2p); the padding belongs to no document.

    Raises:
        ValueError: an unknown kind, or a length or world size below 1.

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

    def __post_init__(self) -> None:
        if self.kind not in ("contiguous", "zigzag"):
            raise ValueError(f"SequenceLayout: kind must be 'contiguous' or 'zigzag', got {self.kind!r}")
        for name in ("seq_len", "world_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"SequenceLayout: {name} must be an integer of at least 1, got {value!r}")

    @property
    def num_pieces(self) -> int:
        """The number of equal pieces of the padded sequence: p, or 2p for zigzag."""
        return self.world_size * (2 if self.kind == "zigzag" else 1)

    @property
    def piece_len(self) -> int:
        """The number of tokens in a piece."""
        return -(-self.seq_len // self.num_pieces)

    @property
    def padded_len(self) -> int:
        """The number of tokens of the sequence with its padding."""
        return self.piece_len * self.num_pieces

    @property
    def local_len(self) -> int:
        """The number of tokens that a rank holds, with padding."""
        return self.padded_len // self.world_size

    def pieces(self, rank: int) -> tuple[range, ...]:
        """Returns the runs of the sequence's tokens that `rank` holds, in the order in which it holds them."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"SequenceLayout: rank must be in 0..{self.world_size - 1}, got {rank!r}")
        numbers = (rank,) if self.kind == "contiguous" else (rank, self.num_pieces - 1 - rank)
        return tuple(range(number * self.piece_len, (number + 1) * self.piece_len) for number in numbers)

    def positions(self, rank: int) -> list[int]:
        """Returns where each of the rank's `local_len` tokens stands in the sequence; `seq_len` and above is padding."""
        return [index for piece in self.pieces(rank) for index in piece]
