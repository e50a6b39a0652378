"""The runs of documents: stretches of tokens that follow each other on one rank. The states of mixers pass from run to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .layouts import SequenceLayout
from .problem import Documents


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
        pieces = []
        for rank in range(layout.world_size):
            place = 0
            for piece in layout.rows[row][rank] if layout.rows else layout.pieces(rank):
                pieces.append((piece.start, piece.stop, place, rank))
                place += len(piece)
        for start, stop in spans:
            before = -1
            for first, end, place, rank in sorted(pieces):
                low, high = max(first, start), min(end, stop)
                if low < high:
                    joined = runs[before] if before >= 0 else None
                    if (
                        joined is not None
                        and joined.rank == rank
                        and joined.place + low - joined.start == place + low - first
                    ):
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
