"""`hf-ring-attention calibrate`: chooses a pattern for each layer and key/value head of a checkpoint, by measurement."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...plan.patterns import Pattern
from ..arguments import missing_extra
from ..options import (
    AsJson,
    CausalModel,
    DeviceName,
    ModelDtype,
    RingSize,
    TrustRemoteCode,
    checked,
    choice_option,
    folder_option,
    names_of_files,
    number_option,
    pattern_option,
    read_text,
    refuse,
    texts_option,
    tokens_option,
)
from ..output import print_json, print_sheet, stdout_left_alone, terminal

if TYPE_CHECKING:
    from ...evaluation.calibration.result import Calibration
    from ..calibration_report import TextLosses

EXAMPLES_OF_CALIBRATE = """\b
Examples:
  hf-ring-attention calibrate --model HuggingFaceTB/SmolLM2-135M \\
      --text book.txt --text manual.txt --budget 0.25 --seq-len 8192
  hf-ring-attention calibrate --model ./folder --text book.txt --rows 4 \\
      --held-out other.txt --compare window:512+4 --output calibrated --plot
  torchrun --nproc-per-node 8 -m hf_ring_attention calibrate \\
      --model ./folder --text book.txt --seq-len 128k --output calibrated
"""

#: The files in the folder of a calibration, and the folder of its measurements.
CALIBRATION, REPORT, PICTURE, MEASURED = "calibration.json", "report.md", "layers.png", "measurements"


def calibrate_command(
    model: CausalModel,
    text: Annotated[list[Path], texts_option("--text", "A text in UTF-8; may be given several times.")],
    budget: Annotated[
        float, typer.Option("--budget", metavar="SHARE", help="Share of exact attention's cost, up to 1.")
    ] = 0.25,
    budget_of: Annotated[
        str, choice_option("--budget-of", ("flops", "cache_reads", "bytes"), "The cost that is counted")
    ] = "flops",
    ranks: Annotated[
        int | None,
        number_option("--ranks", "Ranks of the ring whose bytes are counted; default: the processes.", least=2),
    ] = None,
    seq_len: Annotated[int, tokens_option("--seq-len", "Tokens of a row of text.", 2)] = "4k",  # type: ignore[assignment]
    rows: Annotated[int, number_option("--rows", "Rows taken of each text, spread evenly over it.")] = 1,
    menu: Annotated[
        list[str] | None,
        pattern_option(
            "A pattern to choose among; may be given several times. Default: windows with few and with many sinks, and exact.",
            "--menu",
        ),
    ] = None,
    retrieval: Annotated[
        float | None, typer.Option("--retrieval", metavar="WEIGHT", help="Weight of finding tokens again; 0 for none.")
    ] = None,
    refinements: Annotated[int, number_option("--refinements", "Passes around the choice.", least=0)] = 1,
    seed: Annotated[int, number_option("--seed", "What random tokens follow from.", 0, 2**32 - 1)] = 0,
    held_out: Annotated[
        list[Path] | None, texts_option("--held-out", "A text to measure, and not to choose by.")
    ] = None,
    compare: Annotated[
        list[str] | None, pattern_option("A pattern for all heads to measure as well.", "--compare")
    ] = None,
    output: Annotated[
        Path | None,
        folder_option("--output", "Where results and measurements are written; a run that was ended goes on there."),
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help=f"Draw {PICTURE} into the folder of --output.")] = False,
    ring_size: RingSize = None,
    trust_remote_code: TrustRemoteCode = False,
    dtype: ModelDtype = "float32",
    device_name: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Choose a pattern for each layer and key/value head of a checkpoint.

    Passes of the texts measure what each pattern would do to the predictions of this checkpoint; nothing is trained.
    """
    from ..loading import check_kv_heads, check_positions, read_config  # It loads Transformers, which takes seconds.

    config = checked("--model", partial(read_config, trust=trust_remote_code), model)
    checked("--seq-len", check_positions, config, seq_len)
    for one in map(Pattern.parse, compare or []):
        checked("--compare", check_kv_heads, config, model, one)
    if not 0 < budget <= 1:
        raise refuse(
            f"a share of exact attention's cost, above 0 and at most 1, was expected, got {budget:g}", "--budget"
        )
    _check_options(plot, output, ring_size)
    by_option = {"--text": text, "--held-out": held_out or []}
    names = names_of_files([*text, *by_option["--held-out"]])
    contents = {names[path]: read_text(path, option) for option, paths in by_option.items() for path in paths}
    with stdout_left_alone(as_json):
        from ..calibration_run import CalibrationRun

        try:
            run = CalibrationRun(model, dtype, device_name, trust=trust_remote_code)
            ids = {name: run.rows_of(name, content, seq_len, rows) for name, content in contents.items()}
            chosen = run.calibrate(
                [row for path in text for row in ids[names[path]]],
                budget=budget,
                budget_of=budget_of,
                ranks=ranks,
                **({} if menu is None else {"menu": menu}),
                **({} if retrieval is None else {"retrieval": retrieval}),
                refinements=refinements,
                seed=seed,
                folder=None if output is None else output / MEASURED,
            )
            if run.is_first and output is not None:
                chosen.save(output / CALIBRATION)
                run.config_with(chosen).save_pretrained(output)
            losses = run.losses(ids, {names[path] for path in text}, chosen, compare or [])
        except (OSError, ValueError, NotImplementedError) as error:
            raise refuse(str(error)) from None
    if run.is_first:
        _tell(run, chosen, losses, output, plot, as_json)


def _check_options(plot: bool, output: Path | None, ring_size: int | None) -> None:
    if plot and output is None:
        raise refuse(f"the picture is {PICTURE} in the folder of --output: name one", "--plot")
    missing = plot and missing_extra("a picture", "matplotlib")
    if missing:
        raise refuse(missing, "--plot")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if ring_size not in (None, processes):
        raise refuse(
            f"{ring_size} processes are to share each text, and {processes} were started: start {ring_size} with torchrun "
            f"--nproc-per-node {ring_size}",
            "--ring-size",
        )


def _tell(
    run: Any, chosen: Calibration, losses: Sequence[TextLosses], output: Path | None, plot: bool, as_json: bool
) -> None:
    """Writes the report of a calibration and its picture, and prints its tables or its figures."""
    from ..calibration_report import sheet_of_layers, sheet_of_losses, sheet_of_patterns, write_report

    sheets = [sheet_of_patterns(chosen), sheet_of_losses(losses)]
    if output is not None:
        if plot:
            from ..calibration_plots import plot_calibration

            plot_calibration(chosen, output / PICTURE)
        facts = [
            f"model: {run.source}, {run.dtype}, {run.ring.world_size} process(es)",
            f"command: hf-ring-attention {' '.join(sys.argv[1:])}",
            f"versions: {run.versions}",
            f"seed {chosen.seed}, weight of retrieval {chosen.retrieval:g}, {len(chosen.texts)} row(s) of text"
            f"{', each opened by ' + run.opening if run.opening else ''}",
        ]
        all_sheets = [*sheets, sheet_of_layers(chosen)]
        write_report(output / REPORT, "Calibrated patterns", facts, all_sheets, PICTURE if plot else None)
    if as_json:
        of_texts = [{"text": one.name, "held_out": one.held_out, "nll": one.nlls} for one in losses]
        print_json({"model": run.source, "calibration": chosen.to_dict(), "losses": of_texts})
        return
    for sheet in sheets:
        print_sheet(sheet, terminal())
    if output is not None:
        terminal().print(f"written to {output}: {CALIBRATION}, config.json, {REPORT}{', ' + PICTURE if plot else ''}")
