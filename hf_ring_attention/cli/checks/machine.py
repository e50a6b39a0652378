"""Checks of what the processes run on: the process group, versions, devices and the environment, and the rings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..._version import __version__
from ...hf.models import release_of_table
from .runner import CheckRun, NotApplicable, Verdict, processes

#: The name of this package for pip.
_DISTRIBUTION = "hf-ring-attention"
#: Packages whose versions decide results.
_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "numpy")
#: The newest releases that the tests have run with.
_NEWEST_TESTED = {"torch": "2.13", "transformers": release_of_table()}
#: Environment variables that change results or speed, by their name or its beginning.
_DECISIVE = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_", "ACCELERATE_MIXED_PRECISION",
)  # fmt: skip
#: Parts of the names of those that hosts may set each in their own way.
_OF_A_HOST = ("IFNAME", "_HCA", "DEBUG", "TOPO_FILE")


def join_group(run: CheckRun) -> dict[str, Any]:
    """Makes the process group of all processes, and returns what this one runs on."""
    cuda = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("true", "1", "yes")
    local_rank = int(os.environ.get("LOCAL_RANK", run.rank if run.world_size > 1 else 0))
    if cuda:
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise ValueError(
                f"local rank {local_rank} needs {local_rank + 1} GPUs on {socket.gethostname()}, it has {count}"
            )
        torch.cuda.set_device(local_rank)
    run.device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    run.backend = "nccl" if cuda else "gloo"  # what jobs make
    if run.world_size > 1:
        dist.init_process_group(
            run.backend,
            store=run.board.store,
            rank=run.rank,
            world_size=run.world_size,
            timeout=timedelta(seconds=communication_timeout(run)),
        )
        dist.barrier()
    return {
        "waited": time.perf_counter() - run.board.came,
        "host": socket.gethostname(),
        "device": str(torch.cuda.get_device_properties(local_rank).uuid) if cuda else f"process {os.getpid()}",
        "name": torch.cuda.get_device_name(local_rank) if cuda else f"{platform.machine()} CPU",
        "cores": cores_of_process(),
        "type": run.device.type,
    }


def communication_timeout(run: CheckRun) -> float:
    """Returns the seconds after which the check's own communication fails.

    gloo says so before the check is over, and so tells who waits from who is late. NCCL would end the whole process.
    """
    return 0.75 * run.options.timeout if run.device.type == "cpu" else 2 * run.options.timeout + 60


def cores_of_process() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def judge_launch(run: CheckRun, answers: list[dict[str, Any]]) -> Verdict:
    hosts = list(dict.fromkeys(answer["host"] for answer in answers))
    run.facts["machines"] = answers
    names = list(dict.fromkeys(answer["name"] for answer in answers))
    count = "1 process" if run.world_size == 1 else f"{run.world_size} processes"
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    where = f"on {shown}" if len(hosts) == 1 else f"on {len(hosts)} hosts ({shown})"
    how = f"backend {run.backend}" if run.world_size > 1 else "no launcher"
    figures = {"processes": run.world_size, "hosts": hosts, "backend": run.backend, "devices": names}
    types = {rank: answer["type"] for rank, answer in enumerate(answers)}
    if len({*types.values()}) > 1:
        fewer = [rank for rank, kind in types.items() if kind == "cpu"]
        text = f"{processes(fewer)} found no GPU, the others did"
        return Verdict(
            "failed", text, "Repair the driver on that host, or set ACCELERATE_USE_CPU=true on all.", figures
        )
    return Verdict("ok", f"{count} {where}, {' and '.join(names)}, {how}", figures=figures)


def versions(run: CheckRun) -> dict[str, str | None]:
    """Returns what `installed_versions` does."""
    return installed_versions()


def installed_versions() -> dict[str, str | None]:
    """Returns the versions of what computes, None for a package that is missing."""
    found: dict[str, str | None] = {"python": platform.python_version(), _DISTRIBUTION: __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["torch"] = str(torch.__version__)  # This one also names the build, such as +cpu.
    return found


def judge_versions(run: CheckRun, answers: list[dict[str, str | None]]) -> Verdict:
    first = answers[0]
    differing = _differences(answers)
    if differing:
        name, rank = differing[0]
        text = f"{name} is {answers[rank][name]} on {_with(answers, name, rank)} and {first[name]} on process 0"
        remedy = f"Install the same {name} on all hosts, in the environment that the launcher starts."
        return Verdict("failed", text, remedy, {"differing": [name for name, _ in differing]})
    ranges, newer = _supported(), []
    for name, version in first.items():
        if version is None:
            return Verdict("failed", f"{name} is not installed", f"pip install '{name}{ranges.get(name, '')}'")
        if name in _NEWEST_TESTED and Version(version).release[:2] > Version(_NEWEST_TESTED[name]).release[:2]:
            newer.append(f"{name} {version} is newer than {_NEWEST_TESTED[name]}")
        elif not ranges.get(name, SpecifierSet()).contains(version, prereleases=True):
            text = f"{name} is {version}, and {ranges[name]} is supported"
            remedy = (
                f"Install a newer Python, {ranges[name]}."
                if name == "python"
                else f"pip install '{name}{ranges[name]}'"
            )
            return Verdict("failed", text, remedy)
    if newer:
        remedy = "Read the verdicts below, which tell whether it works; or install the release that was tested."
        return Verdict("warning", f"newer than tested: {' and '.join(newer)}", remedy, dict(first))
    known = "all supported" if ranges else f"{_DISTRIBUTION} is not installed, so their ranges are unknown"
    where = "" if run.world_size == 1 else "the same on all processes, "
    listed = ", ".join(f"{name} {version}" for name, version in first.items())
    return Verdict("ok", f"{where}{known}: {listed}", figures=dict(first))


def _supported() -> dict[str, SpecifierSet]:
    """Returns the versions that this package's own metadata allows; nothing where it runs without being installed."""
    try:
        metadata = importlib.metadata.metadata(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return {}
    needed = [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]
    ranges = {requirement.name: requirement.specifier for requirement in needed if requirement.marker is None}
    return ranges | {"python": SpecifierSet(metadata["Requires-Python"] or "")}


def _differences(answers: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Returns the names whose values differ from process 0's, each with the first process where it does."""
    names = dict.fromkeys(name for answer in answers for name in answer)
    first = answers[0]
    differing = (
        (name, [r for r, answer in enumerate(answers) if answer.get(name) != first.get(name)]) for name in names
    )
    return [(name, ranks[0]) for name, ranks in differing if ranks]


def _with(answers: Sequence[Mapping[str, Any]], name: str, rank: int) -> str:
    """Returns the processes that have the same value as `rank`."""
    return processes([r for r, answer in enumerate(answers) if answer.get(name) == answers[rank].get(name)])


def environment(run: CheckRun) -> dict[str, str]:
    """Returns the environment variables that change results or speed, and torch's number of threads."""
    own = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_DECISIVE) and not any(part in name for part in _OF_A_HOST)
    }
    return own | {"torch's threads": str(torch.get_num_threads())}


def judge_environment(run: CheckRun, answers: list[dict[str, str]]) -> Verdict:
    machines = run.facts["machines"]
    owners: dict[tuple[str, str], int] = {}
    for rank, machine in enumerate(machines):
        other = owners.setdefault((machine["host"], machine["device"]), rank)
        if other != rank:
            text = f"processes {other} and {rank} share the device {machine['device']} of {machine['host']}"
            return Verdict("failed", text, "Give each process a GPU of its own: one process per GPU, by LOCAL_RANK.")
    differing = _differences(answers)
    if differing:
        name, rank = differing[0]
        values = [answers[r].get(name, "not set") for r in (rank, 0)]
        text = f"{name} is {values[0]} on {_with(answers, name, rank)} and {values[1]} on process 0"
        remedy = f"Set {name} to one value on every host before the launcher starts."
        return Verdict("failed", text, remedy, {"differing": [name for name, _ in differing]})
    threads = int(answers[0]["torch's threads"])
    figures = {"threads": threads, "environment": answers[0]}
    shown = ", ".join(f"{name}={value}" for name, value in answers[0].items() if name.isupper()) or "no variable set"
    for host in dict.fromkeys(machine["host"] for machine in machines):
        there = [machine for machine in machines if machine["host"] == host]
        if there[0]["type"] == "cpu" and len(there) > 1 and threads * len(there) > there[0]["cores"]:
            text = f"{len(there)} processes of {threads} threads share the {there[0]['cores']} cores of {host}"
            remedy = f"Set OMP_NUM_THREADS={max(1, there[0]['cores'] // len(there))}, or threads wait for each other."
            return Verdict("warning", text, remedy, figures)
    alone = "a device of its own" if machines[0]["type"] == "cuda" else f"{threads} thread{'s' * (threads > 1)}"
    everyone = "the process has" if run.world_size == 1 else "each process has"
    return Verdict(
        "ok", f"{everyone} {alone}; environment {'' if run.world_size == 1 else 'alike: '}{shown}", figures=figures
    )


def private_names(run: CheckRun) -> None:
    """Looks for the private names of other libraries that this package uses, as its import does."""
    from transformers import PretrainedConfig, PreTrainedModel, Trainer

    from ...compute.private import check_accelerate, check_torch, check_trainer, check_transformers

    check_torch()
    check_transformers(PreTrainedModel, PretrainedConfig)
    check_trainer(Trainer)
    check_accelerate()


def judge_private_names(run: CheckRun, answers: list[None]) -> Verdict:
    return Verdict("ok", "what this package uses of torch, Transformers and Accelerate is there")


def make_rings(run: CheckRun) -> None:
    """Makes the process groups of the rings."""
    size = run.world_size if run.options.ring_size is None else run.options.ring_size
    if run.world_size % size:
        count = "1 process" if run.world_size == 1 else f"{run.world_size} processes"
        raise ValueError(
            f"rings of {size} were asked for, and there are {count}: {run.world_size} = {run.world_size // size} * {size} + "
            f"{run.world_size % size}"
        )
    run.ring_size, run.group = size, None
    if 1 < size < run.world_size:
        run.group, _ = dist.new_subgroups(group_size=size, timeout=timedelta(seconds=communication_timeout(run)))


def judge_rings(run: CheckRun, answers: list[None]) -> Verdict:
    count = run.world_size // run.ring_size
    size = "1 process" if run.ring_size == 1 else f"{run.ring_size} processes"
    text = f"1 ring of {size}" if count == 1 else f"{count} rings of {size} each"
    return Verdict("ok", text, figures={"rings": count, "ring_size": run.ring_size})


def several(run: CheckRun, of_ring: bool = False) -> None:
    """Raises NotApplicable where there is no other process, in the world or in the ring."""
    if (run.ring_size if of_ring else run.world_size) == 1:
        raise NotApplicable("a ring of one process has no neighbour" if of_ring else "there is one process")
