"""Milliseconds and GiB of attention against the length of a row, on a CPU; `make gpu` measures them on a GPU.

A few minutes:      python recipes/bench/lengths.py --tokens 1k,2k,4k
As in the figures:  python recipes/bench/lengths.py --json recipes/bench/cpu.json

The JSON file has the format of `make gpu`, so recipes/bench/draw.py draws both. All implementations take turns on the same
tensors, and each peak is measured in a new process.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from memory import peak_of_call
from speed import measure
from timing import Shape, launch, options, table

PATTERNS = ["exact", "pyramid:512,3", "longnet:2048/1,8192/4,32768/16", "window:512+4"]


def rows_of(shape: Shape, tokens: int, patterns: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Returns the figures of sdpa and of each pattern for rows of so many tokens."""
    timed, refused = measure(shape, tokens, patterns, repeats, with_flex=False)
    if refused:
        raise RuntimeError(f"expected the definition of each pattern: {'; '.join(refused)}")
    rows = []
    for row in timed:
        name = "sdpa" if row["by"] == "sdpa" else row["attention"]
        peak = launch(peak_of_call, 1, shape, tokens, name, "local", device=shape.device)
        rows.append({"name": name, "tokens": tokens, "both ms": 1000 * row["both"], "peak GiB": peak / 2**30})
    return rows


def processor() -> str:
    """Returns the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main(words: Sequence[str] | None = None) -> None:
    """Measures, prints a table for each length, and writes the file of --json."""
    args, shape = options(
        __doc__ or "", words, patterns=PATTERNS, tokens=[2048, 8192, 32768], repeats=3, json="lengths.json"
    )
    if shape.device != "cpu":
        raise SystemExit("this program measures a CPU: make gpu measures a GPU")
    machine = {"device": f"{processor()}, {torch.get_num_threads()} threads", "torch": torch.__version__}
    figures: dict[str, Any] = {"about": f"{args.heads} heads x {args.head_dim}, {args.dtype}", "machine": machine}
    figures["speed"] = []
    for tokens in args.tokens:
        rows = rows_of(shape, tokens, args.patterns, args.repeats)
        title = f"{tokens} tokens, forward and backward, medians of {args.repeats} turns"
        table(
            title, "attention|ms|GiB beside\ninputs", [(row["name"], row["both ms"], row["peak GiB"]) for row in rows]
        )
        figures["speed"] += rows
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
