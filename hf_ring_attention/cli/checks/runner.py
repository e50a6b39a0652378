"""Runs checks one after another on all processes of a launch: every process measures, and judges the answers of all.

Answers travel over the store by which the processes found each other, which takes no part in the communication that is
checked. A measurement runs in a separate thread, so that a process whose measurement hangs still answers. A process without an
answer is gone.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ...transport.lost_processes import is_of_communication

#: The seconds that a process has to answer once another one has failed, or once the launcher ends them all.
PATIENCE = 3.0


class CheckRun:
    """One run of all checks on this process, over the store where the processes found each other.

    The options are of the command line: ranks, model, pattern, and the seconds that a check may take, timeout.
    """

    def __init__(self, options: Namespace, store: Any, rank: int, world_size: int) -> None:
        self.options, self.store, self.rank, self.world_size = options, store, rank, world_size
        self.ring_size = options.ranks or world_size
        self.speaker = 0  # the process that prints verdicts: the first one that answers
        self.told_to_end = threading.Event()  # by the launcher
        self.device: Any = None  # set by the check "launch", which makes the process groups
        self.group: Any = None  # likewise; of a ring, None for all processes
        self.facts: dict[str, Any] = {}  # what earlier checks leave for later ones, by name
        # Answers need a separate connection: the store's first connection is blocked while a process group waits on it.
        self._answers = dist.PrefixStore("hf_ring_attention/check", store.clone())

    def exchange(self, name: str, answer: Any, end: float, failed: bool) -> dict[int, Any]:
        """Leaves an answer in JSON, and returns the answers that are there at the end, by rank; tuples arrive as lists."""
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        self._answers.set(keys[self.rank], json.dumps(answer))
        if failed:
            self._answers.set(f"{name}/failed", "")
        # The others first wait until they have measured.
        self.wait_until(lambda: self._answers.check(keys), name, end + 2 * PATIENCE, turns=2)
        there = {rank: key for rank, key in enumerate(keys) if self._answers.check([key])}
        self.speaker = min(there)
        return {rank: json.loads(self._answers.get(key)) for rank, key in there.items()}

    def wait_until(self, is_over: Callable[[], bool], name: str, end: float, turns: int = 1) -> None:
        """Waits until `is_over` or until the end, which comes soon once a process has failed or all shall end."""
        while not is_over() and time.monotonic() < end:
            if self.told_to_end.is_set() or self._answers.check([f"{name}/failed"]):
                end = min(end, time.monotonic() + turns * PATIENCE)
            time.sleep(0.02)


def meet_processes(options: Namespace) -> CheckRun:
    """Returns the run of this process, which meets in time the processes that the launcher announces in the environment."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return CheckRun(options, dist.HashStore(), 0, 1)
    run = CheckRun(options, *next(rendezvous("env://", timeout=timedelta(seconds=options.timeout))))
    # Launchers send it once another process has failed. This one ends soon after, once it has named the other one.
    signal.signal(signal.SIGTERM, lambda *_: run.told_to_end.set())
    return run


def leave_processes() -> None:
    """Ends once all processes have read the last answers, which process 0 may hold."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check."""

    status: Literal["ok", "warning", "failed", "skipped"]
    text: str  # the figures of a check that is ok; else the fault, with the processes by their numbers
    remedy: str = ""  # what to do, in a sentence; "" for the remedy of the check
    out_of_step: bool = False  # whether a process is gone, hangs or left others waiting: all later checks are skipped


class NotApplicable(Exception):
    """Raised by a measurement that has nothing to check here; its message is the reason."""


@dataclass(frozen=True)
class Check:
    """A check: every process measures in a separate thread, and judges the answers of all processes."""

    name: str
    measure: Callable[[CheckRun], Any]
    judge: Callable[[CheckRun, list[Any]], Verdict]
    remedy: str  # what to do if the measurement raises, or the judge fails it and names no remedy
    needs: tuple[str, ...] = ()  # the checks that must not fail before this one
    alike: str = ""  # what to do if processes answer differently, "{}" for the name of the answer; "" if they may

    def verdict(self, run: CheckRun, answers: list[Any]) -> Verdict:
        """Returns the verdict on the answers of all processes."""
        verdict = (_difference(answers, self.alike) if self.alike else None) or self.judge(run, answers)
        return replace(verdict, remedy=verdict.remedy or self.remedy) if verdict.status == "failed" else verdict


def processes(ranks: Sequence[int]) -> str:
    """Returns "process 1", or "processes 1, 2": at most eight by their numbers."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"process{'es' if len(ranks) > 1 else ''} {shown}"


def _difference(answers: Sequence[Mapping[str, Any]], remedy: str) -> Verdict | None:
    """Returns the verdict on the first name whose values differ from process 0's; None if all values are the same."""
    for name in dict.fromkeys(name for answer in answers for name in answer):
        first, *others = (answer.get(name, "not set") for answer in answers)
        ranks = [rank for rank, value in enumerate(others, 1) if value != first]
        if ranks:
            text = f"{name} is {others[ranks[0] - 1]} on {processes(ranks)} and {first} on process 0"
            return Verdict("failed", text, remedy.format(name))
    return None


def run_checks(run: CheckRun, checks: Sequence[Check]) -> Iterator[tuple[str, Verdict]]:
    """Yields the name and the verdict of each check, in order, on every process."""
    unmet: dict[str, str] = {}  # For checks that failed, or need others that did: why those that need them are skipped.
    obstacle_for_all = ""
    worker = ThreadPoolExecutor(1)  # One thread for all measurements: a device is set for a thread.
    for check in checks:
        obstacle = obstacle_for_all or next((unmet[name] for name in check.needs if name in unmet), "")
        verdict = Verdict("skipped", obstacle) if obstacle else _verdict_of_all(run, check, worker)
        if verdict.out_of_step:
            obstacle_for_all = f"{check.name!r} left the processes out of step"
        if obstacle or verdict.status == "failed":
            unmet[check.name] = f"it needs {check.name!r}"
        yield check.name, verdict
    worker.shutdown(wait=False)  # Its thread may hang.


def _verdict_of_all(run: CheckRun, check: Check, worker: ThreadPoolExecutor) -> Verdict:
    """Measures here, and returns the verdict on all processes: one that is gone comes first, it causes errors of others."""
    end = time.monotonic() + run.options.timeout
    future = worker.submit(check.measure, run)
    run.wait_until(future.done, check.name, end)
    own = _reply_of(future)
    replies = run.exchange(check.name, own, end, failed=own[0] in ("error", "communication"))
    busy, errors, broken, inapplicable = (
        {rank: value for rank, (one, value) in replies.items() if one == kind}
        for kind in ("busy", "error", "communication", "not applicable")
    )
    gone = [rank for rank in range(run.world_size) if rank not in replies]
    if gone:
        text = f"{processes(gone)} of {run.world_size} did not answer: killed, stopped, or ended by an error"
        remedy = "Read that process's output and the launcher's for the cause, then start all again."
        return Verdict("failed", text, remedy, out_of_step=True)
    if busy and not errors:
        text = f"{processes([*busy])} of {run.world_size} did not end within {run.options.timeout:g} s"
        remedy = "See what that process waits for or computes, or allow more with --timeout."
        return Verdict("failed", text, remedy, out_of_step=True)
    if errors or broken:
        causes = errors or broken
        text = f"{processes([*causes])}: {next(iter(causes.values()))}"
        return Verdict("failed", text, check.remedy, out_of_step=len(errors) < run.world_size)
    if inapplicable:
        return Verdict("skipped", next(iter(inapplicable.values())))
    return check.verdict(run, [value for _, value in replies.values()])


def _reply_of(future: Future[Any]) -> tuple[str, Any]:
    """Returns the kind of a process's reply about its measurement now, and the answer, the reason or the error."""
    if not future.done():
        return "busy", None
    error = future.exception()
    if error is None:
        return "measured", future.result()
    text = " ".join(str(error).split())
    if isinstance(error, NotApplicable):
        return "not applicable", text
    if not isinstance(error, (ValueError, NotImplementedError)):
        text = f"{type(error).__name__}: {text}"
    return "communication" if is_of_communication(error) else "error", text
