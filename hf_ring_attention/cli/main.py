"""The command line, `hf-ring-attention`: puts the commands together, and ends wrong ones with one line on stderr."""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from .._version import __version__
from . import calibrate, check, estimate, explain, lm_eval, models, perplexity, plot, recipes
from .options import Parser, Refusal, require_extra

PROGRAM = "hf-ring-attention"
#: For each command the function that adds its options, the command, whose docstring is its help with examples, and what its
#: usage shows besides options.
COMMANDS: dict[str, tuple[Callable[[Parser], None], Callable[[Any], Any], str]] = {
    "explain": (explain.add_explain, explain.explain_command, ""),
    "estimate": (estimate.add_estimate, estimate.estimate_command, ""),
    "plot pattern": (plot.add_plot_pattern, plot.plot_pattern_command, ""),
    "plot layout": (plot.add_plot_layout, plot.plot_layout_command, ""),
    "plot ring": (plot.add_plot_ring, plot.plot_ring_command, ""),
    "models": (models.add_models, models.models_command, "[TYPE ...] "),
    "perplexity": (perplexity.add_perplexity, perplexity.perplexity_command, ""),
    "calibrate": (calibrate.add_calibrate, calibrate.calibrate_command, ""),
    "check": (check.add_check, check.check_command, ""),
    "lm-eval": (lm_eval.add_lm_eval, lm_eval.lm_eval_command, "[OPTION OF LM_EVAL ...] "),
    "recipes": (recipes.add_recipes, recipes.recipes_command, "FOLDER "),
}
_OF_PLOTS = """\
Examples:
  hf-ring-attention plot pattern --pattern pyramid:512,3 --tokens 8k
  hf-ring-attention plot ring --help
"""


def command_parser() -> Parser:
    """Returns the parser of all commands; it loads neither torch nor Transformers."""
    parser = Parser(prog=PROGRAM, description="Exact and dilated ring attention: costs, pictures and measurements.")
    parser.add_argument("--version", action="version", version=__version__)
    top = parser.add_subparsers(metavar="COMMAND", required=True)
    plots = top.add_parser("plot", help="Draw patterns, layouts and rings.", epilog=_OF_PLOTS)
    below = plots.add_subparsers(metavar="PICTURE", required=True)
    for name, (add_options, command, positionals) in COMMANDS.items():
        text, mark, examples = (inspect.getdoc(command) or "").partition("Examples:")
        description = "\n\n".join(textwrap.fill(part, 80) for part in text.strip().split("\n\n"))
        parent = below if name.startswith("plot ") else top
        own = parent.add_parser(
            name.split()[-1], help=text.split("\n")[0], description=description, epilog=mark + examples
        )
        own.usage = f"{own.prog} {positionals}[option ...]"
        add_options(own)
        own.set_defaults(command=command, prog=own.prog)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line, with the arguments of the process by default.

    Raises:
        SystemExit: 2 after one line about wrong arguments; 1 after one that names processes that are gone, or if nobody reads
            what is printed any more; 130 after Ctrl-C.
    """
    try:
        try:
            _main(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # A reader such as `head` has ended. Python flushes again at its own end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _main(arguments: list[str] | None) -> None:
    """Runs a command, and ends the process."""
    prog = PROGRAM
    try:
        require_extra("the command line", "rich")
        words = sys.argv[1:] if arguments is None else arguments
        if words[:1] == ["lm-eval"] and not {*words[1:]} & {"-h", "--help"}:
            prog = f"{PROGRAM} lm-eval"
            lm_eval.lm_eval_command(words[1:])  # lm-evaluation-harness reads these options.
            sys.exit(0)
        args = command_parser().parse_args(words)
        prog = args.prog
        sys.exit(_run(args.command, args))
    except Refusal as error:
        print(f"{prog}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(command: Callable[[Any], Any], args: Any) -> Any:
    """Runs a command; if other processes of its launch are lost, one line names them in place of a traceback."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return command(args)
    from ..transport.lost_processes import LostProcesses, naming_lost_processes  # It loads torch.

    try:
        with naming_lost_processes():
            return command(args)
    except LostProcesses as error:
        print(f"{PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
