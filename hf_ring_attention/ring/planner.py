"""Plans calls: each when it comes, or ahead of it, for batches that a loader has already read."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..plan.choices import Decision, as_decided, decide_transport
from ..plan.joins import Joining
from ..plan.layouts import SequenceLayout
from ..plan.problem import Documents, Problem
from ..plan.traffic import RowBytes
from ..transport.table import TRANSPORTS
from .bindings import ROUNDS_TO_WAIT, Bindings, Turns

#: Threads with equal problems, such as ranks that are threads of one process, plan in turn: the first one makes the plans
#: that they share.
_PLANNING = Turns()

#: The name of the threads that plan ahead.
THREAD = "ring-planner"

#: The most batches that are remembered until their calls come.
_MOST_BATCHES = 64


class _BatchRows(NamedTuple):
    """The rows of a batch: what the calls of a kind differ in."""

    layout: SequenceLayout
    documents: Documents


class _Kind(NamedTuple):
    """What the calls of a kind have in common; the problem has no rows."""

    problem: Problem
    sizes: RowBytes
    device: torch.device
    joining: Joining | None
    transport: str


@dataclass
class _Uses:
    """The rounds in which a kind was called last, and in which it was called last with the rows of an expected batch."""

    called: int
    expected: int


class Planner:
    """Plans the calls of one rank: `plan` when they come, and those of expected batches before, in a thread of its own.

    Calls teach it the kinds that there are: all of a problem but its rows. `expect` tells it the rows of a batch to come,
    which it plans for all kinds of the last few batches. It only makes bindings: nothing that it does changes a result,
    or talks to other ranks. The thread ends when all is planned, so that none is left between batches.

    Args:
        bindings: those of the rank, where its calls find what was made.
    """

    def __init__(self, rank: int, bindings: Bindings) -> None:
        self.rank, self.bindings = rank, bindings
        #: The expected batches whose calls have not passed, in their order, with that of the last call.
        self._batches: OrderedDict[_BatchRows, None] = OrderedDict()
        self._kinds: dict[_Kind, _Uses] = {}
        self._jobs: deque[tuple[_Kind, _BatchRows]] = deque()
        #: A round is some batches that were expected together, and then their calls.
        self._round, self._called = 0, False
        self._thread: threading.Thread | None = None
        #: Whether the thread will look for jobs again before it ends.
        self._working = False
        self._lock = threading.Lock()

    def plan(
        self,
        decide: Callable[[Problem, RowBytes], Decision],
        problem: Problem,
        sizes: RowBytes,
        device: torch.device,
        joining: Joining | None,
    ) -> tuple[Decision, Any]:
        """Returns the decision for a call and its binding; it waits for the thread where that is making the same one."""
        with _PLANNING.of(problem):
            decision = decide(problem, sizes)
            problem = as_decided(problem, decision)
            return decision, self.bindings.of(TRANSPORTS[decision.choice].bind, problem, self.rank, device, joining)

    def learn(
        self, problem: Problem, sizes: RowBytes, device: torch.device, joining: Joining | None, transport: str
    ) -> None:
        """Remembers the kind of a call that came, and plans it for the batches that are expected after this one.

        Args:
            transport: the one asked for, or "auto".
        """
        if not self._batches or device.type not in ("cpu", "cuda"):
            return
        rows = _BatchRows(problem.layout, problem.documents)
        layout = SequenceLayout("contiguous", 1, problem.layout.world_size)  # of no rows, like the documents
        kind = _Kind(replace(problem, layout=layout, documents=()), sizes, device, joining, transport)
        with self._lock:
            self._called = True
            expected = rows in self._batches
            while expected and next(iter(self._batches)) != rows:
                self._batches.popitem(last=False)
            uses = self._kinds.get(kind)
            if uses is None:
                self._kinds[kind] = _Uses(self._round, self._round)
                later = list(self._batches)[1:] if expected else []
                self._begin([(kind, batch) for batch in later])
            else:
                uses.called = self._round
                uses.expected = self._round if expected else uses.expected

    def expect(self, layout: SequenceLayout, documents: Documents) -> None:
        """Plans the calls of a batch to come, of all kinds that came in the last few rounds, and returns at once.

        It may be told of a batch several times.

        Kinds whose calls keep coming with other rows than those expected, such as those of a model of images, are not
        planned: their plans would meet no call.

        Args:
            layout, documents: those of the batch's rows.
        """
        rows = _BatchRows(layout, documents)
        with self._lock:
            if self._called:
                self._called = False
                self._round += 1
                self.bindings.next_round()
                recent = {kind: x for kind, x in self._kinds.items() if self._round - x.called <= ROUNDS_TO_WAIT}
                self._kinds = recent
            if rows in self._batches:
                return
            self._batches[rows] = None
            if len(self._batches) > _MOST_BATCHES:
                self._batches.popitem(last=False)
            fitting = [kind for kind, x in self._kinds.items() if self._round - x.expected <= ROUNDS_TO_WAIT]
            self._begin([(kind, rows) for kind in fitting])

    def wait(self) -> None:
        """Waits until all that is expected is planned; a process that forks calls this first, so as to fork no thread."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _begin(self, jobs: list[tuple[_Kind, _BatchRows]]) -> None:
        """Hands jobs to the thread, and starts it if it is at an end; the lock is held."""
        self._jobs.extend(jobs)
        alive = self._thread is not None and self._thread.is_alive()  # a fork has the object of a thread, and no thread
        if self._jobs and not (self._working and alive):
            self._working = True
            self._thread = threading.Thread(target=_work, args=(weakref.ref(self),), name=THREAD)
            self._thread.start()

    def next_job(self) -> Callable[[], None] | None:
        """Returns what the thread does next, without a reference to the planner; None if it is to end."""
        with self._lock:
            # A process that ends waits for the plan under way, and for no other.
            if not self._jobs or not threading.main_thread().is_alive():
                self._jobs.clear()
                self._working = False
                return None
            kind, rows = self._jobs.popleft()
        rank, bindings = self.rank, self.bindings
        return lambda: _plan_ahead(kind, rows, rank, bindings)


def _plan_ahead(kind: _Kind, rows: _BatchRows, rank: int, bindings: Bindings) -> None:
    problem = replace(kind.problem, layout=rows.layout, documents=rows.documents)
    with _PLANNING.of(problem):
        decision = decide_transport(kind.transport, problem, kind.sizes)
        problem = as_decided(problem, decision)
        bindings.make_ahead(kind.device, TRANSPORTS[decision.choice].bind, problem, rank, kind.device, kind.joining)


def _work(reference: weakref.ref[Planner]) -> None:
    """Does the planner's jobs until there are none; it holds the planner only between them, so that a ring can go."""
    while True:
        planner = reference()
        job = None if planner is None else planner.next_job()
        del planner
        if job is None:
            return
        # An error is one of the call that is planned here: it plans again when it comes, and raises there.
        with contextlib.suppress(Exception):
            job()
