"""Has methods of a Trainer that call Accelerate's functions by name count rings in place of processes."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from accelerate.utils import gather, gather_object

from ..ring.ring import Ring

#: The functions that gather from all processes; an accelerator's methods of these names count rings by themselves.
_GATHER = {"gather": gather, "gather_object": gather_object}


def count_rings_by_name(trainer: Any, ring: Ring) -> ValueError | None:
    """Gives a Trainer of TRL copies of those of its methods that gather by name; returns the error of one that is overridden.

    The copies belong to this Trainer alone, and TRL stays as it is. TRL computes advantages from the rewards of all processes,
    where a ring's completions would count once for each of its ranks.
    """
    replacements: dict[str, Callable[..., Any]] = {
        "gather": trainer.accelerator.gather,
        "gather_object": lambda x: gather_object(x if ring.rank == 0 else []),
    }
    for kind in type(trainer).__mro__:
        if not kind.__module__.startswith("trl."):
            continue
        for name, method in vars(kind).items():
            function = inspect.unwrap(method) if isinstance(method, FunctionType) else None
            called = set() if function is None else _globals_of(function) & _GATHER.keys()
            own = {x for x in called if function is not None and function.__globals__.get(x) is _GATHER[x]}
            if not own or function is None:
                continue
            if getattr(type(trainer), name) is not method:
                return ValueError(
                    f"{type(trainer).__name__} overrides {name} of {kind.__name__}, which counts processes and not rings: "
                    f"rename the override, or use one process for each sequence (ring_size=1)"
                )
            space = {**function.__globals__, **{x: replacements[x] for x in own}}
            copy = FunctionType(
                function.__code__, space, function.__name__, function.__defaults__, function.__closure__
            )
            copy.__kwdefaults__ = function.__kwdefaults__
            setattr(trainer, name, MethodType(copy, trainer))
    return None


@functools.cache
def _globals_of(function: Any) -> set[str]:
    """Returns the names that a function looks up in its module when it runs."""
    return {str(step.argval) for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"}
