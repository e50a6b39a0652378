"""`hf-ring-attention perplexity`: how well a checkpoint predicts texts under several patterns, without training."""

from __future__ import annotations

import copy
import math
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..arguments import existing_file
from ..options import (
    MEASURED_PATTERNS,
    AsJson,
    DeviceName,
    ModelDtype,
    SomePatterns,
    TrustRemoteCode,
    checked,
    parsed,
    picture_option,
    read_text,
    refuse,
    tokens_option,
)
from ..output import Sheet, print_json, print_sheet, spinner, stdout_left_alone, terminal

EXAMPLES_OF_PERPLEXITY = """\b
Examples:
  hf-ring-attention perplexity HuggingFaceTB/SmolLM2-135M book.txt
  hf-ring-attention perplexity ./folder *.txt --tokens 8k \\
      --pattern exact --pattern window:512+4 --pattern longnet:512/1,all/8
  hf-ring-attention perplexity ./folder book.txt --tokens 4k --json
  hf-ring-attention perplexity ./folder book.txt --plot quality.png
"""


def perplexity_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A causal language model: hub id or folder.")],
    texts: Annotated[
        list[Path], typer.Argument(metavar="TEXT_FILE...", parser=parsed(existing_file), help="Texts in UTF-8.")
    ],
    pattern: SomePatterns = MEASURED_PATTERNS,
    tokens: Annotated[int, tokens_option("--tokens", "First tokens of each text.", 2)] = "4k",  # type: ignore[assignment]
    trust_remote_code: TrustRemoteCode = False,
    dtype: ModelDtype = "float32",
    device_name: DeviceName = None,
    plot: Annotated[Path | None, picture_option("--plot", "Draw perplexity against attention FLOPs.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity of texts under attention patterns, each text in one pass.

    Nothing is trained: the figures show what a pattern costs a checkpoint as it is.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        raise refuse(
            f"this command reads a text on one process, and {processes} were started: to shard texts over them, start "
            f"evaluate --tasks perplexity, or recipes/perplexity.py"
        )
    from ..loading import check_positions, read_config  # It loads Transformers, which takes seconds.

    config = checked("MODEL", partial(read_config, trust=trust_remote_code), model)
    contents = {str(path): read_text(path, "TEXT_FILE") for path in texts}
    with stdout_left_alone(as_json):
        ids, loaded = _load(model, contents, tokens, dtype, device_name, trust_remote_code)
        checked("--tokens", check_positions, config, max(row.shape[1] for row in ids.values()))
        rows = _measure(model, config, loaded, ids, list(dict.fromkeys(pattern)))
    if plot is not None:
        from ..plots import plot_quality

        of_all = [row for row in rows if row["text"] == ("all" if len(ids) > 1 else rows[0]["text"])]
        plot_quality([row | {"flop_share": row["share_of_exact_flops"]} for row in of_all], plot)
    if as_json:
        print_json({"model": model, "dtype": dtype, "rows": rows})
        return
    first = {row["text"]: row["perplexity"] for row in reversed(rows)}
    compared = len({row["pattern"] for row in rows}) > 1
    cells = [
        (
            row["text"],
            row["pattern"],
            f"{row['perplexity']:.3f}",
            *([f"{row['perplexity'] / first[row['text']] - 1:+.1%}"] if compared else []),
            f"{row['share_of_exact_flops']:.1%}",
            row["tokens"],
            f"{row['seconds']:.1f}",
        )
        for row in rows
    ]
    change = ("change",) if compared else ()
    headings = ("text", "pattern", "perplexity", *change, "attention FLOPs of exact's", "tokens scored", "seconds")
    print_sheet(Sheet(f"{model}, {dtype}", headings, cells, left=2), terminal())
    if plot is not None:
        terminal().print(f"perplexity against FLOPs: {plot}")


def _load(
    source: str, contents: dict[str, str], tokens: int, dtype: str, device_name: str | None, trust: bool
) -> tuple[dict[str, Any], Any]:
    """Returns the tokens of each text, and the model; refuses a text of a single token."""
    from ...evaluation.texts import first_tokens
    from ..loading import device_or_best, load_model, load_tokenizer

    try:
        tokenizer = load_tokenizer(source, trust=trust)
        ids = {}
        for name, text in contents.items():
            found = first_tokens(text, tokenizer, tokens)[None]
            if found.shape[1] < 2:
                raise refuse(f"{name} has {found.shape[1]} token(s), 2 or more are needed", "TEXT_FILE")
            ids[name] = found
        return ids, load_model(source, dtype, device_or_best(device_name), trust=trust)
    except ValueError as error:
        raise refuse(str(error), "MODEL") from None


def _measure(source: str, config: Any, model: Any, ids: dict[str, Any], patterns: list[str]) -> list[dict[str, Any]]:
    """Returns a row for each text and pattern, and for several texts also one of all their tokens."""
    from ...cost.models import attention_of_model
    from ...evaluation.calibration.result import load_pattern
    from ...evaluation.perplexity import perplexity as measure
    from ...hf.config import patch_config
    from ...hf.patch import patch_model

    loaded, rows = {text: load_pattern(text) for text in patterns}, []
    for pattern in loaded.values():  # One for other models is refused before anything is measured.
        try:
            patch_config(copy.deepcopy(model.config), pattern)
        except (ValueError, NotImplementedError) as error:
            raise refuse(str(error), "--pattern") from None
    for text, pattern in loaded.items():
        for name, row in ids.items():
            try:
                with spinner(f"{text}: {name}"):
                    patch_model(model, pattern)
                    report: Any = measure(model, row)
            except (ValueError, NotImplementedError) as error:
                raise refuse(str(error)) from None
            rows.append(
                {
                    "text": name,
                    "pattern": text,
                    "perplexity": report.perplexity,
                    "nll": report.nll,
                    "tokens": report.tokens,
                    "share_of_exact_flops": attention_of_model(config, source, pattern).flop_share(row.shape[1]),
                    "seconds": report.seconds,
                }
            )
    if len(ids) > 1:
        rows += [_of_all(text, [row for row in rows if row["pattern"] == text]) for text in patterns]
    return sorted(rows, key=lambda row: [*ids, "all"].index(row["text"]))


def _of_all(pattern: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    nll, tokens = (sum(row[name] for row in rows) for name in ("nll", "tokens"))
    return {
        "text": "all",
        "pattern": pattern,
        "perplexity": math.exp(nll / tokens),
        "nll": nll,
        "tokens": tokens,
        "share_of_exact_flops": sum(row["share_of_exact_flops"] * row["tokens"] for row in rows) / tokens,
        "seconds": sum(row["seconds"] for row in rows),
    }
