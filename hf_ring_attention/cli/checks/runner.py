"""Runs checks one after another on all processes of a launch: every process measures, process 0 judges, all hear the verdict.

A measurement runs in a thread of its own while the main thread answers. So process 0 can distinguish a process that hangs
from one that is gone, and neither keeps the others waiting.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ...transport.lost_processes import is_of_communication
from .board import Board

#: The seconds that other processes have to answer once one has failed, and again once process 0 has asked for them.
PATIENCE = 3.0
#: The seconds between two looks at the board.
_BETWEEN_LOOKS = 0.02


@dataclass(frozen=True)
class CheckOptions:
    """The options of the command line.

    Attributes:
        timeout: the seconds that a check may take.
    """

    ring_size: int | None = None
    model: str | None = None
    pattern: str | None = None
    timeout: float = 30.0


class CheckRun:
    """One run of all checks on this process, and what earlier checks leave for later ones.

    Attributes:
        told_to_end: is set when the launcher wants this process to end.
        device, backend: set by the check "launch", which makes the process group.
        ring_size, group: set by the check "rings".
        facts: what process 0 learned from all processes, by name.
        state: what this process keeps, by name.
    """

    def __init__(self, options: CheckOptions, board: Board, told_to_end: threading.Event) -> None:
        self.options, self.board, self.told_to_end = options, board, told_to_end
        self.rank, self.world_size = board.rank, board.world_size
        self.ring_size, self.group = 1, None
        self.device: Any = None
        self.backend = ""
        self.facts: dict[str, Any] = {}
        self.state: dict[str, Any] = {}

    @property
    def first_of_ring(self) -> int:
        """The rank in the world of the first process of this process's ring."""
        return self.rank // self.ring_size * self.ring_size


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check.

    Attributes:
        text: the figures of a check that is ok; else the fault, with the processes by their numbers.
        remedy: what to do, in a sentence; "" for the remedy of the check.
        figures: the measured numbers, by name.
        blocks: whether checks that need this one are skipped.
        out_of_step: whether a process is gone, hangs or left others waiting, so that all later checks are skipped.
    """

    status: Literal["ok", "warning", "failed", "skipped"]
    text: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    blocks: bool = False
    out_of_step: bool = False


class NotApplicable(Exception):
    """Raised by a measurement that has nothing to check here; its message is the reason."""


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        measure: runs on every process; its answer is one of `Board.post`.
        judge: runs on process 0 with the answers of all processes.
        remedy: what to do if `measure` raises, or `judge` fails it without a remedy of its own.
        needs: the checks that must be ok before this one.
    """

    name: str
    measure: Callable[[CheckRun], Any]
    judge: Callable[[CheckRun, list[Any]], Verdict]
    remedy: str
    needs: tuple[str, ...] = ()


class Reply(NamedTuple):
    """The reply of a process: its measurement, why there is nothing to check, its error, or that it still measures."""

    kind: Literal["measured", "not applicable", "error", "busy"]
    value: Any = None


def processes(ranks: Sequence[int]) -> str:
    """Returns "process 1", or "processes 1, 2": at most eight by their numbers."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"process{'es' if len(ranks) > 1 else ''} {shown}"


def run_checks(run: CheckRun, checks: Sequence[Check], tell: Callable[[str, Verdict], None]) -> dict[str, Verdict]:
    """Runs checks in order and returns their verdicts, which are the same on all processes.

    Args:
        tell: hears each verdict on process 0, before the other processes do.

    Raises:
        RuntimeError: process 0 does not answer another process.
    """
    verdicts: dict[str, Verdict] = {}
    with _measuring() as worker:
        for check in checks:
            reason = _obstacle(check, verdicts)
            if reason:
                verdicts[check.name] = Verdict("skipped", reason, blocks=True)
                if run.rank == 0:
                    tell(check.name, verdicts[check.name])
                continue
            future = worker.submit(check.measure, run)
            deadline = time.monotonic() + run.options.timeout
            if run.rank == 0:
                verdict = _verdict(run, check, _collect(run, check.name, future, deadline))
                tell(check.name, verdict)
                run.board.post(f"{check.name}/verdict", asdict(verdict))
            else:
                verdict = _report(run, check.name, future, deadline)
            verdicts[check.name] = verdict
        _take_leave(run)
    return verdicts


def _obstacle(check: Check, verdicts: dict[str, Verdict]) -> str | None:
    """Returns why a check is not run; None for one that is."""
    for name, verdict in verdicts.items():
        if verdict.out_of_step:
            return f"{name!r} left the processes out of step"
    unmet = [name for name in check.needs if name in verdicts and verdicts[name].blocks]
    return f"it needs {unmet[0]!r}" if unmet else None


@contextmanager
def told_to_end() -> Iterator[threading.Event]:
    """Yields an event that SIGTERM sets: launchers send it once another process has failed.

    This process ends by itself soon after, once it has named the other one.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _measuring() -> Iterator[ThreadPoolExecutor]:
    """Yields the one thread of all measurements; it is not waited for, since it may hang."""
    worker = ThreadPoolExecutor(1)
    try:
        yield worker
    finally:
        worker.shutdown(wait=False, cancel_futures=True)


def _answer_of(future: Future[Any]) -> Reply:
    """Returns the reply of a process about its measurement now."""
    if not future.done():
        return Reply("busy")
    error = future.exception()
    if error is None:
        return Reply("measured", future.result())
    if isinstance(error, NotApplicable):
        return Reply("not applicable", str(error))
    text = " ".join(str(error).split())
    refused = isinstance(error, (ValueError, NotImplementedError, argparse.ArgumentTypeError))
    return Reply("error", (text if refused else f"{type(error).__name__}: {text}", is_of_communication(error)))


def _collect(run: CheckRun, name: str, future: Future[Any], deadline: float) -> dict[int, Reply]:
    """Returns, on process 0, the answers that processes give in time; those that are gone give none."""
    answers: dict[int, Reply] = {}
    asked = False
    while True:
        if 0 not in answers and (asked or future.done()):
            answers[0] = _answer_of(future)
        silent = [rank for rank in range(1, run.world_size) if rank not in answers]
        for rank in silent:
            if run.board.has(f"{name}/{rank}"):
                answers[rank] = Reply(*run.board.read(f"{name}/{rank}"))
        if len(answers) == run.world_size:
            break
        now = time.monotonic()
        if any(answer.kind == "error" for answer in answers.values()) or run.told_to_end.is_set():
            deadline = min(deadline, now + PATIENCE)
        if now > deadline:
            if asked:
                break
            asked, deadline = True, now + PATIENCE
            run.board.post(f"{name}/ask", True)
        wait([future], _BETWEEN_LOOKS) if 0 not in answers else time.sleep(_BETWEEN_LOOKS)
    return answers


def _report(run: CheckRun, name: str, future: Future[Any], deadline: float) -> Verdict:
    """Leaves this process's answer for process 0, at the latest when that asks, and returns its verdict."""
    last = deadline + 4 * PATIENCE
    while not future.done() and not run.board.has(f"{name}/ask") and time.monotonic() < last:
        wait([future], 5 * _BETWEEN_LOOKS)
        last = _sooner(run, last)
    run.board.post(f"{name}/{run.rank}", tuple(_answer_of(future)))
    while not run.board.has(f"{name}/verdict"):
        last = _sooner(run, last)
        if time.monotonic() > last:
            raise RuntimeError(f"process 0 has not answered in the check {name!r}, so process {run.rank} ends too")
        time.sleep(_BETWEEN_LOOKS)
    return Verdict(**run.board.read(f"{name}/verdict"))


def _sooner(run: CheckRun, last: float) -> float:
    """Returns until when to wait for process 0, which may be the one that is gone if the launcher ends the others."""
    return min(last, time.monotonic() + 3 * PATIENCE) if run.told_to_end.is_set() else last


def _verdict(run: CheckRun, check: Check, answers: dict[int, Reply]) -> Verdict:
    """Returns the verdict on the answers. Processes that are gone come first, since they cause errors of others."""
    gone = [rank for rank in range(run.world_size) if rank not in answers]
    busy = [rank for rank, answer in sorted(answers.items()) if answer.kind == "busy"]
    errors = {rank: answer.value for rank, answer in sorted(answers.items()) if answer.kind == "error"}
    own_errors = {rank: text for rank, (text, of_communication) in errors.items() if not of_communication}
    of_all = f"of {run.world_size}"
    if gone:
        text = f"{processes(gone)} {of_all} did not answer: killed, stopped, or ended by an error"
        remedy = "Read that process's output and the launcher's for the cause, then start all again."
        return _failed(text, remedy, gone, True)
    if own_errors:
        return _failed(_of_errors(own_errors), check.remedy, own_errors, len(own_errors) < run.world_size)
    if busy:
        text = f"{processes(busy)} {of_all} did not end within {run.options.timeout:g} s"
        return _failed(text, "See what that process waits for or computes, or allow more with --timeout.", busy, True)
    if errors:
        texts = {rank: text for rank, (text, _) in errors.items()}
        return _failed(_of_errors(texts), check.remedy, errors, True)
    reason = next((answer.value for answer in answers.values() if answer.kind == "not applicable"), None)
    if reason is not None:
        return Verdict("skipped", reason)
    verdict = check.judge(run, [answers[rank].value for rank in range(run.world_size)])
    if verdict.status == "failed":
        verdict = replace(verdict, remedy=verdict.remedy or check.remedy, blocks=True)
    return verdict


def _failed(text: str, remedy: str, ranks: Iterable[int], out_of_step: bool) -> Verdict:
    return Verdict("failed", text, remedy, {"processes": [*ranks]}, blocks=True, out_of_step=out_of_step)


def _of_errors(errors: dict[int, str]) -> str:
    """Returns the first error, with the processes that have one."""
    return f"{processes([*errors])}: {next(iter(errors.values()))}"


def _take_leave(run: CheckRun) -> None:
    """Lets process 0, which may hold the store, leave after the others have read the last verdict."""
    if run.rank:
        run.board.post(f"bye/{run.rank}", True)
        return
    deadline, byes = time.monotonic() + PATIENCE, [f"bye/{rank}" for rank in range(1, run.world_size)]
    while time.monotonic() < deadline and not all(map(run.board.has, byes)):
        time.sleep(_BETWEEN_LOOKS)


def end_at_once(status: int) -> None:
    """Ends this process without waiting for threads that hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
