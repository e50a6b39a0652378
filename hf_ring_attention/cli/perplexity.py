"""`hf-ring-attention perplexity`: how well a checkpoint predicts texts, by pattern and by context length, without training."""

from __future__ import annotations

import copy
import itertools
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from .options import Parser, Refusal, checked, comma_list, model_source, pattern_or_file, text_file, token_count
from .output import print_table, short_count, stdout_left_alone, tell_loading, wrote_json

#: In place of a pattern's text: the pattern in the model's config.
OWN = "own"
#: The patterns of a command that names none, and the tokens that it reads of each text.
USUAL_PATTERNS, USUAL_TOKENS = ["exact", "window:512+4", "pyramid:512,3"], 4096


def add_perplexity(parser: Parser) -> None:
    add = parser.add_argument
    parser.add_model("A causal language model: hub id, folder, or smollm2-135m. Needed, or as first word.")
    add("--text", metavar="FILE", type=text_file, nargs="+", action="extend", help="Texts in UTF-8.")
    add("words", metavar="MODEL TEXT_FILE ...", nargs="*", help="Short for --model MODEL --text TEXT_FILE ...")
    text = f"A pattern, a calibration.json, or own (the config's); one or several (default {' '.join(USUAL_PATTERNS)})."
    add("--pattern", metavar="TEXT", nargs="+", action="extend", type=_pattern_or_own, help=text)
    text = "Tokens in a row: texts are cut into rows of each length, and shorter texts are one row (default 4k)."
    add("--tokens", metavar="N,N,...", type=comma_list(token_count(2)), help=text)
    text = "Read only the first N tokens of each text (default: the largest of --tokens)."
    add("--text-tokens", metavar="N", type=token_count(2), help=text)
    add("--stride", metavar="N", type=token_count(), help="With --tokens: each row starts N tokens after the previous.")
    parser.add_picture("--plot", "Draw perplexity against the length of rows.")
    parser.add_choice("--dtype", ("float32", "bfloat16", "float16"), "Data type", "float32")
    parser.add_json()


def _pattern_or_own(text: str) -> str:
    """Reads a pattern, the file of a calibration, or "own"."""
    return text if text == OWN else pattern_or_file(text)


def perplexity_command(args: Namespace) -> None:
    """Measure the perplexity of texts under attention patterns, and at several context lengths.

    Nothing is trained: the figures show how much quality a pattern costs the checkpoint as it is. Several processes, started
    by torchrun or accelerate launch, share each row and print the same figures as one process.

    Examples:
      hf-ring-attention perplexity --model HuggingFaceTB/SmolLM2-135M --text a.txt
      hf-ring-attention perplexity --model ./folder --text *.txt \\
          --tokens 1k,4k,16k --pattern exact calibration.json --plot a.png
      hf-ring-attention perplexity --model ./folder --text book.txt --tokens 4k \\
          --stride 512 --text-tokens 64k --json
      torchrun --nproc-per-node 8 -m hf_ring_attention perplexity \\
          --model ./folder --text book.txt --tokens 32k,128k
    """
    files, lengths, trust = *_files_and_lengths(args), args.trust_remote_code
    tell_loading(args.model)
    from ..cost.models import load_config
    from ..evaluation.texts import tokenized_text
    from .loading import check_positions, load_model, load_tokenizer, ring_of_processes  # It loads torch.

    config = checked("--model", load_config, args.model, trust=trust)
    with stdout_left_alone(args.json):
        ring, device = ring_of_processes()
        tokenizer = checked("--model", load_tokenizer, args.model, trust)
        texts = {name: tokenized_text(text, tokenizer, args.text_tokens or max(lengths)) for name, text in files}
        for name, text in texts.items():
            least = max(1, text.opening) + 1  # The opening tokens, or else the first, are not scored.
            if len(text.ids) < least:
                raise Refusal(f"{name}: {least} tokens or more are needed, got {len(text.ids)}", "--text")
        longest = min(max(lengths), max(len(text.ids) for text in texts.values()))
        checked("--tokens", check_positions, config, longest)
        model = checked("--model", load_model, args.model, args.dtype, device, trust)
        rows = _measured(args, model, texts, lengths, ring)
    if ring.rank == 0 and args.plot is not None:
        from .plots import plot_perplexities  # It imports matplotlib.

        plot_perplexities(rows, args.plot)
    setting = {"model": args.model, "dtype": args.dtype, "processes": ring.world_size}
    if ring.rank == 0 and not wrote_json({**setting, "rows": rows}, args.json):
        by_length = args.text_tokens is not None or {row["length"] for row in rows} != {*lengths[:1]}
        _print_rows(rows, f"{args.model}, {args.dtype}", by_length)


def _files_and_lengths(args: Namespace) -> tuple[list[tuple[str, str]], list[int]]:
    """Returns the names of texts with their contents, and the lengths of rows; a first word without a flag is the model."""
    words = [*filter(None, [args.model]), *args.words]
    if not words or len(words) + len(args.text or ()) < 2:
        raise Refusal("a model and a text are needed: --model ID_OR_FOLDER --text FILE")
    args.model, *names = checked("--model", model_source, words[0]), *words[1:]
    files = [*(args.text or ()), *(checked("--text", text_file, name) for name in names)]
    lengths = list(dict.fromkeys(args.tokens or [args.text_tokens or USUAL_TOKENS]))
    if args.stride is not None and not (args.tokens and args.stride <= min(lengths)):
        raise Refusal(f"it needs --tokens, and may be at most the shortest of them, got {args.stride}", "--stride")
    if args.plot is not None and len(lengths) == 1:
        raise Refusal("it needs two or more lengths of --tokens", "--plot")
    return files, lengths


def _measured(
    args: Namespace, model: Any, texts: dict[str, Any], lengths: list[int], ring: Any
) -> list[dict[str, Any]]:
    """Returns a row for each text, length and pattern, and for several texts also rows of all their tokens."""
    from ..cost.models import attention_of_model
    from ..evaluation.calibration.result import load_pattern
    from ..evaluation.lengths import figures_by_length, sum_of_texts
    from ..hf.names import IMPLEMENTATION

    names = list(dict.fromkeys(args.pattern or USUAL_PATTERNS))
    if OWN in names and getattr(model.config.get_text_config(), IMPLEMENTATION, None) is None:
        raise Refusal("own: the model's config has no pattern; ra.patch_config puts one there", "--pattern")
    patterns = {name: None if name == OWN else load_pattern(name) for name in names}
    source = copy.deepcopy(model.config), args.model
    attention = {name: checked("--pattern", attention_of_model, *source, pattern) for name, pattern in patterns.items()}
    figures = checked(None, figures_by_length, model, texts, patterns, lengths, args.stride, ring, ring.rank == 0)
    rows = {}
    for text, length, name in itertools.product([*texts, *["all"] * (len(texts) > 1)], lengths, names):
        of_length = [one for one in figures if one.length == min(length, len(texts[one.text].ids))]
        group = [one for one in of_length if one.pattern == name and text in (one.text, "all")]
        shares = [attention[name].flop_share(one.length) * one.tokens for one in group]
        whole = sum_of_texts(text, group)
        columns = ("text", "length", "pattern", "perplexity", "bits_per_byte", "nll", "tokens", "seconds")
        row = {column: getattr(whole, column) for column in columns}
        # A text that is shorter than several lengths is measured once.
        rows[text, whole.length, name] = {**row, "share_of_exact_flops": sum(shares) / whole.tokens}
    return [*rows.values()]


def _print_rows(rows: Sequence[dict[str, Any]], title: str, by_length: bool) -> None:
    """Prints a table of the rows; perplexity also as the change from the first of several patterns."""
    first = {(row["text"], row["length"]): row["perplexity"] for row in reversed(rows)}
    columns: dict[str, Any] = {
        "text": lambda row: row["text"],
        "length": lambda row: short_count(row["length"]),
        "pattern": lambda row: row["pattern"],
        "perplexity": lambda row: f"{row['perplexity']:.3f}",
        "change": lambda row: f"{row['perplexity'] / first[row['text'], row['length']] - 1:+.1%}",
        "bits per byte": lambda row: "-" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.3f}",
        "share of exact FLOPs": lambda row: f"{row['share_of_exact_flops']:.1%}",
        "tokens scored": lambda row: row["tokens"],
        "seconds": lambda row: f"{row['seconds']:.1f}",
    }
    del columns["seconds" if by_length else "length"]  # Lines of both would be too long.
    if len({row["pattern"] for row in rows}) == 1:
        del columns["change"]
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    print_table(title, list(columns), cells, left=list(columns).index("perplexity"))
