"""Which process is gone, when communication fails on the others."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ..compute.private import default_store

#: In the messages of torch.distributed and its backends, and of this package's transports.
_OF_COMMUNICATION = re.compile(
    r"gloo|nccl|c10d|socket|connection|timed out|timeout|did not end|did not begin|\b(tcp|file|hash|prefix)?store\b",
    re.IGNORECASE,
)

_KEY = "hf_ring_attention/lost"


class _Lost(RuntimeError):
    """That processes are gone."""


@contextmanager
def naming_lost_processes(seconds: float = 5.0) -> Iterator[None]:
    """Where communication fails inside, says which processes no longer answer; as a context or a decorator.

    Processes that meet such an error leave a word in the process group's store, and wait for that of the others; one
    that was killed, or that ended by an error of its own, leaves none.

    Args:
        seconds: how long to wait for the others.

    Raises:
        RuntimeError: instead of the one that came; names the processes by their rank in the world.
    """
    try:
        yield
    except RuntimeError as error:
        named = isinstance(error, _Lost)  # by a context inside this one
        if named or not dist.is_initialized() or not _OF_COMMUNICATION.search(str(error)):
            raise
        lost = _silent(seconds)
        if not lost:
            raise
        # Others may be silent because they still wait for the one that is gone.
        which = f"process {lost[0]} (killed" if len(lost) == 1 else f"one or more of the processes {lost} (killed"
        raise _Lost(
            f"lost {which}, or ended by an error told there) of {dist.get_world_size()}, so process {dist.get_rank()} ends "
            f"too: {error}"
        ) from error


def _silent(seconds: float) -> list[int]:
    """The processes that leave no word within `seconds`."""
    store = default_store()
    own, world_size = dist.get_rank(), dist.get_world_size()
    silent = [rank for rank in range(world_size) if rank != own]
    try:
        store.set(f"{_KEY}/{own}", "here")
        deadline = time.monotonic() + seconds
        while silent and time.monotonic() < deadline:
            silent = [rank for rank in silent if not store.check([f"{_KEY}/{rank}"])]
            time.sleep(0.05)
        if own == 0:  # its process may hold the store that the others still read
            time.sleep(1)
    except (RuntimeError, ValueError, OSError):  # the store is gone, with the process that held it
        return [0] if own else silent
    return silent
