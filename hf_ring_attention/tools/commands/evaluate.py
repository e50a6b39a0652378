"""`hf-ring-attention evaluate`: what attention patterns keep of a checkpoint, and what they cost, with a report."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from ..arguments import missing_extra, one_of, pattern_source, token_count
from ..options import (
    MEASURED_PATTERNS,
    AsJson,
    CausalModel,
    DeviceName,
    LayoutName,
    ModelDtype,
    RingSize,
    TransportName,
    TrustRemoteCode,
    checked,
    folder_option,
    list_option,
    names_of_files,
    number_option,
    pattern_option,
    read_text,
    refuse,
    texts_option,
    tokens_option,
)
from ..output import Sheet, print_json, print_sheet, stdout_left_alone, terminal

EXAMPLES_OF_EVALUATE = """\b
Examples:
  hf-ring-attention evaluate --model HuggingFaceTB/SmolLM2-135M \\
      --tasks perplexity,passkey,needle --lengths 2k,4k --output report
  hf-ring-attention evaluate --model ./folder --pattern exact --pattern own \\
      --tasks ruler --lengths 4k,8k --text book.txt --output report
  torchrun --nproc-per-node 8 -m hf_ring_attention evaluate --model ./folder \\
      --tasks perplexity,longppl --lengths 32k --text book.txt --output report
  hf-ring-attention evaluate --model ./folder --tasks perplexity \\
      --lengths 1k,4k --stride 512 --text book.txt --output report --json
"""


def pattern_or_own(text: str) -> str:
    """Reads a pattern, the file of a calibration, or "own" for the pattern that the model's config has."""
    return text if text == "own" else pattern_source(text)


def share(text: str) -> float:
    """Reads a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"a number from 0, the beginning, to 1, the end, was expected, got {text!r}")
    return value


def evaluate_command(
    model: CausalModel,
    tasks: Annotated[
        Any,
        list_option(
            "--tasks",
            str,
            "Of perplexity, longppl, passkey, needle, and RULER's, by name or all: ruler.",
            "NAME,NAME,...",
        ),
    ],
    output: Annotated[Path, folder_option("--output", "The report; the same command goes on.")],
    pattern: Annotated[
        list[str],
        pattern_option(
            "A pattern, a file calibration.json, or own: the one in the model's config; may be given several times.",
            kind=pattern_or_own,
        ),
    ] = MEASURED_PATTERNS,
    lengths: Annotated[Any, list_option("--lengths", token_count(8), "Context lengths in tokens.")] = "2k,4k",
    depths: Annotated[
        Any, list_option("--depths", share, "Where answers stand, from 0 to 1, in passkey and needle.")
    ] = "0,0.25,0.5,0.75,1",
    samples: Annotated[
        int, number_option("--samples", "Pieces of each text, and questions of each length and depth.")
    ] = 4,
    text: Annotated[
        list[Path] | None,
        texts_option(
            "--text", "A text in UTF-8, also a haystack; several times. Default: the help texts of Python 3.11."
        ),
    ] = None,
    stride: Annotated[
        int | None,
        tokens_option("--stride", "Score whole texts in windows of each length that advance by so many tokens."),
    ] = None,
    tokens: Annotated[int | None, tokens_option("--tokens", "With --stride: first tokens of each text.", 2)] = None,
    short_context: Annotated[
        int, tokens_option("--short-context", "That of LongPPL, in tokens; the paper's is 4k.")
    ] = "4k",  # type: ignore[assignment]
    least_gain: Annotated[
        float,
        typer.Option(
            "--least-gain", metavar="NATS", help="Of LongPPL's tokens, by the long context; the paper's is 2."
        ),
    ] = 2.0,
    least_likelihood: Annotated[
        float,
        typer.Option(
            "--least-likelihood", metavar="NATS", help="Log-likelihood of LongPPL's tokens; the paper's is -2."
        ),
    ] = -2.0,
    scores: Annotated[
        Any,
        list_option(
            "--scores",
            one_of("generated", "likelihood"),
            "How answers are scored: generated, likelihood, or both.",
            "NAME,...",
        ),
    ] = "generated,likelihood",
    batch: Annotated[int, number_option("--batch", "Questions that are read at once.")] = 1,
    chat: Annotated[bool, typer.Option("--chat", help="Ask by the chat template of the tokenizer.")] = False,
    seed: Annotated[int, number_option("--seed", "Of questions and intervals.", 0, 2**32 - 1)] = 0,
    ring_size: RingSize = None,
    layout: LayoutName = "auto",
    transport: TransportName = "auto",
    trust_remote_code: TrustRemoteCode = False,
    dtype: ModelDtype = "float32",
    device_name: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a checkpoint under attention patterns: perplexity by context length, LongPPL, and retrieval.

    The report is a folder with results.json in the layout of lm-evaluation-harness, report.md and pictures. A run that was
    interrupted goes on where it was. Several processes, started by torchrun or accelerate launch, share each sequence, and
    the figures are those of one.
    """
    from ..loading import read_config

    checked("--model", read_config, model)
    missing = missing_extra("the pictures of a report", "matplotlib")
    if missing:
        raise refuse(missing, "--output")
    if tokens is not None and stride is None:
        raise refuse(
            "--tokens cuts whole texts, which --stride scores; without it, --lengths and --samples say how much"
        )
    contents = {name: read_text(path, "--text") for path, name in names_of_files(text or []).items()}
    with stdout_left_alone():
        from ...evaluation.jobs import EvaluationPlan, expanded_tasks
        from ...evaluation.texts import EvaluationText, python_topics
        from ..evaluation_run import EvaluationRequest, EvaluationRun

        try:
            plan = EvaluationPlan(
                patterns=tuple(dict.fromkeys(pattern)),
                tasks=expanded_tasks(tasks),
                lengths=tuple(lengths),
                depths=tuple(depths),
                samples=samples,
                seed=seed,
                stride=stride,
                most_tokens=tokens,
                short_context=short_context,
                least_gain=least_gain,
                least_likelihood=least_likelihood,
                scores=tuple(scores),
                batch=batch,
                chat=chat,
            )
            texts = tuple(EvaluationText(name, content) for name, content in contents.items()) or (python_topics(),)
            asked = EvaluationRequest(
                model, texts, plan, output, ring_size, layout, transport, dtype, device_name, trust_remote_code
            )
            results = EvaluationRun(asked).run()
        except argparse.ArgumentTypeError as error:
            raise refuse(str(error), "--model") from None
        except (OSError, ValueError, NotImplementedError) as error:
            raise refuse(" ".join(str(error).split())) from None
    if results is None:  # This process is not the main one.
        return
    if as_json:
        print_json(results)
        return
    from ..evaluation_report import cost_rows, quality_rows

    headings, rows = quality_rows(results)
    notes = [*results["remarks"], f"report: {output / 'report.md'}"]
    print_sheet(Sheet(f"{model}, {dtype}", headings, rows, left=3), terminal())
    headings, rows = cost_rows(results)
    print_sheet(Sheet("", headings, rows, notes, left=2), terminal())
