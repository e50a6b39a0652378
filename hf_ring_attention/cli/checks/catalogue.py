"""The checks of `hf-ring-attention check` in order, and their run as one process of a launch."""

from __future__ import annotations

import sys
import threading
from argparse import Namespace
from collections.abc import Callable

import torch.distributed as dist

from .runner import Check, CheckRun, Verdict, run_checks

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


def all_checks(ring_size: int) -> list[Check]:
    """Returns the checks of rings of this size, in the order in which they run."""
    transports = _TRANSPORTS if ring_size > 1 else _ONE_PROCESS
    return [
        Check("launch", "machine.launch", _START),
        Check("versions", "machine.versions", _INSTALL, ("launch",)),
        Check("environment", "machine.environment", _INSTALL, ("launch",)),
        Check("rings", "machine.rings", _DIVIDE, ("launch",)),
        Check("latency", "links.latency", _REACH, ("rings",)),
        Check("bandwidth", "links.bandwidth", _REACH, ("rings",)),
        Check("timeouts", "links.timeouts", _REACH, ("launch",)),
        Check("model", "model.config", _MODEL, ("versions", "rings")),
        *(Check(name, "oracle.transport", _WRONG, ("model",), way) for name, way in transports.items()),
        Check("train step", "model.train_step", _TRAIN, tuple(transports)),
        Check("generation", "model.generation", _GENERATE, tuple(transports)),
    ]


def check_launch(
    options: Namespace, tell: Callable[[str, Verdict], None], told_to_end: threading.Event
) -> tuple[int, bool]:
    """Runs all checks on this process and on the others of its launch.

    Args:
        tell: hears each verdict, on process 0.
        told_to_end: is set when the launcher wants this process to end.

    Returns:
        The exit status, and whether all processes answer, so that this one can end in order.
    """
    try:
        run = CheckRun.join(options, told_to_end)
    except (RuntimeError, ValueError) as error:
        text = f"the processes did not meet within {options.timeout:g} s: {' '.join(str(error).split())}"
        remedy = "Start WORLD_SIZE processes that all reach MASTER_ADDR and MASTER_PORT."
        tell("launch", Verdict("failed", text, remedy))
        return 1, False
    try:
        verdicts = run_checks(run, all_checks(options.ring_size or run.world_size), tell)
    except RuntimeError as error:
        print(f"hf-ring-attention check: {error}", file=sys.stderr)
        return 1, False
    all_answer = not any(verdict.out_of_step for verdict in verdicts.values())
    if all_answer and dist.is_initialized():
        dist.destroy_process_group()
    return int(any(verdict.status == "failed" for verdict in verdicts.values())), all_answer
