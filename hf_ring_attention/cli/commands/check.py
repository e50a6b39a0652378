"""`hf-ring-attention check`: run by the launcher of a long job before that job, it says in a minute what would go wrong."""

from __future__ import annotations

import textwrap
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import AsJson, RingSize, model_option, pattern_option, positive_option
from ..output import print_json, stdout_left_alone, terminal

if TYPE_CHECKING:
    from ..checks.runner import Verdict

EXAMPLES_OF_CHECK = """\b
Examples:
  hf-ring-attention check --model ./folder
  torchrun --nproc-per-node 8 -m hf_ring_attention check --model ./folder
  torchrun --nproc-per-node 8 -m hf_ring_attention check --ring-size 4 \\
      --model Qwen/Qwen3-8B --pattern pyramid:512,3
  accelerate launch --config_file FILE -m hf_ring_attention check
"""

#: The verdicts as they are shown, with their styles in a terminal.
_SHOWN = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "failed": ("FAILED", "bold red"),
    "skipped": ("-", "dim"),
}
#: The widths of the columns of the verdict and of the check's name.
_COLUMNS = 9, 21


def check_command(
    ring_size: RingSize = None,
    model: Annotated[str | None, model_option("The job's model, or its config.json; no weights are loaded.")] = None,
    pattern: Annotated[
        str | None,
        pattern_option("The job's pattern. Default: what the model has saved, else exact."),
    ] = None,
    timeout: Annotated[float, positive_option("--timeout", "The longest for each check.", "SECONDS")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Check processes, links and attention before a long job, by its own launcher.

    One verdict a line, and what to do about each failure. The exit status is 0 if nothing failed. Attention, a training step
    and generation are compared with one process, at small sizes.
    """
    from ..checks.launch import check_launch
    from ..checks.runner import CheckOptions, end_at_once, told_to_end

    start, console = time.monotonic(), terminal()
    verdicts: dict[str, Verdict] = {}

    def tell(name: str, verdict: Verdict) -> None:
        verdicts[name] = verdict
        if not as_json:
            _print_verdict(name, verdict, console)

    with told_to_end() as told:
        with stdout_left_alone(as_json):
            outcome = check_launch(CheckOptions(ring_size, model, pattern, timeout), tell, told)
        if verdicts and as_json:
            print_json([{"check": name, **asdict(verdict)} for name, verdict in verdicts.items()])
        elif verdicts:
            console.print(_summary(verdicts, time.monotonic() - start))
        if not outcome.all_answer:
            end_at_once(outcome.status)
    raise typer.Exit(outcome.status)


def _print_verdict(name: str, verdict: Verdict, console: Any) -> None:
    """Prints a verdict on one line, which a narrow terminal breaks, and below it the remedy if it has one."""
    from rich.text import Text

    word, style = _SHOWN[verdict.status]
    head = Text(f"{word:{_COLUMNS[0]}}", style=style).append(f"{name:{_COLUMNS[1]}}", style="bold")
    width = console.width - sum(_COLUMNS) if console.is_terminal else 10**6
    margin = " " * sum(_COLUMNS)
    lines = textwrap.wrap(verdict.text, width, break_on_hyphens=False)
    if verdict.remedy:
        lines += textwrap.wrap(f"What to do: {verdict.remedy}", width, break_on_hyphens=False)
    console.print(head.append(f"\n{margin}".join(lines), style="default"), soft_wrap=True)


def _summary(verdicts: dict[str, Verdict], seconds: float) -> str:
    """Returns the last line: what failed, or that nothing did."""
    names = {status: [name for name, x in verdicts.items() if x.status == status] for status in _SHOWN}
    count = len(verdicts) - len(names["skipped"])
    if names["failed"]:
        return f"failed, after {seconds:.0f} s: {', '.join(names['failed'])}"
    warned = f" but for warnings of {', '.join(names['warning'])}" if names["warning"] else ""
    return f"all {count} checks are ok{warned}, in {seconds:.0f} s"
