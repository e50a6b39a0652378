"""Runs all checks as one process of a launch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from .board import Board
from .catalogue import all_checks
from .runner import CheckOptions, CheckRun, Verdict, run_checks


class Outcome(NamedTuple):
    """The end of a run: the exit status, and whether all processes answer, so that this one can end in order."""

    status: int
    all_answer: bool


def check_launch(options: CheckOptions, tell: Callable[[str, Verdict], None], told_to_end: threading.Event) -> Outcome:
    """Runs all checks on this process and on those that its launcher has started beside it.

    Args:
        tell: hears each verdict, on process 0.
        told_to_end: is set when the launcher wants this process to end.
    """
    try:
        board = Board.join(options.timeout)
    except (RuntimeError, ValueError) as error:
        text = f"the processes did not meet within {options.timeout:g} s: {' '.join(str(error).split())}"
        remedy = "Start as many processes as WORLD_SIZE says, where all reach MASTER_ADDR and MASTER_PORT."
        tell("launch", Verdict("failed", text, remedy))
        return Outcome(1, False)
    try:
        verdicts = run_checks(
            CheckRun(options, board, told_to_end), all_checks(options.ring_size or board.world_size), tell
        )
    except RuntimeError as error:
        print(f"hf-ring-attention check: {error}", file=sys.stderr)
        return Outcome(1, False)
    all_answer = not any(verdict.out_of_step for verdict in verdicts.values())
    if all_answer and dist.is_initialized():
        dist.destroy_process_group()
    return Outcome(int(any(verdict.status == "failed" for verdict in verdicts.values())), all_answer)
