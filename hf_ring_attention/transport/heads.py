"""The exchange of tokens for heads: each rank gives its tokens of all heads, and gets all tokens of its group of some heads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.heads import Heads, Place, group_size, pieces_of, place_of, problem_of_heads, rows_of_member
from ..plan.joins import Joining
from ..plan.problem import Problem
from .communicators import Exchanger, PartOfRanks
from .ring import RingBinding, RingTransport, bind_ring
from .transports import Link, Traffic

#: Ends an exchange under way: waits for the messages of the other ranks, and returns the tensors that are made of them.
Finish = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class HeadsPiece:
    """Heads that are exchanged and computed together: the heads of each member of a group, and the steps of its ring."""

    of_ranks: tuple[Heads, ...]
    ring: RingBinding


@dataclass(frozen=True)
class HeadsBinding:
    """The pieces of a rank, and its place."""

    pieces: tuple[HeadsPiece, ...]
    place: Place
    #: For each member of the group, the runs of its tokens among the rows of the group: for each batch row, or once if all
    #: batch rows are divided alike.
    rows: tuple[tuple[tuple[range, ...], ...], ...]


def bind_heads(problem: Problem, rank: int, device: torch.device, joining: Joining | None) -> HeadsBinding:
    """Binds the plan of `rank` for the heads transport."""
    place, members = place_of(problem, rank), range(group_size(problem))
    batch_rows = range(len(problem.layout.rows) or 1)

    def ring(heads: Heads) -> RingBinding:
        return bind_ring(problem_of_heads(problem, heads), place.group, device, joining)

    pieces = zip(*(pieces_of(problem, member) for member in members))
    return HeadsBinding(
        pieces=tuple(HeadsPiece(of_ranks, ring(of_ranks[place.member])) for of_ranks in pieces),
        place=place,
        rows=tuple(
            tuple(rows_of_member(problem, place._replace(member=member), row) for row in batch_rows)
            for member in members
        ),
    )


class HeadsTransport:
    """Exchanges tokens for heads, a piece of the heads at a time, all tensors of a piece in one message to each rank."""

    def __init__(self, binding: HeadsBinding, communicator: Exchanger, traffic: Traffic) -> None:
        self.binding, self.traffic = binding, traffic
        (group, self.rank), size = binding.place, len(binding.rows)
        #: The group that exchanges heads, and the ring of the ranks that have the same heads in all groups.
        self.group = PartOfRanks(communicator, range(group * size, (group + 1) * size))
        self.ring = PartOfRanks(communicator, range(self.rank, communicator.world_size, size))
        self.link = Link(self.group, traffic, "attention by heads", communicator.rank)
        self.num_kv_heads = binding.pieces[-1].of_ranks[-1].kv.stop

    def of_piece(self, piece: HeadsPiece) -> RingTransport:
        """Returns the transport of a piece's heads, once the tokens of the group are here."""
        return RingTransport(piece.ring, self.ring, self.traffic, self.link.rank)

    def own_heads(self, piece: HeadsPiece, x: Tensor | None) -> Tensor | None:
        """Returns a view of the numbers that this rank's heads of a piece have in x [H]; None for None."""
        heads = piece.of_ranks[self.rank].query
        return None if x is None else x[heads.start : heads.stop]

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
            return [x[:, heads[rank].start : heads[rank].stop] for x, heads in tensors]

        def finish(parts: list[list[Tensor]]) -> list[Tensor]:
            wholes = []
            for number, (x, heads) in enumerate(tensors):
                shape = (x.shape[0], len(heads[self.rank]), x.shape[2] * len(heads), *x.shape[3:])
                whole = x.new_empty(shape)
                for runs, part in zip(self.binding.rows, parts):
                    for batch_rows, run, own in _by_run(runs):
                        whole[batch_rows, :, run] = part[number][batch_rows, :, own]
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
            return [_rows_of_member(x, self.binding.rows[rank]) for x in tensors]

        def finish(parts: list[list[Tensor]]) -> list[Tensor]:
            for heads, part in zip(piece.of_ranks, parts):
                for (_, target), rows in zip(queries, part):
                    target[:, heads.query.start : heads.query.stop] = rows
                for (_, target), rows in zip(keys, part[len(queries) :]):
                    target[:, heads.kv.start : heads.kv.stop] += rows
            return []

        return self._start(content, sent, finish)

    def _start(
        self, content: str, sent: Callable[[int], list[Tensor]], finish: Callable[[list[list[Tensor]]], list[Tensor]]
    ) -> Finish:
        """Starts to send `sent(rank)` to each other member, and to receive as much from it; `finish` takes all parts."""
        own, members = sent(self.rank), range(len(self.binding.rows))
        others = [member for member in members if member != self.rank]
        if not others:
            return lambda: finish([own])
        message = _cat([x.flatten() for member in others for x in sent(member)])
        message = message.contiguous()  # The gradient of a sum is one number for all rows.
        counts = [0 if member == self.rank else message.numel() // len(others) for member in members]
        received, wait = self.link.all_to_all(content, message, counts, counts)

        def arrived() -> list[Tensor]:
            wait()
            shapes = [x.shape for x in own]
            parts = received.split(counts)
            return finish([own if i == self.rank else _unpacked(part, shapes) for i, part in enumerate(parts)])

        return arrived


def _cat(parts: list[Tensor], dim: int = 0) -> Tensor:
    """Returns the parts, one after the other; a single part without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _unpacked(message: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """Returns the tensors of these shapes that follow each other in a message."""
    parts = message.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes)]


def _by_run(rows: Sequence[Sequence[range]]) -> Iterator[tuple[slice, slice, slice]]:
    """Yields the batch rows of each run of rows, the run, and the place of the run in the member's own rows."""
    for row, runs in enumerate(rows):
        batch_rows = slice(row, row + 1) if len(rows) > 1 else slice(None)
        starts = itertools.accumulate((len(run) for run in runs), initial=0)
        for run, start in zip(runs, starts):
            yield batch_rows, slice(run.start, run.stop), slice(start, start + len(run))


def _rows_of_member(x: Tensor, rows: Sequence[Sequence[range]]) -> Tensor:
    """Returns a member's rows of x [B, heads, tokens, ...], [B, heads, local tokens, ...]."""
    by_row: dict[int, list[Tensor]] = {}
    for batch_rows, run, _ in _by_run(rows):
        by_row.setdefault(batch_rows.start or 0, []).append(x[batch_rows, :, run])
    return _cat([_cat(runs, 2) for runs in by_row.values()], 0)
