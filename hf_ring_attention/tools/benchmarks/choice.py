"""Measures the transports against each other, and how good the automatic choice is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...compute.merge import accumulation_dtype
from ...plan.patterns import Pattern, Window
from ...plan.problem import Problem
from ...plan.traffic import RowBytes
from ...ring.attention import ring_attention
from ...ring.ring import Ring
from ..output import Sheet
from .harness import (
    CallShape,
    forward_backward,
    progress,
)


def patterns_for(tokens: int) -> dict[str, Pattern]:
    """Returns the patterns that the transports are compared on: all keys, sparse far ones, and near ones only."""
    return {
        "exact": Pattern.exact(),
        "longnet": Pattern.longnet([tokens // 16, tokens // 4, tokens], [1, 4, 16]),
        "window": Pattern((Window(max(1, tokens // 16)),)),
    }


def compare_transports(shape: CallShape, lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Returns the seconds of forward + backward by both transports, and what "auto" takes, for each pattern and length.

    Calls alternate; the ratio is the median of the ratios of neighbouring calls.
    """
    rings = {name: Ring(transport=name) for name in ("ring", "collective")}
    auto, rows = Ring(), []
    widths = 2 * shape.head_dim
    dtype = getattr(torch, shape.dtype)
    sizes = RowBytes(widths * dtype.itemsize, widths * accumulation_dtype(dtype).itemsize)
    cells = [(tokens, name) for tokens in lengths for name in patterns_for(tokens)]
    for tokens, name in progress(cells, "transports"):
        pattern = patterns_for(tokens)[name]
        layout = auto.layout_for(tokens, pattern)
        tensors = shape.tensors(layout.local_len)
        times: dict[str, list[float]] = {name: [] for name in rings}
        number, least = 0, repeats
        while number <= least:
            for transport in list(times)[:: 1 if number % 2 else -1]:
                elapsed = forward_backward(
                    lambda *x, ring=rings[transport], p=pattern, at=layout: ring_attention(
                        *x, pattern=p, ring=ring, layout=at
                    ),
                    tensors,
                    shape.device,
                )
                if number:
                    times[transport].append(sum(elapsed))
            if number == 1:  # Short calls scatter more, and are repeated for a second, equally often on every rank.
                pairs = torch.tensor([1 / sum(map(sum, times.values()))], device=shape.device)
                dist.broadcast(pairs, 0)
                least = max(repeats, min(100, int(pairs)))
            number += 1
        seconds = {transport: statistics.median(calls) for transport, calls in times.items()}
        ratio = statistics.median(c / r for c, r in zip(times["collective"], times["ring"]))
        problem = Problem(pattern, layout, (((0, tokens),),), num_heads=shape.heads, num_kv_heads=shape.kv_heads)
        decision = auto.decide(problem, sizes)
        worse = {"ring": 1 / ratio, "collective": ratio, "local": 1.0}[decision.choice]  # "local" has nothing to move.
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


def transport_report(rows: list[dict[str, Any]], world_size: int) -> Sheet:
    """Returns the table, the crossover of each pattern, and how good the automatic choice was."""
    lines = ["paired ratio: collective / ring"]
    for name in dict.fromkeys(row["pattern"] for row in rows):
        cells = [row for row in rows if row["pattern"] == name]
        # The ring is never slower from the first of these lengths on.
        wins = [
            row["tokens"]
            for i, row in enumerate(cells)
            if all(later["collective_over_ring"] >= 1 for later in cells[i:])
        ]
        where = (
            f"from {wins[0]} tokens on the ring is faster" if wins else "the ring is not faster at the longest length"
        )
        lines.append(f"{name}, {world_size} ranks: {where}")
    good = sum(row["auto_over_best"] <= 1.1 for row in rows)
    lines.append(f"auto is within 10 % of the better one in {good} of {len(rows)} cells")
    return Sheet(
        f"ring against collective, forward + backward, {world_size} ranks",
        (
            "pattern",
            "tokens",
            "layout",
            "ring ms",
            "collective ms",
            "paired ratio",
            "auto",
            "auto / better",
        ),
        [
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
        ],
        lines,
    )
