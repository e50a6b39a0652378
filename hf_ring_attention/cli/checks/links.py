"""Checks of the links between the processes: latency and bandwidth of each link of the rings, and timeouts."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_nccl_timeout, default_pg_timeout

from ..output import short_bytes, short_seconds
from .runner import CheckRun, NotApplicable, Verdict

#: A link is slow if it takes so many times as long as the median of its kind.
_SLOW = 4
#: The bytes of a message whose time is the latency, and of one whose time shows the bandwidth, with how often each goes.
_SMALL, _LARGE = (8, 30), (4 << 20, 5)
#: A timeout shorter than the slowest message times this ends a job that is merely slow.
_MARGIN = 100


def measure_latency(run: CheckRun) -> float:
    """Returns the seconds of a small message to the next process."""
    return _one_way(run, *_SMALL)


def measure_bandwidth(run: CheckRun) -> float:
    """Returns the seconds of a large message to the next process."""
    return _one_way(run, *_LARGE)


def _one_way(run: CheckRun, size: int, repeats: int) -> float:
    """Returns the median seconds of a message of `size` bytes to the next process of the ring, by round trips.

    One link of a ring is measured after the other, so that each is seen by itself.
    """
    if run.ring_size == 1:
        raise NotApplicable("a ring of one process has no neighbour")
    message = torch.zeros(size, dtype=torch.uint8, device=run.device)
    place, times = run.rank - run.first_of_ring, []
    for number in range(run.ring_size):
        here, there = number + run.first_of_ring, (number + 1) % run.ring_size + run.first_of_ring
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


def judge_latency(run: CheckRun, answers: list[float]) -> Verdict:
    most, median = max(answers), statistics.median(answers)
    text = f"median {short_seconds(median)} of {_SMALL[0]} bytes to the next process, slowest {short_seconds(most)}"
    figures: dict[str, Any] = {"median_seconds": median, "slowest_seconds": most}
    return _judged_links(run, answers, text, "Look for what else uses that link or those cores.", figures)


def judge_bandwidth(run: CheckRun, answers: list[float]) -> Verdict:
    run.facts["slowest"] = max(answers)
    median, least = (_LARGE[0] / seconds for seconds in (statistics.median(answers), max(answers)))
    size, speeds = short_bytes(_LARGE[0]), [f"{short_bytes(speed)}/s" for speed in (median, least)]
    figures: dict[str, Any] = {"median_bytes_per_second": median, "least_bytes_per_second": least}
    remedy = "Look for the network that this link takes: NCCL_DEBUG=INFO, or GLOO_SOCKET_IFNAME."
    text = f"median {speeds[0]} for {size} to the next process, least {speeds[1]}"
    return _judged_links(run, answers, text, remedy, figures)


def _judged_links(run: CheckRun, seconds: list[float], text: str, remedy: str, figures: dict[str, Any]) -> Verdict:
    """Returns a warning if the slowest link is much slower than others of its kind, inside hosts or between hosts."""
    hosts = [machine["host"] for machine in run.facts["machines"]]
    ends = [rank // run.ring_size * run.ring_size + (rank + 1) % run.ring_size for rank in range(run.world_size)]
    within = [hosts[rank] == hosts[end] for rank, end in enumerate(ends)]
    slowest = seconds.index(max(seconds))
    alike = [time_of_link for time_of_link, inside in zip(seconds, within) if inside == within[slowest]]
    slow = seconds[slowest] > _SLOW * statistics.median(alike)
    text += f" from process {slowest} to {ends[slowest]}"
    figures["slowest_link"] = [slowest, ends[slowest]]
    return Verdict("warning", text, remedy, figures) if slow else Verdict("ok", text, figures=figures)


def measure_timeouts(run: CheckRun) -> float:
    """Returns the seconds that a job's process group waits by default."""
    if run.world_size == 1:
        raise NotApplicable("there is one process")
    default = default_pg_nccl_timeout if run.device.type == "cuda" else default_pg_timeout
    return (default or default_pg_timeout).total_seconds()


def judge_timeouts(run: CheckRun, answers: list[float]) -> Verdict:
    seconds, slowest = min(answers), run.facts.get("slowest", 0.0)
    figures = {"default_seconds": seconds, "check_seconds": run.options.timeout}
    if seconds >= _MARGIN * slowest:
        text = f"a process waits {seconds / 60:g} min for a late one; a check {run.options.timeout:g} s"
        return Verdict("ok", text, figures=figures)
    text = f"a process waits {seconds:g} s, and a message of {short_bytes(_LARGE[0])} takes {short_seconds(slowest)}"
    remedy = "Give the job's process group a longer timeout: InitProcessGroupKwargs(timeout=...), or ddp_timeout=."
    return Verdict("failed", text, remedy, figures)
