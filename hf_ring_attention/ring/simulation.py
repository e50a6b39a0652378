"""All ranks of a ring in one process, for tests and first trials: the same plans and engine, and no process group."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, cast

import torch

from ..plan.branches import check_count
from ..plan.layouts import LayoutKind
from ..transport.simulated import SimulatedCommunicator
from .ring import Ring

Result = TypeVar("Result")


def simulate(
    world_size: int,
    *,
    layout: LayoutKind | str = "auto",
    transport: str = "auto",
    heads: int | None = None,
    kernel: str = "auto",
    timeout: float = 300.0,
) -> list[Ring]:
    """Returns the rings of all ranks, in this process; each needs a separate thread, as in `run_simulated`.

    They compute the same as processes would, on the device of the tensors, and take as long as one rank or longer.

    Args:
        layout, transport, heads, kernel: as for `Ring`.
        timeout: the most seconds that a rank waits for another.

    Raises:
        ValueError: a world size below 1, or an unknown name.

    Example:
        >>> rings = ra.simulate(2)
        >>> rings[1]
        Ring(rank 1 of 2, layout='auto', transport='auto')
        >>> layout = rings[1].layout_for(8, "exact")
        >>> [ring.shard(torch.arange(8)[None], layout).tolist() for ring in rings]
        [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    """
    check_count("simulate", "world_size", world_size)
    return [Ring.over(c, layout, transport, heads, kernel) for c in SimulatedCommunicator.all_of(world_size, timeout)]


def run_simulated(
    function: Callable[[Ring], Result],
    world_size: int,
    **settings: Any,
) -> list[Result]:
    """Returns [function(ring) for the ring of each rank]; the calls run side by side, each in a thread.

    Args:
        world_size: the number of ranks.
        settings: layout, transport, heads, kernel and timeout, as for `simulate`.

    Raises:
        Exception: the error of `function` on a rank; the other ranks end as well.

    Example:
        >>> def attend(ring):
        ...     x = torch.randn(1, 2, 4, 8)  # 4 of 12 tokens
        ...     return ra.ring_attention(x, x, x, pattern="window:5", ring=ring).shape
        >>> ra.run_simulated(attend, 3)
        [torch.Size([1, 2, 4, 8]), torch.Size([1, 2, 4, 8]), torch.Size([1, 2, 4, 8])]
    """
    rings = simulate(world_size, **settings)
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run(ring: Ring) -> Result:
        # Backward runs in the calling thread. Otherwise all ranks on a GPU would share one thread, and wait for each other.
        with (
            torch.autograd.set_multithreading_enabled(False),
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
        ):
            return function(ring)

    failed: list[Future[Result]] = []  # the first failure first

    def depart(communicator: SimulatedCommunicator, future: Future[Result]) -> None:
        error = future.exception()
        if error is not None:
            failed.append(future)
        communicator.depart("its function returned" if error is None else f"it raised {type(error).__name__}: {error}")

    with ThreadPoolExecutor(world_size, thread_name_prefix="rank") as threads:
        futures = []
        for ring in rings:
            futures.append(threads.submit(run, ring))
            futures[-1].add_done_callback(partial(depart, cast(SimulatedCommunicator, ring.communicator)))
    return [future.result() for future in [*failed, *futures]][len(failed) :]
