"""The search for a lost process, when communication fails on the others."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ..compute.private import default_store

#: Words in errors of communication, of torch.distributed, its backends and this package's transports.
_OF_COMMUNICATION = re.compile(
    r"(?i)gloo|nccl|c10d|socket|connection|timed out|timeout|did not end|did not begin|\b(tcp|file|hash|prefix)?store\b"
)
_KEY = "hf_ring_attention/lost"


class LostProcesses(RuntimeError):
    """An error that names processes that are gone."""


@contextmanager
def naming_lost_processes(seconds: float = 5.0) -> Iterator[None]:
    """Names the processes that no longer answer when communication fails inside; it is a context or a decorator.

    A process that meets such an error leaves an entry in the process group's store, and waits for the entries of the others:
    a process that was killed, stalls, or ended by another error leaves none. Without a group, the error names this process.

    Args:
        seconds: the time to wait for the others.

    Raises:
        RuntimeError: instead of the error of communication; it names the processes by their rank in the world.

    Example:
        >>> with ra.naming_lost_processes():
        ...     sizes = ra.run_simulated(lambda ring: ring.world_size, 2)
        >>> sizes
        [2, 2]
        >>> with ra.naming_lost_processes():  # any other error comes as it is
        ...     raise RuntimeError("the loss is not finite")
        Traceback (most recent call last):
        RuntimeError: the loss is not finite
    """
    try:
        yield
    except RuntimeError as error:
        # A context inside this one has named the processes already if the error is a `LostProcesses`.
        if isinstance(error, LostProcesses) or not is_of_communication(error):
            raise
        if not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE", 1)) == 1:
                raise
            raise LostProcesses(
                f"process {os.environ.get('RANK', '?')} of {os.environ['WORLD_SIZE']} was not joined by all others: look for a "
                f"process that ended in each output, and start all again: {error}"
            ) from error
        lost = _silent(seconds)
        if not lost:
            raise
        # Others may be silent because they still wait for the lost one.
        which = f"process {lost[0]}" if len(lost) == 1 else f"one or more of the processes {lost}"
        raise LostProcesses(
            f"lost {which} of {dist.get_world_size()} (killed, stalled, or ended by an error in its own output), so process "
            f"{dist.get_rank()} ends too; start again from the last checkpoint: {error}"
        ) from error


def is_of_communication(error: BaseException) -> bool:
    """Returns whether communication failed, so that the cause may be in another process."""
    return isinstance(error, RuntimeError) and bool(_OF_COMMUNICATION.search(str(error)))


def _silent(seconds: float) -> list[int]:
    """Returns the processes that leave no entry within `seconds`."""
    answers: list[list[int]] = []
    # If the process that holds the store stalls, the store never answers, whatever its timeout.
    search = threading.Thread(target=lambda: answers.append(_without_entry(seconds)), daemon=True)
    search.start()
    search.join(2 * seconds + 1)
    if answers:
        return answers[0]
    return [0] if dist.get_rank() else list(range(1, dist.get_world_size()))


def _without_entry(seconds: float) -> list[int]:
    """Leaves this process's entry, and returns the processes without one; process 0 if the store went with it."""
    store, own = default_store(), dist.get_rank()
    silent = [rank for rank in range(dist.get_world_size()) if rank != own]
    try:
        store.set(f"{_KEY}/{own}", "here")
        deadline = time.monotonic() + seconds
        while silent and time.monotonic() < deadline:
            silent = [rank for rank in silent if not store.check([f"{_KEY}/{rank}"])]
            time.sleep(0.05)
        if own == 0:  # this process may hold the store, which the others still read
            time.sleep(1)
    except (RuntimeError, ValueError, OSError):  # the store is gone, with the process that held it
        silent = [0] if own else silent
    return silent
