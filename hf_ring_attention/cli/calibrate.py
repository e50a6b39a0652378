"""`hf-ring-attention calibrate`: chooses a pattern for each layer and key/value head of a checkpoint, by measurement."""

from __future__ import annotations

import copy
import math
import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..plan.patterns import Pattern
from .options import (
    Parser,
    Refusal,
    add_checkpoint,
    add_choice,
    add_json,
    at_least,
    checked,
    existing_file,
    missing_extra,
    new_folder,
    pattern_text,
    read_text,
    token_count,
)
from .output import Sheet, layer_numbers, print_json, print_sheet, short_count, stdout_left_alone

if TYPE_CHECKING:
    from torch import Tensor

    from ..evaluation.calibration.result import Calibration
    from ..ring.ring import Ring

EXAMPLES_OF_CALIBRATE = """\
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
_BUDGETS = {"flops": "the FLOPs", "cache_reads": "the reads of the cache", "bytes": "the bytes of the ring"}


@dataclass(frozen=True)
class TextLosses:
    """The losses of a text under several patterns, in nats a token.

    Attributes:
        name: of the text.
        held_out: whether the text took no part in the choice.
        nlls: by the names of patterns; the first one is exact attention.
    """

    name: str
    held_out: bool
    nlls: dict[str, float]


def add_calibrate(parser: Parser) -> None:
    """Adds the options of `calibrate`."""
    add = parser.add_argument
    add("--model", metavar="ID_OR_FOLDER", required=True, help="A causal language model: hub id or folder.")
    text = "A text in UTF-8; repeatable."
    add("--text", metavar="FILE", type=existing_file, action="append", required=True, help=text)
    text = "Share of exact attention's cost, up to 1 (default 0.25)."
    add("--budget", metavar="SHARE", type=float, default=0.25, help=text)
    add_choice(parser, "--budget-of", tuple(_BUDGETS), "The cost that is counted", "flops")
    text = "Ranks of the ring whose bytes are counted (default: the processes)."
    add("--ranks", metavar="N", type=at_least(2), help=text)
    add("--seq-len", metavar="N", type=token_count(2), default="4k", help="Tokens of a row of text (default 4k).")
    text = "Rows taken of each text, spread evenly over it (default 1)."
    add("--rows", metavar="N", type=at_least(1), default=1, help=text)
    text = "A pattern to choose among; repeatable. Default: windows with few and with many sinks, and exact."
    add("--menu", metavar="TEXT", type=pattern_text, action="append", help=text)
    add("--retrieval", metavar="WEIGHT", type=float, help="Weight of finding tokens again; 0 for none.")
    add("--refinements", metavar="N", type=at_least(0), default=1, help="Passes around the choice (default 1).")
    text = "Number that random tokens follow from (default 0)."
    add("--seed", metavar="N", type=at_least(0, 2**32 - 1), default=0, help=text)
    text = "A text to measure, and not to choose by; repeatable."
    add("--held-out", metavar="FILE", type=existing_file, action="append", default=[], help=text)
    text = "A pattern for all heads to measure as well; repeatable."
    add("--compare", metavar="TEXT", type=pattern_text, action="append", default=[], help=text)
    text = "Folder for results and measurements; an interrupted run continues there."
    add("--output", metavar="FOLDER", type=new_folder, help=text)
    add("--plot", action="store_true", help=f"Draw {PICTURE} into the folder of --output.")
    add("--ring-size", metavar="N", type=at_least(1), help="Processes that share each sequence (default: all).")
    add_checkpoint(parser)
    add_json(parser)


def calibrate_command(args: Namespace) -> None:
    """Choose a pattern for each layer and key/value head of a checkpoint.

    Passes of the texts measure what each pattern would do to the predictions of this checkpoint; nothing is trained.
    """
    from .loading import check_kv_heads, check_positions, read_config  # It loads Transformers, which takes seconds.

    config = checked("--model", read_config, args.model, args.trust_remote_code)
    checked("--seq-len", check_positions, config, args.seq_len)
    for text in args.compare:
        checked("--compare", check_kv_heads, config, args.model, Pattern.parse(text))
    _check_options(args)
    names = names_of_files([*args.text, *args.held_out])
    contents = {names[path]: read_text(path, "--text") for path in args.text}
    contents |= {names[path]: read_text(path, "--held-out") for path in args.held_out}
    with stdout_left_alone(args.json):
        try:
            run = CalibrationRun(args)
            rows = {name: run.rows_of(name, content) for name, content in contents.items()}
            calibration = run.calibrate([row for path in args.text for row in rows[names[path]]])
            losses = run.losses(rows, {names[path] for path in args.text}, calibration)
        except (OSError, ValueError, NotImplementedError) as error:
            raise Refusal(str(error)) from None
    if run.ring.rank == 0:
        _print_calibration(args, run, calibration, losses)


def names_of_files(paths: Sequence[Path]) -> dict[Path, str]:
    """Returns the name that tables and reports give each file: its own, or the paths of all if two files share one."""
    alike = len({path.name for path in paths}) < len(set(paths))
    return {path: str(path) if alike else path.name for path in paths}


def _check_options(args: Namespace) -> None:
    if not 0 < args.budget <= 1:
        raise Refusal(
            f"a share of exact attention's cost, above 0 and at most 1, was expected, got {args.budget:g}", "--budget"
        )
    if args.plot and args.output is None:
        raise Refusal(f"the picture is {PICTURE} in the folder of --output: name one", "--plot")
    missing = missing_extra("a picture", "matplotlib") if args.plot else None
    if missing:
        raise Refusal(missing, "--plot")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if args.ring_size not in (None, processes):
        raise Refusal(
            f"{args.ring_size} processes are to share each text, and {processes} were started: start them with torchrun "
            f"--nproc-per-node {args.ring_size}",
            "--ring-size",
        )


class CalibrationRun:
    """A model on the device of this process, and the ring of all processes.

    Raises:
        ValueError: a model that cannot be loaded.
    """

    ring: Ring

    def __init__(self, args: Namespace) -> None:
        from ..evaluation.texts import opening_tokens
        from .loading import load_model, load_tokenizer, ring_of_processes

        self.args = args
        self.ring, device = ring_of_processes(args.device)
        self._tokenizer = load_tokenizer(args.model, args.trust_remote_code)
        self._model = load_model(args.model, args.dtype, device, args.trust_remote_code)
        #: The tokens with which each row opens.
        self._opening: Tensor = opening_tokens(self._tokenizer)

    @property
    def opening(self) -> str:
        """The tokens with which each row opens, as text; empty for most models."""
        return " ".join(self._tokenizer.convert_ids_to_tokens(self._opening.tolist()))

    def rows_of(self, name: str, content: str) -> list[Tensor]:
        """Returns rows [seq_len] of a text's tokens, spread evenly over it, behind those with which the model's texts open.

        Raises:
            ValueError: a text of fewer tokens.
        """
        import torch

        from ..evaluation.texts import beginning_of

        tokens, count = self.args.seq_len, self.args.rows
        part = beginning_of(content, tokens) if count == 1 else content
        ids = self._tokenizer(part, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]
        room = tokens - len(self._opening)
        if len(ids) < room * count or room < 1:
            raise ValueError(
                f"{name} has {len(ids)} tokens, and {count} row(s) of {room} = {count * room} are needed: take a longer text, "
                f"fewer rows, or a smaller --seq-len"
            )
        starts = [(len(ids) - room) * row // max(1, count - 1) for row in range(count)]
        return [torch.cat([self._opening, ids[start : start + room]]) for start in starts]

    def calibrate(self, rows: Sequence[Tensor]) -> Calibration:
        """Returns the chosen patterns, and writes them and the model's config with them to the folder of --output."""
        from ..evaluation.calibration.calibrate import calibrate
        from ..hf.config import patch_config

        args = self.args
        options = {name: getattr(args, name) for name in ("budget", "budget_of", "ranks", "refinements", "seed")}
        options |= {name: getattr(args, name) for name in ("menu", "retrieval") if getattr(args, name) is not None}
        folder = None if args.output is None else args.output / MEASURED
        calibration = calibrate(self._model, rows, ring=self.ring, folder=folder, **options)
        if self.ring.rank == 0 and args.output is not None:
            calibration.save(args.output / CALIBRATION)
            patch_config(copy.deepcopy(self._model.config), calibration).save_pretrained(args.output)
        return calibration

    def losses(self, rows: dict[str, list[Tensor]], chosen_by: set[str], calibration: Calibration) -> list[TextLosses]:
        """Measures texts under exact attention, under the calibration, and under the patterns of --compare.

        Args:
            chosen_by: the names of the texts by which the patterns were chosen.
        """
        from ..evaluation.perplexity import perplexity
        from ..evaluation.progress import progress_bar
        from ..hf.patch import patch_model

        nlls: dict[str, dict[str, float]] = {name: {} for name in rows}
        compared = {"exact": "exact", "calibrated": calibration, **{text: text for text in self.args.compare}}
        for name, pattern in compared.items():
            patch_model(self._model, pattern, ring=self.ring)
            silent = self.ring.rank > 0
            for text, of_text in progress_bar(f"perplexity, {name}", rows.items(), unit="text", silent=silent):
                reports = [perplexity(self._model, row, ring=self.ring) for row in of_text]
                nlls[text][name] = sum(one.nll for one in reports) / sum(one.tokens for one in reports)
        return [TextLosses(name, name not in chosen_by, of_text) for name, of_text in nlls.items()]


def _print_calibration(
    args: Namespace, run: CalibrationRun, calibration: Calibration, losses: Sequence[TextLosses]
) -> None:
    """Writes the report of a calibration and its picture, and prints its tables or its figures."""
    sheets = [sheet_of_patterns(calibration), sheet_of_losses(losses)]
    if args.output is not None:
        if args.plot:
            from .plots import plot_calibration

            plot_calibration(calibration, args.output / PICTURE)
        _write_report(args, run, calibration, [*sheets, sheet_of_layers(calibration)])
    if args.json:
        of_texts = [{"text": one.name, "held_out": one.held_out, "nll": one.nlls} for one in losses]
        print_json({"model": args.model, "calibration": calibration.to_dict(), "losses": of_texts})
        return
    for sheet in sheets:
        print_sheet(sheet)
    if args.output is not None:
        print(f"written to {args.output}: {CALIBRATION}, config.json, {REPORT}{', ' + PICTURE if args.plot else ''}")


def _write_report(args: Namespace, run: CalibrationRun, calibration: Calibration, sheets: Sequence[Sheet]) -> None:
    import torch
    import transformers

    from ..evaluation.whole_files import write_whole

    facts = [
        f"model: {args.model}, {args.dtype}, {run.ring.world_size} process(es)",
        f"command: hf-ring-attention {' '.join(sys.argv[1:])}",
        f"versions: hf_ring_attention {__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
        f"seed {calibration.seed}, weight of retrieval {calibration.retrieval:g}, {len(calibration.texts)} row(s) of text"
        f"{', each opened by ' + run.opening if run.opening else ''}",
    ]
    parts = ["# Calibrated patterns\n", "\n".join(f"- {fact}" for fact in facts) + "\n"]
    parts += [sheet.markdown() for sheet in sheets]
    if args.plot:
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


def sheet_of_losses(losses: Sequence[TextLosses]) -> Sheet:
    """Returns a table with the perplexity of each text under exact attention, and its ratio under the other patterns."""
    exact, *others = losses[0].nlls
    ratios = [[math.exp(text.nlls[name] - text.nlls[exact]) for name in others] for text in losses]
    rows: list[Any] = []
    for text, of_text in zip(losses, ratios):
        held_out, perplexity = "yes" if text.held_out else "no", f"{math.exp(text.nlls[exact]):.3f}"
        rows.append((text.name, held_out, perplexity, *(f"{ratio:.4f}" for ratio in of_text)))
    if len(losses) > 1:
        rows.append(("mean", "", "", *(f"{sum(of_pattern) / len(losses):.4f}" for of_pattern in zip(*ratios))))
    headings = ("text", "held out", f"perplexity, {exact}", *(f"{name}, over exact's" for name in others))
    return Sheet("Perplexity", headings, rows, left=2)
