"""Checks of what is between the processes: clocks, the latency and bandwidth of each link of the rings, and timeouts."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_nccl_timeout, default_pg_timeout

from ...transport.communicators import Message, ProcessGroupCommunicator
from ..output import short_bytes, short_seconds
from .machine import several
from .runner import CheckRun, Verdict, processes

#: Clocks that differ by more than so many seconds make logs of several hosts hard to read.
MOST_SECONDS_APART = 1.0
#: A link is called slow where it is so many times slower than the median of its kind.
_SLOW = 4
#: The bytes of a message whose time is the latency, and of one whose time shows the bandwidth, with how often each goes.
_SMALL, _LARGE = (8, 30), (4 << 20, 5)
#: A timeout shorter than the slowest message times this ends a job that is merely slow.
_MARGIN = 100


def clock(run: CheckRun, rounds: int = 5) -> tuple[float, float]:
    """Returns how many seconds this clock is ahead of process 0's, and how exact that is: half of the shortest round trip."""
    several(run)
    assert dist.group.WORLD is not None
    message, others = torch.zeros(1, dtype=torch.float64), ProcessGroupCommunicator(dist.group.WORLD)
    if run.rank == 0:
        for peer in range(1, run.world_size):
            for _ in range(rounds):
                others.exchange([], [Message(peer, message)]).wait()
                message[0] = time.time()
                others.exchange([Message(peer, message)], []).wait()
        return 0.0, 0.0
    trips = []
    for _ in range(rounds):
        start = time.time()
        others.exchange([Message(0, message)], []).wait()
        others.exchange([], [Message(0, message)]).wait()
        end = time.time()
        trips.append((end - start, (start + end) / 2 - float(message)))
    shortest, ahead = min(trips)
    return ahead, shortest / 2


def judge_clocks(run: CheckRun, answers: list[tuple[float, float]]) -> Verdict:
    ahead = [offset for offset, _ in answers]
    first, last = ahead.index(min(ahead)), ahead.index(max(ahead))
    apart = ahead[last] - ahead[first]
    figures = {"seconds_apart": apart}
    if apart > MOST_SECONDS_APART:
        text = f"process {last}'s clock is {short_seconds(apart)} ahead of process {first}'s"
        return Verdict(
            "warning", text, "Set the clocks by NTP, or the logs of the hosts will not fit together.", figures
        )
    exact = short_seconds(max(error for _, error in answers))
    return Verdict("ok", f"at most {short_seconds(apart)} apart, measured to {exact}", figures=figures)


def _one_way(run: CheckRun, size: int, repeats: int) -> float:
    """Returns the median seconds of a message of `size` bytes to the next process of the ring, by round trips.

    One link of a ring is measured after the other, so that each is seen by itself.
    """
    several(run, of_ring=True)
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


def latency(run: CheckRun) -> float:
    """Returns the seconds of a small message to the next process."""
    return _one_way(run, *_SMALL)


def bandwidth(run: CheckRun) -> float:
    """Returns the seconds of a large message to the next process."""
    return _one_way(run, *_LARGE)


def _of_links(run: CheckRun, seconds: list[float]) -> tuple[int, int, float, bool]:
    """Returns the slowest link, its time, and whether others of its kind (inside of a host, between hosts) are much faster."""
    hosts = [machine["host"] for machine in run.facts["machines"]]
    ends = [rank // run.ring_size * run.ring_size + (rank + 1) % run.ring_size for rank in range(run.world_size)]
    slowest = max(range(run.world_size), key=lambda rank: seconds[rank])
    inside = hosts[slowest] == hosts[ends[slowest]]
    alike = [t for rank, t in enumerate(seconds) if (hosts[rank] == hosts[ends[rank]]) == inside]
    return slowest, ends[slowest], seconds[slowest], seconds[slowest] > _SLOW * statistics.median(alike)


def judge_latency(run: CheckRun, answers: list[float]) -> Verdict:
    start, end, slowest, slow = _of_links(run, answers)
    median = statistics.median(answers)
    figures = {"median_seconds": median, "slowest_seconds": slowest, "slowest_link": [start, end]}
    text = (
        f"median {short_seconds(median)} of {_SMALL[0]} bytes to the next process, slowest {short_seconds(slowest)} from "
        f"process {start} to {end}"
    )
    remedy = "Look for what else uses that link or those cores." if slow else ""
    return Verdict("warning" if slow else "ok", text, remedy, figures)


def judge_bandwidth(run: CheckRun, answers: list[float]) -> Verdict:
    start, end, slowest, slow = _of_links(run, answers)
    run.facts["slowest"] = slowest
    median, least = (_LARGE[0] / seconds for seconds in (statistics.median(answers), slowest))
    figures = {"median_bytes_per_second": median, "least_bytes_per_second": least, "slowest_link": [start, end]}
    text = (
        f"median {short_bytes(median)}/s for {short_bytes(_LARGE[0])} to the next process, least {short_bytes(least)}/s from "
        f"process {start} to {end}"
    )
    remedy = "Look for the network that this link takes: NCCL_DEBUG=INFO, or GLOO_SOCKET_IFNAME." if slow else ""
    return Verdict("warning" if slow else "ok", text, remedy, figures)


def timeouts(run: CheckRun) -> float:
    """Returns the seconds that a job's process group waits, where it does not say otherwise."""
    several(run)
    default = default_pg_nccl_timeout if run.device.type == "cuda" else default_pg_timeout
    return (default or default_pg_timeout).total_seconds()


def judge_timeouts(run: CheckRun, answers: list[float]) -> Verdict:
    seconds, slowest = min(answers), run.facts.get("slowest")
    waited = [machine["waited"] for machine in run.facts["machines"]]
    first, last = waited.index(max(waited)), waited.index(min(waited))
    backend = "nccl" if run.facts["machines"][0]["type"] == "cuda" else "gloo"
    figures: dict[str, Any] = {"default_seconds": seconds, "check_seconds": run.options.timeout}
    text = (
        f"a process waits {seconds / 60:g} min for a late one, {backend}'s default; a check {run.options.timeout:g} s; "
    )
    text += f"process {first} came first and waited {short_seconds(waited[first] - waited[last])} for process {last}"
    if slowest is not None and seconds < _MARGIN * slowest:
        text = f"{processes([0])} waits {seconds:g} s, and a message of {short_bytes(_LARGE[0])} takes {short_seconds(slowest)}"
        remedy = "Give the job's process group a longer timeout: InitProcessGroupKwargs(timeout=...), or ddp_timeout=."
        return Verdict("failed", text, remedy, figures)
    return Verdict("ok", text, figures=figures)
