"""`hf-ring-attention check`: run by the launcher of a long job before that job, it finds in a minute what would go wrong."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .options import Parser, Refusal, above_zero, at_least, checked
from .output import stdout_left_alone, terminal, wrote_json

if TYPE_CHECKING:
    from .checks.runner import Verdict


#: The verdicts as they are shown, with their styles in a terminal.
_SHOWN = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "failed": ("FAILED", "bold red")}
_SHOWN |= {"skipped": ("-", "dim")}
#: The widths of the columns of the verdict and of the check's name.
_COLUMNS = 9, 21


def add_check(parser: Parser) -> None:
    add = parser.add_argument
    add("--ranks", metavar="N", type=at_least(1), was="--ring-size", help="Ranks in a ring (default: all processes).")
    add("--model", metavar="ID_OR_FOLDER", help="The job's model, or its config.json; it loads no weights.")
    parser.add_pattern("The job's pattern (default: the model's, else exact).")
    text = "Time limit of each check (default 30)."
    add("--timeout", metavar="SECONDS", type=above_zero(), default=30.0, help=text)
    parser.add_json()


def check_command(args: Namespace) -> int:
    """Check processes, links and attention before a long job, with its launcher.

    It prints one verdict per line, and a remedy for each failure. The exit status is 0 if nothing failed. At small sizes, it
    compares attention, a training step and generation with one process.

    Examples:
      hf-ring-attention check --model ./folder
      torchrun --nproc-per-node 8 -m hf_ring_attention check --model ./folder
      torchrun --nproc-per-node 8 -m hf_ring_attention check --ranks 4 \\
          --model Qwen/Qwen3-8B --pattern pyramid:512,3
      accelerate launch --config_file FILE -m hf_ring_attention check
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if args.ranks is not None and count % args.ranks:
        raise Refusal(f"a number that divides the {count} processes was expected, got {args.ranks}", "--ranks")
    from .checks.catalogue import all_checks
    from .checks.runner import leave_processes, meet_processes, run_checks

    start, console = time.monotonic(), terminal()
    verdicts: dict[str, Verdict] = {}
    run = checked(None, meet_processes, args)
    try:
        with stdout_left_alone(args.json):
            for name, verdict in run_checks(run, all_checks(run.ring_size)):
                verdicts[name] = verdict
                if run.rank == run.speaker:
                    _print_verdict(name, verdict, console)
    except RuntimeError as error:  # The store is gone, with the process that held it.
        print(f"hf-ring-attention check: {error}", file=sys.stderr)
        os._exit(1)
    if run.rank == run.speaker and not wrote_json({name: asdict(x) for name, x in verdicts.items()}, args.json):
        console.print(_summary(verdicts, time.monotonic() - start))
    status = int(any(verdict.status == "failed" for verdict in verdicts.values()))
    if any(verdict.out_of_step for verdict in verdicts.values()):
        sys.stdout.flush()
        time.sleep(run.rank == 0)  # It may hold the store, in which the others still read.
        os._exit(status)  # Threads that hang would keep it.
    leave_processes()
    return status


def _print_verdict(name: str, verdict: Verdict, console: Any) -> None:
    """Prints a verdict on one line, which a narrow terminal breaks, and below it the remedy if it has one."""
    from rich.text import Text

    word, style = _SHOWN[verdict.status]
    head = Text(f"{word:{_COLUMNS[0]}}", style=style).append(f"{name:{_COLUMNS[1]}}", style="bold")
    width = console.width - sum(_COLUMNS) if console.is_terminal else 10**6
    texts = [verdict.text, f"What to do: {verdict.remedy}"] if verdict.remedy else [verdict.text]
    lines = [line for text in texts for line in textwrap.wrap(text, width, break_on_hyphens=False)]
    console.print(head.append(f"\n{' ' * sum(_COLUMNS)}".join(lines), style="default"), soft_wrap=True)


def _summary(verdicts: dict[str, Verdict], seconds: float) -> str:
    """Returns the last line: the checks that failed, or that none did."""
    names = {status: [name for name, x in verdicts.items() if x.status == status] for status in _SHOWN}
    if names["failed"]:
        return f"failed, after {seconds:.0f} s: {', '.join(names['failed'])}"
    warned = f" but for warnings of {', '.join(names['warning'])}" if names["warning"] else ""
    return f"all {len(verdicts) - len(names['skipped'])} checks are ok{warned}, in {seconds:.0f} s"
