"""The parts that measurements share: tensors, processes of one thread (on a GPU machine: one per GPU), clocks and peaks.

Calls that are compared alternate within one run, and medians are shown.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from ...evaluation.progress import progress_bar

TIMEOUT = timedelta(minutes=15)


@dataclass(frozen=True)
class CallShape:
    """The shape of a benchmark's tensors: heads, head size, dtype by name, and the kind of device."""

    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    device: str = "cpu"

    def tensors(self, tokens: int, heads: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns q, k, v that require gradients, and dout."""
        heads = heads or self.heads
        kv_heads = math.gcd(heads, self.kv_heads)
        generator = torch.Generator(self.device).manual_seed(seed)
        q, k, v, dout = (
            torch.randn(
                1,
                count,
                tokens,
                self.head_dim,
                generator=generator,
                device=self.device,
                dtype=getattr(torch, self.dtype),
            )
            for count in (heads, kv_heads, kv_heads, heads)
        )
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def peak_memory(device: torch.device) -> int:
    """Returns the most bytes that this process has held: of the device's memory, or of main memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Where a process has this status, getrusage also counts what the parent process held.
    return _resident("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def held_memory(device: torch.device) -> int:
    """Returns the bytes that this process holds now, of the memory of `peak_memory`; off Linux, the most that it has held."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _resident("VmRSS") or peak_memory(device)


def _resident(name: str) -> int | None:
    """Returns the bytes of a line of this process's status, or None where the system writes none."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return 1024 * int(next(line.split()[1] for line in status.read_text().splitlines() if name in line))


def reset_peak_memory(device: torch.device) -> int:
    """Resets `peak_memory`, where the system can (CUDA, Linux), and returns its new value."""
    counter = Path("/proc/self/clear_refs")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif counter.exists():
        counter.write_text("5")
    return peak_memory(device)


def give_memory_back_at_once() -> None:
    """Tells glibc to return freed tensors to the system, so that the peak of a process is that of what it holds."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Other C libraries have none.
        if mallopt is not None:
            mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD


#: The server that the processes of a benchmark are forked from loads this once: each would need seconds for it.
_LOADED_ONCE = ["hf_ring_attention.tools.benchmarks.loaded"]


def launch(function: Callable[..., Any], world_size: int, shape: CallShape, *args: Any, threads: int | None = 1) -> Any:
    """Runs function(shape, *args) on each of `world_size` ranks, in processes of their own, and returns what rank 0 does.

    The answer is made of numbers, texts, tensors, tuples, lists, sets and dicts.

    Args:
        threads: the threads of each process; None for as many as torch takes.
    """
    method = "spawn"
    if "forkserver" in mp.get_all_start_methods():
        method = "forkserver"
        mp.get_context(method).set_forkserver_preload(_LOADED_ONCE)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, folder, threads, function, shape, args)
        mp.start_processes(_rank, arguments, nprocs=world_size, start_method=method)
        return torch.load(Path(folder, "answer"), weights_only=True)


def _rank(
    rank: int,
    world_size: int,
    folder: str,
    threads: int | None,
    function: Callable[..., Any],
    shape: CallShape,
    args: tuple[Any, ...],
) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    if shape.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if shape.device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    answer = function(shape, *args)
    if rank == 0:
        torch.save(answer, Path(folder, "answer"))
    dist.barrier()
    dist.destroy_process_group()


def machine_name(device: str) -> str:
    """Returns the name of what the figures were measured on."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"


def alternately(names: Sequence[str], number: int) -> list[str]:
    """Returns the names in an order that changes from run to run, so that none is always the first."""
    return list(names)[:: 1 if number % 2 else -1]


def timed(function: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Returns the seconds from when all ranks begin until all are done, and what the function returned."""
    _barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = function()
    if device == "cuda":
        torch.cuda.synchronize()
    _barrier()
    return time.perf_counter() - start, result


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def forward_backward(
    attention: Callable[[Tensor, Tensor, Tensor], Any], tensors: tuple[Tensor, Tensor, Tensor, Tensor], device: str
) -> tuple[float, float]:
    """Returns (forward, backward) seconds."""
    q, k, v, dout = tensors
    forward, out = timed(lambda: attention(q, k, v), device)
    backward, _ = timed(lambda: out.backward(dout), device)
    for x in (q, k, v):
        x.grad = None
    return forward, backward


def progress(numbers: Iterable[Any], label: str) -> Iterable[Any]:
    """Returns the numbers, with a bar on stderr, which rank 0 shows for all; in a file, a line every half minute."""
    of_another = dist.is_initialized() and dist.get_rank() > 0
    bar: Iterable[Any] = progress_bar(label, numbers, silent=of_another)
    return bar


def medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Returns the medians of (forward, backward) seconds."""
    return statistics.median(f for f, _ in times), statistics.median(b for _, b in times)
