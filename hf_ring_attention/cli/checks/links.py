"""Checks of the links between neighbours of the rings: latency and bandwidth."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from ..output import short_bytes, short_seconds
from .runner import CheckRun, NotApplicable, Verdict

#: A link is slow if it takes so many times as long as the median of its kind.
_SLOW = 4
#: A message of at most this many bytes shows the latency, a larger one the bandwidth.
_SMALL = 1024


def measure_link(run: CheckRun, size: int, repeats: int) -> float:
    """Returns the median seconds of a message of `size` bytes to the next process of the ring, by round trips.

    One link of a ring is measured after the other, so that each is seen by itself.
    """
    if run.ring_size == 1:
        raise NotApplicable("a ring of one process has no neighbour")
    message = torch.zeros(size, dtype=torch.uint8, device=run.device)
    place, times = run.rank % run.ring_size, []
    for number in range(run.ring_size):
        here, there = (run.rank - place + x % run.ring_size for x in (number, number + 1))
        for _ in range(repeats + 1) if run.rank in (here, there) else ():
            start = time.perf_counter()
            for sender, receiver in ((here, there), (there, here)):
                if run.rank == sender:
                    dist.send(message, receiver)
                else:
                    dist.recv(message, sender)
            if run.device.type == "cuda":
                torch.cuda.synchronize()
            if number == place:
                times.append((time.perf_counter() - start) / 2)
    return statistics.median(times[1:])  # The first one also connects.


def judge_link(run: CheckRun, answers: list[float], size: int) -> Verdict:
    """Returns a warning if the slowest link is much slower than others of its kind, inside hosts or between hosts."""
    hosts = [machine["host"] for machine in run.facts["machines"]]
    ends = [rank // run.ring_size * run.ring_size + (rank + 1) % run.ring_size for rank in range(run.world_size)]
    within = [hosts[rank] == hosts[end] for rank, end in enumerate(ends)]
    median, most = statistics.median(answers), max(answers)
    slowest = answers.index(most)
    if size <= _SMALL:
        text = f"median {short_seconds(median)} of {size} bytes to the next process, slowest {short_seconds(most)}"
        remedy = "Look for what else uses that link or those cores."
    else:
        usual, least = (f"{short_bytes(size / seconds)}/s" for seconds in (median, most))
        text = f"median {usual} for {short_bytes(size)} to the next process, least {least}"
        remedy = "Look for the network that this link takes: NCCL_DEBUG=INFO, or GLOO_SOCKET_IFNAME."
    text += f" from process {slowest} to {ends[slowest]}"
    alike = [seconds for seconds, inside in zip(answers, within) if inside == within[slowest]]
    return Verdict("warning", text, remedy) if most > _SLOW * statistics.median(alike) else Verdict("ok", text)
