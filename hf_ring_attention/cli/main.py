"""Starts the command line, `hf-ring-attention`; a wrong argument ends it with one line on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from .arguments import missing_extra


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; `arguments` are those of the process by default.

    Raises:
        SystemExit: 2 after one line on stderr for what was wrong with the arguments, 1 after one that names processes that
            are gone, 130 where the user stopped it.
    """
    missing = missing_extra("the command line", "typer", "rich")
    if missing:
        sys.exit(f"hf-ring-attention: {missing}")
    import typer

    from .app import PROGRAM, app
    from .options import CommandError, Refusal

    command = typer.main.get_command(app)
    try:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            status = command.main(arguments, prog_name=PROGRAM, standalone_mode=False)
        else:
            status = _among_others(partial(command.main, arguments, prog_name=PROGRAM, standalone_mode=False))
    except CommandError as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else PROGRAM
        message = " ".join(error.format_message().split()).rstrip(".")
        if not isinstance(error, (typer.BadParameter, Refusal)) or message.startswith("Missing"):
            message += f". '{where} --help' shows what it takes"
        print(f"{where}: {message}", file=sys.stderr)
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


def _among_others(run: Callable[[], Any]) -> Any:
    """Runs a command as one process of a launch; if others are lost, one line names them in place of a traceback."""
    from ..transport.lost_processes import LostProcesses, naming_lost_processes  # It loads torch.

    try:
        with naming_lost_processes():
            return run()
    except LostProcesses as error:
        print(f"hf-ring-attention: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
