"""`hf-ring-attention perplexity`: how well a checkpoint predicts texts, by pattern and by context length, without training."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..arguments import existing_file, pattern_source, token_count
from ..options import (
    MEASURED_PATTERNS,
    AsJson,
    DeviceName,
    ModelDtype,
    TrustRemoteCode,
    checked,
    list_option,
    parsed,
    pattern_option,
    picture_option,
    read_text,
    refuse,
    tokens_option,
)
from ..output import Sheet, print_json, print_sheet, short_count, stdout_left_alone, terminal

if TYPE_CHECKING:
    from ...evaluation.lengths import LengthFigures
    from ...evaluation.texts import TokenizedText

EXAMPLES_OF_PERPLEXITY = """\b
Examples:
  hf-ring-attention perplexity HuggingFaceTB/SmolLM2-135M book.txt
  hf-ring-attention perplexity ./folder *.txt --lengths 1k,4k,16k \\
      --pattern exact --pattern window:512+4 --pattern calibration.json
  hf-ring-attention perplexity ./folder book.txt --lengths 4k --stride 512 \\
      --tokens 64k --json
  hf-ring-attention perplexity ./folder book.txt --plot quality.png
  torchrun --nproc-per-node 8 -m hf_ring_attention perplexity ./folder \\
      book.txt --lengths 32k,128k
"""
#: In place of a pattern's text: the pattern in the model's config.
OWN = "own"
#: The tokens that are read of each text, unless an option says otherwise.
USUAL_TOKENS = 4096


def pattern_or_own(text: str) -> str:
    """Reads a pattern, the file of a calibration, or "own"."""
    return text if text == OWN else pattern_source(text)


def perplexity_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A causal language model: hub id or folder.")],
    texts: Annotated[
        list[Path], typer.Argument(metavar="TEXT_FILE...", parser=parsed(existing_file), help="Texts in UTF-8.")
    ],
    pattern: Annotated[
        list[str],
        pattern_option(
            "A pattern, a file calibration.json, or own: the pattern in the model's config; may be given several times.",
            kind=pattern_or_own,
        ),
    ] = MEASURED_PATTERNS,
    tokens: Annotated[
        int | None,
        tokens_option("--tokens", "First tokens of each text. Default: 4k, or the greatest of --lengths.", 2),
    ] = None,
    lengths: Annotated[
        Any, list_option("--lengths", token_count(2), "Context lengths: texts are cut into windows of each.")
    ] = None,
    stride: Annotated[
        int | None, tokens_option("--stride", "With --lengths: windows overlap, and advance by so many tokens.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    dtype: ModelDtype = "float32",
    device_name: DeviceName = None,
    plot: Annotated[
        Path | None, picture_option("--plot", "Draw perplexity against attention FLOPs, at the greatest length.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity of texts under attention patterns, and at several context lengths.

    Nothing is trained: the figures show what a pattern costs a checkpoint as it is. Several processes, started by torchrun
    or accelerate launch, share each window, and the figures are those of one.
    """
    from ..loading import check_positions, read_config  # It loads Transformers, which takes seconds.

    config = checked("MODEL", partial(read_config, trust=trust_remote_code), model)
    by_length, lengths = lengths is not None, list(dict.fromkeys(lengths or [tokens or USUAL_TOKENS]))
    count, names = tokens or max(lengths), list(dict.fromkeys(pattern))
    if stride is not None and not (by_length and stride <= min(lengths)):
        raise refuse(f"it needs --lengths, and may be at most the shortest of them, got {stride}", "--stride")
    contents = {str(path): read_text(path, "TEXT_FILE") for path in texts}
    with stdout_left_alone(as_json):
        from ..loading import load_model, load_tokenizer, ring_of_processes

        try:
            ring, device = ring_of_processes(device_name)
            tokenized = _tokens_of(contents, load_tokenizer(model, trust=trust_remote_code), count)
            longest = min(max(lengths), max(len(text.ids) for text in tokenized.values()))
            checked("--lengths" if by_length else "--tokens", check_positions, config, longest)
            loaded = load_model(model, dtype, device, trust=trust_remote_code)
        except ValueError as error:
            raise refuse(str(error), "MODEL") from None
        rows = _measured(model, config, loaded, tokenized, names, lengths, stride, ring)
    if ring.rank > 0:
        return
    if plot is not None:
        from ..plots import plot_quality

        drawn = [row for row in rows if row["text"] == rows[-1]["text"] and row["length"] == max(lengths)]
        plot_quality([row | {"flop_share": row["share_of_exact_flops"]} for row in drawn], plot)
    if as_json:
        print_json({"model": model, "dtype": dtype, "processes": ring.world_size, "rows": rows})
        return
    print_sheet(_sheet_of(rows, f"{model}, {dtype}", by_length), terminal())
    if plot is not None:
        terminal().print(f"perplexity against FLOPs: {plot}")


def _tokens_of(contents: dict[str, str], tokenizer: Any, count: int) -> dict[str, TokenizedText]:
    """Returns the first tokens of each text; refuses a text of a single token."""
    from ...evaluation.texts import tokenized_text

    found = {name: tokenized_text(text, tokenizer, count) for name, text in contents.items()}
    for name, text in found.items():
        if len(text.ids) < 2:
            raise refuse(f"{name} has {len(text.ids)} token(s), 2 or more are needed", "TEXT_FILE")
    return found


def _measured(
    source: str,
    config: Any,
    model: Any,
    texts: dict[str, TokenizedText],
    names: list[str],
    lengths: list[int],
    stride: int | None,
    ring: Any,
) -> list[dict[str, Any]]:
    """Returns a row for each text, length and pattern, and for several texts also rows of all their tokens."""
    from ...cost.models import attention_of_model
    from ...evaluation.calibration.result import load_pattern
    from ...evaluation.lengths import figures_by_length, sum_of_texts
    from ...evaluation.progress import progress_bar
    from ...hf.config import patch_config
    from ...hf.registration import IMPLEMENTATION

    if OWN in names and getattr(model.config.get_text_config(), IMPLEMENTATION, None) is None:
        raise refuse("own: the model's config has no pattern; ra.patch_config puts one there", "--pattern")
    patterns = {name: None if name == OWN else load_pattern(name) for name in names}
    for one in (pattern for pattern in patterns.values() if pattern is not None):
        try:
            patch_config(copy.deepcopy(model.config), one)
        except (ValueError, NotImplementedError) as error:
            raise refuse(str(error), "--pattern") from None
    try:
        with progress_bar("perplexity", total=len(names) * len(texts) * len(lengths), silent=ring.rank > 0) as bar:
            figures = figures_by_length(model, texts, patterns, lengths, stride, ring, bar.update)
    except (ValueError, NotImplementedError) as error:
        raise refuse(str(error)) from None

    def share(name: str, length: int, text: str) -> float:
        tokens = min(length, len(texts[text].ids))
        return attention_of_model(config, source, patterns[name]).flop_share(tokens)

    rows = [_row(one, share(one.pattern, one.length, one.text)) for one in figures]
    if len(texts) > 1:
        for name in names:
            for length in lengths:
                group = [one for one in figures if (one.pattern, one.length) == (name, length)]
                whole = sum_of_texts("all", group)
                weighted = sum(share(name, length, one.text) * one.tokens for one in group)
                rows.append(_row(whole, weighted / whole.tokens))
    order = [*texts, "all"]
    return sorted(rows, key=lambda row: (order.index(row["text"]), lengths.index(row["length"])))


def _row(one: LengthFigures, share: float) -> dict[str, Any]:
    return {
        "text": one.text,
        "length": one.length,
        "pattern": one.pattern,
        "perplexity": one.perplexity,
        "bits_per_byte": one.bits_per_byte,
        "nll": one.nll,
        "tokens": one.tokens,
        "share_of_exact_flops": share,
        "seconds": one.seconds,
    }


def _sheet_of(rows: Sequence[dict[str, Any]], title: str, by_length: bool) -> Sheet:
    """Returns a table of the rows; perplexity also as the change from the first of several patterns."""
    first = {(row["text"], row["length"]): row["perplexity"] for row in reversed(rows)}
    compared = len({row["pattern"] for row in rows}) > 1
    cells = [
        (
            row["text"],
            *([short_count(row["length"])] if by_length else []),
            row["pattern"],
            f"{row['perplexity']:.3f}",
            *([f"{row['perplexity'] / first[row['text'], row['length']] - 1:+.1%}"] if compared else []),
            "-" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.3f}",
            f"{row['share_of_exact_flops']:.1%}",
            row["tokens"],
            f"{row['seconds']:.1f}",
        )
        for row in rows
    ]
    headings = [
        "text",
        *(["length"] if by_length else []),
        "pattern",
        "perplexity",
        *(["change"] if compared else []),
        *("bits per byte", "attention FLOPs of exact's", "tokens scored", "seconds"),
    ]
    return Sheet(title, headings, cells, left=headings.index("perplexity"))
