"""Shows the whole package on real input: a pretrained model gets patterns for its heads, is evaluated, and learns them.

    python recipes/demo.py            (or: make demo)

It writes demo/demo.json with every figure; demo/calibration.json, which other recipes take as --pattern, and its picture
demo/layers.png; demo/retrieval.png (pass keys found by depth and length), demo/patterns.png (who attends to whom),
demo/quality.png (perplexity against FLOPs) and demo/losses.png (loss along the document); in about 8 minutes on 2 CPU cores.
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
from hf_ring_attention.cli.arguments import at_least, missing_extra, new_folder
from hf_ring_attention.cli.calibration_plots import plot_calibration
from hf_ring_attention.cli.calibration_report import sheet_of_patterns
from hf_ring_attention.cli.output import print_sheet
from hf_ring_attention.cli.plots import plot_losses, plot_patterns, plot_quality

PATTERNS = ["exact", "window:512+4", "pyramid:512,3", "longnet:512/1,2048/4,all/8"]
BUDGET = 0.25
#: The tokens of the manual before each row that calibration reads: behind what perplexity is measured on.
CALIBRATED_AT = (40_000, 80_000)
#: What is asked of the calibrated patterns, and of two others.
QUESTIONS = ["--tasks", "passkey", "--lengths", "1024", "2048", "--patterns", "exact", "window:512+4"]
PICTURES = ("patterns", "layers", "quality", "losses", "retrieval")
HERE = Path(__file__).parent


def launch(*program: str, processes: int = 2, stdout: int | None = None) -> str | None:
    """Runs a recipe, or -m and a module, with `accelerate launch`, on one GPU for each process or on the CPU.

    Returns its standard output if `stdout` is subprocess.PIPE.
    """
    environment = dict(os.environ)
    if torch.cuda.device_count() < processes:
        environment["ACCELERATE_USE_CPU"] = "true"
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or processes) // processes))
    settings = ["--multi_gpu", "--num_processes", str(processes), "--num_machines", "1"]
    settings += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *settings, *program]
    return subprocess.run(command, check=True, env=environment, stdout=stdout, text=True).stdout


def by_length(text: str, lengths: list[int], patterns: list[str], output: Path) -> list[dict]:
    """Returns the rows of `hf-ring-attention perplexity --lengths` on two processes, which share each window."""
    manual = output / "manual.txt"
    manual.write_text(text, encoding="utf-8")
    words = ["perplexity", str(common.installed_model(common.BUNDLED)), str(manual), "--json"]
    words += ["--lengths", ",".join(map(str, lengths)), *(word for one in patterns for word in ("--pattern", one))]
    rows = json.loads(launch("-m", "hf_ring_attention", *words, stdout=subprocess.PIPE))["rows"]
    manual.unlink()
    return rows


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

    console.rule("3. perplexity by context length, from two processes that share each window")
    lengths = [max(2, args.tokens // 4), args.tokens]
    two = named(by_length(text, lengths, ["exact", str(calibration_file)], args.output), calibration_file)
    table = Table(title="two processes")
    headings = ("pattern", "tokens", "perplexity", "bits per byte", "relative difference from one process")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "pattern" else "right")
    by_pattern = {row["pattern"]: row["perplexity"] for row in one}
    for row in two:
        figures = [str(row["length"]), f"{row['perplexity']:.3f}", f"{row['bits_per_byte']:.3f}"]
        if row["length"] == args.tokens:
            row["difference"] = row["perplexity"] / by_pattern[row["pattern"]] - 1
            figures.append(f"{row['difference']:+.1e}")
        table.add_row(row["pattern"], *figures)
    console.print(table)
    minutes["two processes"] = (time.perf_counter() - start) / 60

    console.rule("4. questions about long prompts: pass keys to be found again")
    del model
    found_file, picture = args.output / "found.json", args.output / "retrieval.png"
    words = [*QUESTIONS, str(calibration_file), "--json", str(found_file), "--plot", str(picture)]
    subprocess.run([sys.executable, str(HERE / "retrieval.py"), *words], check=True)
    found = named(json.loads(found_file.read_text())["rows"], calibration_file)
    found_file.unlink()
    minutes["questions"] = (time.perf_counter() - start) / 60

    console.rule(
        f"5. fine-tune: {args.steps} steps with the calibrated pattern, the sequence sharded over two processes"
    )
    tuning_file = args.output / "finetune.json"
    launch(
        str(HERE / "finetune.py"),
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
    seconds = time.perf_counter() - start
    figures = {
        "version": ra.__version__,
        "tokens": args.tokens,
        "one_process": one,
        "two_processes": two,
        "pass_keys": found,
        "finetune": tuning,
        "minutes_at_the_end_of": minutes,
        "seconds": seconds,
    }
    checkpoints.write_text(args.output / "demo.json", json.dumps(figures, indent=1))
    console.rule(f"done in {seconds / 60:.1f} minutes")
    for name in ("demo.json", "calibration.json", *(f"{name}.png" for name in PICTURES)):
        console.print(f"{args.output / name}")


if __name__ == "__main__":
    main()
