"""The runs of documents, and the bytes of the mixers of hybrid models, whose states pass from run to run.

A run is a stretch of tokens of a document that follow each other on one rank. Ranks gather a few numbers for each run, or the
rows of hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .layouts import SequenceLayout
from .problem import Documents
from .traffic import Bytes, RankTraffic


class StateRun(NamedTuple):
    """A stretch of a document on one rank: tokens [start, stop) of a batch row."""

    row: int
    start: int
    stop: int
    place: int  # the index of its first token among the rank's tokens
    rank: int
    before: int  # the number of the previous run of its document, in the list of all runs; -1 for the first run
    alone: bool  # whether it is a whole document

    @property
    def held(self) -> tuple[int, int, int]:
        """The batch row, and the start and stop of its tokens among the rank's tokens."""
        return self.row, self.place, self.place + self.stop - self.start


def runs_of(documents: Documents, layout: SequenceLayout) -> list[StateRun]:
    """Returns the runs of all documents on all ranks, in the order of the whole rows."""
    runs: list[StateRun] = []
    for row, spans in enumerate(documents):
        pieces = [
            (piece.start, piece.stop, place, rank)
            for rank in range(layout.world_size)
            for place, piece in layout.placed_pieces(rank, row)
        ]
        for start, stop in spans:
            before = -1
            for first, end, place, rank in sorted(pieces):
                low, high = max(first, start), min(end, stop)
                if low < high:
                    joined = runs[before] if before >= 0 else None
                    if joined is not None and (joined.rank, joined.place - joined.start) == (rank, place - first):
                        runs[before] = joined._replace(stop=high, alone=joined.start == start and high == stop)
                        continue
                    whole = low == start and high == stop
                    runs.append(StateRun(row, low, high, place + low - first, rank, before, whole))
                    before = len(runs) - 1
    return runs


def linked_runs(runs: Sequence[StateRun], all_of_them: bool = False) -> tuple[list[StateRun], int]:
    """Returns the runs among which states pass, with `before` as an index of this list, and the rows of each rank's batch.

    Whole documents count too (`all_of_them`) for a cache that takes the states behind the rows.
    """
    numbers = [number for number, run in enumerate(runs) if all_of_them or not run.alone]
    places = {number: place for place, number in enumerate(numbers)}
    linked = [runs[number]._replace(before=places.get(runs[number].before, -1)) for number in numbers]
    ranks = [run.rank for run in linked]
    most = max(map(ranks.count, set(ranks)), default=0)
    return _evened(linked, most), most


def _evened(runs: list[StateRun], most: int) -> list[StateRun]:
    """Cuts the longest runs of a rank in two until it has `most` runs, which take no longer: they are rows of one batch."""
    pieces = [[run] for run in runs]
    for rank in {run.rank for run in runs}:
        own = [parts for parts in pieces if parts[0].rank == rank]
        for _ in range(most - len(own)):
            parts = max(own, key=lambda parts: max(part.stop - part.start for part in parts))
            number = max(range(len(parts)), key=lambda number: parts[number].stop - parts[number].start)
            run = parts[number]
            half = (run.stop - run.start) // 2
            if not half:
                break
            middle = run.start + half
            parts[number : number + 1] = [run._replace(stop=middle), run._replace(start=middle, place=run.place + half)]
    evened: list[StateRun] = []
    last_of: list[int] = []
    for parts in pieces:
        before = -1 if parts[0].before < 0 else last_of[parts[0].before]
        for part in parts:
            evened.append(part._replace(before=before))
            before = len(evened) - 1
        last_of.append(before)
    return evened


class StateNumbers(NamedTuple):
    """The numbers that a mixer gathers for one run."""

    channels: int  # of its convolution; 0 without a convolution
    kernel: int  # the tokens that an output of the convolution sees
    sums: int  # the numbers of its state, and of the factor of the state before the run; 0 without a state

    def of_run(self, itemsize: int, accumulated: int, kept: bool = False) -> int:
        """Returns the bytes that one run adds: numbers of the model have `itemsize` bytes, and numbers of sums `accumulated`.

        If a cache takes the states behind the rows (`kept`), it needs one more input of the convolution.
        """
        return self.channels * (self.kernel - (not kept)) * itemsize + self.sums * accumulated


def delta_rule_sums(heads: int, key_dim: int, value_dim: int) -> int:
    """Returns the numbers of a delta rule: a state [heads, Dk, Dv], and its factor [Dk, Dk] for each head."""
    return heads * key_dim * (value_dim + key_dim)


def state_space_sums(heads: int, head_dim: int, state_size: int) -> int:
    """Returns the numbers of Mamba 2: a state [heads, P, N], and a decay of each head."""
    return heads * (head_dim * state_size + 1)


def selective_sums(channels: int, state_size: int) -> int:
    """Returns the numbers of Mamba: a state [channels, N], and a decay for each entry."""
    return 2 * channels * state_size


def gathered_traffic(own_bytes: int, world_size: int, without_gradients: int = 0) -> RankTraffic:
    """Returns the bytes that a rank moves and holds to gather equal parts of all ranks, and to send home their gradients.

    The bytes `without_gradients` travel only in forward.
    """
    peers = world_size - 1
    forward, backward = peers * (own_bytes + without_gradients), peers * own_bytes
    return RankTraffic(
        forward=Bytes(forward, forward),
        backward=Bytes(backward, backward),
        buffers=(peers and world_size) * (own_bytes + max(own_bytes, without_gradients)),
    )


def states_traffic(
    numbers: StateNumbers,
    documents: Documents,
    layout: SequenceLayout,
    itemsize: int,
    accumulated: int,
    kept: bool = False,
) -> RankTraffic:
    """Returns the bytes that every rank moves and holds in one layer whose mixer passes states, whatever the lengths of runs.

    `StateNumbers.of_run` explains `itemsize`, `accumulated` and `kept`.
    """
    _, most = linked_runs(runs_of(documents, layout), kept)
    return gathered_traffic(most * numbers.of_run(itemsize, accumulated, kept), layout.world_size)


def rows_traffic(
    width: int, batch_size: int, layout: SequenceLayout, itemsize: int, with_positions: bool = False
) -> RankTraffic:
    """Returns the bytes that every rank moves and holds in one layer whose mixer gathers rows, some with their positions."""
    tokens = batch_size * layout.local_len
    return gathered_traffic(tokens * width * itemsize, layout.world_size, 8 * tokens * with_positions)
