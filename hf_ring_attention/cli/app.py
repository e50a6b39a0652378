"""Puts the commands of `hf-ring-attention` together, and loads neither torch nor Transformers."""

from __future__ import annotations

from typing import Annotated

import typer

from .._version import __version__
from .commands import calibrate, check, estimate, explain, lm_eval, models, perplexity, plot, recipes

PROGRAM = "hf-ring-attention"

app = typer.Typer(
    name=PROGRAM,
    help="Exact and dilated ring attention: what a call would do, pictures of it, and measurements.",
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


def _version(show: bool) -> None:
    if show:
        print(__version__)
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("explain", epilog=explain.EXAMPLES_OF_EXPLAIN)(explain.explain_command)
app.command("estimate", epilog=estimate.EXAMPLES_OF_ESTIMATE)(estimate.estimate_command)
app.add_typer(plot.plot_commands, name="plot")
app.command("models", epilog=models.EXAMPLES_OF_MODELS)(models.models_command)
app.command("perplexity", epilog=perplexity.EXAMPLES_OF_PERPLEXITY)(perplexity.perplexity_command)
app.command("lm-eval", epilog=lm_eval.EXAMPLES_OF_LM_EVAL, context_settings=lm_eval.ANY_ARGUMENTS)(
    lm_eval.lm_eval_command
)
app.command("calibrate", epilog=calibrate.EXAMPLES_OF_CALIBRATE)(calibrate.calibrate_command)
app.command("check", epilog=check.EXAMPLES_OF_CHECK)(check.check_command)
app.command("recipes", epilog=recipes.EXAMPLES_OF_RECIPES)(recipes.recipes_command)
