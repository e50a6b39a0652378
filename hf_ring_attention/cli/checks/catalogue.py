"""The checks of `hf-ring-attention check`, in order.

What imports the rest of the package, and Transformers, is imported by the checks that need it: if that fails on one process,
all hear of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .links import bandwidth, clock, judge_bandwidth, judge_clocks, judge_latency, judge_timeouts, latency, timeouts
from .machine import (
    environment,
    join_group,
    judge_environment,
    judge_launch,
    judge_private_names,
    judge_rings,
    judge_versions,
    make_rings,
    private_names,
    versions,
)
from .runner import Check, CheckRun

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
_TRAIN = "Train a type that `hf-ring-attention models` lists; report this output where it is one."
_GENERATE = "Generate with no prefill over a ring, or with an older Transformers; report this output."


def _later(module: str, name: str, *arguments: Any) -> Callable[..., Any]:
    """Returns a function of a module of this folder that is imported when it is called, with arguments after the run."""

    def call(run: CheckRun, *rest: Any) -> Any:
        return getattr(importlib.import_module(f".{module}", __package__), name)(run, *arguments, *rest)

    return call


def all_checks(ring_size: int) -> list[Check]:
    """Returns the checks of rings of this size, in the order in which they run."""
    transports = _TRANSPORTS if ring_size > 1 else _ONE_PROCESS
    judge_transport = _later("oracle", "judge_transport")
    return [
        Check("launch", join_group, judge_launch, f"Start one process per device. {_REACH}"),
        Check("versions", versions, judge_versions, _INSTALL, ("launch",)),
        Check("environment", environment, judge_environment, _INSTALL, ("launch",)),
        Check("private names", private_names, judge_private_names, _INSTALL, ("versions",)),
        Check(
            "rings", make_rings, judge_rings, "Give a --ring-size that divides the number of processes.", ("launch",)
        ),
        Check("clocks", clock, judge_clocks, _REACH, ("launch",)),
        Check("latency", latency, judge_latency, _REACH, ("rings",)),
        Check("bandwidth", bandwidth, judge_bandwidth, _REACH, ("rings",)),
        Check("timeouts", timeouts, judge_timeouts, _REACH, ("launch",)),
        Check(
            "model", _later("model", "read_model"), _later("model", "judge_model"), _MODEL, ("private names", "rings")
        ),
        *(
            Check(name, _later("oracle", "check_transport", *way), judge_transport, _WRONG, ("model",))
            for name, way in transports.items()
        ),
        Check("traffic", _later("oracle", "check_bytes"), _later("oracle", "judge_bytes"), _WRONG, tuple(transports)),
        Check(
            "train step", _later("model", "train_step"), _later("model", "judge_train_step"), _TRAIN, tuple(transports)
        ),
        Check(
            "generation",
            _later("model", "generation"),
            _later("model", "judge_generation"),
            _GENERATE,
            tuple(transports),
        ),
    ]
