"""Computes when each rank of a ring would compute, send and wait in a forward pass, from the plan and two given speeds.

This is arithmetic and no measurement: a step takes its FLOPs over the speed of a device, a hop its bytes over the speed of a
link, and both begin at once, as the ring transport does it: post the next hop, compute, wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..plan.plans import of_heads, tiles_from
from ..plan.problem import Problem
from ..plan.routes import Lap, ring_laps


@dataclass(frozen=True)
class Span:
    """An activity of a rank from `start` to `stop`, in seconds.

    Attributes:
        source: the rank whose keys are computed with, waited for or sent on.
    """

    rank: int
    kind: Literal["compute", "send", "wait"]
    step: int
    source: int
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """All spans of a forward pass; `seconds` is when the last rank is done."""

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

    Args:
        pair_flops: the floating point operations of a query-key pair.
        row_bytes: the bytes of a key row and its value row.
        flops: the operations that a device does in a second.
        bandwidth: the bytes that a rank sends to the next one in a second, while the others do the same.
    """
    p = problem.layout.world_size
    steps = [(lap, number) for lap in ring_laps(problem) for number in range(0 if lap.with_own else 1, lap.steps + 1)]
    spans: list[Span] = []
    begins = [0.0] * p
    if steps and steps[0][1]:  # rows must arrive before anything can be computed
        steps.insert(0, (steps[0][0], 0))
    for index, (lap, number) in enumerate(steps):
        following = steps[index + 1] if index + 1 < len(steps) and steps[index + 1][1] else None
        done = []
        for rank in range(p):
            seconds = _pairs(problem, lap, number, rank) * pair_flops / flops
            done.append(begins[rank] + seconds)
            if seconds:
                spans.append(Span(rank, "compute", index, lap.source(rank, number), begins[rank], done[rank]))
        ready = [*done]
        if following is not None:
            _travel(following, index + 1, row_bytes / bandwidth, begins, ready, spans)
        for rank in range(p):
            if ready[rank] > done[rank] and following is not None:
                awaited = following[0].source(rank, following[1])
                spans.append(Span(rank, "wait", index, awaited, done[rank], ready[rank]))
        begins = ready
    return Timeline(p, tuple(spans))


def _pairs(problem: Problem, lap: Lap, number: int, rank: int) -> int:
    """Returns the number of query-key pairs of a rank at a step."""
    if (number == 0 and not lap.with_own) or (number > 0 and lap.hop(rank, number) is None):
        return 0
    batches = of_heads(tiles_from(problem, rank, lap.source(rank, number)), lap.heads, problem.group)
    return sum(batch.pairs(problem.group) for batch in batches)


def _travel(
    hop: tuple[Lap, int], step: int, seconds_of_a_row: float, begins: list[float], ready: list[float], spans: list[Span]
) -> None:
    """Adds the hops to a step, posted when the step before it begins, and delays the ranks that must wait for them."""
    lap, number = hop
    p = len(begins)
    for receiver in range(p):
        sender = (receiver - lap.direction) % p
        rows = lap.hop(receiver, number)
        if rows is not None:
            start = max(begins[sender], begins[receiver])
            stop = start + len(rows.rows) * seconds_of_a_row
            spans.append(Span(sender, "send", step, lap.source(receiver, number), start, stop))
            ready[sender], ready[receiver] = max(ready[sender], stop), max(ready[receiver], stop)
