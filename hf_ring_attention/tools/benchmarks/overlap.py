"""Measures how much of a delay of every message shows in the time of a call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...plan.patterns import Pattern
from ...ring.attention import ring_attention
from ...ring.ring import Ring
from ...transport.communicators import Communicator, Message, Pending, ProcessGroupCommunicator
from ..output import Sheet
from .harness import (
    CallShape,
    medians,
    progress,
    timed,
)


class DelayedCommunicator(ProcessGroupCommunicator):
    """A process group whose messages take `seconds` longer."""

    seconds = 0.0

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return _Delayed(super().exchange(sends, receives), time.perf_counter() + self.seconds)


class _Delayed:
    def __init__(self, pending: Pending, earliest: float) -> None:
        self.pending, self.earliest = pending, earliest

    def wait(self) -> None:
        time.sleep(max(0.0, self.earliest - time.perf_counter()))
        self.pending.wait()


def measure_overlap(shape: CallShape, tokens: int, shares: Sequence[float], repeats: int) -> list[dict[str, Any]]:
    """Returns how much of a delay of every hop, as a share of a step's computation, shows in the time of exact attention."""
    assert dist.group.WORLD is not None
    communicator = DelayedCommunicator(dist.group.WORLD)
    delayed_messages: Communicator = communicator
    ring = Ring.over(delayed_messages, "zigzag", "ring")
    tensors = shape.tensors(tokens // ring.world_size)

    def run(seconds: float) -> tuple[float, float, int, int]:
        communicator.seconds = seconds
        ring.reset_traffic()
        q, k, v, dout = tensors
        forward, out = timed(lambda: ring_attention(q, k, v, pattern=Pattern.exact(), ring=ring), shape.device)
        hops = ring.traffic().hops
        backward, _ = timed(lambda: out.backward(dout), shape.device)
        for x in (q, k, v):
            x.grad = None
        return forward, backward, hops, ring.traffic().hops

    run(0.0)
    forward, _, hops, _ = run(0.0)
    # In zigzag on 2 ranks, a rank computes as much with its own keys as with the other's after the hop.
    step = forward / (2 * hops)
    if ring.world_size != 2:
        step = forward / (hops * ring.world_size / (ring.world_size - 1))
    rows = []
    for share in shares:
        growths = []
        for number in progress(range(repeats), f"delay {share:.0%}"):
            delays = (0.0, share * step)
            plain, delayed = (run(seconds) for seconds in (delays if number % 2 else delays[::-1]))
            if not number % 2:
                plain, delayed = delayed, plain
            growths.append(
                (
                    (delayed[0] - plain[0]) / (delayed[2] * share * step),
                    (sum(delayed[:2]) - sum(plain[:2])) / (delayed[3] * share * step),
                )
            )
        forward_share, both_share = medians(growths)
        rows.append(
            {"share": share, "delay": share * step, "hops": delayed[3], "forward": forward_share, "both": both_share}
        )
    return rows


def overlap_report(rows: list[dict[str, Any]], world_size: int) -> Sheet:
    """Returns the table of `measure_overlap`."""
    return Sheet(
        f"how much of a delay of every hop shows in exact attention, {world_size} ranks",
        ("delay of a hop, of a step", "ms", "hops", "of the delay visible: forward", "forward + backward"),
        [
            (
                f"{row['share']:.0%}",
                f"{1e3 * row['delay']:.1f}",
                row["hops"],
                f"{row['forward']:.0%}",
                f"{row['both']:.0%}",
            )
            for row in rows
        ],
    )
