"""Perplexity of a long document under several attention patterns, in one pass, whole or sharded over processes.

One device:    python recipes/perplexity.py --tokens 4096
Many devices:  torchrun --nproc-per-node 8 recipes/perplexity.py --model ID --text FILE --tokens 131072
A data set:    python recipes/perplexity.py --model ID --dataset ID --split test --patterns exact window:512+4
A picture:     python recipes/perplexity.py --patterns exact window:512+4 pyramid:512,3 window:128+4 --plot quality.png
Small CPU:     ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 recipes/perplexity.py --tokens 2048
SLURM, 2 nodes of 8 GPUs, one ring of 16:
    srun --nodes 2 --ntasks-per-node 1 bash -c 'torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 --rdzv-backend c10d \\
        --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1):29500 \\
        recipes/perplexity.py --model ID --text FILE --tokens 524288'

`accelerate launch` works as well as torchrun. Without --model and --text, the recipe reads the model and the text of the
demo.
"""

from __future__ import annotations

import argparse
import json

import checkpoints
import common
import documents
import torch
from accelerate import Accelerator

import hf_ring_attention as ra
from hf_ring_attention.cli.arguments import at_least, missing_extra, new_file, pattern_source, picture_file
from hf_ring_attention.cli.plots import plot_quality
from hf_ring_attention.cost.models import attention_of_model
from hf_ring_attention.evaluation.calibration.result import load_pattern


def measure(model, ids, specs, ring=None, progress=print):
    """Returns a dict of figures for each pattern, in order."""
    figures = []
    for spec in specs:
        pattern = load_pattern(spec)
        ra.patch_model(model, pattern, ring=ring)
        report = ra.perplexity(model, ids, ring=ring)
        figures.append(
            {
                "pattern": spec,
                "perplexity": report.perplexity,
                "nll": report.nll,
                "tokens": report.tokens,
                "flop_share": attention_of_model(model.config, model.name_or_path, pattern).flop_share(ids.shape[1]),
                "seconds": report.seconds,
                "token_nll": report.token_nll[0].tolist(),
            }
        )
        progress(f"{spec}: perplexity {report.perplexity:.3f} in {report.seconds:.1f} s")
    return figures


def table(figures, title):
    """Returns the figures as a table; perplexity also as the change from the first of several rows."""
    from rich.table import Table

    shown = Table(title=title)
    several = len(figures) > 1
    for heading in ("pattern", "perplexity", *["change"] * several, "attention FLOPs", "seconds"):
        shown.add_column(heading, justify="left" if heading == "pattern" else "right")
    for row in figures:
        change = row["perplexity"] / figures[0]["perplexity"] - 1
        shown.add_row(
            row["pattern"],
            f"{row['perplexity']:.3f}",
            *[f"{change:+.1%}"] * several,
            f"{row['flop_share']:.1%}",
            f"{row['seconds']:.1f}",
        )
    return shown


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_model(parser)
    documents.add_arguments(parser, ["text", "dataset", "config", "split", "columns"])
    parser.add_argument(
        "--tokens", type=at_least(2), default=4096, help="first tokens of the text to read (default 4096)"
    )
    parser.add_argument(
        "--patterns",
        type=pattern_source,
        nargs="+",
        default=["exact", "window:512+4", "pyramid:512,3"],
        help=f"{common.PATTERN_HELP} (default exact window:512+4 pyramid:512,3)",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="type of numbers (default float32)",
    )
    parser.add_argument("--json", type=new_file, help="file for the figures, with the loss of every token")
    parser.add_argument("--plot", type=picture_file, help="file for a picture of perplexity against attention FLOPs")
    args = parser.parse_args(argv)
    documents.check_arguments(parser, args)
    missing = missing_extra("the table", "rich")
    if missing:
        parser.error(missing)
    return args


def main() -> None:
    args = parse_args()
    from rich.console import Console

    accelerator = Accelerator()
    text = documents.whole_text(documents.sources_of(args))
    trust, ring = args.trust_remote_code, ra.Ring()
    for spec in args.patterns:
        common.check_heads(args.model, load_pattern(spec), trust=trust)
    accelerator.print(common.describe_run(ring, ", ".join(args.patterns), False, f"{args.tokens} tokens"))
    ids = common.tokenize(common.load_tokenizer(args.model, trust=trust), text, args.tokens)
    model = common.load_model(args.model, getattr(torch, args.dtype), trust=trust).to(accelerator.device)
    progress = print if accelerator.is_main_process else lambda line: None
    figures = measure(model, ids, args.patterns, ring, progress)
    if accelerator.is_main_process:
        Console().print(table(figures, f"{ids.shape[1]} tokens on {ring.world_size} process(es)"))
        if args.json:
            checkpoints.write_text(args.json, json.dumps({"world_size": ring.world_size, "figures": figures}))
        if args.plot:
            plot_quality(figures, args.plot)
            print(f"perplexity against FLOPs: {args.plot}")
    accelerator.end_training()


if __name__ == "__main__":
    with ra.naming_lost_processes():
        main()
