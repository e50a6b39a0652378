"""Shows the package on a real model and a real text, in about three minutes on 2 CPU cores.

    python recipes/demo.py            (or: make demo)

1. One layer on a long row: torch's attention, a window, and both over a ring of two processes.
2. Perplexity with exact attention, from one process and from two.
3. Perplexity under patterns that skip most of the row.
4. Pass keys: hidden numbers that the model finds again.
5. Fine-tuning with a pattern, compared with exact attention.
6. If there is time, a short calibration: a pattern chosen for each head, compared with a window at the same cost.

It writes every figure to demo/demo.json, and pictures to demo/speed.png (part 1), demo/patterns.png (who attends to whom),
demo/quality.png (perplexity against FLOPs), demo/losses.png (loss along the text) and demo/retrieval.png (pass keys).
Part 6 writes the folder demo/calibrated, whose calibration.json other recipes take as --pattern, and demo/layers.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Read when torch loads. On a busy machine, threads that spin while they wait more than double the time of most parts.
os.environ["OMP_WAIT_POLICY"] = "passive"

import checkpoints
import common
import documents
import perplexity
import torch
from arguments import Help, at_least, missing_extra, positive, token_count
from pictures import plot_layer, plot_losses, plot_quality

import hf_ring_attention as ra

WINDOW, PYRAMID, LONGNET = "window:512+4", "pyramid:512,3", "longnet:512/1,2048/4,all/8"
#: The pattern that learns: its window is so small that the model needs to.
LEARNED = "window:64+4"
#: The share of exact attention's FLOPs that the calibration may spend, and a pattern that spends as much on rows of 1024.
BUDGET, RIVAL = 0.25, "window:128+4"
HERE = Path(__file__).parent
BUSY = "The seconds of part 1 are too long, and compare nothing: run the demo again when the machine is idle."
#: The seconds between two lines of a long part.
HEARTBEAT = 25.0
#: The time of the whole demo, as a multiple of the time of the parts before the calibration.
WITH_CALIBRATION = 1.3


def say(text: str) -> None:
    """Prints a paragraph that fits a terminal."""
    print(textwrap.fill(text, 80, break_on_hyphens=False, break_long_words=False), flush=True)


def run(*program: str, processes: int = 1) -> dict[str, Any] | list[dict[str, Any]]:
    """Runs a recipe, with `accelerate launch` if `processes` share its rows, and returns the figures of its --json."""
    environment, command = os.environ | {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}, [sys.executable]
    if processes > 1:
        if torch.cuda.device_count() < processes:
            environment["ACCELERATE_USE_CPU"] = "true"
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or processes) // processes))
        command += ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)]
        command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        words = [str(HERE / program[0]), *program[1:], "--json", str(figures)]
        subprocess.run([*command, *words], check=True, env=environment)
        return json.loads(figures.read_text())


def against_exact(perplexities: Mapping[str, float]) -> str:
    """Returns how much higher the perplexity of each pattern is than that of the first, exact attention."""
    exact, *others = perplexities
    changes = [f"{name} {perplexities[name] / perplexities[exact] - 1:+.1%}" for name in others]
    return f"perplexity against {exact}: {', '.join(changes)}"


def command(*words: str, **options: Any) -> None:
    """Runs a command of the command line."""
    subprocess.run([sys.executable, "-m", "hf_ring_attention", *words], check=True, **options)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("--layer-tokens", type=token_count(1024), default=16384, help="tokens of the row in part 1 (default 16384)")
    add("--tokens", type=token_count(64), default=2048, help="tokens of the text, in parts 2 to 4 (default 2048)")
    add("--steps", type=at_least(1), default=4, help="steps of fine-tuning (default 4)")
    add("--row-tokens", type=token_count(64), default=256, help="tokens of a row in fine-tuning (default 256)")
    add("--minutes", type=positive, default=3.2, help="calibrate only if it can end by this minute (default 3.2)")
    add("--output", type=Path, default=Path("demo"), help="folder for figures and pictures (default demo)")
    args = parser.parse_args(argv)
    missing = missing_extra("matplotlib", "peft", "rich") or common.obstacle(common.BUNDLED)
    if missing:
        parser.error(f"the demo {missing}")
    return args


class Demo:
    """The parts of the demo: each tells what it shows, shows it, and keeps its figures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start, self.figures = args, time.perf_counter(), {"version": ra.__version__}
        self.number, self.begun = 0, threading.Event()
        args.output.mkdir(parents=True, exist_ok=True)
        self.text = documents.whole_text(documents.Sources())
        (args.output / "text.txt").write_text(self.text, encoding="utf-8")

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    @property
    def model_words(self) -> list[str]:
        """The option that names the model as a folder, so that programs need not tell again where it comes from."""
        return ["--model", str(common.installed_model())]

    def part(self, number: int, name: str, text: str) -> None:
        """Begins a part."""
        self.number = number
        self.begun.set()
        print(f"\n== {number}. {name} ({self.seconds:.0f} s so far)", flush=True)
        say(text)

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Prints a line from time to time while a part goes on."""
        ended = False

        def beat() -> None:
            start = time.perf_counter()
            while not ended:
                if self.begun.wait(HEARTBEAT):
                    self.begun.clear()
                    start = time.perf_counter()
                elif not ended:
                    print(f"\n(part {self.number} goes on: {time.perf_counter() - start:.0f} s)", flush=True)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended = True
            self.begun.set()
            thread.join()

    @property
    def disturbed(self) -> bool:
        """Whether other programs kept those waiting whose speed the demo compares."""
        return any(row["disturbed"] for row in self.figures["layer"] if row["processes"] == 1)

    def layer(self) -> None:
        tokens = self.args.layer_tokens
        self.part(
            1,
            "One layer on a long row",
            f"Attention of {tokens} tokens, forward and backward. sdpa is torch's own exact attention. A window reads 512 "
            "tokens and 4 sinks, so it is far faster. In a ring of two, each process holds half of the row, and at times "
            "some keys of the other half.",
        )
        words = ("layer.py", "--tokens", str(tokens), "--pattern", WINDOW)
        self.figures["layer"] = [*run(*words), *run(*words, processes=2)]
        if self.disturbed:
            say(f"Other programs keep this machine busy. {BUSY}")
        plot_layer(self.figures["layer"], tokens, self.args.output / "speed.png")
        print(f"the same as a picture: {self.args.output / 'speed.png'}", flush=True)

    def perplexities(self) -> None:
        tokens, output = self.args.tokens, self.args.output
        self.part(
            2,
            "Exact perplexity, from one process and from two",
            f"SmolLM2-135M-Instruct reads {tokens} tokens of Python's manual: in one process, then in a ring of two that share "
            "them. The ring computes the same attention, so the perplexities agree to rounding.",
        )
        tokenizer, model = common.load_tokenizer(), common.load_model()
        ids = common.tokenize(tokenizer, self.text, tokens)
        print("perplexity    FLOPs       time  pattern")
        (exact,) = rows = list(perplexity.measure(model, ids, ["exact"]))
        print(perplexity.line(exact), flush=True)
        words = ("perplexity.py", *self.model_words, "--tokens", str(tokens), "--pattern", "exact")
        two = run(*words, processes=2)["figures"][0]
        difference = two["perplexity"] / exact["perplexity"] - 1
        print(f"two processes against one: {difference:+.1e}")
        self.part(
            3,
            "Perplexity under patterns",
            "The same text with patterns that skip much of attention. The model was not trained for them: the last line "
            "shows what each of them costs. A row as short as this saves no time; part 1 shows a long one.",
        )
        for row in perplexity.measure(model, ids, [WINDOW, PYRAMID, LONGNET]):
            print(perplexity.line(row), flush=True)
            rows.append(row)
        print(against_exact({row["pattern"]: row["perplexity"] for row in rows}), flush=True)
        plot_quality(rows, output / "quality.png")
        plot_losses({row["pattern"]: row.pop("token_nll") for row in rows}, output / "losses.png")
        config, shown = model.config, ["exact", WINDOW, PYRAMID, LONGNET]
        heads = [f"--heads={config.num_attention_heads}", f"--kv-heads={config.num_key_value_heads}"]
        words = ["--tokens", str(tokens), *heads, "--head", "0", "--plot", str(output / "patterns.png")]
        words += [word for pattern in shown for word in ("--pattern", pattern)]
        command("plot", "pattern", *words, stdout=subprocess.DEVNULL)
        self.figures |= {"perplexity": rows, "two_processes": difference, "tokens": tokens}

    def pass_keys(self) -> None:
        length = "512"
        self.part(
            4,
            "Pass keys",
            f"A number is hidden in {length} tokens of noise. The model rates eight numbers; by chance the right "
            "number would come first once in eight times. A window of 128 tokens forgets what lies before it.",
        )
        words = [*self.model_words, "--tasks", "passkey", "--tokens", length, "--pattern", "exact", "window:128+4"]
        self.figures["pass_keys"] = run("retrieval.py", *words, "--plot", str(self.args.output / "retrieval.png"))[
            "rows"
        ]

    def fine_tuning(self) -> None:
        steps = self.args.steps
        self.part(
            5,
            "Fine-tuning",
            f"{steps} steps of adapters over a ring of two, with exact attention and with a window of 64 tokens. Both learn "
            "the text. The window starts worse; the last lines show how much of the gap these few steps close.",
        )
        trained: dict[str, Any] = {}
        self.figures["fine_tuning"] = trained
        for pattern in ("exact", LEARNED):
            folder = self.args.output / f"finetuned-{pattern.partition(':')[0]}"
            words = [
                *self.model_words,
                "--pattern",
                pattern,
                "--steps",
                str(steps),
                "--tokens",
                str(self.args.row_tokens),
            ]
            words += ["--held-out", str(2 * self.args.row_tokens), "--ranks", "2", "--output", str(folder)]
            words += ["--lora", "16", "--lr", "1e-3"]
            trained[pattern] = run("finetune.py", *words, processes=2)
        for when in ("before", "after"):
            held_out = {pattern: figures[f"perplexity_{when}"] for pattern, figures in trained.items()}
            print(f"{when} the steps, held-out {against_exact(held_out)}", flush=True)

    def calibration(self) -> None:
        tokens, output = str(self.args.tokens // 2), self.args.output
        self.part(
            6,
            "Calibration",
            f"Each head gets the cheapest pattern that it can bear, at {BUDGET:.0%} of exact attention's FLOPs for rows of "
            f"{tokens} tokens. This demo reads one row and makes no second pass; a real calibration reads more. The last lines "
            f"measure other text, compared with {RIVAL} in all heads.",
        )
        words = [*self.model_words, "--text", str(output / "text.txt"), "--tokens", tokens]
        words += ["--budget", str(BUDGET), "--refinements", "0", "--output", str(output / "calibrated")]
        command("calibrate", *words, "--plot", str(output / "layers.png"))
        ids = common.tokenize(common.load_tokenizer(), self.text[len(self.text) // 2 :], int(tokens))
        patterns, rows = ["exact", RIVAL, str(output / "calibrated" / "calibration.json")], []
        for row in perplexity.measure(common.load_model(), ids, patterns):
            print(perplexity.line(row), flush=True)
            rows.append({name: figure for name, figure in row.items() if name != "token_nll"})
        print(against_exact({row["pattern"]: row["perplexity"] for row in rows}), flush=True)
        self.figures["calibration"] = rows

    def closing(self) -> None:
        """Says what the figures have shown, and how to go on."""
        speed, memory = (
            {(row["attention"], row["processes"]): row[name] for row in self.figures["layer"]}
            for name in ("seconds", "bytes")
        )
        quality = {row["pattern"]: row["perplexity"] for row in self.figures["perplexity"]}
        faster = f"{WINDOW} was {speed['sdpa', 1] / speed[WINDOW, 1]:.1f} times as fast as sdpa"
        say(
            f"{BUSY if self.disturbed else f'In a layer of {self.args.layer_tokens} tokens, {faster}.'} In a ring of two, "
            f"each process took {memory[WINDOW, 2] / memory[WINDOW, 1]:.0%} of the memory of one. On {self.args.tokens} "
            f"tokens, {WINDOW} raised perplexity by {quality[WINDOW] / quality['exact'] - 1:.1%}. Other texts and models run "
            "the same way; for example:"
        )
        words = ["perplexity", "--model", common.installed_model(), "--text", self.args.output / "text.txt"]
        words += ["--pattern", "exact", "--pattern", WINDOW]
        print(f"\n    {shlex.join([sys.executable, '-m', 'hf_ring_attention', *map(str, words)])}")


def main() -> None:
    args = parse_args()
    demo = Demo(args)
    with demo.heartbeat():
        demo.layer()
        demo.perplexities()
        demo.pass_keys()
        demo.fine_tuning()
        minutes = WITH_CALIBRATION * demo.seconds / 60
        if minutes < args.minutes:
            demo.calibration()
        else:  # The next run may take longer.
            print(f"\nno time for part 6, a calibration: with --minutes {math.ceil(1.2 * minutes)} it runs")
    checkpoints.write_text(args.output / "demo.json", json.dumps(demo.figures | {"seconds": demo.seconds}, indent=1))
    print(f"\n== done in {demo.seconds / 60:.1f} minutes; figures and pictures are in {args.output}")
    demo.closing()


if __name__ == "__main__":
    main()
