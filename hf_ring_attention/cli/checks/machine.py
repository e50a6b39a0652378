"""Checks of what the processes run on: the process groups, versions, devices and the environment."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch.distributed.distributed_c10d import default_pg_nccl_timeout, default_pg_timeout

from ..._version import __version__
from ...hf.models import release_of_table
from .runner import CheckRun, Verdict, processes

#: The name of this package for pip.
_DISTRIBUTION = "hf-ring-attention"
#: Packages whose versions decide results.
_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "numpy")
#: The newest releases that the tests have run with.
NEWEST_TESTED = {"torch": "2.13", "transformers": release_of_table()}
#: Environment variables that change results or speed, by their name or its beginning.
_DECISIVE = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_", "ACCELERATE_MIXED_PRECISION",
)  # fmt: skip
#: Parts of the names of those that hosts may set each in their own way.
_OF_A_HOST = ("IFNAME", "_HCA", "DEBUG", "TOPO_FILE")


def measure_launch(run: CheckRun) -> dict[str, Any]:
    """Makes the process groups of all processes and of the rings, and returns the machine of this one."""
    cuda = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("true", "1", "yes")
    host, local_rank = socket.gethostname(), int(os.environ.get("LOCAL_RANK", run.rank if run.world_size > 1 else 0))
    if cuda:
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise ValueError(f"local rank {local_rank} needs {local_rank + 1} GPUs on {host}, it has {count}")
        torch.cuda.set_device(local_rank)
    run.device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if run.world_size > 1:
        ranks: Any = {"store": run.store, "rank": run.rank, "world_size": run.world_size}
        # gloo fails before the check is over, so the verdict can name who waits and who is late. NCCL would end the process.
        seconds = 2 * run.options.timeout + 60 if cuda else 0.75 * run.options.timeout
        dist.init_process_group("nccl" if cuda else "gloo", **ranks, timeout=timedelta(seconds=seconds))
        dist.barrier()
        if 1 < run.ring_size < run.world_size:
            run.group, _ = dist.new_subgroups(group_size=run.ring_size, timeout=timedelta(seconds=seconds))
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
        remedy = "Repair the driver on that host, or set ACCELERATE_USE_CPU=true on all."
        return Verdict("failed", text, remedy)
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    where = f"on {shown}" if len(hosts) == 1 else f"on {len(hosts)} hosts ({shown})"
    devices = f"{where}, {' and '.join(names)}"
    if run.world_size == 1:
        return Verdict("ok", f"1 process {devices}, no launcher")
    count, minutes = run.world_size // run.ring_size, answers[0]["waits"] / 60
    rings = f"{count} ring{'s' * (count > 1)} of {run.ring_size}"
    how = f"backend {dist.get_backend()}, which waits {minutes:g} min for a late process"
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
    first, ranges, newer = answers[0], _supported(), []
    for name, version in first.items():
        supported = ranges.get(name, SpecifierSet())
        remedy = f"pip install '{name}{supported}'"
        if version is None:
            return Verdict("failed", f"{name} is not installed", remedy)
        if name in NEWEST_TESTED and Version(version).release[:2] > Version(NEWEST_TESTED[name]).release[:2]:
            newer.append(f"{name} {version} is newer than {NEWEST_TESTED[name]}")
        elif not supported.contains(version, prereleases=True):
            return Verdict("failed", f"{name} is {version}, and {supported} is supported", remedy)
    if newer:
        remedy = "Read the verdicts below, which show whether it works; or install the release that was tested."
        return Verdict("warning", f"newer than tested: {' and '.join(newer)}", remedy)
    known = "all supported" if ranges else f"{_DISTRIBUTION} is not installed, so their ranges are unknown"
    where = "" if run.world_size == 1 else "the same on all processes, "
    listed = ", ".join(f"{name} {version}" for name, version in first.items())
    return Verdict("ok", f"{where}{known}: {listed}")


def _supported() -> dict[str, SpecifierSet]:
    """Returns the versions that this package's own metadata allows; nothing if it runs without being installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        needed = [Requirement(text) for text in importlib.metadata.requires(_DISTRIBUTION) or ()]
        return {requirement.name: requirement.specifier for requirement in needed if requirement.marker is None}
    return {}


def measure_environment(run: CheckRun) -> dict[str, str]:
    """Returns the environment variables that change results or speed, and torch's number of threads."""
    names = [name for name in sorted(os.environ) if name.startswith(_DECISIVE)]
    own = {name: os.environ[name] for name in names if not any(part in name for part in _OF_A_HOST)}
    return own | {"torch's threads": str(torch.get_num_threads())}


def judge_environment(run: CheckRun, answers: list[dict[str, str]]) -> Verdict:
    machines = run.facts["machines"]
    owners: dict[tuple[str, str], int] = {}
    for rank, machine in enumerate(machines):
        other = owners.setdefault((machine["host"], machine["device"]), rank)
        if other != rank:
            text = f"processes {other} and {rank} share the device {machine['device']} of {machine['host']}"
            return Verdict("failed", text, "Give each process a GPU of its own: one process per GPU, by LOCAL_RANK.")
    threads = int(answers[0]["torch's threads"])
    for host, count in Counter(machine["host"] for machine in machines if machine["type"] == "cpu").items():
        cores = next(machine["cores"] for machine in machines if machine["host"] == host)
        if count > 1 and threads * count > cores:
            text = f"{count} processes of {threads} threads share the {cores} cores of {host}"
            remedy = f"Set OMP_NUM_THREADS={max(1, cores // count)}, or threads wait for each other."
            return Verdict("warning", text, remedy)
    own = "a device of its own" if machines[0]["type"] == "cuda" else f"{threads} thread{'s' * (threads > 1)}"
    everyone, alike = ("the process has", "") if run.world_size == 1 else ("each process has", "alike: ")
    shown = ", ".join(f"{name}={value}" for name, value in answers[0].items() if name.isupper()) or "no variable set"
    return Verdict("ok", f"{everyone} {own}; environment {alike}{shown}")
