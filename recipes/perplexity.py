"""Perplexity of a long document under several attention patterns, on one process or sharded over several.

One device:    python recipes/perplexity.py --tokens 4096
Many devices:  torchrun --nproc-per-node 8 recipes/perplexity.py --model ID --text FILE --tokens 131072
A data set:    python recipes/perplexity.py --model ID --dataset ID --split test --pattern exact window:512+4
A picture:     python recipes/perplexity.py --pattern exact window:512+4 pyramid:512,3 window:128+4 --plot quality.png
Small CPU:     ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 recipes/perplexity.py --tokens 2048

`accelerate launch` works as well as torchrun. Without --model and --text, the recipe takes the demo's.
`hf-ring-attention perplexity` measures several texts and context lengths.
"""

from __future__ import annotations

import argparse
import json

import checkpoints
import common
import documents
import torch
from accelerate import Accelerator
from arguments import DTYPES, PATTERN_HELP, Help, check_extra, load_pattern, new_file, pattern_source, token_count
from bench.timing import Several
from pictures import plot_quality
from transformers import HfArgumentParser

import hf_ring_attention as ra

PATTERNS = ["exact", "window:512+4", "pyramid:512,3"]


def measure(model, ids, names, ring=None):
    """Yields the figures of each pattern. Its FLOPs leave out layers that have their own window."""
    config = model.config.get_text_config()
    heads = {"num_heads": config.num_attention_heads}
    heads["num_kv_heads"] = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for name in names:
        pattern, tokens = load_pattern(name), ids.shape[1]
        report = ra.perplexity(ra.patch_model(model, pattern, ring=ring), ids, ring=ring, progress=True)
        is_pattern = isinstance(pattern, ra.Pattern)
        yield {
            "pattern": name,
            "perplexity": report.perplexity,
            "nll": report.nll,
            "tokens": report.tokens,
            "flop_share": pattern.flop_share(tokens, **heads) if is_pattern else pattern.share("flops", tokens),
            "seconds": report.seconds,
            "token_nll": report.token_nll[0].tolist(),
        }


def line(row):
    """Returns the figures of a pattern as a line of text."""
    figures = f"{row['perplexity']:>10.3f} {row['flop_share']:>8.1%} {row['seconds']:>8.1f} s"
    return f"{figures}  {row['pattern']}"


def parse_args(argv=None) -> argparse.Namespace:
    parser = HfArgumentParser(documents.Texts, description=__doc__, formatter_class=Help)
    common.add_model(parser)
    add = parser.add_argument
    add("--tokens", type=token_count(2), default=4096, help="first tokens of the text to read (default 4096)")
    patterns = f"{PATTERN_HELP} (default {' '.join(PATTERNS)})"
    add("--pattern", dest="patterns", type=pattern_source, nargs="+", action=Several, default=PATTERNS, help=patterns)
    add("--dtype", choices=DTYPES, default="float32", help="data type (default float32)")
    add("--json", type=new_file, help="file for the figures, with the loss of every token")
    add("--plot", type=new_file, help="file for a picture of perplexity against attention FLOPs")
    args = parser.parse_args(argv)
    documents.check_arguments(parser, args)
    check_extra(parser, "--plot", args.plot, "matplotlib")
    return args


def main() -> None:
    args = parse_args()
    accelerator, ring, trust = Accelerator(), ra.Ring(), args.trust_remote_code
    text = documents.whole_text(documents.sources_of(args))
    for name in args.patterns:
        common.check_heads(args.model, load_pattern(name), trust=trust)
    accelerator.print(common.describe_run(ring, args.model, ", ".join(args.patterns), False, f"{args.tokens} tokens"))
    ids = common.tokenize(common.load_tokenizer(args.model, trust=trust), text, args.tokens)
    model = common.load_model(args.model, getattr(torch, args.dtype), trust=trust).to(accelerator.device)
    accelerator.print("perplexity    FLOPs       time  pattern")
    figures = []
    for row in measure(model, ids, args.patterns, ring):
        accelerator.print(line(row))
        figures.append(row)
    if args.json and accelerator.is_main_process:
        checkpoints.write_text(args.json, json.dumps({"world_size": ring.world_size, "figures": figures}))
    if args.plot and accelerator.is_main_process:
        plot_quality(figures, args.plot)
    accelerator.end_training()


if __name__ == "__main__":
    with ra.naming_lost_processes():
        main()
