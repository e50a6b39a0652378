"""Runs a function on several ranks, gloo processes of one thread or simulated ones, and brings back what they return."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

import hf_ring_attention as ra
from tests.support.tolerance import float64, is_float64

#: Seconds after which something hangs and is not merely slow: some ten times what the longest launch of the tests takes
#: beside four busy processes on two cores. Tests that do not test timeouts take this one.
TIMEOUT = 600
#: Seconds within which ranks are done that wait for no timeout; far from TIMEOUT, so that having waited for it shows.
PROMPTLY = TIMEOUT / 10
#: Seconds that the other ranks have to tell their own story once one has failed; they end sooner when all have.
PATIENCE = 60
#: Ranks are forked from a process that computed nothing, and imported what takes seconds once for all of them.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.preloaded"])


def run_ranks(function, world_size, *args, timeout=TIMEOUT):
    """[function(rank, *args) for each rank], run side by side, in float64 where the caller computes in it.

    A rank that raises ends all of them, and its traceback is the error; so does `timeout` (seconds). No process stays.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            CONTEXT.Process(target=_rank, args=(function, rank, world_size, folder, timeout, is_float64(), args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        try:
            while any(process.is_alive() for process in processes):
                if any(process.exitcode not in (None, 0) for process in processes):
                    end = time.monotonic() + PATIENCE
                    while any(process.is_alive() for process in processes) and time.monotonic() < end:
                        time.sleep(0.1)
                    break
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        finally:
            alive = [process.is_alive() for process in processes]
            for process in processes:
                process.kill()
                process.join()
        answers = []
        errors = []
        for rank in range(world_size):
            path = os.path.join(folder, f"{rank}.pickle")
            if not os.path.exists(path):
                errors.append(f"rank {rank}: " + ("still running" if alive[rank] else "ended without an answer"))
                continue
            with open(path, "rb") as file:
                ok, answer = pickle.load(file)
            answers.append(answer)
            if not ok:
                errors.append(f"rank {rank}:\n{answer}")
        if errors:
            raise AssertionError(f"of {world_size} ranks, after at most {timeout} s:\n" + "\n".join(errors))
        return answers


def run_simulated(function, world_size, *, timeout=TIMEOUT, **settings):
    """`ra.run_simulated`, in float64 where the caller computes in it."""
    on = is_float64()  # a matter of each thread

    def run(ring):
        with float64(on):
            return function(ring)

    return ra.run_simulated(run, world_size, timeout=timeout, **settings)


def _rank(function, rank, world_size, folder, timeout, in_float64, args):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        with float64(in_float64):
            answer = (True, function(rank, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    with open(os.path.join(folder, f"{rank}.part"), "wb") as file:
        pickle.dump(answer, file)
    os.replace(os.path.join(folder, f"{rank}.part"), os.path.join(folder, f"{rank}.pickle"))
    if not answer[0]:
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()
