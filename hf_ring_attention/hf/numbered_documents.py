"""Shards that say themselves which tokens they hold: by the number of each token's document, and its position there.

So a layout travels with its batch: positions and numbers are cut like the tokens, and each rank learns from all ranks' runs
which pieces they hold. Their rows are those of the batch without the padding between documents, which stands at the end.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.layouts import SequenceLayout
from ..plan.problem import Documents
from ..ring.ring import Ring


class NumberedRun(NamedTuple):
    """Tokens of a shard that follow each other in a document, the first of them at this position; number -1 is padding."""

    number: int
    position: int
    length: int


#: For each batch row the runs of a shard, in their order.
RunsOfShard = list[list[NumberedRun]]


def tells_its_layout(ring: Ring) -> bool:
    """Returns whether shards with seq_idx say which tokens they hold; other ones are divided as the ring divides rows."""
    return ring.world_size > 1 and ring.layout in ("auto", "documents")


def numbered_runs(positions: Tensor | None, mask: Tensor | None, seq_idx: Tensor, first: int) -> RunsOfShard:
    """Returns the runs of a shard.

    Args:
        positions: [B, n], or [1, n] for all rows.
        mask: [B, n], 0 for padding; None for none.
        seq_idx: [B, n], the number of each token's document in its row, negative for padding.
        first: the position id of a row's first token.

    Raises:
        ValueError: tensors that are missing or have other shapes.
    """
    expected = tuple(seq_idx.shape) if isinstance(seq_idx, Tensor) else None
    if expected is None or len(expected) != 2:
        raise ValueError(f"seq_idx must be a tensor [B, n] like input_ids, got {expected or type(seq_idx).__name__}")
    for name, x in (("position_ids", positions), ("attention_mask", mask)):
        shapes = (expected, (1, expected[1])) if name == "position_ids" else (expected,)
        if x is None and name == "position_ids":
            raise ValueError(
                f"position_ids are missing, and a model would number the tokens of every shard from 0: pass those of the "
                f"shard, {expected}, beside its seq_idx"
            )
        if x is not None and tuple(x.shape) not in shapes:
            raise ValueError(
                f"{name} of a shard must have the shape of its seq_idx, {expected}, got {tuple(x.shape)}: shard them alike"
            )
    assert positions is not None
    numbers = seq_idx.cpu().long().clamp_min(-1)
    if mask is not None:
        numbers = numbers.masked_fill((mask == 0).cpu(), -1)
    within = (positions.cpu() - first).expand(expected).masked_fill(numbers < 0, 0)
    cut = (numbers[:, 1:] != numbers[:, :-1]) | ((within[:, 1:] != within[:, :-1] + 1) & (numbers[:, 1:] >= 0))
    rows = []
    for row in range(expected[0]):
        starts = [0, *(torch.nonzero(cut[row]).flatten() + 1).tolist()]
        lengths = [stop - start for start, stop in zip(starts, [*starts[1:], expected[1]])]
        of_runs = zip(numbers[row, starts].tolist(), within[row, starts].tolist(), lengths)
        rows.append([NumberedRun(*run) for run in of_runs])
    return rows


def layout_of_shards(ring: Ring, positions: Tensor | None, mask: Tensor | None, seq_idx: Tensor) -> SequenceLayout:
    """Returns the layout that the shards of all ranks tell; every rank calls it with its own.

    Raises:
        ValueError: on every rank, for shards that contradict each other.
    """
    with ring.agreement("the layout of a batch") as call:
        call.message = numbered_runs(positions, mask, seq_idx, 0)
    return layout_of_runs(call.answers)[0]


def runs_of_layout(layout: SequenceLayout, documents: Documents, rank: int) -> RunsOfShard:
    """Returns the runs of a rank's shard, as `numbered_runs` will find them in it."""
    return [list(_merged_runs(_runs_of_row(layout.pieces(rank, row), spans))) for row, spans in enumerate(documents)]


def _runs_of_row(pieces: Sequence[range], spans: Sequence[tuple[int, int]]) -> Iterator[NumberedRun]:
    starts, stops = [start for start, _ in spans], [stop for _, stop in spans]
    for piece in pieces:
        done = piece.start
        for number in range(bisect.bisect_right(stops, piece.start), bisect.bisect_left(starts, piece.stop)):
            low, high = max(done, starts[number]), min(piece.stop, stops[number])
            yield NumberedRun(-1, 0, low - done)
            yield NumberedRun(number, low - starts[number], high - low)
            done = high
        yield NumberedRun(-1, 0, piece.stop - done)


def _merged_runs(runs: Iterable[NumberedRun]) -> Iterator[NumberedRun]:
    """Yields runs that are not empty, those that follow each other in a document, or in padding, as one."""
    last: NumberedRun | None = None
    for run in runs:
        if not run.length:
            continue
        follows = last is not None and last.number == run.number
        if last is not None and follows and (run.number < 0 or last.position + last.length == run.position):
            last = last._replace(length=last.length + run.length)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


def layout_of_runs(by_rank: Sequence[RunsOfShard]) -> tuple[SequenceLayout, Documents]:
    """Returns the layout "documents" of all ranks' shards, and its documents: one behind the other, and then padding.

    Raises:
        ValueError: documents of which tokens are missing, or held twice.
    """
    local_len = sum(run.length for run in by_rank[0][0])
    rows, documents = [], []
    for row in range(len(by_rank[0])):
        held = [shard[row] for shard in by_rank]
        begins = _begins(row, held)
        starts, end = {}, 0
        for number, (position, length) in sorted(begins.items()):
            starts[number] = end - position
            end += length
        documents.append(
            tuple(
                (starts[n] + position, starts[n] + position + length)
                for n, (position, length) in sorted(begins.items())
            )
        )
        pieces: list[tuple[range, ...]] = []
        for runs in held:
            own: list[range] = []
            for run in runs:
                start = end if run.number < 0 else starts[run.number] + run.position
                end += run.length if run.number < 0 else 0
                if own and own[-1].stop == start:
                    own[-1] = range(own[-1].start, start + run.length)
                else:
                    own.append(range(start, start + run.length))
            pieces.append(tuple(own))
        rows.append(tuple(pieces))
    world_size = len(by_rank)
    return SequenceLayout("documents", local_len * world_size, world_size, tuple(rows)), tuple(documents)


def _begins(row: int, held: Sequence[Sequence[NumberedRun]]) -> dict[int, tuple[int, int]]:
    """Returns the first position and the length of each document of a row, by its number.

    Raises:
        ValueError: documents of which tokens are missing, or held twice.
    """
    by_number: dict[int, list[NumberedRun]] = {}
    for rank, runs in enumerate(held):
        last: dict[int, int] = {}
        for run in runs:
            if run.number < 0:
                continue
            if run.position < last.get(run.number, run.position):
                raise ValueError(
                    f"rank {rank} holds tokens of document {run.number} (seq_idx) of batch row {row} out of their order: "
                    f"position {run.position} behind position {last[run.number]}: a shard holds the tokens "
                    f"of a document in its order"
                )
            last[run.number] = run.position + run.length - 1
            by_number.setdefault(run.number, []).append(run)
    begins = {}
    for number, runs in by_number.items():
        runs.sort()
        for before, run in itertools.pairwise(runs):
            if before.position + before.length != run.position:
                raise ValueError(
                    f"the shards contradict each other: in batch row {row}, the tokens of document {number} (seq_idx) have "
                    f"positions {before.position} to {before.position + before.length - 1}, and the next ones "
                    f"{run.position} to {run.position + run.length - 1}, so that tokens are missing or held twice: a ring "
                    f"needs position_ids that count each document of the whole row from its first token, and seq_idx that "
                    f"number its documents, both sharded like input_ids"
                )
        begins[number] = runs[0].position, sum(run.length for run in runs)
    return begins
