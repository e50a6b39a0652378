"""Measures the ring against the ideal: a share of the same FLOPs on every rank, without communication."""

from __future__ import annotations

import statistics
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F

from ...plan.patterns import Pattern
from ...ring.attention import ring_attention
from ...ring.ring import Ring
from ..output import Sheet
from .harness import (
    CallShape,
    forward_backward,
    medians,
    progress,
)


def compare_with_ideal(shape: CallShape, exact_tokens: int, longnet_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Returns the seconds of the ring, and of a share of the same FLOPs on every rank without any communication.

    The share of exact attention is causal flash attention of 1 / p of the heads over the whole sequence. The share of LongNet
    is 1 / p of the time that one rank alone needs for the whole sequence.
    """
    p, rank = dist.get_world_size(), dist.get_rank()
    rows = []
    exact = Pattern.exact()
    ring = Ring(layout="zigzag", transport="ring")
    tensors, share = shape.tensors(exact_tokens // p), shape.tensors(exact_tokens, max(1, shape.heads // p))
    times: list[list[tuple[float, float]]] = [[], []]
    for number in progress(range(repeats + 1), "exact"):
        for which in (0, 1) if number % 2 else (1, 0):
            elapsed = (
                forward_backward(lambda *x: ring_attention(*x, pattern=exact, ring=ring), tensors, shape.device)
                if which == 0
                else forward_backward(
                    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                    share,
                    shape.device,
                )
            )
            if number:
                times[which].append(elapsed)
    rows.append(_ratios("exact, zigzag", exact_tokens, *times))

    longnet = Pattern.longnet([2048, 8192, 32768], [1, 4, 16])
    ring = Ring(transport="ring")
    layout = ring.layout_for(longnet_tokens, longnet)
    tensors, whole = shape.tensors(layout.local_len), shape.tensors(longnet_tokens)
    times = [[], []]
    for number in progress(range(repeats + 1), "longnet"):
        for which in (0, 1) if number % 2 else (1, 0):
            if which == 0:
                elapsed = forward_backward(
                    lambda *x: ring_attention(*x, pattern=longnet, ring=ring, layout=layout), tensors, shape.device
                )
            elif rank == 0:
                elapsed = forward_backward(lambda *x: ring_attention(*x, pattern=longnet), whole, shape.device)
                elapsed = (elapsed[0] / p, elapsed[1] / p)
            else:
                for _ in range(4):  # These are the barriers of the rank that computes.
                    dist.barrier()
                elapsed = (0.0, 0.0)
            if number:
                times[which].append(elapsed)
    rows.append(_ratios(f"longnet, {layout.kind}", longnet_tokens, *times))
    return rows


def _ratios(
    name: str, tokens: int, ring: list[tuple[float, float]], ideal: list[tuple[float, float]]
) -> dict[str, Any]:
    """Returns medians, and medians of the paired ratios ideal / ring."""
    pairs = list(zip(ring, ideal))
    return {
        "pattern": name,
        "tokens": tokens,
        "ring": medians(ring),
        "ideal": medians(ideal),
        "forward": statistics.median(ideal_seconds[0] / ring_seconds[0] for ring_seconds, ideal_seconds in pairs),
        "both": statistics.median(sum(ideal_seconds) / sum(ring_seconds) for ring_seconds, ideal_seconds in pairs),
    }


def ideal_report(rows: list[dict[str, Any]], world_size: int) -> Sheet:
    """Returns the table of `compare_with_ideal`."""
    return Sheet(
        f"the ring against the same FLOPs without communication, {world_size} ranks",
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
        [
            (
                row["pattern"],
                row["tokens"],
                *(f"{x:.3f}" for x in (*row["ring"], *row["ideal"])),
                f"{row['forward']:.2f}",
                f"{row['both']:.2f}",
            )
            for row in rows
        ],
    )
