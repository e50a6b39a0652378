"""Checks of what the processes run on: the process groups, versions, devices, the environment, and links to neighbours."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import statistics
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import parse_flag_from_env
from packaging.requirements import Requirement
from packaging.version import Version
from torch.distributed.distributed_c10d import default_pg_nccl_timeout, default_pg_timeout

from ..._version import __version__
from ...hf.models import release_of_table
from ...plan.traffic import short_bytes
from ..output import short_seconds
from .runner import CheckRun, NotApplicable, Verdict, processes

#: The name of this package for pip.
_DISTRIBUTION = "hf-ring-attention"
#: Packages whose versions decide results.
_PACKAGES = ("torch", "transformers", "accelerate", "numpy")
#: The newest releases that the tests have run with.
NEWEST_TESTED = {"torch": "2.13", "transformers": release_of_table()}
#: Environment variables that change results or speed, by their name or its beginning.
_DECISIVE = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_", "ACCELERATE_MIXED_PRECISION",
)  # fmt: skip
#: Parts of the names of variables that may differ between hosts.
_OF_A_HOST = ("IFNAME", "_HCA", "DEBUG", "TOPO_FILE")
#: A link is slow if it takes so many times as long as the median of its kind.
_SLOW = 4
#: A message of at most this many bytes shows the latency, a larger one the bandwidth.
_SMALL = 1024


def measure_launch(run: CheckRun) -> dict[str, Any]:
    """Makes the process groups of all processes and of the rings, and returns the machine of this one."""
    cuda = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
    host, local_rank = socket.gethostname(), int(os.environ.get("LOCAL_RANK", run.rank))
    if cuda:
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise ValueError(f"local rank {local_rank} needs {local_rank + 1} GPUs on {host}, it has {count}")
        torch.cuda.set_device(local_rank)
    run.device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if run.world_size > 1:
        ranks: Any = {"store": run.store, "rank": run.rank, "world_size": run.world_size}
        # gloo fails before the check is over, so the verdict can name who waits and who is late. NCCL would end the process.
        timeout = timedelta(seconds=2 * run.options.timeout + 60 if cuda else 0.75 * run.options.timeout)
        dist.init_process_group("nccl" if cuda else "gloo", **ranks, timeout=timeout)
        dist.barrier()
        if 1 < run.ring_size < run.world_size:
            run.group, _ = dist.new_subgroups(group_size=run.ring_size, timeout=timeout)
    return {
        "host": host,
        "device": str(torch.cuda.get_device_properties(local_rank).uuid) if cuda else f"process {os.getpid()}",
        "name": torch.cuda.get_device_name(local_rank) if cuda else f"{platform.machine()} CPU",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "type": run.device.type,
        "waits": ((cuda and default_pg_nccl_timeout) or default_pg_timeout).total_seconds(),
    }


def judge_launch(run: CheckRun, answers: list[dict[str, Any]]) -> Verdict:
    """Keeps the machines of all processes for later checks, and refuses some with a GPU and some without."""
    run.facts["machines"] = answers
    hosts, names = ([*dict.fromkeys(answer[name] for answer in answers)] for name in ("host", "name"))
    without = [rank for rank, answer in enumerate(answers) if answer["type"] == "cpu"]
    if 0 < len(without) < run.world_size:
        text = f"{processes(without)} found no GPU, the others did"
        return Verdict("failed", text, "Repair the driver on that host, or set ACCELERATE_USE_CPU=true on all.")
    devices = f"on {hosts[0] if len(hosts) == 1 else f'{len(hosts)} hosts'}, {' and '.join(names)}"
    if run.world_size == 1:
        return Verdict("ok", f"1 process {devices}, no launcher")
    count = run.world_size // run.ring_size
    rings = f"{count} ring{'s' * (count > 1)} of {run.ring_size}"
    how = f"backend {dist.get_backend()}, which waits {answers[0]['waits'] / 60:g} min for a late process"
    return Verdict("ok", f"{run.world_size} processes {devices}, {rings}; {how}")


def measure_versions(run: CheckRun) -> dict[str, str | None]:
    """Returns the versions of what computes, None for a package that is missing."""
    installed: dict[str, str | None] = {"python": platform.python_version(), _DISTRIBUTION: __version__}
    for package in _PACKAGES:
        installed[package] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed | {"torch": str(torch.__version__)}  # This one also names the build, such as +cpu.


def judge_versions(run: CheckRun, answers: list[dict[str, str | None]]) -> Verdict:
    """Refuses missing packages and releases outside of the ranges that this package's own metadata allows."""
    needed: dict[str, Requirement] = {}
    with suppress(importlib.metadata.PackageNotFoundError):  # It may run without being installed.
        requirements = map(Requirement, importlib.metadata.requires(_DISTRIBUTION) or ())
        needed = {one.name: one for one in requirements if one.marker is None}
    newer = []
    for name, version in answers[0].items():
        if version is None:
            return Verdict("failed", f"{name} is not installed", f"pip install '{needed.get(name, name)}'")
        if name in NEWEST_TESTED and Version(version).release[:2] > Version(NEWEST_TESTED[name]).release[:2]:
            newer.append(f"{name} {version} is newer than {NEWEST_TESTED[name]}")
        elif name in needed and not needed[name].specifier.contains(version, prereleases=True):
            text = f"{name} is {version}, and {needed[name].specifier} is supported"
            return Verdict("failed", text, f"pip install '{needed[name]}'")
    if newer:
        remedy = "Read the verdicts below, which show whether it works; or install the release that was tested."
        return Verdict("warning", f"newer than tested: {' and '.join(newer)}", remedy)
    known = "all supported" if needed else f"{_DISTRIBUTION} is not installed, so their ranges are unknown"
    listed = ", ".join(f"{name} {version}" for name, version in answers[0].items())
    return Verdict("ok", f"{'the same on all processes, ' * (run.world_size > 1)}{known}: {listed}")


def measure_environment(run: CheckRun) -> dict[str, str]:
    """Returns the environment variables that change results or speed, and torch's number of threads."""
    names = [name for name in sorted(os.environ) if name.startswith(_DECISIVE)]
    own = {name: os.environ[name] for name in names if not any(part in name for part in _OF_A_HOST)}
    return own | {"torch's threads": str(torch.get_num_threads())}


def judge_environment(run: CheckRun, answers: list[dict[str, str]]) -> Verdict:
    """Refuses processes that share a GPU, and warns of processes that share too few cores."""
    machines = run.facts["machines"]
    owners: dict[tuple[str, str], int] = {}
    for rank, machine in enumerate(machines):
        other = owners.setdefault((machine["host"], machine["device"]), rank)
        if other != rank:
            text = f"processes {other} and {rank} share the device {machine['device']} of {machine['host']}"
            return Verdict("failed", text, "Give each process a GPU of its own: one process per GPU, by LOCAL_RANK.")
    threads, cores = int(answers[0]["torch's threads"]), {machine["host"]: machine["cores"] for machine in machines}
    for host, count in Counter(machine["host"] for machine in machines if machine["type"] == "cpu").items():
        if count > 1 and threads * count > cores[host]:
            text = f"{count} processes of {threads} threads share the {cores[host]} cores of {host}"
            remedy = f"Set OMP_NUM_THREADS={max(1, cores[host] // count)}, or threads wait for each other."
            return Verdict("warning", text, remedy)
    own = "a GPU" if machines[0]["type"] == "cuda" else f"{threads} thread{'s' * (threads > 1)}"
    shown = ", ".join(f"{name}={value}" for name, value in answers[0].items() if name.isupper()) or "no variable set"
    return Verdict("ok", f"{own} for each process, the same environment: {shown}")


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
