"""The checks of `hf-ring-attention check` in order, and their run as one process of a launch."""

from __future__ import annotations

import sys
import threading
from argparse import Namespace
from collections.abc import Callable

import torch.distributed as dist

from .runner import Check, CheckRun, Verdict, run_checks

#: The bytes of a message whose time is the latency, and of one whose time shows the bandwidth, with how often each goes.
LATENCY, BANDWIDTH = (8, 30), (4 << 20, 5)
#: The oracle's checks: a transport each, and whether only neighbours exchange heads.
_TRANSPORTS = {"oracle ring": ("ring", False), "oracle collective": ("collective", False)}
_TRANSPORTS |= {"oracle heads": ("heads", False), "oracle heads x ring": ("heads", True)}
_REACH = "Open the ports between the hosts, and name their network: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME."
_WRONG = "Do not train: run `make test` on that host, try another torch release, and report it with this output."
_INSTALL = "Install the package with its dependencies again on that host: pip install ."
_MODEL = "Name a folder or an id of the hub that every host can read, of a type that `hf-ring-attention models` lists."
_TRAIN = "Train a type that `hf-ring-attention models` lists; if it is one, report this output."
_GENERATE = "Generate with no prefill over a ring, or with an older Transformers; report this output."
_SAME_VERSION = "Install the same {} on all hosts, in the environment that the launcher starts."
_SAME_VALUE = "Set {} to one value on every host before the launcher starts."
_SAME_MODEL = "Copy the same folder to all hosts, or name the same revision."
_START = f"Start one process per device. {_REACH}"


def all_checks(ring_size: int) -> list[Check]:
    """Returns the checks of rings of this size, in the order in which they run."""
    transports = _TRANSPORTS if ring_size > 1 else {"oracle local": ("local", False)}
    return [
        Check("launch", "machine.launch", _START),
        Check("versions", "machine.versions", _INSTALL, ("launch",), _SAME_VERSION),
        Check("environment", "machine.environment", _INSTALL, ("launch",), _SAME_VALUE),
        Check("latency", "links.link", _REACH, ("launch",), arguments=LATENCY),
        Check("bandwidth", "links.link", _REACH, ("launch",), arguments=BANDWIDTH),
        Check("model", "model.config", _MODEL, ("versions",), _SAME_MODEL),
        *(Check(name, "oracle.transport", _WRONG, ("model",), arguments=way) for name, way in transports.items()),
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
        run = CheckRun(options, told_to_end)
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
