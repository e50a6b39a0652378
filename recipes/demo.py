"""Shows the whole package on real input: a pretrained model reads a long document, alone and sharded, and learns from it.

    python recipes/demo.py            (or: make demo)

It writes demo/demo.json with every figure, demo/patterns.png (who attends to whom) and demo/losses.png (loss along the
document), in about 8 minutes on 2 CPU cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import checkpoints
import common
import documents
import perplexity
import torch

import hf_ring_attention as ra
from hf_ring_attention.tools.arguments import at_least, missing_extra, new_folder
from hf_ring_attention.tools.plots import plot_losses, plot_patterns

PATTERNS = ["exact", "window:512+4", "pyramid:512,3", "longnet:512/1,2048/4,all/8"]
SHARDED = ["exact", "pyramid:512,3"]
HERE = Path(__file__).parent


def launch(recipe: str, *arguments: str, processes: int = 2) -> None:
    """Runs a recipe with `accelerate launch` on one GPU for each process, or on the CPU where there are too few."""
    environment = dict(os.environ)
    if torch.cuda.device_count() < processes:
        environment["ACCELERATE_USE_CPU"] = "true"
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or processes) // processes))
    settings = ["--multi_gpu", "--num_processes", str(processes), "--num_machines", "1"]
    settings += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *settings, str(HERE / recipe), *arguments]
    subprocess.run(command, check=True, env=environment)


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=at_least(2), default=4096, help="tokens of the document that are read")
    parser.add_argument("--steps", type=at_least(1), default=20, help="fine-tuning steps")
    parser.add_argument("--seq-len", type=at_least(2), default=1024, help="tokens of a fine-tuning sequence")
    parser.add_argument(
        "--held-out", type=at_least(2), default=2048, help="tokens kept for perplexity before and after"
    )
    parser.add_argument(
        "--output", type=new_folder, default=Path("demo"), help="folder for figures and pictures (default demo)"
    )
    args = parser.parse_args(argv)
    missing = missing_extra("the demo", "matplotlib", "rich") or common.obstacle(common.BUNDLED)
    if missing:
        parser.error(missing)
    return args


def main() -> None:
    args = parse_args()
    from rich.console import Console
    from rich.table import Table

    start = time.perf_counter()
    console = Console()
    args.output.mkdir(parents=True, exist_ok=True)

    console.rule(f"1. perplexity of the first {args.tokens} tokens, one process")
    ids = common.tokenize(common.load_tokenizer(), documents.whole_text(documents.Sources()), args.tokens)
    model = common.load_model()
    one = perplexity.measure(model, ids, PATTERNS)
    console.print(perplexity.table(one, f"SmolLM2-135M, topics of Python's manual, {args.tokens} tokens"))
    heads = {"num_heads": model.config.num_attention_heads, "num_kv_heads": model.config.num_key_value_heads}
    del model

    console.rule("2. the same from two processes, the sequence sharded")
    sharded_file = args.output / "sharded.json"
    options = ["--tokens", str(args.tokens), "--json", str(sharded_file), "--patterns", *SHARDED]
    launch("perplexity.py", *options)
    two = json.loads(sharded_file.read_text())["figures"]
    sharded_file.unlink()
    table = Table(title="one process against two")
    for heading in ("pattern", "one process", "two processes", "relative difference"):
        table.add_column(heading, justify="left" if heading == "pattern" else "right")
    by_pattern = {row["pattern"]: row for row in one}
    for row in two:
        alone = by_pattern[row["pattern"]]["perplexity"]
        row["difference"] = row["perplexity"] / alone - 1
        table.add_row(row["pattern"], f"{alone:.6f}", f"{row['perplexity']:.6f}", f"{row['difference']:+.1e}")
    console.print(table)

    console.rule(f"3. {args.steps} fine-tuning steps with pyramid:512,3, the sequence sharded over two processes")
    tuning_file = args.output / "finetune.json"
    launch(
        "finetune.py",
        *("--ring-size", "2", "--pattern", "pyramid:512,3", "--steps", str(args.steps), "--seq-len", str(args.seq_len)),
        *("--held-out", str(args.held_out), "--output", str(args.output / "finetuned"), "--json", str(tuning_file)),
    )
    tuning = json.loads(tuning_file.read_text())
    tuning_file.unlink()

    patterns = {name: ra.Pattern.parse(name) for name in PATTERNS}
    plot_patterns(patterns, args.tokens, args.output / "patterns.png", **heads)
    plot_losses({row["pattern"]: row.pop("token_nll") for row in one}, args.output / "losses.png")
    for row in two:
        row.pop("token_nll")
    seconds = time.perf_counter() - start
    figures = {
        "version": ra.__version__,
        "tokens": args.tokens,
        "one_process": one,
        "two_processes": two,
        "finetune": tuning,
        "seconds": seconds,
    }
    checkpoints.write_text(args.output / "demo.json", json.dumps(figures, indent=1))
    console.rule(f"done in {seconds / 60:.1f} minutes")
    for name in ("demo.json", "patterns.png", "losses.png"):
        console.print(f"{args.output / name}")


if __name__ == "__main__":
    main()
