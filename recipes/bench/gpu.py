"""Errors, speed, memory, training steps and decoding on one GPU, in a run of at most nine minutes that installs nothing.

On a GPU:            make gpu
Some parts of it:    make gpu GPU_ARGS="--parts speed decoding --json figures.json"
In less time:        make gpu GPU_ARGS="--seconds 300"
Settings of kernels: make gpu GPU_ARGS=--tune
A dry run, any CPU:  make gpu GPU_ARGS=--small

Each table is printed as soon as it is measured, and a JSON file has all figures so far. The run names each part
that it skips for lack of time, memory or packages. It prints goals beside the results, and fails only on wrong numbers
and errors.

With --tune, it runs `tests/tune.py` instead: in five minutes, this finds settings of the fused kernels, and prints them as rows
for the code.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from decisions import compiled, proofs
from gpu_times import (
    TINY,
    cache_name,
    decoding,
    flash,
    long_rows,
    results,
    ring_on_one_device,
    speed,
    steps,
)
from memory import model_of
from report import CUDA, DEVICE, DTYPE, Report
from speed import LIMITS
from timing import Shape, apart, table, timed
from torch import Tensor

import hf_ring_attention as ra

ROOT = Path(__file__).parents[2]
#: Nine minutes, and five to find settings, less what Python takes to load.
SECONDS, SECONDS_TO_TUNE = 520, 290
SETTINGS = "settings of the fused kernels"
#: Kernels that a device may have. A ring refuses the others, with its reason.
KERNELS = ("auto", "fused", "cudnn", "flash", "efficient", "math") if CUDA else ("auto", "math")


def commit() -> str:
    """Returns the commit of this checkout, and whether files differ from it; of other copies, the version."""
    if not ((ROOT / ".git").exists() and shutil.which("git")):
        return f"version {ra.__version__}"
    words = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def machine(report: Report) -> None:
    """Prints versions, and two ceilings: a product of matrices, and a copy."""
    names = [name for name in ("torch", "transformers", "accelerate", "triton", "numpy") if find_spec(name)]
    found = {"commit": commit(), "device": torch.cuda.get_device_name() if CUDA else f"{os.cpu_count()} cores"}
    found |= {"python": sys.version.split()[0]} | {name: import_module(name).__version__ for name in names}
    found |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())} if CUDA else {}
    side, size = (256, 1 << 20) if report.small else (8192, 1 << 30)
    a = torch.randn(side, side, device=DEVICE, dtype=getattr(torch, DTYPE))
    x, y = torch.empty(2, size, dtype=torch.uint8, device=DEVICE)
    found["product of matrices"] = f"{2e-9 * side**3 / timed(lambda: a @ a)[0]:.3g} TFLOP/s"
    found["copy"] = f"{2e-6 * size / timed(lambda: y.copy_(x))[0]:.4g} GB/s, read and written"
    report.figures["machine"] = found
    print(*(f"{name:20} {text}" for name, text in found.items()), sep="\n")


def errors(report: Report) -> None:
    """Compares every kernel that the device has with float64 on the CPU, which the tests compare with the definition."""
    tokens, shape, rows = 80 if report.small else 1000, Shape(4, 1, report.shape.head_dim, DTYPE, DEVICE), []
    for text, packed in itertools.product(("exact", "window:64+4", "pyramid:32,3", "longnet:64/1,256/4"), (0, 1)):
        ends = (0, 1, 2, tokens // 2, tokens // 2 + 1, tokens) if packed else (0, tokens)
        tensors, call = shape.tensors(tokens), {"pattern": text, "documents": [[*itertools.pairwise(ends)]]}
        expected = results([x.detach().cpu().double() for x in tensors], ra.Ring.alone(), **call)
        for kernel in KERNELS:
            if f"kernel {kernel}, exact" in report.figures["left out"]:
                continue
            name = f"{'kernel ' * (kernel != 'auto')}{kernel}, {text}{', packed' * packed}"
            found = report.run(name, 3, partial(results, tensors, ra.Ring.alone(kernel=kernel), **call))
            far = [*map(apart, found or (), expected)]
            rows += [(name, *(f"{x:.1e}" for x in far))] if found else []
            if not all(x <= LIMITS[DTYPE] for x in far):
                report.note("wrong", name, f"errors of out, lse, dq, dk, dv: {far}, beyond {LIMITS[DTYPE]}")
    report.figures["errors"] = sorted(rows)
    table(f"Errors relative to float64; the bound is {LIMITS[DTYPE]}", f"{DTYPE}|out|lse|dq|dk|dv", sorted(rows))


def marked_files() -> list[str]:
    """Returns the files of tests that are marked cuda; the longest, whole calls against the oracle, are the last to start."""
    files = sorted(ROOT.glob("tests/*/test_*.py"), key=lambda path: ("oracle" in path.name, path))
    return [str(path) for path in files if "mark.cuda" in path.read_text("utf-8")]


def tests(report: Report, *files: str) -> None:
    """Runs the tests that are marked cuda; a file that imports a missing package is named."""
    marked = marked_files()
    if not find_spec("pytest") or not marked:
        return report.note("left out", "tests", "pytest is missing" if marked else "this copy has no tests")
    words = ["-m", "pytest", "-q", "-m", "cuda", "--all", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    words += ["-p", "no:benchmark"]  # Beside xdist it warns, and here each warning is an error.
    words += [*(["-n", "4"] if CUDA and find_spec("xdist") else []), *(files or marked[: 1 if report.small else None])]
    limit = max(1.0, min(150.0, report.left - 30))
    with tempfile.TemporaryFile("w+") as printed:
        settings: dict[str, Any] = {"cwd": ROOT, "stderr": subprocess.STDOUT, "env": {**os.environ, "COLUMNS": "400"}}
        process = subprocess.Popen([sys.executable, *words], stdout=printed, **settings)
        for seconds, end in ((limit, signal.SIGINT), (20, signal.SIGKILL)):  # Interrupted, pytest lists its failures.
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                report.note("left out", "tests", f"those that had not ended after {limit:.0f} s")
                process.send_signal(end)
        process.wait()
        printed.seek(0)
        text = printed.read().strip()
    for name, reason in re.findall(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", text, re.MULTILINE):
        lines = re.search(rf"^_+ ERROR collecting {re.escape(name)} _+$(.*?)^[_=]{{3}}", text, re.MULTILINE | re.DOTALL)
        missing = lines and re.search(r"No module named '(\w+)", lines[1])
        report.note(*("left out", name, f"{missing[1]} is missing") if missing else ("wrong", name, reason))
    ended = re.search(r"^=* ?(\d+ (?:passed|failed|skipped|deselected|error).* in .*?)[ =]*$", text, re.MULTILINE)
    report.figures["tests"] = ended[1] if ended else ""
    print(report.figures["tests"])
    if not ended and "tests" not in report.figures["left out"]:
        report.note("wrong", "tests", f"pytest did not run: {text[-300:]}")


def tune(report: Report) -> None:
    """Finds settings of the fused kernels in another process, which can choose Triton's interpreter."""
    if not (ROOT / "tests" / "tune.py").exists():
        return report.note("left out", SETTINGS, "this copy has no tests")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tune.json")
        words = ["-m", "tests.tune", "--seconds", str(report.left), "--json", str(file), *["--small"] * report.small]
        settings = {} if CUDA else {"TRITON_INTERPRET": "1"}
        ended = subprocess.run([sys.executable, *words], cwd=ROOT, env={**os.environ, **settings}, check=False)
        found = json.loads(file.read_text("utf-8")) if file.exists() else {"wrong": {}}
    if ended.returncode and not found["wrong"]:
        report.note("wrong", SETTINGS, f"tests/tune.py ended with status {ended.returncode}")
    for kind in ("left out", "wrong", "settings"):
        report.figures.setdefault(kind, {}).update(found.get(kind, {}))


def generated(model: Any, ids: Tensor, ring: ra.Ring) -> Tensor:
    """Returns the tokens that follow a prefill over a ring."""
    ra.patch_model(model.eval(), ring=ring)
    cache = {cache_name(model): ra.prefill(model, ids[:, :-1])}
    return model.generate(ids, **cache, use_cache=True, max_new_tokens=4, do_sample=False, pad_token_id=0)


def group(report: Report) -> None:
    """Uses a process group of this process: agreement, a gather, a training step, prefill and decoding."""
    backend, shape = "nccl" if CUDA else "gloo", Shape(4, 2, 16, DTYPE, DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        rings, rows = (ra.Ring(), ra.Ring.alone()), torch.arange(8.0, device=DEVICE)
        model, ids = model_of(shape, 64, **TINY), torch.arange(3, 35, device=DEVICE)[None]
        losses = [ra.patch_model(model, "window:8+2", ring=ring)(input_ids=ids, labels=ids).loss for ring in rings]
        losses[0].backward()
        same = {"agreement": rings[0].communicator.gather_objects("a") == ["a"]}
        same |= {"gather": torch.equal(rings[0].communicator.gather(rows)[0], rows), "step": torch.equal(*losses)}
        same["prefill and decoding"] = torch.equal(*(generated(model, ids, ring) for ring in rings))
        dist.destroy_process_group()
    report.figures["group"] = {"backend": backend, **same}
    print(f"{backend}, one process: {', '.join(f'{name} {is_same}' for name, is_same in same.items())}")
    if not all(same.values()):
        report.note("wrong", "process group", f"{backend} gives other results than no group: {same}")


def parts_of(small: bool) -> dict[str, tuple[int, list[tuple[Any, ...]]]]:
    """Returns the parts of a run by name: their seconds on an H100, and their sections: a title, a function, arguments.

    Decoding, the ring and long rows have the seconds of the programs that they were before they were parts.
    """
    lengths = (256, 512, 1024) if small else (8192, 32768, 131072, 524288)
    *short, longest = ((f"speed, {tokens} tokens", speed, tokens) for tokens in lengths)
    return {
        "errors": (18, [("errors", errors)]),
        "tests": (150, [("tests marked cuda", tests)]),
        "speed": (40, short),
        "steps": (50, [("training steps", steps)]),
        "decoding": (22, [("decoding", decoding)]),
        "ring": (25, [("a simulated ring", ring_on_one_device)]),
        "group": (5, [("process group", group)]),
        "long": (80, [("long rows", long_rows)]),
        "flash": (0, [("FlashAttention 3 and 4", flash)]),  # 60 s where both are installed
        "longest": (130, [(f"{longest[0]}, the longest rows", *longest[1:])]),
        # In a run of all parts they have the time that is left; by name, 270 and 60 s.
        "compile": (0, [("compiled models", compiled)]),
        "proofs": (0, [("first calls", proofs)]),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Runs all sections, and ends with status 1 for wrong numbers and errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = f"time limit of the run, in seconds (default: {SECONDS}, with --tune {SECONDS_TO_TUNE})"
    parser.add_argument("--seconds", type=float, help=text)
    parser.add_argument("--small", action="store_true", help="every section at small sizes, also on a CPU")
    shown = ", ".join(f"{name} {seconds} s" for name, (seconds, _) in parts_of(False).items())
    text = f"the parts to run, by default all; expected on an H100: {shown}"
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--parts", nargs="+", choices=parts_of(False), metavar="PART", help=text)
    either.add_argument("--tune", action="store_true", help="find settings of the fused kernels, in place of all parts")
    default = Path(os.environ.get("OUT", "."), "gpu.json")
    parser.add_argument("--json", type=Path, default=default, help="default: gpu.json, in the folder $OUT or this one")
    args = parser.parse_args(words)
    if not (CUDA or args.small):
        parser.error("expected a GPU, found none: use --small for a dry run on the CPU")
    seconds = args.seconds or (SECONDS_TO_TUNE if args.tune else SECONDS)
    report = Report(seconds, args.small, args.json)
    sections: list[tuple[Any, ...]] = [("versions and ceilings", machine)]
    for name, (_, of_part) in parts_of(args.small).items():
        sections += of_part if name in (args.parts or [name]) and not args.tune else []
    sections += [(SETTINGS, tune)] if args.tune else []
    for title, section, *arguments in sections:
        print(f"== {title}, {report.left:.0f} s left", flush=True)
        report.run(title, 5, section, report, *arguments)
    goals = [row["goal"].endswith("met") for row in report.figures["speed"] if row["goal"]]
    left_out, wrong = (len(report.figures[kind]) for kind in ("left out", "wrong"))
    print(f"{sum(goals)} of {len(goals)} goals met, {left_out} parts left out, {wrong} wrong; figures in {args.json}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
