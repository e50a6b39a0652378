"""All ranks of a ring in one process, for tests and for trying things out: same plans, same engine, no process group."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar, cast

import torch

from ..plan.layouts import LayoutKind
from ..transport.simulated import SimulatedCommunicator
from .ring import Ring

Result = TypeVar("Result")


def simulate(
    world_size: int, *, layout: LayoutKind | str = "auto", transport: str = "auto", timeout: float = 300.0
) -> list[Ring]:
    """The rings of all ranks, in this process; each is to be driven by a thread of its own, as `run_simulated` does.

    They compute what processes would, on whatever device the tensors are; they are no faster than one rank.

    Args:
        layout, transport: as for `Ring`.
        timeout: seconds that a rank waits for another at most.

    Raises:
        ValueError: a world size below 1, or an unknown name.
    """
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"simulate: world_size must be an integer of at least 1, got {world_size!r}")
    return [Ring.over(c, layout, transport) for c in SimulatedCommunicator.all_of(world_size, timeout)]


def run_simulated(
    function: Callable[[Ring], Result],
    world_size: int,
    *,
    layout: LayoutKind | str = "auto",
    transport: str = "auto",
    timeout: float = 300.0,
) -> list[Result]:
    """[function(ring) for the ring of each rank], side by side, each in a thread.

    Args:
        world_size, layout, transport, timeout: as for `simulate`.

    Raises:
        Whatever `function` raises on a rank; the other ranks end as well.
    """
    rings = simulate(world_size, layout=layout, transport=transport, timeout=timeout)
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run(ring: Ring) -> Result:
        # Backward runs in the threads that call it: on a GPU all ranks would share one and wait for each other.
        with (
            torch.autograd.set_multithreading_enabled(False),
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
        ):
            return function(ring)

    failed: list[Future[Result]] = []  # in the order in which they did

    def depart(communicator: SimulatedCommunicator, future: Future[Result]) -> None:
        error = future.exception()
        if error is not None:
            failed.append(future)
        communicator.depart("its function returned" if error is None else f"it raised {type(error).__name__}: {error}")

    with ThreadPoolExecutor(world_size, thread_name_prefix="rank") as threads:
        futures = []
        for ring in rings:
            futures.append(threads.submit(run, ring))
            futures[-1].add_done_callback(partial(depart, cast(SimulatedCommunicator, ring._communicator)))
    return [future.result() for future in [*failed, *futures]][len(failed) :]
