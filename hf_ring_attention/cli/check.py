"""`hf-ring-attention check`: run by the launcher of a long job before that job, it finds in a minute what would go wrong."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from .options import Parser, Refusal, above_zero, at_least
from .output import terminal

if TYPE_CHECKING:
    from .checks.runner import Verdict


#: The verdicts as they are shown, with their styles in a terminal.
_SHOWN = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "failed": ("FAILED", "bold red")}
_SHOWN |= {"skipped": ("-", "dim")}
#: The widths of the columns of the verdict and of the check's name.
_COLUMNS = 9, 21


def add_check(parser: Parser) -> None:
    """Adds the options of `check`."""
    add, text = parser.add_argument, "The job's model, or its config.json; no weights are loaded."
    add("--ring-size", metavar="N", type=at_least(1), help="Processes that share each sequence (default: all).")
    add("--model", metavar="ID_OR_FOLDER", help=text)
    parser.add_pattern("The job's pattern; default: the model's, else exact.")
    add(
        "--timeout", metavar="SECONDS", type=above_zero(), default=30.0, help="The longest for each check (default 30)."
    )


def check_command(args: Namespace) -> int:
    """Check processes, links and attention before a long job, by its own launcher.

    One verdict a line, and what to do about each failure. The exit status is 0 if nothing failed. Attention, a training step
    and generation are compared with one process, at small sizes.

    Examples:
      hf-ring-attention check --model ./folder
      torchrun --nproc-per-node 8 -m hf_ring_attention check --model ./folder
      torchrun --nproc-per-node 8 -m hf_ring_attention check --ring-size 4 \\
          --model Qwen/Qwen3-8B --pattern pyramid:512,3
      accelerate launch --config_file FILE -m hf_ring_attention check
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if args.ring_size is not None and count % args.ring_size:
        raise Refusal(f"a number that divides the {count} processes was expected, got {args.ring_size}", "--ring-size")
    from .checks.catalogue import check_launch
    from .checks.runner import told_to_end

    start, console = time.monotonic(), terminal()
    verdicts: dict[str, Verdict] = {}

    def tell(name: str, verdict: Verdict) -> None:
        verdicts[name] = verdict
        _print_verdict(name, verdict, console)

    with told_to_end() as told:
        status, all_answer = check_launch(args, tell, told)
        if verdicts:
            console.print(_summary(verdicts, time.monotonic() - start))
        if not all_answer:
            sys.stdout.flush()
            os._exit(status)  # Threads that hang would keep it.
    return status


def _print_verdict(name: str, verdict: Verdict, console: Any) -> None:
    """Prints a verdict on one line, which a narrow terminal breaks, and below it the remedy if it has one."""
    from rich.text import Text

    word, style = _SHOWN[verdict.status]
    head = Text(f"{word:{_COLUMNS[0]}}", style=style).append(f"{name:{_COLUMNS[1]}}", style="bold")
    width = console.width - sum(_COLUMNS) if console.is_terminal else 10**6
    lines = textwrap.wrap(verdict.text, width, break_on_hyphens=False)
    if verdict.remedy:
        lines += textwrap.wrap(f"What to do: {verdict.remedy}", width, break_on_hyphens=False)
    margin = " " * sum(_COLUMNS)
    console.print(head.append(f"\n{margin}".join(lines), style="default"), soft_wrap=True)


def _summary(verdicts: dict[str, Verdict], seconds: float) -> str:
    """Returns the last line: the checks that failed, or that none did."""
    names = {status: [name for name, x in verdicts.items() if x.status == status] for status in _SHOWN}
    count = len(verdicts) - len(names["skipped"])
    if names["failed"]:
        return f"failed, after {seconds:.0f} s: {', '.join(names['failed'])}"
    warned = f" but for warnings of {', '.join(names['warning'])}" if names["warning"] else ""
    return f"all {count} checks are ok{warned}, in {seconds:.0f} s"
