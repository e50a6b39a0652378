"""Computes when each rank of a ring computes, sends and waits in a forward pass, from the plan and two assumed speeds.

A step takes its FLOPs divided by a device's speed, and a hop its bytes divided by a link's speed. Both begin at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..plan.plans import of_heads, tiles_from
from ..plan.problem import Problem
from ..plan.routes import Lap, ring_laps


@dataclass(frozen=True)
class Span:
    """An activity of a rank from `start` to `stop`, in seconds, with the keys of the rank `source`."""

    rank: int
    kind: Literal["compute", "send", "wait"]
    step: int
    source: int
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """All spans of a forward pass."""

    ranks: int
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """The time at which the last rank is done."""
        return max((span.stop for span in self.spans), default=0.0)

    def share(self, kind: str) -> float:
        """Returns the share of all ranks' time that they spend with this kind of span."""
        whole = self.seconds * self.ranks
        return sum(span.stop - span.start for span in self.spans if span.kind == kind) / whole if whole else 0.0


def ring_timeline(problem: Problem, *, pair_flops: int, row_bytes: int, flops: float, bandwidth: float) -> Timeline:
    """Returns the forward pass of the ring transport.

    A query-key pair takes `pair_flops` operations, and a key row has `row_bytes` with its value row. In a second, a device
    makes `flops` operations, and a rank sends `bandwidth` bytes to the next one.
    """
    ranks = range(problem.layout.world_size)
    steps = [(lap, number) for lap in ring_laps(problem) for number in range(0 if lap.with_own else 1, lap.steps + 1)]
    if steps and steps[0][1]:  # Rows must arrive before anything can be computed.
        steps.insert(0, (steps[0][0], 0))
    spans: list[Span] = []
    begins = [0.0] * len(ranks)
    for index, (lap, number) in enumerate(steps):
        done = [begins[rank] + _pairs(problem, lap, number, rank) * pair_flops / flops for rank in ranks]
        for rank in ranks:
            if done[rank] > begins[rank]:
                spans.append(Span(rank, "compute", index, lap.source(rank, number), begins[rank], done[rank]))
        ready = [*done]
        lap, number = steps[index + 1] if index + 1 < len(steps) else (lap, 0)
        for receiver in ranks if number else ():  # The next step needs rows of other ranks.
            hop, sender = lap.hop(receiver, number), (receiver - lap.direction) % len(ranks)
            if hop is not None:
                start = max(begins[sender], begins[receiver])
                stop = start + len(hop.rows) * row_bytes / bandwidth
                spans.append(Span(sender, "send", index + 1, lap.source(receiver, number), start, stop))
                ready[sender], ready[receiver] = max(ready[sender], stop), max(ready[receiver], stop)
        for rank in ranks:
            if ready[rank] > done[rank]:
                spans.append(Span(rank, "wait", index, lap.source(rank, number), done[rank], ready[rank]))
        begins = ready
    return Timeline(len(ranks), tuple(spans))


def _pairs(problem: Problem, lap: Lap, number: int, rank: int) -> int:
    if (number == 0 and not lap.with_own) or (number > 0 and lap.hop(rank, number) is None):
        return 0
    batches = of_heads(tiles_from(problem, rank, lap.source(rank, number)), lap.heads)
    return sum(batch.pairs(problem.group) for batch in batches)
