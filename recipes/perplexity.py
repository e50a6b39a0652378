"""Perplexity of a long document under several attention patterns, in one pass, whole or sharded over processes.

One device:    python recipes/perplexity.py --tokens 4096
Many devices:  torchrun --nproc-per-node 8 recipes/perplexity.py --model ID --text FILE --tokens 131072
Small CPU:     ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 recipes/perplexity.py --tokens 2048

`accelerate launch` does as well as torchrun. Without --model and --text it reads the model and the text that install
with the demo extra.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import common
import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table

import hf_ring_attention as ra
from hf_ring_attention import cli


def measure(model, ids, specs, ring=None, progress=print):
    """A dict of figures for each pattern, in order."""
    figures = []
    for spec in specs:
        pattern = cli.parse_pattern(spec)
        ra.patch_model(model, pattern, ring=ring)
        report = ra.perplexity(model, ids, ring=ring)
        figures.append(
            {
                "pattern": spec,
                "perplexity": report.perplexity,
                "nll": report.nll,
                "tokens": report.tokens,
                "flop_share": common.flop_share(pattern, ids.shape[1], model.config),
                "seconds": report.seconds,
                "token_nll": report.token_nll[0].tolist(),
            }
        )
        progress(f"{spec}: perplexity {report.perplexity:.3f} in {report.seconds:.1f} s")
    return figures


def table(figures, title):
    """The figures as a table; perplexity also as the change from the first row."""
    shown = Table(title=title)
    for heading in ("pattern", "perplexity", "change", "attention FLOPs", "seconds"):
        shown.add_column(heading, justify="left" if heading == "pattern" else "right")
    for row in figures:
        change = row["perplexity"] / figures[0]["perplexity"] - 1
        shown.add_row(
            row["pattern"],
            f"{row['perplexity']:.3f}",
            f"{change:+.1%}",
            f"{row['flop_share']:.1%}",
            f"{row['seconds']:.1f}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="hub id or folder of a causal language model; default: the bundled SmolLM2-135M"
    )
    parser.add_argument("--text", help="text file or dataset id; default: the topics of Python's manual")
    parser.add_argument("--tokens", type=int, default=4096, help="first tokens of the text to read (default 4096)")
    parser.add_argument(
        "--patterns", nargs="+", default=["exact", "window:512+4", "pyramid:512,3"], help=cli.PATTERN_HELP
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--json", type=Path, help="file for the figures, with the loss of every token")
    args = parser.parse_args()
    for spec in args.patterns:
        cli.parse_pattern(spec)

    accelerator = Accelerator()
    model, tokenizer = common.load(args.model, getattr(torch, args.dtype))
    ids = common.tokenize(tokenizer, common.load_text(args.text), args.tokens)
    model = model.to(accelerator.device)
    ring = ra.Ring()
    progress = print if accelerator.is_main_process else lambda line: None
    figures = measure(model, ids, args.patterns, ring, progress)
    if accelerator.is_main_process:
        Console().print(table(figures, f"{ids.shape[1]} tokens on {ring.world_size} process(es)"))
        if args.json:
            args.json.write_text(json.dumps({"world_size": ring.world_size, "figures": figures}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
