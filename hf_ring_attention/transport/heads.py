"""The exchange of tokens for heads: each rank gives its tokens of all heads, and gets all tokens of its group of some heads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.heads import Heads, Place, group_size, pieces_of, place_of, problem_of_heads, rows_of_member
from ..plan.problem import Problem
from .communicators import Communicator
from .ring import RingBinding, RingTransport, bind_ring
from .transports import Link, Traffic

#: Ends an exchange under way: waits for the messages of the other ranks, and returns the tensors that are made of them.
Finish = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class HeadsPiece:
    """Heads that are exchanged and computed together."""

    of_ranks: tuple[Heads, ...]  # of each member of a group
    ring: RingBinding  # the steps round the ring of the ranks that have them


class RowsOfRun(NamedTuple):
    """A run of a member's tokens in some batch rows: its rows among the group's, and among the member's own."""

    batch_rows: slice
    of_group: slice
    own: slice


@dataclass(frozen=True)
class HeadsBinding:
    """The pieces of a rank, and its place."""

    pieces: tuple[HeadsPiece, ...]
    place: Place
    rows: tuple[tuple[RowsOfRun, ...], ...]  # the tokens of each member of the group


def bind_heads(problem: Problem, rank: int, device: torch.device, joining: Hashable) -> HeadsBinding:
    """Binds the plan of `rank` for the heads transport."""
    place, members = place_of(problem, rank), range(group_size(problem))

    def ring(heads: Heads) -> RingBinding:
        return bind_ring(problem_of_heads(problem, heads), place.group, device, joining)

    pieces = zip(*(pieces_of(problem, member) for member in members))
    return HeadsBinding(
        pieces=tuple(HeadsPiece(of_ranks, ring(of_ranks[place.member])) for of_ranks in pieces),
        place=place,
        rows=tuple(tuple(_rows_of_runs(problem, place._replace(member=member))) for member in members),
    )


def _rows_of_runs(problem: Problem, place: Place) -> Iterator[RowsOfRun]:
    """Yields the runs of a member's tokens, in its order; all batch rows together if they are alike."""
    count = len(problem.layout.rows)
    for row in range(count or 1):
        runs = rows_of_member(problem, place, row)
        starts = itertools.accumulate((len(run) for run in runs), initial=0)
        for run, start in zip(runs, starts):
            batch_rows = slice(row, row + 1) if count else slice(None)
            yield RowsOfRun(batch_rows, _slice_of(run), slice(start, start + len(run)))


class HeadsTransport:
    """Exchanges tokens for heads, a piece of the heads at a time, all tensors of a piece in one message to each rank."""

    def __init__(self, binding: HeadsBinding, communicator: Communicator, traffic: Traffic) -> None:
        (group, self.member), size = binding.place, len(binding.rows)
        self.binding = binding
        self.link = Link(communicator, traffic, "attention by heads", range(group * size, (group + 1) * size))
        self.num_kv_heads = binding.pieces[-1].of_ranks[-1].kv.stop

    def of_piece(self, piece: HeadsPiece) -> RingTransport:
        """Returns the transport of a piece's heads among the ranks that have them, once the tokens of the group are here."""
        communicator, size = self.link.communicator, len(self.binding.rows)
        same_heads = range(self.member, communicator.world_size, size)
        return RingTransport(piece.ring, communicator, self.link.traffic, same_heads)

    def own_heads(self, piece: HeadsPiece, x: Tensor | None) -> Tensor | None:
        """Returns a view of the numbers that this rank's heads of a piece have in x [H]; None for None."""
        return None if x is None else x[_slice_of(piece.of_ranks[self.member].query)]

    def in_turn(
        self, content: str, queries: Sequence[Tensor], keys: Sequence[Tensor]
    ) -> Iterator[tuple[HeadsPiece, list[Tensor]]]:
        """Yields each piece with its results of `_to_heads`, while those of the next piece are under way."""
        pieces = self.binding.pieces
        coming = self._to_heads(pieces[0], content, queries, keys)
        for piece, following in zip(pieces, (*pieces[1:], None)):
            whole = coming()
            if following is not None:
                coming = self._to_heads(following, content, queries, keys)
            yield piece, whole

    def _to_heads(self, piece: HeadsPiece, content: str, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Finish:
        """Starts to take tensors [B, heads, local tokens, ...] of all heads to [B, heads of the piece, tokens, ...].

        The end returns the results of `queries`, and then the results of `keys`, which are of key/value heads.
        """
        tensors = [(x, [heads.query for heads in piece.of_ranks]) for x in queries]
        tensors += [(x, [heads.kv for heads in piece.of_ranks]) for x in keys]

        def sent(rank: int) -> list[Tensor]:
            return [x[:, _slice_of(heads[rank])] for x, heads in tensors]

        def finish(parts: list[list[Tensor]]) -> list[Tensor]:
            wholes = []
            for number, (x, heads) in enumerate(tensors):
                whole = x.new_empty(x.shape[0], len(heads[self.member]), x.shape[2] * len(heads), *x.shape[3:])
                for runs, part in zip(self.binding.rows, parts):
                    for batch_rows, of_group, own in runs:
                        whole[batch_rows, :, of_group] = part[number][batch_rows, :, own]
                wholes.append(whole)
            return wholes

        return self._start(content, sent, finish)

    def to_tokens(
        self,
        piece: HeadsPiece,
        content: str,
        queries: Sequence[tuple[Tensor, Tensor]],
        keys: Sequence[tuple[Tensor, Tensor]],
    ) -> Finish:
        """Starts to bring tensors [B, heads of the piece, tokens, ...] home, into [B, heads, local tokens, ...] of all heads.

        Each tensor comes with its target. Key/value heads are added to it, since several ranks may have one head.
        """
        tensors = [x for x, _ in (*queries, *keys)]

        def sent(rank: int) -> list[Tensor]:
            return [_rows_of_member(x, self.binding.rows[rank], x.shape[2] // len(self.binding.rows)) for x in tensors]

        def finish(parts: list[list[Tensor]]) -> list[Tensor]:
            for heads, part in zip(piece.of_ranks, parts):
                for (_, target), rows in zip(queries, part):
                    target[:, _slice_of(heads.query)] = rows
                for (_, target), rows in zip(keys, part[len(queries) :]):
                    target[:, _slice_of(heads.kv)] += rows
            return []

        return self._start(content, sent, finish)

    def _start(
        self, content: str, sent: Callable[[int], list[Tensor]], finish: Callable[[list[list[Tensor]]], list[Tensor]]
    ) -> Finish:
        """Starts to send `sent(rank)` to each other member, and to receive as much from it; `finish` takes all parts."""
        own, members = sent(self.member), range(len(self.binding.rows))
        others = [member for member in members if member != self.member]
        if not others:
            return lambda: finish([own])
        parts = [x.flatten() for member in others for x in sent(member)]
        # The gradient of a sum is one number for all rows.
        message = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
        del parts  # They are copies, and would stay beside the message until it has left.
        counts = [0 if member == self.member else message.numel() // len(others) for member in members]
        received, wait = self.link.all_to_all(content, message, counts, counts)

        def arrived() -> list[Tensor]:
            wait()
            parts = [part.split([x.numel() for x in own]) for part in received.split(counts) if len(part)]
            came = [[x.view(like.shape) for x, like in zip(part, own)] for part in parts]
            return finish([*came[: self.member], own, *came[self.member :]])

        return arrived


def _slice_of(run: range) -> slice:
    return slice(run.start, run.stop)


def _rows_of_member(x: Tensor, runs: Sequence[RowsOfRun], local_len: int) -> Tensor:
    """Returns a member's rows of x [B, heads, tokens, ...], [B, heads, local tokens, ...]; a single run without a copy."""
    if len(runs) == 1:
        return x[:, :, runs[0].of_group]
    rows = x.new_empty(*x.shape[:2], local_len, *x.shape[3:])
    for batch_rows, of_group, own in runs:
        rows[batch_rows, :, own] = x[batch_rows, :, of_group]
    return rows
