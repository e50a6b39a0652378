"""`hf-ring-attention calibrate`: chooses a pattern for each layer and key/value head of a checkpoint, by measurement."""

from __future__ import annotations

import copy
import math
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._version import __version__
from .options import (
    Parser,
    Refusal,
    at_least,
    checked,
    existing_file,
    missing_extra,
    new_folder,
    read_text,
    token_count,
)
from .output import Sheet, layer_numbers, print_json, print_sheet, short_count, stdout_left_alone

if TYPE_CHECKING:
    from torch import Tensor

    from ..evaluation.calibration.result import Calibration

#: The files in the folder of a calibration, and the folder of its measurements.
CALIBRATION, REPORT, PICTURE, MEASURED = "calibration.json", "report.md", "layers.png", "measurements"
_BUDGETS = {"flops": "the FLOPs", "cache_reads": "the reads of the cache", "bytes": "the bytes of the ring"}


def add_calibrate(parser: Parser) -> None:
    """Adds the options of `calibrate`."""
    add = parser.add_argument
    add("--model", metavar="ID_OR_FOLDER", required=True, help="A causal language model: hub id or folder.")
    text = "A text in UTF-8; repeatable."
    add("--text", metavar="FILE", type=existing_file, action="append", required=True, help=text)
    text = "Share of exact attention's cost, up to 1 (default 0.25)."
    add("--budget", metavar="SHARE", type=float, default=0.25, help=text)
    parser.add_choice("--budget-of", tuple(_BUDGETS), "The cost that is counted", "flops")
    text = "Ranks of the ring whose bytes are counted (default: the processes)."
    add("--ranks", metavar="N", type=at_least(2), help=text)
    add("--seq-len", metavar="N", type=token_count(2), default="4k", help="Tokens of a row of text (default 4k).")
    text = "Rows taken of each text, spread evenly over it (default 1)."
    add("--rows", metavar="N", type=at_least(1), default=1, help=text)
    text = "A pattern to choose among; repeatable. Default: windows with few and with many sinks, and exact."
    parser.add_pattern(text, "--menu", action="append")
    add("--retrieval", metavar="WEIGHT", type=float, help="Weight of finding tokens again; 0 for none.")
    add("--refinements", metavar="N", type=at_least(0), default=1, help="Passes around the choice (default 1).")
    text = "Number that random tokens follow from (default 0)."
    add("--seed", metavar="N", type=at_least(0, 2**32 - 1), default=0, help=text)
    text = "Folder for results and measurements; an interrupted run continues there."
    add("--output", metavar="FOLDER", type=new_folder, help=text)
    add("--plot", action="store_true", help=f"Draw {PICTURE} into the folder of --output.")
    parser.add_checkpoint()
    parser.add_json()


def calibrate_command(args: Namespace) -> None:
    """Choose a pattern for each layer and key/value head of a checkpoint.

    Passes of the texts measure what each pattern would do to the predictions of this checkpoint; nothing is trained.
    `hf-ring-attention perplexity` measures the result on other texts.

    Examples:
      hf-ring-attention calibrate --model HuggingFaceTB/SmolLM2-135M \\
          --text book.txt --text manual.txt --budget 0.25 --seq-len 8192
      hf-ring-attention calibrate --model ./folder --text book.txt --rows 4 \\
          --output calibrated --plot
      torchrun --nproc-per-node 8 -m hf_ring_attention calibrate \\
          --model ./folder --text book.txt --seq-len 128k --output calibrated
    """
    from .loading import check_positions, read_config  # It loads Transformers, which takes seconds.

    config = checked("--model", read_config, args.model, args.trust_remote_code)
    checked("--seq-len", check_positions, config, args.seq_len)
    if not 0 < args.budget <= 1:
        message = "a share of exact attention's cost, above 0 and at most 1, was expected"
        raise Refusal(f"{message}, got {args.budget:g}", "--budget")
    if args.plot and args.output is None:
        raise Refusal(f"the picture is {PICTURE} in the folder of --output: name one", "--plot")
    missing = missing_extra("a picture", "matplotlib") if args.plot else None
    if missing:
        raise Refusal(missing, "--plot")
    contents = {str(path): read_text(path, "--text") for path in args.text}
    with stdout_left_alone(args.json):
        try:
            calibration, is_first, facts = _calibrated(args, contents)
        except (OSError, ValueError, NotImplementedError) as error:
            raise Refusal(str(error)) from None
    if not is_first:
        return
    sheets = [sheet_of_patterns(calibration), sheet_of_texts(calibration, list(contents), args.rows)]
    if args.output is not None:
        _write_report(args, calibration, facts, [*sheets, sheet_of_layers(calibration)])
    if args.json:
        print_json({"model": args.model, "calibration": calibration.to_dict()})
        return
    for sheet in sheets:
        print_sheet(sheet)
    if args.output is not None:
        print(f"written to {args.output}: {CALIBRATION}, config.json, {REPORT}{', ' + PICTURE if args.plot else ''}")


def _calibrated(args: Namespace, contents: dict[str, str]) -> tuple[Calibration, bool, list[str]]:
    """Returns the chosen patterns, whether this process is the first, and facts for a report.

    Writes the patterns, and the model's config with them, to the folder of --output.
    """
    import torch
    import transformers

    from ..evaluation.calibration.calibrate import calibrate
    from ..evaluation.texts import opening_tokens
    from ..hf.config import patch_config
    from .loading import load_model, load_tokenizer, ring_of_processes

    ring, device = ring_of_processes(args.device)
    tokenizer = load_tokenizer(args.model, args.trust_remote_code)
    rows = [row for name, text in contents.items() for row in rows_of(tokenizer, name, text, args.seq_len, args.rows)]
    model = load_model(args.model, args.dtype, device, args.trust_remote_code)
    options = {name: getattr(args, name) for name in ("budget", "budget_of", "ranks", "refinements", "seed")}
    options |= {name: getattr(args, name) for name in ("menu", "retrieval") if getattr(args, name) is not None}
    folder = None if args.output is None else args.output / MEASURED
    calibration = calibrate(model, rows, ring=ring, folder=folder, **options)
    if ring.rank == 0 and args.output is not None:
        calibration.save(args.output / CALIBRATION)
        patch_config(copy.deepcopy(model.config), calibration).save_pretrained(args.output)
    opening = " ".join(tokenizer.convert_ids_to_tokens(opening_tokens(tokenizer).tolist()))
    facts = [
        f"model: {args.model}, {args.dtype}, {ring.world_size} process(es)",
        f"command: hf-ring-attention {' '.join(sys.argv[1:])}",
        f"versions: hf_ring_attention {__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
        f"seed {calibration.seed}, weight of retrieval {calibration.retrieval:g}, {len(rows)} row(s) of text"
        f"{', each opened by ' + opening if opening else ''}",
    ]
    return calibration, ring.rank == 0, facts


def rows_of(tokenizer: Any, name: str, content: str, tokens: int, count: int) -> list[Tensor]:
    """Returns rows [tokens] of a text, spread evenly over it, behind the tokens with which the model's texts open.

    Raises:
        ValueError: a text of fewer tokens.
    """
    import torch

    from ..evaluation.texts import beginning_of, opening_tokens

    part, opening = beginning_of(content, tokens) if count == 1 else content, opening_tokens(tokenizer)
    ids = tokenizer(part, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]
    room = tokens - len(opening)
    if len(ids) < room * count or room < 1:
        raise ValueError(
            f"{name} has {len(ids)} tokens, and {count} row(s) of {room} = {count * room} are needed: take a longer text, "
            f"fewer rows, or a smaller --seq-len"
        )
    starts = [(len(ids) - room) * row // max(1, count - 1) for row in range(count)]
    return [torch.cat([opening, ids[start : start + room]]) for start in starts]


def _write_report(args: Namespace, calibration: Calibration, facts: list[str], sheets: Sequence[Sheet]) -> None:
    """Writes the report of a calibration in Markdown, and its picture."""
    from ..evaluation.whole_files import write_whole

    parts = ["# Calibrated patterns\n", "\n".join(f"- {fact}" for fact in facts) + "\n"]
    parts += [sheet.markdown() for sheet in sheets]
    if args.plot:
        from .plots import plot_calibration

        plot_calibration(calibration, args.output / PICTURE)
        parts.append(f"![The pattern of each layer and key/value head]({PICTURE})\n")
    write_whole(args.output / REPORT, "\n".join(parts))


def sheet_of_patterns(calibration: Calibration) -> Sheet:
    """Returns a table with a line for each pattern of the menu: its cost, and the layers and heads that have it."""
    heads = calibration.of_heads()
    counts = Counter(pattern for patterns in heads.values() for pattern in patterns)
    total, rows = sum(counts.values()), []
    for pattern in sorted(calibration.menu, key=calibration.share_of):
        layers = layer_numbers([layer for layer in sorted(heads) if pattern in heads[layer]]) or "-"
        share, count = calibration.share_of(pattern), counts[pattern]
        rows.append((str(pattern), f"{share:.1%}", str(count), f"{count / total:.0%}", layers))
    shares = [
        f"{calibration.flop_share:.2%} of exact attention's FLOPs at {short_count(calibration.seq_len)} tokens",
        f"{calibration.share('cache_reads'):.2%} of its reads of the cache for the next token",
    ]
    if calibration.ranks:
        shares.append(f"{calibration.share('bytes'):.2%} of the bytes of a ring of {calibration.ranks}")
    notes = [*shares, f"the budget was {calibration.budget:.2%} of {_BUDGETS[calibration.budget_of]}"]
    title = f"{total} groups of heads: {len(heads)} layers by key/value heads"
    return Sheet(title, ("pattern", "FLOPs of exact's", "groups", "of all", "in layers"), rows, notes)


def sheet_of_layers(calibration: Calibration) -> Sheet:
    """Returns a table with the pattern of each layer, and the mean cost of its heads."""
    rows = []
    for layer, pattern in sorted(calibration.layers.items()):
        shares = list(map(calibration.share_of, calibration.of_heads()[layer]))
        rows.append((str(layer), str(pattern), f"{sum(shares) / len(shares):.1%}"))
    return Sheet("Patterns of layers", ("layer", "pattern", "FLOPs of exact's"), rows, left=2)


def sheet_of_texts(calibration: Calibration, names: Sequence[str], rows: int) -> Sheet:
    """Returns a table with the perplexity of each row of text under exact attention, and its ratio under the choice."""
    titles = [f"{name}, row {row + 1}" if rows > 1 else name for name in names for row in range(rows)]
    cells = [
        (title, f"{math.exp(text.exact_nll):.3f}", f"{text.perplexity_ratio:.4f}")
        for title, text in zip(titles, calibration.texts, strict=True)
    ]
    return Sheet("Perplexity of the texts that were chosen by", ("text", "exact", "calibrated / exact"), cells)
