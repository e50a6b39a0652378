"""Runs a function on several ranks, gloo processes of one thread or simulated ones, and returns their results."""

import contextlib
import multiprocessing
import os
import pickle
import random
import socket
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import hf_ring_attention as ra
from tests.support.tolerance import float64, is_float64

#: Seconds after which something hangs and is not merely slow: some ten times as long as the longest launch of the tests
#: beside four busy processes on two cores. All tests take it but those that test timeouts.
TIMEOUT = 600
#: Seconds within which ranks are done that wait for no timeout; far from TIMEOUT, so that having waited for it shows.
PROMPTLY = TIMEOUT / 10
#: Seconds that the other ranks have to report their errors once a rank has failed; they end sooner when all have.
PATIENCE = 60
#: Ranks are forked from a process that computed nothing, and imported what takes seconds once for all of them.
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = "tests.support.preloaded"
CONTEXT.set_forkserver_preload([PRELOADED])


def forked(target, *args):
    """A process that runs target(*args) once it is started."""
    start_server()
    return CONTEXT.Process(target=_run_preloaded, args=(target, *args))


def start_server():
    """Starts the server that forks, if it does not run yet: whoever forks first decides what all processes find imported."""
    # It looks for modules in the current folder, which a test may have changed, and skips the modules that it does not find:
    # each process would then import them anew.
    with contextlib.chdir(Path(__file__).parents[2]):
        forkserver.ensure_running()


def _run_preloaded(target, *args):
    assert PRELOADED in sys.modules, "the server that forks has imported nothing"
    target(*args)


class RankPool:
    """Processes that stay for one call after another; each call makes a process group.

    They are started when a call first needs them, and anew after a call that failed. If a function leaves an object behind in
    its process, such as an Accelerator, the next call meets it: run such functions by `run_ranks`.
    """

    def __init__(self):
        self._ranks = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Leaves no process."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []

    def run(self, function, world_size, *args, timeout=TIMEOUT, lost=()):
        """[function(rank, *args) for each rank], run side by side, in float64 if the caller computes in it.

        A rank that raises ends all of them, and its traceback is the error; so does `timeout` (seconds). The ranks `lost`
        end by themselves without an answer, and are left out.
        """
        while len(self._ranks) < world_size:
            ours, theirs = CONTEXT.Pipe()
            process = forked(_serve, len(self._ranks), theirs)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        answers, errors = {}, {}
        with tempfile.TemporaryDirectory() as folder:
            seed = random.randrange(2**32)
            call = pickle.dumps((function, world_size, f"{folder}/store", timeout, is_float64(), seed, args))
            pending = {connection: rank for rank, (_, connection) in enumerate(self._ranks[:world_size])}
            try:
                for connection in pending:
                    connection.send_bytes(call)
                deadline = time.monotonic() + timeout
                while pending and (left := deadline - time.monotonic()) > 0:
                    for connection in wait(pending, left):
                        rank = pending.pop(connection)
                        try:
                            ok, answer = pickle.loads(connection.recv_bytes())
                        except (EOFError, ConnectionError):
                            ok, answer = rank in lost, "ended without an answer"
                        (answers if ok else errors)[rank] = answer
                        if errors:
                            deadline = min(deadline, time.monotonic() + PATIENCE)
                errors |= dict.fromkeys(pending.values(), "still running")
            finally:
                if pending or errors or lost:
                    self.close()
        if errors:
            told = "\n".join(f"rank {rank}:\n{error}" for rank, error in sorted(errors.items()))
            raise AssertionError(f"of {world_size} ranks, after at most {timeout} s:\n{told}")
        return [answers[rank] for rank in range(world_size) if rank not in lost]


def run_ranks(function, world_size, *args, **options):
    """`RankPool.run` in processes of this call alone."""
    with RankPool() as ranks:
        return ranks.run(function, world_size, *args, **options)


def run_simulated(function, world_size, *, timeout=TIMEOUT, **settings):
    """`ra.run_simulated`, in float64 if the caller computes in it."""
    on = is_float64()  # a matter of each thread

    def run(ring):
        with float64(on):
            return function(ring)

    return ra.run_simulated(run, world_size, timeout=timeout, **settings)


def on_ranks(work, make, world_size=2, **settings):
    """[work(ring, model)] of simulated ranks; each has a separate model from make(), patched with its ring."""
    models = [make() for _ in range(world_size)]
    return run_simulated(lambda ring: work(ring, ra.patch_model(models[ring.rank], ring=ring)), world_size, **settings)


def free_port():
    """A port at which nobody listens, below those that the system gives to connections, which it could give away meanwhile."""
    any_of = random.SystemRandom()  # whichever: nothing that is computed depends on it
    while True:
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", any_of.randrange(10000, 32000)))
            return free.getsockname()[1]


def begin_as_a_program():
    """Has this process of `CONTEXT` compute on one thread, and start others as programs do and not as it was started itself.

    A second fork server would import everything anew, for five seconds.
    """
    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)


def _serve(rank, connection):
    """Answers calls until the pool ends this process, or the tests end."""
    begin_as_a_program()
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        function, world_size, store, timeout, in_float64, seed, args = pickle.loads(call)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        limit = timedelta(seconds=timeout)
        try:
            dist.init_process_group("gloo", f"file://{store}", limit, world_size, rank)
            with float64(in_float64):
                answer = (True, function(rank, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        if answer[0]:
            with contextlib.suppress(RuntimeError):  # of a rank that failed, and reports this itself
                dist.barrier()
                dist.destroy_process_group()
        connection.send_bytes(pickle.dumps(answer))
        if not answer[0]:
            os._exit(1)  # the others learn from their connections that it is gone
