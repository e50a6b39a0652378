"""Plans calls: each when it comes, or ahead of it, for batches that a loader has already read."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ..plan.choices import Decision, decide_call
from ..plan.layouts import SequenceLayout
from ..plan.problem import Documents, Problem
from ..plan.traffic import RowBytes
from ..transport.communicators import Communicator
from ..transport.heads import HeadsTransport
from ..transport.table import TRANSPORTS
from ..transport.transports import Traffic, Transport
from .bindings import ROUNDS_TO_WAIT, Bindings, Kept

logger = logging.getLogger(__name__)

#: The locks of the problems that are planned now; the last thread with a problem drops its lock.
_TURNS: weakref.WeakValueDictionary[Problem, Any] = weakref.WeakValueDictionary()
_TURNS_LOCK = threading.Lock()

#: The name of the threads that plan ahead.
THREAD = "ring-planner"

#: The most batches that are remembered until their calls come.
_MOST_BATCHES = 64

#: The rows of a batch; calls of one kind differ only in these.
_BatchRows = tuple[SequenceLayout, Documents]


class CallKey(NamedTuple):
    """The values that decide a call's plan, and its rows of tensors on a device; a kind of calls has a problem without rows."""

    problem: Problem
    sizes: RowBytes
    device: torch.device
    joining: Hashable

    def with_rows(self, layout: SequenceLayout, documents: Documents) -> CallKey:
        """Returns the key of a call that differs only in its rows."""
        return self._replace(problem=replace(self.problem, layout=layout, documents=documents))


@contextlib.contextmanager
def in_turn(problem: Problem) -> Iterator[None]:
    """Waits until no other thread is in this context with an equal problem.

    Ranks that are threads of one process plan in turn: the first one makes the plans that all share.
    """
    with _TURNS_LOCK:
        turn = _TURNS.setdefault(problem, threading.Lock())
    with turn:
        yield


def _decided(transport: str, key: CallKey, rank: int) -> tuple[Decision, tuple[Any, ...]]:
    """Returns the transport of a call, and the function and arguments that make its binding."""
    problem, decision = decide_call(transport, key.problem, key.sizes)
    return decision, (TRANSPORTS[decision.choice].bind, problem, rank, key.device, key.joining)


class Planner:
    """Plans the calls of one rank: each call when it comes, and calls of expected batches before, in a separate thread.

    Calls teach it the kinds of calls. `expect` announces the rows of a coming batch, and the planner plans them for all kinds
    of the last few batches. It changes no result, and talks to no other rank. The thread ends when all is planned.
    """

    def __init__(self, transport: str, communicator: Communicator | None, bindings: Bindings, traffic: Traffic) -> None:
        self.transport, self.bindings = transport, bindings
        self._communicator, self._traffic = communicator, traffic
        self._rank = 0 if communicator is None else communicator.rank
        self._logged: set[str] = set()
        #: The batch of the last call, and after it the expected batches in their order.
        self.batches: OrderedDict[_BatchRows, None] = OrderedDict()
        #: Kinds of calls, and the last round that had such a call with the rows of an expected batch.
        self._kinds: dict[CallKey, int] = {}
        self._jobs: deque[tuple[CallKey, _BatchRows]] = deque()
        #: A round is some batches that are expected together, and then their calls.
        self._round, self._called = 0, False
        self._thread: threading.Thread | None = None
        #: Whether the thread will look for jobs again before it ends.
        self._working = False
        self._lock = threading.Lock()

    def transport_for(self, key: CallKey) -> tuple[Kept, Transport | HeadsTransport]:
        """Returns the binding of a call, with its row numbers on the device, and the transport by it.

        If the thread is making the same binding, this waits for it.
        """
        start = time.perf_counter()
        with in_turn(key.problem):
            decision, call = _decided(self.transport, key, self._rank)
            kept = self.bindings.of(*call)
        self._traffic.planned_seconds += time.perf_counter() - start
        self.learn(key)
        if self._rank == 0 and decision.choice not in self._logged:  # once, whatever the number of layers and calls
            self._logged.add(decision.choice)
            ranks = key.problem.layout.world_size
            logger.info("ring of %d: transport %s, because %s", ranks, decision.choice, decision.reason)
        make: Callable[..., Transport | HeadsTransport] = TRANSPORTS[decision.choice].make
        return kept, make(kept.binding, self._communicator, self._traffic)

    def learn(self, key: CallKey) -> None:
        """Remembers the kind of a call that came, and plans it for the batches that are expected after its batch."""
        if not self.batches or key.device.type not in ("cpu", "cuda"):
            return
        rows = key.problem.layout, key.problem.documents
        with self._lock:
            self._called = True
            if rows not in self.batches:
                return
            while next(iter(self.batches)) != rows:
                self.batches.popitem(last=False)
            kind = key.with_rows(SequenceLayout("contiguous", 1, rows[0].world_size), ())
            if kind not in self._kinds:
                self._begin([(kind, batch) for batch in list(self.batches)[1:]])
            self._kinds[kind] = self._round

    def expect(self, layout: SequenceLayout, documents: Documents) -> None:
        """Plans the calls of a coming batch, of all kinds that came in the last few rounds, and returns at once.

        A batch may be announced several times. A kind that comes with other rows, as in a model of images, is not planned.
        """
        rows = layout, documents
        with self._lock:
            if self._called:
                self._called = False
                self._round += 1
                self.bindings.next_round()
                self._kinds = {kind: x for kind, x in self._kinds.items() if self._round - x <= ROUNDS_TO_WAIT}
            if rows in self.batches:
                return
            self.batches[rows] = None
            if len(self.batches) > _MOST_BATCHES:
                self.batches.popitem(last=False)
            self._begin([(kind, rows) for kind in self._kinds])

    def wait(self) -> None:
        """Waits until all expected batches are planned; call it before a fork, which must not copy a busy thread."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _begin(self, jobs: list[tuple[CallKey, _BatchRows]]) -> None:
        """Hands jobs to the thread, and starts it if it has ended; the lock is held."""
        self._jobs.extend(jobs)
        alive = self._thread is not None and self._thread.is_alive()  # a fork copies the thread object, not the thread
        if self._jobs and not (self._working and alive):
            self._working = True
            self._thread = threading.Thread(target=_work, args=(weakref.ref(self),), name=THREAD)
            self._thread.start()

    def next_job(self) -> Callable[[], None] | None:
        """Returns the thread's next job, which holds no reference to the planner; None to end the thread."""
        with self._lock:
            # A process that ends waits for the plan under way, and for no other.
            if not self._jobs or not threading.main_thread().is_alive():
                self._jobs.clear()
                self._working = False
                return None
            return partial(_plan_ahead, *self._jobs.popleft(), self.transport, self._rank, self.bindings)


def _plan_ahead(kind: CallKey, rows: _BatchRows, transport: str, rank: int, bindings: Bindings) -> None:
    key = kind.with_rows(*rows)
    with in_turn(key.problem):
        _, call = _decided(transport, key, rank)
        bindings.make_ahead(key.device, *call)


def _work(reference: weakref.ref[Planner]) -> None:
    """Does the planner's jobs; it holds the planner only between jobs, so that a ring can be collected."""
    while True:
        planner = reference()
        job = None if planner is None else planner.next_job()
        del planner
        if job is None:
            return
        # The call that is planned here plans again when it comes, and raises the error there.
        with contextlib.suppress(ValueError, RuntimeError):
            job()
