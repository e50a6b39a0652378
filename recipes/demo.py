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
from collections import Counter
from pathlib import Path

import checkpoints
import common
import documents
import perplexity
import torch
from arguments import at_least, missing_extra
from pictures import plot_losses, plot_quality

import hf_ring_attention as ra

PATTERNS = ["exact", "window:512+4", "pyramid:512,3", "longnet:512/1,2048/4,all/8"]
BUDGET = 0.25
#: The tokens of the manual before each row that calibration reads: behind the tokens that perplexity reads.
CALIBRATED_AT = (40_000, 80_000)
PICTURES = ("patterns", "layers", "quality", "losses", "retrieval")
HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "hf_ring_attention"]


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
    return [row | {"pattern": row["pattern"].replace(str(calibration_file), "calibrated")} for row in figures]


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, rows = parser.add_argument, "tokens of each of the two rows that calibration reads"
    add("--tokens", type=at_least(2), default=4096, help="tokens of the document that are read")
    add("--calibrate", type=at_least(64), default=2048, help=rows)
    add("--steps", type=at_least(1), default=20, help="fine-tuning steps")
    add("--seq-len", type=at_least(2), default=1024, help="tokens of a fine-tuning sequence")
    add("--held-out", type=at_least(2), default=2048, help="tokens kept for perplexity before and after")
    add("--output", type=Path, default=Path("demo"), help="folder for figures and pictures (default demo)")
    args = parser.parse_args(argv)
    missing = missing_extra("matplotlib", "rich") or common.obstacle(common.BUNDLED)
    if missing:
        parser.error(f"the demo {missing}")
    return args


def main() -> None:
    args = parse_args()
    start, minutes, output = time.perf_counter(), {}, args.output
    output.mkdir(parents=True, exist_ok=True)

    def done(step: str) -> None:
        minutes[step] = (time.perf_counter() - start) / 60
        print(f"-- {minutes[step]:.1f} minutes so far\n", flush=True)

    print(f"== 1. calibrate: a pattern for each head, at {BUDGET:.0%} of exact attention's FLOPs", flush=True)
    tokenizer, model = common.load_tokenizer(), common.load_model()
    text = documents.whole_text(documents.Sources())
    ids = common.tokenize(tokenizer, text, max(CALIBRATED_AT) + args.calibrate)
    rows = [ids[0, first : first + args.calibrate] for first in CALIBRATED_AT]
    # Second passes would take nearly as long again.
    calibration = ra.calibrate(model, rows, budget=BUDGET, seq_len=args.tokens, refinements=0)
    calibration_file = output / "calibration.json"
    calibration.save(calibration_file)
    counts = Counter(str(pattern) for heads in calibration.of_heads().values() for pattern in heads)
    for pattern, count in counts.most_common():
        print(f"{count:>4} groups of heads: {pattern}")
    done("calibrate")

    print(f"== 2. evaluate: perplexity of {args.tokens} other tokens, one process", flush=True)
    print("perplexity    FLOPs       time  pattern")
    one = []
    for row in perplexity.measure(model, ids[:, : args.tokens], [*PATTERNS, str(calibration_file)]):
        one += named([row], calibration_file)
        print(perplexity.line(one[-1]), flush=True)
    heads = [f"--heads={model.config.num_attention_heads}", f"--kv-heads={model.config.num_key_value_heads}"]
    del model
    done("perplexity")

    print("== 3. perplexity by context length, from two processes that share each window", flush=True)
    lengths = [max(2, args.tokens // 4), args.tokens]
    two = named(by_length(text, lengths, ["exact", str(calibration_file)], output), calibration_file)
    by_pattern = {row["pattern"]: row["perplexity"] for row in one}
    for row in two:
        text_of_row = f"{row['pattern']:<10} {row['length']:>6} tokens: perplexity {row['perplexity']:.3f}"
        if row["length"] == args.tokens:
            row["difference"] = row["perplexity"] / by_pattern[row["pattern"]] - 1
            text_of_row += f", {row['difference']:+.1e} from one process"
        print(text_of_row)
    done("two processes")

    print("== 4. questions about long prompts: pass keys to be found again", flush=True)
    found_file = output / "found.json"
    words = ["--tasks", "passkey", "--lengths", "1024", "2048", "--patterns", "exact", "window:512+4"]
    words += [str(calibration_file), "--json", str(found_file), "--plot", str(output / "retrieval.png")]
    subprocess.run([sys.executable, str(HERE / "retrieval.py"), *words], check=True)
    found = named(json.loads(found_file.read_text())["rows"], calibration_file)
    found_file.unlink()
    done("questions")

    print(f"== 5. fine-tune: {args.steps} steps with the calibrated pattern, rows shared by two processes", flush=True)
    tuning_file = output / "finetune.json"
    launch(
        str(HERE / "finetune.py"),
        *("--ring-size", "2", "--pattern", str(calibration_file), "--steps", str(args.steps)),
        *("--seq-len", str(args.seq_len), "--held-out", str(args.held_out)),
        *("--output", str(output / "finetuned"), "--json", str(tuning_file)),
    )
    tuning = json.loads(tuning_file.read_text())
    tuning_file.unlink()
    done("fine-tune")

    drawn = ["pattern", *PATTERNS, "--tokens", str(args.tokens), *heads]
    for words in (
        [*drawn, "--output", str(output / "patterns.png")],
        ["calibration", str(calibration_file), "--output", str(output / "layers.png")],
    ):
        subprocess.run([*COMMAND, "plot", *words], check=True, stdout=subprocess.DEVNULL)
    plot_quality(one, output / "quality.png")
    plot_losses({row["pattern"]: row.pop("token_nll") for row in one}, output / "losses.png")
    figures = {
        "version": ra.__version__,
        "tokens": args.tokens,
        "one_process": one,
        "two_processes": two,
        "pass_keys": found,
        "finetune": tuning,
        "minutes_at_the_end_of": minutes,
        "seconds": time.perf_counter() - start,
    }
    checkpoints.write_text(output / "demo.json", json.dumps(figures, indent=1))
    print(f"== done in {figures['seconds'] / 60:.1f} minutes")
    for name in ("demo.json", "calibration.json", *(f"{name}.png" for name in PICTURES)):
        print(output / name)


if __name__ == "__main__":
    main()
