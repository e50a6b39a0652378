"""`hf-ring-attention calibrate`: chooses a pattern for each layer and key/value head of a checkpoint, by measurement."""

from __future__ import annotations

import copy
import io
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from ..evaluation.whole_files import write_whole
from .options import Parser, Refusal, above_zero, at_least, checked, new_folder, text_file, token_count
from .output import layer_numbers, print_table, short_count, stdout_left_alone, tell_loading, wrote_json

if TYPE_CHECKING:
    from torch import Tensor

    from ..evaluation.calibration.choice import BudgetOf
    from ..evaluation.calibration.result import Calibration

#: The files in the folder of a calibration, and the folder of its measurements.
CALIBRATION, REPORT, MEASURED = "calibration.json", "report.txt", "measurements"
_BUDGETS: dict[BudgetOf, str] = {
    "flops": "the FLOPs",
    "cache_reads": "the reads of the cache",
    "cache": "the cache",
    "bytes": "the bytes of the ring",
}


def add_calibrate(parser: Parser) -> None:
    add, text = parser.add_argument, "Tokens in each row of text (default 4k)."
    parser.add_model("A causal language model: hub id, folder, or smollm2-135m.", required=True)
    add("--text", metavar="FILE", type=text_file, nargs="+", action="extend", required=True, help="Texts in UTF-8.")
    add("--budget", metavar="SHARE", type=above_zero(1), default=0.25, help="Share of exact's cost (default 0.25).")
    parser.add_choice("--budget-of", tuple(_BUDGETS), "The cost to count", "flops")
    add("--ranks", metavar="N", type=at_least(2), help="Ranks whose bytes are counted (default: all processes).")
    add("--tokens", metavar="N", type=token_count(2), default="4k", help=text)
    add("--rows", metavar="N", type=at_least(1), default=1, help="Rows from each text, evenly spaced (default 1).")
    text = "A pattern to choose from; repeatable. Default: windows with few and with many sinks, and exact."
    parser.add_pattern(text, "--menu", several=True)
    text = "Weight of retrieval in the scores; 0 turns it off (default 0.1)."
    add("--retrieval", metavar="WEIGHT", type=float, default=0.1, help=text)
    add("--refinements", metavar="N", type=at_least(0), default=1, help="Passes that correct the choice (default 1).")
    add("--seed", metavar="N", type=at_least(0, 2**32 - 1), default=0, help="Seed of the random tokens (default 0).")
    text = "Folder for results and measurements; an interrupted run continues there."
    add("--output", metavar="FOLDER", type=new_folder, help=text)
    parser.add_picture("--plot", "Draw the pattern of each layer and key/value head.")
    parser.add_choice("--dtype", ("float32", "bfloat16", "float16"), "Data type", "float32")
    parser.add_json()


def calibrate_command(args: Namespace) -> None:
    """Choose a pattern for each layer and key/value head of a checkpoint.

    It reads the texts to measure how much each pattern would change the predictions of this checkpoint; nothing is trained.
    Then measure the result on other texts with `hf-ring-attention perplexity`.

    Examples:
      hf-ring-attention calibrate --model HuggingFaceTB/SmolLM2-135M \\
          --text book.txt --text manual.txt --budget 0.25 --tokens 8192
      hf-ring-attention calibrate --model ./folder --text book.txt --rows 4 \\
          --output calibrated --plot layers.png
      torchrun --nproc-per-node 8 -m hf_ring_attention calibrate \\
          --model ./folder --text book.txt --tokens 128k --output calibrated
    """
    tell_loading(args.model)
    from ..cost.models import load_config
    from ..evaluation.calibration.calibrate import MENU, calibrate, menu_and_cost
    from ..hf.model.config import patch_config
    from .loading import check_positions, load_model, load_tokenizer, ring_of_processes  # It loads torch.

    trust = args.trust_remote_code
    checked("--tokens", check_positions, checked("--model", load_config, args.model, trust=trust), args.tokens)
    with stdout_left_alone(args.json):
        ring, device = ring_of_processes()
        if args.budget_of == "bytes" and args.ranks is None and ring.world_size == 1:
            raise Refusal("one process moves no bytes: name the ranks of the ring, 2 or more", "--ranks")
        menu = args.menu or MENU
        checked(None, menu_and_cost, menu, args.budget_of, args.ranks, ring, args.tokens, args.budget)
        tokenizer = checked("--model", load_tokenizer, args.model, trust)
        rows = [x for text in args.text for x in checked("--text", rows_of, tokenizer, *text, args.tokens, args.rows)]
        model = checked("--model", load_model, args.model, args.dtype, device, trust)
        names = ("budget", "budget_of", "ranks", "retrieval", "refinements", "seed")
        options = {name: getattr(args, name) for name in names}
        options |= {"menu": menu, "ring": ring, "folder": None if args.output is None else args.output / MEASURED}
        calibration = checked(None, calibrate, model, rows, **options)
    if ring.rank > 0:
        return
    with redirect_stdout(io.StringIO()) as report:
        _print_patterns(calibration, f"{args.model}, {args.dtype}")
        _print_texts(calibration, [name for name, _ in args.text], args.rows)
    shares = {of: calibration.share(of) for of in _BUDGETS if of != "bytes" or calibration.ranks}
    figures = {"model": args.model, "dtype": args.dtype, "shares": shares, **calibration.to_dict()}
    alone = wrote_json(figures, args.json)
    if not alone:
        print(report.getvalue(), end="")
    if args.output is not None:
        calibration.save(args.output / CALIBRATION)
        patch_config(copy.deepcopy(model.config), calibration).save_pretrained(args.output)
        write_whole(args.output / REPORT, report.getvalue())
    if args.plot is not None:
        from .plots import plot_calibration  # It imports matplotlib.

        plot_calibration(calibration, args.plot)
    for place in filter(None, () if alone else (args.output, args.plot, args.json)):
        print(f"wrote {place}")


def rows_of(tokenizer: Any, name: str, content: str, tokens: int, count: int) -> list[Tensor]:
    """Returns rows [tokens] of a text, spread evenly over it, behind the tokens with which the model's texts open."""
    import torch

    from ..evaluation.texts import tokenized_text

    text = tokenized_text(content, tokenizer, tokens if count == 1 else None)
    opening, ids = text.ids.tensor_split([text.opening])
    room = tokens - len(opening)
    if len(ids) < room * count or room < 1:
        remedy = "take a longer text, fewer rows, or a smaller --tokens"
        needed = f"{count * room} (--rows {count} of {room})"
        raise ValueError(f"{name} has {len(ids)} tokens, and {needed} are needed: {remedy}")
    starts = [(len(ids) - room) * row // max(1, count - 1) for row in range(count)]
    return [torch.cat([opening, ids[start : start + room]]) for start in starts]


def _print_patterns(calibration: Calibration, model: str) -> None:
    """Prints a table with a line for each pattern of the menu: its cost, and the layers and heads that have it."""
    heads = calibration.of_heads()
    counts = Counter(pattern for patterns in heads.values() for pattern in patterns)
    total, rows = counts.total(), []
    for pattern in sorted(calibration.menu, key=calibration.share_of):
        layers = layer_numbers([layer for layer in sorted(heads) if pattern in heads[layer]]) or "-"
        shares, count = (f"{calibration.share_of(pattern, of):.1%}" for of in ("flops", "cache")), counts[pattern]
        rows.append((pattern, *shares, count, f"{count / total:.0%}", layers))
    notes = [
        "FLOPs, cache: shares of exact attention's in a group; share: of all groups",
        f"{calibration.flop_share:.2%} of exact attention's FLOPs at {short_count(calibration.seq_len)} tokens",
        f"{calibration.share('cache'):.2%} of its cache (ra.PatternCache)",
        f"{calibration.share('cache_reads'):.2%} of its reads of the cache for the next token",
        f"the budget was {calibration.budget:.2%} of {_BUDGETS[calibration.budget_of]}",
    ]
    if calibration.ranks:
        notes.insert(4, f"{calibration.share('bytes'):.2%} of the bytes of a ring of {calibration.ranks}")
    title = f"{model}: {total} groups of heads in {len(heads)} layers"
    print_table(title, ("pattern", "FLOPs", "cache", "groups", "share", "in layers"), rows, notes)


def _print_texts(calibration: Calibration, names: Sequence[str], rows: int) -> None:
    """Prints a table with the perplexity of each row of text under exact attention, and its ratio under the choice."""
    titles = [f"{name}, row {row + 1}" if rows > 1 else name for name in names for row in range(rows)]
    cells = [
        (title, f"{math.exp(text.exact_nll):.3f}", f"{text.perplexity_ratio:.4f}")
        for title, text in zip(titles, calibration.texts, strict=True)
    ]
    title, note = "Perplexity on the calibration texts (not held out)", f"seed {calibration.seed}, weight of retrieval"
    print_table(title, ("text", "exact", "calibrated / exact"), cells, [f"{note} {calibration.retrieval:g}"])
