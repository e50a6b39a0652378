"""What the benchmarks share: options, inputs, processes, calls in alternating order, peaks of memory, tables of 80 columns."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import platform
import resource
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

WIDTH = 80
#: Every rank is forked from a process that has imported these.
PRELOADED = ["torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "accelerate"]


def count(text: str) -> int:
    """Reads a number of tokens such as 4096, 4k or 1M."""
    size = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 1)
    return int(text if size == 1 else text[:-1]) * size


class Several(argparse.Action):
    """Collects the values of an option that may be repeated, in place of its default; a value may be a list."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest)
        new = [x for value in values for x in (value if isinstance(value, list) else [value])]
        setattr(namespace, self.dest, new if before is self.default else [*before, *new])


@dataclass(frozen=True)
class Shape:
    """Heads, head size, dtype and device of the measured tensors."""

    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    device: str = "cpu"

    def tensors(self, tokens: int, heads: int | None = None) -> list[torch.Tensor]:
        """Returns q, k and v, which require gradients, and the gradient of the output; `heads` limits the query heads."""
        heads = heads or self.heads
        kv_heads = math.gcd(heads, self.kv_heads)
        random = torch.Generator(self.device).manual_seed(0)
        options = {"generator": random, "device": self.device, "dtype": getattr(torch, self.dtype)}
        sizes = [heads, kv_heads, kv_heads, heads]
        q, k, v, dout = (torch.randn(1, size, tokens, self.head_dim, **options) for size in sizes)
        return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


def as_models_store(shape: Shape, tokens: int) -> list[torch.Tensor]:
    """Returns q, k, v and the gradient of the output; the numbers of a token lie side by side."""
    return [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in shape.tensors(tokens)]


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the error of a tensor, relative to the norm of the expected one."""
    expected = expected.detach().double()
    return float((found.detach().to(expected) - expected).norm() / expected.norm())


def options(program: str, words: Sequence[str] | None, **defaults: Any) -> tuple[argparse.Namespace, Shape]:
    """Reads the options that all programs have, and those with these defaults, and prints the machine.

    A default tells the kind of an option: "4k" of tokens, a list of one or more values, False of a switch.
    """
    parser = argparse.ArgumentParser(description=program, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"heads": 8, "kv_heads": 0, "head_dim": 64, "dtype": "float32", **defaults}.items():
        first = default[0] if isinstance(default, list) else default
        several = isinstance(default, list)
        number = (lambda text: [count(part) for part in text.split(",")]) if several else count
        how: dict[str, Any] = {"type": str if name in ("dtype", "patterns", "parts", "plot", "json") else number}
        how |= {"nargs": "+", "action": Several} if several else {}
        how = {"action": "store_true"} if first is False else {**how, "default": default, "help": f"default: {default}"}
        option = "--pattern" if name == "patterns" else f"--{name.replace('_', '-')}"
        parser.add_argument(option, dest=name, **how)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(words)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"{os.cpu_count()} cores, {platform.machine()}"
    print(f"{machine}, torch {torch.__version__}, {args.dtype}, {args.heads} heads x {args.head_dim}\n")
    return args, Shape(args.heads, args.kv_heads or args.heads, args.head_dim, args.dtype, args.device)


def clock(call: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Returns the seconds from the moment when all ranks are ready until all are done, and the result of the call."""
    start, result = 0.0, None
    for work in (lambda: None, call):
        start, result = time.perf_counter(), work()
        if device == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
    return time.perf_counter() - start, result


def forward_backward(attend: Callable[..., Any], tensors: Sequence[torch.Tensor], device: str) -> tuple[float, float]:
    """Returns the seconds of forward, and of forward and backward together."""
    *inputs, dout = tensors
    forward, out = clock(lambda: attend(*inputs), device)
    backward, _ = clock(lambda: out.backward(dout), device)
    for x in inputs:
        x.grad = None
    return forward, forward + backward


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Returns the milliseconds of a call, and those of the host until the work of one call is queued."""

    def run(count: int) -> tuple[float, float]:
        start = time.perf_counter()
        for _ in range(count):
            call()
        queued = time.perf_counter() - start
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start) / count, 1000 * queued / count

    first = run(1)  # Kernels compile, and plans are made.
    one, host = first if first[0] > 2000 else run(1)
    return (run(min(20, int(500 / one)))[0] if one < 250 else one), host


def kernel_ms(call: Callable[[], Any]) -> float:
    """Returns the milliseconds that the kernels of a call take on a GPU, the mean of four calls; NaN without a GPU.

    Copies and fills by the driver do not count, nor does the time that the GPU waits for its host.
    """
    if not torch.cuda.is_available():
        return math.nan
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(4):
            call()
        torch.cuda.synchronize()
    return kernel_microseconds(seen.key_averages()) / 4000


def kernel_microseconds(events: Iterable[Any]) -> float:
    """Returns the microseconds of the kernels among averaged events of a profile.

    Operators count the time of their kernels once more, and are events of the host.
    """
    kernels = (x for x in events if x.device_type != DeviceType.CPU and not x.is_user_annotation)
    return sum(x.self_device_time_total for x in kernels if not x.key.startswith(("Memcpy", "Memset")))


Runs = dict[str, list[tuple[float, ...]]]


def alternate(calls: dict[str, Callable[[], tuple[float, ...]]], repeats: int) -> Runs:
    """Returns the seconds that each call measures, turn by turn; every other turn goes through the calls backwards.

    The first turn does not count: in it kernels compile, plans are made and connections open.
    """
    runs: Runs = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            seconds = calls[name]()
            if turn:
                runs[name].append(seconds)
    return runs


def median(runs: Runs, name: str, part: int = -1) -> float:
    """Returns the median of the seconds of a call."""
    return statistics.median(seconds[part] for seconds in runs[name])


def ratio(runs: Runs, above: str, below: str, part: int = -1) -> float:
    """Returns the median of the ratios of two calls in the same turn, which a busy machine changes least."""
    return statistics.median(a[part] / b[part] for a, b in zip(runs[above], runs[below]))


def table(title: str, headings: str, rows: Sequence[Sequence[Any]], *notes: str) -> None:
    """Prints rows, if any, below headings, "a|b" for two columns; numbers have three digits, "-" is none."""
    if not rows:
        return
    cells = [[str(row[0]), *map(_shown, row[1:])] for row in rows]
    tops = [("\n" + heading).split("\n")[-2:] for heading in headings.split("|")]
    widths = [max(len(text) for text in (*top, *column)) for top, column in zip(tops, zip(*cells))]
    # A name that leaves no room for its numbers has a line of its own.
    widths[0] = min(widths[0], WIDTH - sum(width + 2 for width in widths[1:]))
    print("\n".join(textwrap.wrap(title, WIDTH)))
    for name, *numbers in [*filter(any, zip(*tops)), *cells]:
        if len(name) > widths[0]:
            print("\n".join(textwrap.wrap(name, WIDTH)))
            name = ""
        texts = (f"{text:>{width}}" for text, width in zip(numbers, widths[1:]))
        print("  ".join([f"{name:<{widths[0]}}", *texts]).rstrip())
    for note in notes:
        print("\n".join(textwrap.wrap(note, WIDTH)))
    print(flush=True)


def _shown(cell: Any) -> str:
    if not isinstance(cell, float):
        return str(cell)
    small = f"{cell:.2e}" if 0 < abs(cell) < 0.001 else f"{cell:#.3g}"
    return "-" if math.isnan(cell) else f"{cell:.0f}" if abs(cell) >= 100 else small


def launch(function: Callable[..., Any], processes: int, *args: Any, device: str) -> Any:
    """Runs function(*args) in new processes of one thread each, and returns the answer of rank 0, which JSON can hold."""
    mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (processes, folder, function, args, device), processes, start_method="forkserver")
        return json.loads(Path(folder, "answer").read_text())


def _rank(rank: int, processes: int, folder: str, function: Any, args: Any, device: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", ACCELERATE_USE_CPU=str(device == "cpu"))
    os.environ["OMP_NUM_THREADS"] = "1"  # Accelerate sets the number of threads anew otherwise.
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend, store = "nccl" if device == "cuda" else "gloo", f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=processes)
    answer = function(*args)
    if rank == 0:
        Path(folder, "answer").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def of_all_ranks(number: Any) -> list[Any]:
    """Returns the numbers of all ranks, on every rank."""
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return numbers


def return_memory_at_once() -> None:
    """Has glibc return freed tensors to the system, so that the peak of a process is the sum of its tensors."""
    if hasattr(ctypes.CDLL(None), "mallopt"):  # Other C libraries lack it.
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD


def held_memory(device: str, peak: bool = False) -> int:
    """Returns the bytes that this process holds, or held at most since `reset_peak`: of the GPU, or of main memory."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    status = Path("/proc/self/status")
    if not status.exists():  # On Linux, getrusage would count the launcher's memory, too.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    name = "VmHWM" if peak else "VmRSS"
    return 1024 * int(next(line.split()[1] for line in status.read_text().splitlines() if name in line))


def reset_peak(device: str) -> int:
    """Collects garbage, resets the peak, and returns the bytes that are held now."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif (peak := Path("/proc/self/clear_refs")).exists():
        peak.write_text("5")
    return held_memory(device)
