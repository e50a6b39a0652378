"""The checks of `hf-ring-attention check` in order, and their run as one process of a launch.

The checks import Transformers, and most of this package, when they run: if that fails on one process, all hear of it.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from . import links, machine
from .board import Board
from .runner import Check, CheckOptions, CheckRun, Verdict, run_checks

#: The oracle's checks: a transport each, and whether only neighbours exchange heads.
_TRANSPORTS = {
    "oracle ring": ("ring", False),
    "oracle collective": ("collective", False),
    "oracle heads": ("heads", False),
    "oracle heads x ring": ("heads", True),
}
_ONE_PROCESS = {"oracle local": ("local", False)}
_REACH = "Open the ports between the hosts, and name their network: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME."
_WRONG = "Do not train: run `make test` on that host, try another torch release, and report it with this output."
_INSTALL = "Install the package with its dependencies again on that host: pip install ."
_MODEL = "Name a folder or an id of the hub that every host can read, of a type that `hf-ring-attention models` lists."
_TRAIN = "Train a type that `hf-ring-attention models` lists; if it is one, report this output."
_GENERATE = "Generate with no prefill over a ring, or with an older Transformers; report this output."
_START = f"Start one process per device. {_REACH}"
_DIVIDE = "Give a --ring-size that divides the number of processes."


def _later(module: str, name: str, *arguments: Any) -> Callable[..., Any]:
    """Returns a function of a module of this folder that is imported when it is called, with arguments after the run."""

    def call(run: CheckRun, *rest: Any) -> Any:
        return getattr(importlib.import_module(f".{module}", __package__), name)(run, *arguments, *rest)

    return call


def all_checks(ring_size: int) -> list[Check]:
    """Returns the checks of rings of this size, in the order in which they run."""
    transports = _TRANSPORTS if ring_size > 1 else _ONE_PROCESS
    oracles = [
        Check(name, _later("oracle", "check_transport", *way), _later("oracle", "judge_transport"), _WRONG, ("model",))
        for name, way in transports.items()
    ]
    train_step, judge_train_step = _later("model", "train_step"), _later("model", "judge_train_step")
    generation, judge_generation = _later("model", "generation"), _later("model", "judge_generation")
    read_model, judge_model = _later("model", "read_model"), _later("model", "judge_model")
    return [
        Check("launch", machine.join_group, machine.judge_launch, _START),
        Check("versions", machine.versions, machine.judge_versions, _INSTALL, ("launch",)),
        Check("environment", machine.environment, machine.judge_environment, _INSTALL, ("launch",)),
        Check("rings", machine.make_rings, machine.judge_rings, _DIVIDE, ("launch",)),
        Check("latency", links.latency, links.judge_latency, _REACH, ("rings",)),
        Check("bandwidth", links.bandwidth, links.judge_bandwidth, _REACH, ("rings",)),
        Check("timeouts", links.timeouts, links.judge_timeouts, _REACH, ("launch",)),
        Check("model", read_model, judge_model, _MODEL, ("versions", "rings")),
        *oracles,
        Check("train step", train_step, judge_train_step, _TRAIN, tuple(transports)),
        Check("generation", generation, judge_generation, _GENERATE, tuple(transports)),
    ]


class Outcome(NamedTuple):
    """The end of a run: the exit status, and whether all processes answer, so that this one can end in order."""

    status: int
    all_answer: bool


def check_launch(options: CheckOptions, tell: Callable[[str, Verdict], None], told_to_end: threading.Event) -> Outcome:
    """Runs all checks on this process and on the others of its launch.

    Args:
        tell: hears each verdict, on process 0.
        told_to_end: is set when the launcher wants this process to end.
    """
    try:
        board = Board.join(options.timeout)
    except (RuntimeError, ValueError) as error:
        text = f"the processes did not meet within {options.timeout:g} s: {' '.join(str(error).split())}"
        remedy = "Start WORLD_SIZE processes that all reach MASTER_ADDR and MASTER_PORT."
        tell("launch", Verdict("failed", text, remedy))
        return Outcome(1, False)
    try:
        checks = all_checks(options.ring_size or board.world_size)
        verdicts = run_checks(CheckRun(options, board, told_to_end), checks, tell)
    except RuntimeError as error:
        print(f"hf-ring-attention check: {error}", file=sys.stderr)
        return Outcome(1, False)
    all_answer = not any(verdict.out_of_step for verdict in verdicts.values())
    if all_answer and dist.is_initialized():
        dist.destroy_process_group()
    return Outcome(int(any(verdict.status == "failed" for verdict in verdicts.values())), all_answer)
