"""Errors, speed, memory and training steps on one GPU, in a run of at most nine minutes that installs nothing.

On a GPU:            make gpu
In less time:        make gpu GPU_ARGS="--seconds 300 --json figures.json"
A dry run, any CPU:  make gpu GPU_ARGS=--small

Each table is printed as soon as it is measured, and a JSON file has all figures so far. The run names every part that time,
memory or packages do not allow. It prints goals beside the results, and fails only for wrong numbers and errors.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from memory import STEP, model_of, times_of_step
from peers import packed_row
from speed import LIMITS, sdpa
from timing import Shape, held_memory, reset_peak, table, timed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hf_ring_attention as ra

ROOT, GIB = Path(__file__).parents[2], 2**30
CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", "bfloat16") if CUDA else ("cpu", "float32")
#: Kernels that a device may have. A ring refuses the others, with its reason.
KERNELS = ("auto", "fused", "cudnn", "flash", "efficient", "math") if CUDA else ("auto", "math")
#: The kernel that is timed beside the one that auto takes, if their results differ.
OTHER = "fused" if CUDA else "math"
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION if CUDA else SDPBackend.MATH)
#: Patterns, whether rows have many documents, and goals: shares of the speed of SDPA's faster backend, 0 for no goal.
GOALS = [("exact", False, 0.95), ("exact", True, 0.5), ("window:512+4", False, 0.45), ("window:512+4", True, 0.45)]
GOALS += [("window:4096+4", False, 0), ("pyramid:512,3", False, 0.45), ("pyramid:512,3", True, 0.45)]
GOALS += [("longnet:2048/1,8192/4,32768/16", False, 0.55)]
SPEED = ("forward ms", "both ms", "forward TF/s", "both TF/s", "host ms", "peak GiB")
WAYS = ("sdpa", "exact", "window:512+4", "pyramid:512,3")
#: Head sizes and other sizes of the models that are trained.
LLAMAS: dict[str, tuple[int, dict[str, Any]]] = {
    "1B": (64, {"intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256, "tie_word_embeddings": True}),
    "8B, 4 layers": (128, {"intermediate_size": 14336, "vocab_size": 128256}),
}
TINY = {"vocab_size": 128, "num_hidden_layers": 1}


class Report:
    """The figures so far, the parts that were left out, and those that are wrong."""

    def __init__(self, seconds: float, small: bool, file: Path) -> None:
        self.end, self.small, self.file = time.monotonic() + seconds, small, file
        self.figures: dict[str, Any] = {"left out": {}, "wrong": {}, "speed": [], "steps": []}
        self.shape = Shape(4, 2, 16, DTYPE, DEVICE) if small else Shape(32, 8, 128, DTYPE, DEVICE)

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return max(0.0, self.end - time.monotonic())

    def note(self, kind: str, name: str, reason: str) -> None:
        """Names a part that is "left out" or "wrong", with the reason."""
        self.figures[kind][name] = reason
        print(f"{kind}: {name}: {reason}", flush=True)

    def run(self, name: str, seconds: float, part: Callable[..., Any], *args: Any) -> Any:
        """Returns the answer of a part, None if it takes longer than is left or fails; writes all figures."""
        try:
            if seconds < self.left:
                return part(*args)
            self.note("left out", name, f"it takes about {seconds:.0f} s, and {self.left:.0f} s are left")
        except torch.OutOfMemoryError:
            self.note("left out", name, "the device has too little memory")
        except Exception as error:  # Other parts still have figures.
            refused = name.startswith("kernel ") and isinstance(error, (ValueError, NotImplementedError))
            refused = refused or "No available kernel" in str(error)  # The words of sdpa.
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.note("left out" if refused else "wrong", name, reason)
        finally:
            self.file.write_text(re.sub(r"\bNaN\b", "null", json.dumps(self.figures, indent=1)) + "\n", "utf-8")
        return None


def machine(report: Report) -> None:
    """Prints versions, and two ceilings: a product of matrices, and a copy."""
    names = [name for name in ("torch", "transformers", "accelerate", "triton", "numpy") if find_spec(name)]
    found = {"device": torch.cuda.get_device_name() if CUDA else f"{os.cpu_count()} cores"}
    found |= {"python": sys.version.split()[0]} | {name: import_module(name).__version__ for name in names}
    found |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())} if CUDA else {}
    side, size = (256, 1 << 20) if report.small else (8192, 1 << 30)
    a = torch.randn(side, side, device=DEVICE, dtype=getattr(torch, DTYPE))
    x, y = torch.empty(2, size, dtype=torch.uint8, device=DEVICE)
    found["product of matrices"] = f"{2e-9 * side**3 / timed(lambda: a @ a)[0]:.3g} TFLOP/s"
    found["copy"] = f"{2e-6 * size / timed(lambda: y.copy_(x))[0]:.4g} GB/s, read and written"
    report.figures["machine"] = found
    print(*(f"{name:20} {text}" for name, text in found.items()), sep="\n")


def apart(found: Tensor, expected: Tensor) -> float:
    """Returns the error of a tensor, relative to the norm of the expected one."""
    expected = expected.detach().double()
    return float((found.detach().to(expected) - expected).norm() / expected.norm())


def results(tensors: Sequence[Tensor], kernel: str, **call: Any) -> list[Tensor]:
    """Returns out, lse, dq, dk and dv by a kernel."""
    *leaves, dout = tensors
    out, lse = ra.ring_attention(*leaves, ring=ra.Ring.alone(kernel=kernel), return_lse=True, **call)
    return [out, lse, *torch.autograd.grad(out, leaves, dout)]


def errors(report: Report) -> None:
    """Compares every kernel that the device has with float64 on the CPU, which the tests compare with the definition."""
    tokens, shape, rows = 80 if report.small else 1000, Shape(4, 1, report.shape.head_dim, DTYPE, DEVICE), []
    for text, packed in itertools.product(("exact", "window:64+4", "pyramid:32,3", "longnet:64/1,256/4"), (0, 1)):
        ends = (0, 1, 2, tokens // 2, tokens // 2 + 1, tokens) if packed else (0, tokens)
        tensors, call = shape.tensors(tokens), {"pattern": text, "documents": [[*itertools.pairwise(ends)]]}
        expected = results([x.detach().cpu().double().requires_grad_() for x in tensors], "auto", **call)
        for kernel in KERNELS:
            if f"kernel {kernel}, exact" in report.figures["left out"]:
                continue
            name = f"{'kernel ' * (kernel != 'auto')}{kernel}, {text}{', packed' * packed}"
            found = report.run(name, 3, partial(results, tensors, kernel, **call))
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


def times_of(attend: Callable[..., Any], tensors: Sequence[Tensor], flops: float) -> dict[str, float]:
    """Returns the times and rates of a call, and its peak of memory beside its inputs."""
    *inputs, dout = tensors
    forward, _ = timed(lambda: attend(*inputs))
    leaves = [x.detach().requires_grad_() for x in inputs]
    held = reset_peak(DEVICE)
    both, host = timed(lambda: torch.autograd.grad(attend(*leaves), leaves, dout))
    peak = (held_memory(DEVICE, peak=True) - held) / GIB if CUDA else math.nan
    return dict(zip(SPEED, (forward, both, flops / forward / 1e9, 3.5 * flops / both / 1e9, host, peak)))


def speed(report: Report, tokens: int) -> None:
    """Times attention, forward and backward."""
    shape, every, rows = report.shape, report.figures["speed"], []
    # The numbers of a token lie side by side, as models store them.
    tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in shape.tensors(tokens)]

    def measure(name: str, attend: Callable[..., Any], pairs: float, goal: float = 0) -> None:
        before = next((x for x in reversed(every) if x["name"] == name), {"both ms": 0, "pairs": 1})
        seconds = 3 + 0.002 * before["both ms"] * pairs / before["pairs"]
        flops = 4 * shape.head_dim * shape.heads * pairs
        if times := report.run(f"{name}, {tokens} tokens", seconds, times_of, attend, tensors, flops):
            best = max((x["both TF/s"] for x in rows if "sdpa" in x["name"]), default=times["both TF/s"])
            share = math.nan if "sdpa" in name else times["both TF/s"] / best
            reached = f"{goal} {'met' if share >= goal else 'missed'}" if goal else ""
            rows.append({"name": name, "tokens": tokens, "pairs": pairs, **times, "of SDPA": share, "goal": reached})
            every.append(rows[-1])

    for backend in BACKENDS:
        measure(f"sdpa {backend.name.split('_')[0].lower()}", sdpa_kernel(backend)(sdpa), tokens * (tokens + 1) / 2)
    for text, packed, goal in GOALS:
        documents = packed_row(tokens, 5 if report.small else 190) if packed else [(0, tokens)]
        share = partial(ra.Pattern.parse(text).flop_share, num_heads=shape.heads, num_kv_heads=shape.kv_heads)
        pairs = sum(share(n) * n * (n + 1) / 2 for n in (stop - start for start, stop in documents))
        name = f"{text}, {len(documents)}" if packed else text
        call = partial(ra.ring_attention, pattern=text, documents=[documents])
        calls = [partial(call, ring=ra.Ring.alone(kernel=kernel)) for kernel in ("auto", OTHER)]
        measure(name, calls[0], pairs, goal)
        if f"kernel {OTHER}, exact" in report.figures["left out"]:
            continue
        other = f"kernel {OTHER}, {name}"
        part = f"{other}, {tokens} tokens"
        ends = report.run(part, 30, lambda *ways: [x(*tensors[:3])[:, :, -1024:] for x in ways], *calls)
        if ends and not apart(*ends) <= LIMITS[DTYPE]:
            report.note("wrong", part, "its results are not those of the kernel that auto takes")
        if ends and not torch.equal(*ends):  # The same kernel would give the same bits.
            measure(other, calls[1], pairs, goal)
    table(
        f"Attention of {tokens} tokens, {shape.heads} / {shape.kv_heads} heads x {shape.head_dim}, {DTYPE}",
        "pattern|fwd\nms|both\nms|fwd\nTF/s|both\nTF/s|of\nSDPA|\ngoal|host\nms|peak\nGiB",
        [[row[x] for x in ("name", *SPEED[:4], "of SDPA", "goal", *SPEED[4:])] for row in rows],
        "Both: forward and backward. TF/s: TFLOP/s of the pairs that queries see. Of SDPA: of its faster backend's.",
    )


def steps(report: Report) -> None:
    """Times training steps with checkpointing, and compares their peaks with the estimate."""
    tokens, rows = 256 if report.small else 32768, report.figures["steps"]
    for name, (head_dim, sizes) in LLAMAS.items():
        model = (report.shape, tokens, TINY) if report.small else (Shape(32, 8, head_dim, DTYPE, DEVICE), tokens, sizes)
        for way in WAYS:
            if step := report.run(f"step of {name}, {way}", 25, times_of_step, way, *model):
                rows.append({"name": f"{name}, {way}", **step})
        losses = [x["loss"] for x in rows if x["name"] in (f"{name}, sdpa", f"{name}, exact")]
        if losses and not max(losses) / min(losses) - 1 <= LIMITS[DTYPE]:
            report.note("wrong", f"step of {name}", f"the losses of sdpa and of exact attention differ: {losses}")
    title = f"A training step of {tokens} tokens with checkpointing, {DTYPE}; sdpa forms all logits at once"
    table(title, "|".join(("model, attention", *STEP)), [[x[y] for y in ("name", *STEP)] for x in rows])


def generated(model: Any, ids: Tensor, ring: ra.Ring) -> Tensor:
    """Returns the tokens that follow a prefill over a ring."""
    ra.patch_model(model.eval(), ring=ring)
    named = "cache" in inspect.signature(model.prepare_inputs_for_generation).parameters
    cache = {"cache" if named else "past_key_values": ra.prefill(model, ids[:, :-1])}
    return model.generate(ids, **cache, max_new_tokens=4, do_sample=False, pad_token_id=0)


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


def main(words: Sequence[str] | None = None) -> None:
    """Runs all sections, and ends with status 1 for wrong numbers and errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540, help="the most seconds of the run (default: 540)")
    parser.add_argument("--small", action="store_true", help="every section at small sizes, also on a CPU")
    default = Path(os.environ.get("OUT", "."), "gpu.json")
    parser.add_argument("--json", type=Path, default=default, help="default: gpu.json, in the folder $OUT or this one")
    args = parser.parse_args(words)
    if not (CUDA or args.small):
        parser.error("expected a GPU, found none: use --small for a dry run on the CPU")
    report = Report(args.seconds, args.small, args.json)
    short = [(f"speed, {x} tokens", speed, x) for x in ((256, 512) if args.small else (8192, 32768, 131072))]
    long = ("speed of the longest rows", speed, 1024 if args.small else 524288)
    sections: list[Any] = [("versions and ceilings", machine), ("errors", errors), ("tests marked cuda", tests)]
    for name, section, *arguments in (*sections, *short, ("training steps", steps), ("process group", group), long):
        print(f"== {name}, {report.left:.0f} s left", flush=True)
        report.run(name, 5, section, report, *arguments)
    goals = [row["goal"].endswith("met") for row in report.figures["speed"] if row["goal"]]
    left_out, wrong = (len(report.figures[kind]) for kind in ("left out", "wrong"))
    print(f"{sum(goals)} of {len(goals)} goals met, {left_out} parts left out, {wrong} wrong; figures in {args.json}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
