"""Measurements of the ring on this machine: transports against each other, against the ideal, memory, and overlap.

Each starts processes of one thread (on a GPU machine: one per GPU) and compares within one run, alternating, by medians.
"""

from __future__ import annotations

import gc
import math
import os
import pickle
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
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from .attention import ring_attention
from .bindings import bind_collective, bind_ring
from .blocks import accumulation_dtype
from .communicators import Communicator, Message, Pending, ProcessGroupCommunicator
from .patterns import Pattern, Window
from .plans import Problem
from .ring import Ring
from .routes import Sizes

TIMEOUT = timedelta(minutes=15)


@dataclass(frozen=True)
class Shape:
    """Of the tensors of a benchmark: heads, head size, dtype by name, and the kind of device."""

    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    device: str = "cpu"

    def tensors(self, tokens: int, heads: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v that require gradients, and dout."""
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
    """Bytes this process has held at most: of the device's memory, or of main memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # where it does, getrusage also counts what the parent process held
        return 1024 * int(next(line.split()[1] for line in status.read_text().splitlines() if "VmHWM" in line))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_memory(device: torch.device) -> int:
    """Starts `peak_memory` anew, where the system can (CUDA, Linux), and returns what it is then."""
    counter = Path("/proc/self/clear_refs")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif counter.exists():
        counter.write_text("5")
    return peak_memory(device)


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """In Markdown, first column to the left."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def launch(function: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """function(*args) on each of `world_size` ranks, processes of one thread; what rank 0 returns."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world_size, folder, function, args), nprocs=world_size)
        return pickle.loads(Path(folder, "answer").read_bytes())


def _rank(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    shape = next(x for x in args if isinstance(x, Shape))
    torch.set_num_threads(1)
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
    answer = function(*args)
    if rank == 0:
        Path(folder, "answer").write_bytes(pickle.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def _timed(function: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Seconds from the moment all ranks begin to the moment all have done."""
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = function()
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - start, result


def _forward_backward(
    attention: Callable[[Tensor, Tensor, Tensor], Any], tensors: tuple[Tensor, Tensor, Tensor, Tensor], device: str
) -> tuple[float, float]:
    """(forward, backward) seconds."""
    q, k, v, dout = tensors
    forward, out = _timed(lambda: attention(q, k, v), device)
    backward, _ = _timed(lambda: out.backward(dout), device)
    for x in (q, k, v):
        x.grad = None
    return forward, backward


def _progress(numbers: Iterable[Any], what: str) -> Iterable[Any]:
    return tqdm(numbers, desc=what, leave=False, disable=dist.get_rank() != 0)


def _medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(f for f, _ in times), statistics.median(b for _, b in times)


# Transports against each other -----------------------------------------------------------------------------------


def patterns_for(tokens: int) -> dict[str, Pattern]:
    """The patterns that the transports are compared on: all keys, sparse far ones, and near ones only."""
    return {
        "exact": Pattern.exact(),
        "longnet": Pattern.longnet([tokens // 16, tokens // 4, tokens], [1, 4, 16]),
        "window": Pattern((Window(max(1, tokens // 16)),)),
    }


def compare_transports(shape: Shape, lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Seconds of forward + backward by both transports, and what "auto" takes, for each pattern and length.

    Calls alternate; their ratio is the median of those of neighbours.
    """
    rings = {name: Ring(transport=name) for name in ("ring", "collective")}
    auto, rows = Ring(), []
    widths = 2 * shape.head_dim
    dtype = getattr(torch, shape.dtype)
    sizes = Sizes(widths * dtype.itemsize, widths * accumulation_dtype(dtype).itemsize)
    cells = [(tokens, name) for tokens in lengths for name in patterns_for(tokens)]
    for tokens, name in _progress(cells, "transports"):
        pattern = patterns_for(tokens)[name]
        layout = auto.layout_for(tokens, pattern)
        tensors = shape.tensors(layout.local_len)
        times: dict[str, list[float]] = {name: [] for name in rings}
        number, least = 0, repeats
        while number <= least:
            for transport in list(times)[:: 1 if number % 2 else -1]:
                found = _forward_backward(
                    lambda *x, ring=rings[transport], p=pattern, at=layout: ring_attention(
                        *x, pattern=p, ring=ring, layout=at
                    ),
                    tensors,
                    shape.device,
                )
                if number:
                    times[transport].append(sum(found))
            if number == 1:  # short calls scatter more, and are repeated for a second; as often on every rank
                pairs = torch.tensor([1 / sum(sum(found) for found in times.values())], device=shape.device)
                dist.broadcast(pairs, 0)
                least = max(repeats, min(100, int(pairs)))
            number += 1
        seconds = {transport: statistics.median(found) for transport, found in times.items()}
        ratio = statistics.median(c / r for c, r in zip(times["collective"], times["ring"]))
        decision = auto.decide(Problem(pattern, layout, (((0, tokens),),), shape.heads, shape.kv_heads), sizes)
        worse = {"ring": 1 / ratio, "collective": ratio, "local": 1.0}[decision.choice]  # "local": nothing to move
        rows.append(
            {
                "pattern": name,
                "tokens": tokens,
                "layout": layout.kind,
                **seconds,
                "pairs": len(times["ring"]),
                "collective_over_ring": ratio,
                "auto": decision.choice,
                "reason": decision.reason,
                "auto_over_best": max(1.0, worse),
            }
        )
    return rows


def transport_report(rows: list[dict[str, Any]], world_size: int) -> str:
    """The table, the crossover of each pattern, and how good the automatic choice was."""
    lines = [
        table(
            (
                "pattern",
                "tokens",
                "layout",
                "ring ms",
                "collective ms",
                "paired collective / ring",
                "auto",
                "auto / better",
            ),
            (
                (
                    row["pattern"],
                    row["tokens"],
                    row["layout"],
                    f"{1e3 * row['ring']:.1f}",
                    f"{1e3 * row['collective']:.1f}",
                    f"{row['collective_over_ring']:.2f}",
                    row["auto"],
                    f"{row['auto_over_best']:.2f}",
                )
                for row in rows
            ),
        ),
        "",
    ]
    for name in dict.fromkeys(row["pattern"] for row in rows):
        mine = [row for row in rows if row["pattern"] == name]
        # From this length on the ring is never slower.
        wins = [
            row["tokens"] for i, row in enumerate(mine) if all(later["collective_over_ring"] >= 1 for later in mine[i:])
        ]
        where = (
            f"from {wins[0]} tokens on the ring is faster" if wins else "the ring is not faster at the longest length"
        )
        lines.append(f"{name}, {world_size} ranks: {where}")
    good = sum(row["auto_over_best"] <= 1.1 for row in rows)
    lines.append(f"auto is within 10 % of the better one in {good} of {len(rows)} cells")
    return "\n".join(lines)


# Against the ideal -----------------------------------------------------------------------------------------------


def compare_with_ideal(shape: Shape, exact_tokens: int, longnet_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """The ring against a share of the same FLOPs on every rank without any communication.

    Exact: causal flash attention of 1 / p of the heads over the whole row. LongNet: twice (p times) the rate of the
    local path, which one rank alone measures over the whole row.
    """
    p, rank = dist.get_world_size(), dist.get_rank()
    rows = []
    exact = Pattern.exact()
    ring = Ring(layout="zigzag", transport="ring")
    tensors, share = shape.tensors(exact_tokens // p), shape.tensors(exact_tokens, max(1, shape.heads // p))
    times: list[list[tuple[float, float]]] = [[], []]
    for number in _progress(range(repeats + 1), "exact"):
        for which in (0, 1) if number % 2 else (1, 0):
            found = (
                _forward_backward(lambda *x: ring_attention(*x, pattern=exact, ring=ring), tensors, shape.device)
                if which == 0
                else _forward_backward(
                    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                    share,
                    shape.device,
                )
            )
            if number:
                times[which].append(found)
    rows.append(_ratios("exact, zigzag", exact_tokens, *times))

    longnet = Pattern.longnet([2048, 8192, 32768], [1, 4, 16])
    ring = Ring(transport="ring")
    layout = ring.layout_for(longnet_tokens, longnet)
    tensors, whole = shape.tensors(layout.local_len), shape.tensors(longnet_tokens)
    times = [[], []]
    for number in _progress(range(repeats + 1), "longnet"):
        for which in (0, 1) if number % 2 else (1, 0):
            if which == 0:
                found = _forward_backward(
                    lambda *x: ring_attention(*x, pattern=longnet, ring=ring, layout=layout), tensors, shape.device
                )
            elif rank == 0:
                found = _forward_backward(lambda *x: ring_attention(*x, pattern=longnet), whole, shape.device)
                found = (found[0] / p, found[1] / p)
            else:
                for _ in range(4):  # the barriers of the rank that computes
                    dist.barrier()
                found = (0.0, 0.0)
            if number:
                times[which].append(found)
    rows.append(_ratios(f"longnet, {layout.kind}", longnet_tokens, *times))
    return rows


def _ratios(
    name: str, tokens: int, ring: list[tuple[float, float]], ideal: list[tuple[float, float]]
) -> dict[str, Any]:
    """Medians, and medians of the paired ratios ideal / ring."""
    pairs = list(zip(ring, ideal))
    return {
        "pattern": name,
        "tokens": tokens,
        "ring": _medians(ring),
        "ideal": _medians(ideal),
        "forward": statistics.median(best[0] / mine[0] for mine, best in pairs),
        "both": statistics.median(sum(best) / sum(mine) for mine, best in pairs),
    }


def ideal_report(rows: list[dict[str, Any]]) -> str:
    """Table of `compare_with_ideal`."""
    return table(
        (
            "pattern",
            "tokens",
            "ring forward s",
            "ring backward s",
            "ideal forward s",
            "ideal backward s",
            "of the ideal: forward",
            "forward + backward",
        ),
        (
            (
                row["pattern"],
                row["tokens"],
                *(f"{x:.3f}" for x in (*row["ring"], *row["ideal"])),
                f"{row['forward']:.2f}",
                f"{row['both']:.2f}",
            )
            for row in rows
        ),
    )


# Memory ----------------------------------------------------------------------------------------------------------


def peak_of_call(shape: Shape, tokens_per_rank: int, transport: str) -> list[int]:
    """Bytes that forward + backward of exact causal attention held at most, beyond its inputs; of each rank."""
    device = torch.device(shape.device)
    ring = Ring(layout="zigzag", transport=transport if dist.get_world_size() > 1 else "auto")  # type: ignore[arg-type]
    pattern = Pattern.exact()
    for tokens in (64, tokens_per_rank):  # the first loads what kernels and connections need
        q, k, v, dout = shape.tensors(tokens)
        # The plan is made once for all layers and steps, and is not of the call.
        seq_len = tokens * ring.world_size
        layout = ring.layout_for(seq_len, pattern)
        problem = Problem(pattern, layout, (((0, seq_len),),), shape.heads, shape.kv_heads)
        (bind_collective if transport == "collective" else bind_ring)(problem, ring.rank, device)
        gc.collect()
        before = reset_peak_memory(device)
        ring_attention(q, k, v, pattern=pattern, ring=ring).backward(dout)
        held = peak_memory(device) - before
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, held)
    return gathered


def measure_memory(shape: Shape, tokens_per_rank: int, world_sizes: Sequence[int]) -> dict[str, dict[int, int]]:
    """{transport: {ranks: the largest `peak_of_call` of a rank}}, each in processes of its own."""
    # glibc then gives freed tensors back at once, and the peak of a process is that of what it holds.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    cells = [(transport, p) for transport in ("ring", "collective") for p in world_sizes]
    peaks: dict[str, dict[int, int]] = {}
    for transport, p in tqdm(cells, desc="memory", leave=False):
        peaks.setdefault(transport, {})[p] = max(launch(peak_of_call, p, shape, tokens_per_rank, transport))
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    return peaks


def memory_report(peaks: dict[str, dict[int, int]], tokens_per_rank: int) -> str:
    """Table of peaks, {transport: {ranks: bytes}}."""
    ranks = list(next(iter(peaks.values())))
    rows = [
        (
            transport,
            *(f"{by_ranks[p] / 2**20:.0f} MiB" for p in ranks),
            f"{by_ranks[ranks[-1]] / by_ranks[2]:.2f}" if by_ranks.get(2) else "",
        )
        for transport, by_ranks in peaks.items()
    ]
    headings = (f"{tokens_per_rank} tokens a rank", *(f"p = {p}" for p in ranks), f"p = {ranks[-1]} / p = 2")
    return table(headings, rows)


# Overlap ---------------------------------------------------------------------------------------------------------


class DelayedCommunicator(ProcessGroupCommunicator):
    """A process group whose messages take `seconds` longer."""

    seconds = 0.0

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return _Delayed(super().exchange(sends, receives), time.perf_counter() + self.seconds)


class _Delayed:
    def __init__(self, pending: Pending, earliest: float) -> None:
        self.pending, self.earliest = pending, earliest

    def wait(self) -> None:
        time.sleep(max(0.0, self.earliest - time.perf_counter()))
        self.pending.wait()


def measure_overlap(shape: Shape, tokens: int, shares: Sequence[float], repeats: int) -> list[dict[str, Any]]:
    """How much of a delay of every hop, as a share of a step's computation, shows in the time of exact attention."""
    assert dist.group.WORLD is not None
    communicator = DelayedCommunicator(dist.group.WORLD)
    as_given: Communicator = communicator
    ring = Ring.over(as_given, "zigzag", "ring")
    tensors = shape.tensors(tokens // ring.world_size)

    def run(seconds: float) -> tuple[float, float, int, int]:
        communicator.seconds = seconds
        ring.reset_traffic()
        q, k, v, dout = tensors
        forward, out = _timed(lambda: ring_attention(q, k, v, pattern=Pattern.exact(), ring=ring), shape.device)
        hops = ring.traffic().hops
        backward, _ = _timed(lambda: out.backward(dout), shape.device)
        for x in (q, k, v):
            x.grad = None
        return forward, backward, hops, ring.traffic().hops

    run(0.0)
    forward, _, hops, _ = run(0.0)
    step = forward / (2 * hops)  # a rank's own keys and, for each hop, another rank's: equal work in zigzag of 2 ranks
    if ring.world_size != 2:
        step = forward / (hops * ring.world_size / (ring.world_size - 1))
    rows = []
    for share in shares:
        growths = []
        for number in _progress(range(repeats), f"delay {share:.0%}"):
            delays = (0.0, share * step)
            plain, delayed = (run(seconds) for seconds in (delays if number % 2 else delays[::-1]))
            if not number % 2:
                plain, delayed = delayed, plain
            growths.append(
                (
                    (delayed[0] - plain[0]) / (delayed[2] * share * step),
                    (sum(delayed[:2]) - sum(plain[:2])) / (delayed[3] * share * step),
                )
            )
        forward_share, both_share = _medians(growths)
        rows.append(
            {"share": share, "delay": share * step, "hops": delayed[3], "forward": forward_share, "both": both_share}
        )
    return rows


def overlap_report(rows: list[dict[str, Any]]) -> str:
    """Table of `measure_overlap`."""
    return table(
        ("delay of a hop, of a step", "ms", "hops", "of the delay visible: forward", "forward + backward"),
        (
            (
                f"{row['share']:.0%}",
                f"{1e3 * row['delay']:.1f}",
                row["hops"],
                f"{row['forward']:.0%}",
                f"{row['both']:.0%}",
            )
            for row in rows
        ),
    )
