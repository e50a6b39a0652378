"""Ranks of which one is killed, stalls or raises at a chosen point, and what becomes of the others: see tests/ring."""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import hf_ring_attention as ra
from hf_ring_attention.transport import communicators, transports
from tests.support.ranks import TIMEOUT, begin_as_a_program, forked, free_port

KINDS = ("killed", "stalled", "raising")
MOMENTS = ("before", "in", "after")
#: The phases of a run: the transport of each case, and the name of the operation in the middle of which its fault comes.
PHASES = {
    "set-up": ("ring", ""),
    "forward hop": ("ring", "ring attention"),
    "backward hop": ("ring", "ring attention, backward pass"),
    "all-to-all of rows": ("collective", "collective attention"),
    "all-to-all of heads": ("heads", "attention by heads"),
    "agreement": ("ring", ""),
}
WORLD_SIZE = 3
#: Seconds after which ranks give up one that stalls. Whatever waits for no such timeout has all the time.
SECONDS_OF_A_STALL = 10
#: The error of the rank that raises, which must reach the rank's output unchanged.
OWN_ERROR = "no memory left (raised by the test)"


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, when."""

    kind: str
    phase: str
    moment: str
    rank: int

    def __str__(self):
        return f"rank {self.rank} {self.kind} {self.moment} {self.phase}"

    @property
    def alone_at_start(self):
        """Whether the process group is never complete."""
        return (self.phase, self.moment) == ("set-up", "before")

    @property
    def ends_by_timeout(self):
        """Whether the others only notice by a timeout: a connection cannot break before it is made."""
        return self.kind == "stalled" or (self.phase == "set-up" and self.moment != "after")


class FaultyRank:
    """One rank of a run; if it is the one of the fault, it has it at its point."""

    def __init__(self, rank, fault):
        self.rank, self.fault = rank, fault

    def reach(self, phase, moment):
        """The fault, if this is where it is."""
        fault = self.fault
        if (self.rank, phase, moment) != (fault.rank, fault.phase, fault.moment):
            return
        if fault.kind == "raising":
            raise RuntimeError(OWN_ERROR)
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "killed" else signal.SIGSTOP)

    def inside(self, phase, module, name, where):
        """Patches a function of a module so that the fault is just before its call in which `where` is found."""
        function = getattr(module, name)

        def reached(*args, **options):
            if where(args):
                self.reach(phase, "in")
            return function(*args, **options)

        return mock.patch.object(module, name, reached)

    def run(self, ready):
        """Set-up, a call of attention or an agreement, with its fault before, in or after."""
        fault = self.fault
        limit = timedelta(seconds=SECONDS_OF_A_STALL)
        self.reach("set-up", "before")
        first = limit if fault.alone_at_start else timedelta(seconds=TIMEOUT)
        dist.init_process_group("gloo", rank=self.rank, world_size=WORLD_SIZE, timeout=first)
        # A first exchange takes longer than others, and longer on a busy machine.
        dist.barrier()
        self.reach("set-up", "in")
        group = dist.new_group(timeout=limit if fault.ends_by_timeout else None)
        self.reach("set-up", "after")
        if fault.phase != "set-up":
            self.meet(ready)
        ring = ra.Ring(group, layout="contiguous", transport=PHASES[fault.phase][0])
        (self.agree if fault.phase == "agreement" else self.attend)(ring)
        # The next step of a rank after its fault, where the others wait for it.
        with ring.agreement("the end"):
            pass

    def meet(self, folder):
        """Waits for all ranks without a message, so that the fault meets none of them in its set-up."""
        folder.mkdir(exist_ok=True)
        (folder / f"ready_{self.rank}").touch()
        deadline = time.monotonic() + TIMEOUT
        while len([*folder.glob("ready_*")]) < WORLD_SIZE and time.monotonic() < deadline:
            time.sleep(0.02)

    def attend(self, ring):
        """One call forward and backward; "before" and "after" are around the pass that the phase is about."""
        phase, awaited = self.fault.phase, PHASES[self.fault.phase][1]
        backward = phase == "backward hop"
        q, k, v = (torch.ones(1, 3, 4, 8, requires_grad=True) for _ in range(3))
        with self.inside(phase, transports.Link, "_arrive", lambda args: args[1].startswith(awaited)):
            if not backward:
                self.reach(phase, "before")
            out = ra.ring_attention(q, k, v, pattern="exact", ring=ring, causal=False)
            self.reach(phase, "before" if backward else "after")
            out.sum().backward()
            if backward:
                self.reach(phase, "after")

    def agree(self, ring):
        """An exchange of objects: their sizes, and then themselves."""
        of_objects = iter((False, True))
        communicator = communicators.ProcessGroupCommunicator
        exchange = self.inside("agreement", communicator, "gather", lambda _: next(of_objects, False))
        self.reach("agreement", "before")
        with exchange, ring.agreement("a call") as call:
            call.same("the pattern", "exact")
        self.reach("agreement", "after")


@dataclass
class Outcome:
    """What became of each rank: its exit status, and the error that it ended by."""

    statuses: list
    errors: list
    hung: list


#: Processes learn of each other's ends when one is started or joined, which must not be in two threads at once.
PROCESSES = threading.Lock()


def alive(ranks):
    with PROCESSES:
        return [rank for rank in ranks if rank.is_alive()]


def outcome_of(fault, folder):
    """Runs the ranks, as a launcher would: it kills the rank that stalls once the others have ended."""
    port = free_port()
    ranks = [forked(_run, rank, fault, folder, port) for rank in range(WORLD_SIZE)]
    awaited = [rank for number, rank in enumerate(ranks) if fault.kind != "stalled" or number != fault.rank]
    try:
        with PROCESSES:
            for rank in ranks:
                rank.start()
        # The process group's own timeout is TIMEOUT: ranks that end by it are too late here.
        deadline = time.monotonic() + TIMEOUT / 2
        while (waiting := alive(awaited)) and (left := deadline - time.monotonic()) > 0:
            wait([rank.sentinel for rank in waiting], left)
        running = alive(ranks)
    finally:
        with PROCESSES:
            for rank in ranks:
                if rank.pid is not None:
                    rank.kill()
                    rank.join()
    hung = [number for number, rank in enumerate(ranks) if rank in running]
    errors = [file.read_text() if (file := Path(folder, f"{n}.error")).exists() else "" for n in range(WORLD_SIZE)]
    return Outcome([rank.exitcode for rank in ranks], errors, hung)


def _run(rank, fault, folder, port):
    """The process of a rank, which leaves its error in a file and not on the screen of the tests."""
    begin_as_a_program()
    screen = os.open(Path(folder, f"{rank}.screen"), os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(screen, stream.fileno())
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        with ra.naming_lost_processes():
            FaultyRank(rank, fault).run(Path(folder, "ready"))
    except (RuntimeError, ValueError, SystemExit) as error:
        Path(folder, f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
        sys.exit(1)
