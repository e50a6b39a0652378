"""Shows the whole package on real input: a pretrained model gets patterns for its heads, is evaluated, and learns them.

    python recipes/demo.py            (or: make demo)

It writes demo/demo.json with every figure; demo/calibration.json, which other recipes take as --pattern, and a picture of it,
demo/layers.png; demo/calibrated, the model with these patterns in its config; demo/evaluation, the report on questions about
long prompts; demo/patterns.png (who attends to whom), demo/quality.png (perplexity against FLOPs) and demo/losses.png (loss
along the document); in about 8 minutes on 2 CPU cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
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
from hf_ring_attention.evaluation.journal import RUN_FILE
from hf_ring_attention.tools.arguments import at_least, missing_extra, new_folder
from hf_ring_attention.tools.calibration_plots import plot_calibration
from hf_ring_attention.tools.calibration_report import sheet_of_patterns
from hf_ring_attention.tools.output import print_sheet
from hf_ring_attention.tools.plots import plot_losses, plot_patterns, plot_quality

PATTERNS = ["exact", "window:512+4", "pyramid:512,3", "longnet:512/1,2048/4,all/8"]
BUDGET = 0.25
#: The tokens of the manual before each row that calibration reads: behind what perplexity is measured on.
CALIBRATED_AT = (40_000, 80_000)
#: What is asked of the calibrated model, which has its patterns in its config.
QUESTIONS = [
    *("--pattern", "exact", "--pattern", "window:512+4", "--pattern", "own"),
    *("--tasks", "passkey", "--lengths", "2k", "--depths", "0,0.5,1", "--samples", "1", "--scores", "likelihood"),
]
PICTURES = ("patterns", "layers", "quality", "losses")
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


def remove_report(folder: Path) -> None:
    """Removes the report of an earlier demo, whose model may have had other patterns; a folder without one stays as it is."""
    if (folder / RUN_FILE).exists():
        shutil.rmtree(folder)


def named(figures: list[dict], calibration_file: Path) -> list[dict]:
    """Returns figures of patterns, in which a calibration has a name in place of its file."""
    return [
        row | {"pattern": "calibrated" if row["pattern"] == str(calibration_file) else row["pattern"]}
        for row in figures
    ]


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=at_least(2), default=4096, help="tokens of the document that are read")
    parser.add_argument(
        "--calibrate", type=at_least(64), default=2048, help="tokens of each of the two rows that calibration reads"
    )
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
    tokenizer, model = common.load_tokenizer(), common.load_model()
    text = documents.whole_text(documents.Sources())
    heads = {"num_heads": model.config.num_attention_heads, "num_kv_heads": model.config.num_key_value_heads}

    console.rule(f"1. calibrate: a pattern for each head, at {BUDGET:.0%} of exact attention's FLOPs")
    rows = [common.tokenize(tokenizer, text, args.calibrate, skip)[0] for skip in CALIBRATED_AT]
    # Second passes would take nearly as long again.
    calibration = ra.calibrate(model, rows, budget=BUDGET, seq_len=args.tokens, refinements=0)
    calibration_file = args.output / "calibration.json"
    calibration.save(calibration_file)
    print_sheet(sheet_of_patterns(calibration), console)
    minutes = {"calibrate": (time.perf_counter() - start) / 60}

    console.rule(f"2. evaluate: perplexity of {args.tokens} other tokens, one process")
    ids = common.tokenize(tokenizer, text, args.tokens)
    one = named(perplexity.measure(model, ids, [*PATTERNS, str(calibration_file)]), calibration_file)
    console.print(perplexity.table(one, f"SmolLM2-135M, topics of Python's manual, {args.tokens} tokens"))
    minutes["perplexity"] = (time.perf_counter() - start) / 60

    console.rule("3. the same from two processes, the sequence sharded")
    sharded_file = args.output / "sharded.json"
    options = ["--tokens", str(args.tokens), "--json", str(sharded_file), "--patterns", "exact", str(calibration_file)]
    launch("perplexity.py", *options)
    two = named(json.loads(sharded_file.read_text())["figures"], calibration_file)
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
    minutes["two processes"] = (time.perf_counter() - start) / 60

    console.rule("4. questions about long prompts: pass keys to be found again")
    ra.patch_model(model, calibration)
    folder = args.output / "calibrated"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    remove_report(args.output / "evaluation")
    evaluation = ["--model", str(folder), "--output", str(args.output / "evaluation"), *QUESTIONS]
    subprocess.run([sys.executable, "-m", "hf_ring_attention", "evaluate", *evaluation], check=True)
    minutes["questions"] = (time.perf_counter() - start) / 60

    console.rule(
        f"5. fine-tune: {args.steps} steps with the calibrated pattern, the sequence sharded over two processes"
    )
    tuning_file = args.output / "finetune.json"
    launch(
        "finetune.py",
        *("--ring-size", "2", "--pattern", str(calibration_file), "--steps", str(args.steps)),
        *("--seq-len", str(args.seq_len), "--held-out", str(args.held_out)),
        *("--output", str(args.output / "finetuned"), "--json", str(tuning_file)),
    )
    tuning = json.loads(tuning_file.read_text())
    tuning_file.unlink()
    minutes["fine-tune"] = (time.perf_counter() - start) / 60

    patterns = {name: ra.Pattern.parse(name) for name in PATTERNS}
    plot_patterns(patterns, args.tokens, args.output / "patterns.png", **heads)
    plot_calibration(calibration, args.output / "layers.png")
    plot_quality(one, args.output / "quality.png")
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
        "minutes_at_the_end_of": minutes,
        "seconds": seconds,
    }
    checkpoints.write_text(args.output / "demo.json", json.dumps(figures, indent=1))
    console.rule(f"done in {seconds / 60:.1f} minutes")
    for name in ("demo.json", "calibration.json", "evaluation/report.md", *(f"{name}.png" for name in PICTURES)):
        console.print(f"{args.output / name}")


if __name__ == "__main__":
    main()
