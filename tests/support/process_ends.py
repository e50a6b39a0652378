"""Processes that end as programs do, right after a message: `python -m tests.support.process_ends rings 200 6` prints how.

Of "rings", each launch has four processes, and six launches run at once. Of "slow", each launch is one process without a ring,
whose threads of gloo come last on its core: many an end then meets a thread that still has a tensor.
"""

import collections
import contextlib
import os
import socket
import sys
import time

import torch
import torch.distributed as dist

from hf_ring_attention.transport import communicators  # noqa: F401 - what it does at an end is what is tried


def rings():
    import hf_ring_attention as ra

    ring = ra.Ring(transport="heads")
    for _ in range(3):
        x = torch.randn(1, 4, 16, 8, requires_grad=True)
        ra.ring_attention(x, x, x, pattern="exact", ring=ring).sum().backward()


def slow():
    dist.all_reduce(torch.ones(3))  # It begins the threads.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, os.sched_getaffinity(0))
            if thread != os.getpid():
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    for _ in range(3):
        dist.all_reduce(torch.ones(3))


def main(kind, launches, at_once):
    """Returns on a process that was begun, which then ends, as on the one that begins them."""
    if kind == "rings":
        from hf_ring_attention.ring import attention  # noqa: F401 - once for all processes
    size, begun, running, ends = {"rings": 4, "slow": 1}[kind], 0, {}, collections.Counter()
    start = time.monotonic()
    while begun < launches or running:
        while begun < launches and len({*running.values()}) < at_once:
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
            for rank in range(size):
                if (process := os.fork()) == 0:
                    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
                    return globals()[kind]()
                running[process] = begun
            begun += 1
        process, status = os.wait()
        del running[process]
        ends[os.waitstatus_to_exitcode(status)] += 1
    print(dict(ends), f"{time.monotonic() - start:.0f} s", file=sys.stderr)
    print(dict(ends))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
