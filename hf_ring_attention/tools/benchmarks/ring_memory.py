"""Measures the peak memory of a call, as the ring grows."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...plan.patterns import Pattern
from ...plan.problem import Problem
from ...plan.traffic import RowBytes
from ...ring.attention import ring_attention
from ...ring.ring import Ring
from ..output import Sheet, mebibytes
from .harness import (
    CallShape,
    give_memory_back_at_once,
    launch,
    peak_memory,
    progress,
    reset_peak_memory,
)


def peak_of_call(shape: CallShape, tokens_per_rank: int, transport: str) -> list[int]:
    """Returns the most bytes that forward + backward of exact causal attention held beyond its inputs, for each rank."""
    give_memory_back_at_once()
    device = torch.device(shape.device)
    ring = Ring(layout="zigzag", transport=transport if dist.get_world_size() > 1 else "auto")  # type: ignore[arg-type]
    pattern = Pattern.exact()
    for tokens in (64, tokens_per_rank):  # The first call loads what kernels and connections need.
        q, k, v, dout = shape.tensors(tokens)
        # The plan is made here, because it is made once for all layers and steps, and is no memory of the call.
        seq_len = tokens * ring.world_size
        layout = ring.layout_for(seq_len, pattern)
        problem = Problem(pattern, layout, (((0, seq_len),),), num_heads=shape.heads, num_kv_heads=shape.kv_heads)
        ring.transport_for(problem, RowBytes(1, 1), device, None)
        gc.collect()
        before = reset_peak_memory(device)
        ring_attention(q, k, v, pattern=pattern, ring=ring).backward(dout)
        held = peak_memory(device) - before
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, held)
    return gathered


def measure_memory(shape: CallShape, tokens_per_rank: int, world_sizes: Sequence[int]) -> dict[str, dict[int, int]]:
    """Returns {transport: {ranks: the largest `peak_of_call` of a rank}}, each measured in processes of its own."""
    cells = [(transport, p) for transport in ("ring", "collective") for p in world_sizes]
    peaks: dict[str, dict[int, int]] = {}
    for transport, p in progress(cells, "ring memory"):
        peaks.setdefault(transport, {})[p] = max(launch(peak_of_call, p, shape, tokens_per_rank, transport))
    return peaks


def memory_report(peaks: dict[str, dict[int, int]], tokens_per_rank: int) -> Sheet:
    """Returns the table of peaks, {transport: {ranks: bytes}}."""
    ranks = list(next(iter(peaks.values())))
    rows = [
        (
            transport,
            *(f"{mebibytes(by_ranks[p])} MiB" for p in ranks),
            f"{by_ranks[ranks[-1]] / by_ranks[2]:.2f}" if by_ranks.get(2) else "",
        )
        for transport, by_ranks in peaks.items()
    ]
    headings = (f"{tokens_per_rank} tokens a rank", *(f"p = {p}" for p in ranks), f"p = {ranks[-1]} / p = 2")
    return Sheet("peak memory of exact attention, forward + backward, of a rank", headings, rows)
