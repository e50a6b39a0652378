"""Runs checks one after another on all processes of a launch: every process measures, process 0 judges, all hear the verdict.

A measurement runs in a thread of its own. The main thread answers over the store by which the processes found each other,
which takes no part in the communication that is checked. So process 0 can distinguish a process that hangs from one that is
gone, and neither keeps the others waiting.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ...transport.lost_processes import is_of_communication

#: The seconds that a process has to answer once another one has failed, or once the launcher ends them all.
PATIENCE = 3.0
#: The seconds between two looks at the messages.
_BETWEEN_LOOKS = 0.02


class CheckRun:
    """One run of all checks on this process. It meets the processes that the launcher announces in the environment.

    Attributes:
        options: of the command line: ring_size, model, pattern, and the seconds that a check may take, timeout.
        told_to_end: is set when the launcher wants this process to end.
        store: where the processes found each other; None for a process without a launcher.
        device, group: set by the check "launch", which makes the process groups; `group` is a ring's, None for all.
        facts: what earlier checks leave for later ones, by name.

    Raises:
        RuntimeError: processes that do not come in time, or an environment without the variables of launchers.
    """

    def __init__(self, options: Namespace, told_to_end: threading.Event) -> None:
        self.options, self.told_to_end = options, told_to_end
        self.store, self.rank, self.world_size = None, 0, int(os.environ.get("WORLD_SIZE", "1"))
        if self.world_size > 1:
            timeout = timedelta(seconds=options.timeout)
            self.store, self.rank, self.world_size = next(rendezvous("env://", timeout=timeout))
        self.ring_size, self.group = options.ring_size or self.world_size, None
        self.device: Any = None
        self.facts: dict[str, Any] = {}
        # Messages have a connection of their own: a process group that waits for another one blocks the first.
        connection = dist.HashStore() if self.store is None else self.store.clone()
        self._messages: Any = dist.PrefixStore("hf_ring_attention/check", connection)

    @property
    def first_of_ring(self) -> int:
        """The rank in the world of the first process of this process's ring."""
        return self.rank // self.ring_size * self.ring_size

    def post(self, key: str, message: Any) -> None:
        """Leaves a message in JSON for all processes; tuples arrive as lists."""
        self._messages.set(key, json.dumps(message))

    def has(self, *keys: str) -> bool:
        """Returns whether all these messages are there."""
        return bool(self._messages.check([*keys]))

    def read(self, key: str) -> Any:
        """Returns a message that is there."""
        return json.loads(self._messages.get(key))

    def of_all(self, name: str) -> list[str]:
        """Returns the keys of one message of every process."""
        return [f"{name}/{rank}" for rank in range(self.world_size)]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check.

    Attributes:
        text: the figures of a check that is ok; else the fault, with the processes by their numbers.
        remedy: what to do, in a sentence; "" for the remedy of the check.
        out_of_step: whether a process is gone, hangs or left others waiting, so that all later checks are skipped.
    """

    status: Literal["ok", "warning", "failed", "skipped"]
    text: str
    remedy: str = ""
    out_of_step: bool = False


class NotApplicable(Exception):
    """Raised by a measurement that has nothing to check here; its message is the reason."""


@dataclass(frozen=True)
class Check:
    """A check by two functions of a module of this folder, such as `measure_launch` and `judge_launch`.

    The module is imported when the check runs: it may import most of this package, and if that fails on one process, all hear
    of it.

    Attributes:
        functions: the module and the end of their names, such as "machine.launch".
        remedy: what to do if the measurement raises, or the judge fails it without a remedy of its own.
        needs: the checks that must not fail before this one.
        alike: what to do if processes answer differently, "{}" for the name of the answer; "" if they may.
        arguments: further arguments of both functions.
    """

    name: str
    functions: str
    remedy: str
    needs: tuple[str, ...] = ()
    alike: str = ""
    arguments: tuple[Any, ...] = ()

    def measure(self, run: CheckRun) -> Any:
        """Runs on every process, and returns a message of `CheckRun.post`."""
        return self._function("measure")(run, *self.arguments)

    def judge(self, run: CheckRun, answers: list[Any]) -> Verdict:
        """Runs on process 0, with the answers of all processes."""
        verdict: Verdict | None = _difference(answers, self.alike) if self.alike else None
        verdict = verdict or self._function("judge")(run, answers, *self.arguments)
        return replace(verdict, remedy=verdict.remedy or self.remedy) if verdict.status == "failed" else verdict

    def _function(self, kind: str) -> Callable[..., Any]:
        module, _, name = self.functions.partition(".")
        return getattr(importlib.import_module(f".{module}", __package__), f"{kind}_{name}")


def processes(ranks: Sequence[int]) -> str:
    """Returns "process 1", or "processes 1, 2": at most eight by their numbers."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"process{'es' if len(ranks) > 1 else ''} {shown}"


def _difference(answers: Sequence[Mapping[str, Any]], remedy: str) -> Verdict | None:
    """Returns the verdict on the first name whose values differ from process 0's; None if all values are the same."""
    first = answers[0]
    for name in dict.fromkeys(name for answer in answers for name in answer):
        values = [answer.get(name, "not set") for answer in answers]
        other = next((value for value in values if value != first.get(name, "not set")), None)
        if other is not None:
            ranks = [rank for rank, value in enumerate(values) if value == other]
            text = f"{name} is {other} on {processes(ranks)} and {first.get(name, 'not set')} on process 0"
            return Verdict("failed", text, remedy.format(name))
    return None


def run_checks(run: CheckRun, checks: Sequence[Check], tell: Callable[[str, Verdict], None]) -> dict[str, Verdict]:
    """Runs checks in order and returns their verdicts, which are the same on all processes.

    Args:
        tell: hears each verdict on process 0.

    Raises:
        RuntimeError: process 0 does not answer another process.
    """
    verdicts: dict[str, Verdict] = {}
    unmet: dict[str, str] = {}  # For checks that failed, or need others that did: why those that need them are skipped.
    worker = ThreadPoolExecutor(1)  # One thread for all measurements: a device is set for a thread.
    try:
        for check in checks:
            late = [name for name, verdict in verdicts.items() if verdict.out_of_step]
            obstacles = [f"{name!r} left the processes out of step" for name in late]
            obstacles += [unmet[name] for name in check.needs if name in unmet]
            verdict = Verdict("skipped", obstacles[0]) if obstacles else _verdict_of_all(run, check, worker)
            verdicts[check.name] = verdict
            if obstacles or verdict.status == "failed":
                unmet[check.name] = f"it needs {check.name!r}"
            if run.rank == 0:
                tell(check.name, verdict)
        # Process 0, which may hold the store, leaves after the others have read the last verdict.
        run.post(f"bye/{run.rank}", True)
        if run.rank == 0:
            _wait_until(run, "bye", lambda: run.has(*run.of_all("bye")), time.monotonic() + PATIENCE)
    finally:
        worker.shutdown(wait=False, cancel_futures=True)  # Its thread may hang.
    return verdicts


def _verdict_of_all(run: CheckRun, check: Check, worker: ThreadPoolExecutor) -> Verdict:
    """Measures here, posts the reply, and returns the verdict of process 0 on the replies of all processes."""
    name, end = check.name, time.monotonic() + run.options.timeout
    future = worker.submit(check.measure, run)
    _wait_until(run, name, future.done, end)
    reply = _reply_of(future)
    run.post(f"{name}/{run.rank}", reply)
    if reply[0] in ("error", "communication"):
        run.post(f"{name}/failed", True)
    if run.rank == 0:
        replies = run.of_all(name)
        _wait_until(run, name, lambda: run.has(*replies), end, steps=2)
        verdict = _judged(run, check, {rank: run.read(key) for rank, key in enumerate(replies) if run.has(key)})
        run.post(f"{name}/verdict", asdict(verdict))
        return verdict
    _wait_until(run, name, lambda: run.has(f"{name}/verdict"), end, steps=4)
    if not run.has(f"{name}/verdict"):
        raise RuntimeError(f"process 0 has not answered in the check {name!r}, so process {run.rank} ends too")
    return Verdict(**run.read(f"{name}/verdict"))


def _wait_until(run: CheckRun, name: str, is_over: Callable[[], bool], end: float, steps: int = 1) -> None:
    """Waits until `is_over` or until the end, which comes soon once a process has failed or the launcher ends them all.

    Args:
        steps: 1 to wait for this process itself; more if others must have waited before they can answer.
    """
    end += (steps - 1) * PATIENCE
    while not is_over() and time.monotonic() < end:
        if run.told_to_end.is_set() or run.has(f"{name}/failed"):
            end = min(end, time.monotonic() + steps * PATIENCE)
        time.sleep(_BETWEEN_LOOKS)


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


def _judged(run: CheckRun, check: Check, replies: dict[int, tuple[str, Any]]) -> Verdict:
    """Returns the verdict on the replies. Processes that are gone come first, since they cause errors of others."""
    of_kind: dict[str, dict[int, Any]] = {}
    for rank, (kind, value) in replies.items():
        of_kind.setdefault(kind, {})[rank] = value
    gone = [rank for rank in range(run.world_size) if rank not in replies]
    busy, errors, broken = (of_kind.get(kind, {}) for kind in ("busy", "error", "communication"))
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
    if "not applicable" in of_kind:
        return Verdict("skipped", next(iter(of_kind["not applicable"].values())))
    return check.judge(run, [*of_kind["measured"].values()])


@contextmanager
def told_to_end() -> Iterator[threading.Event]:
    """Yields an event that SIGTERM sets: launchers send it once another process has failed.

    This process ends by itself soon after, once it has named the other one.
    """
    event = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, before)
