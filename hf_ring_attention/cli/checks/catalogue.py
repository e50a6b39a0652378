"""The checks of `hf-ring-attention check`, in order."""

from __future__ import annotations

from functools import partial
from typing import get_args

from ...plan.traffic import TransportKind
from . import machine, model, oracle
from .runner import Check

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

    def link(name: str, size: int, repeats: int) -> Check:
        measure = partial(machine.measure_link, size=size, repeats=repeats)
        return Check(name, measure, partial(machine.judge_link, size=size), _REACH, ("launch",))

    def transport(name: str, way: str, neighbours: bool = False) -> Check:
        measure = partial(oracle.measure_transport, transport=way, neighbours=neighbours)
        return Check(name, measure, oracle.judge_transport, _WRONG, ("model",))

    oracles = [transport("oracle local", "local")]
    if ring_size > 1:
        ways = [way for way in get_args(TransportKind) if way not in ("auto", "local")]
        oracles = [transport(f"oracle {way}", way) for way in ways]
        oracles.append(transport("oracle heads x ring", "heads", neighbours=True))
    tested = tuple(check.name for check in oracles)
    return [
        Check("launch", machine.measure_launch, machine.judge_launch, _START),
        Check("versions", machine.measure_versions, machine.judge_versions, _INSTALL, ("launch",), _SAME_VERSION),
        Check(
            "environment", machine.measure_environment, machine.judge_environment, _INSTALL, ("launch",), _SAME_VALUE
        ),
        link("latency", 8, 30),
        link("bandwidth", 4 << 20, 5),
        Check("model", model.measure_config, model.judge_config, _MODEL, ("versions",), _SAME_MODEL),
        *oracles,
        Check("train step", model.measure_train_step, model.judge_figures, _TRAIN, tested),
        Check("generation", model.measure_generation, model.judge_figures, _GENERATE, tested),
    ]
