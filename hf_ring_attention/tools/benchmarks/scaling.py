"""Measures how many tokens a second a ring computes attention of, as the ring grows."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ...plan.patterns import Pattern
from ...ring.attention import ring_attention
from ...ring.ring import Ring
from ..output import Sheet
from .harness import CallShape, alternately, forward_backward, launch, progress


def rates_of_ring(shape: CallShape, tokens: int, patterns: Sequence[str], repeats: int) -> dict[str, float]:
    """Returns the tokens a second of forward + backward under each pattern: medians of runs that alternate."""
    calls = {}
    for name in patterns:
        pattern = Pattern.parse(name)
        ring = Ring(layout="zigzag" if pattern == Pattern.exact() else "auto")
        layout = ring.layout_for(tokens, pattern)
        calls[name] = (
            partial(ring_attention, pattern=pattern, ring=ring, layout=layout),
            shape.tensors(layout.local_len),
        )
    seconds: dict[str, list[float]] = {name: [] for name in patterns}
    # The first run of each does not count: plans are made in it, and kernels and connections are loaded.
    for number in progress(range(repeats + 1), "scaling"):
        for name in alternately(patterns, number):
            elapsed = forward_backward(*calls[name], shape.device)
            if number:
                seconds[name].append(sum(elapsed))
    return {name: statistics.median(tokens / run for run in runs) for name, runs in seconds.items()}


def measure_scaling(
    shape: CallShape, tokens: int, patterns: Sequence[str], world_sizes: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Returns `rates_of_ring` for each number of ranks, each measured in processes of its own.

    Returns:
        {"tokens", "devices": GPUs or cores of this machine, "rows": [{"pattern", "rates": {ranks: tokens a second},
        "efficiency"}]}. Efficiency is the rate of the largest ring over as many times that of one rank; None where one
        rank is not measured.
    """
    sizes = sorted(set(world_sizes))
    by_size = {
        p: launch(rates_of_ring, p, shape, tokens, patterns, repeats) for p in progress(sizes, "numbers of ranks")
    }
    rows = []
    for name in patterns:
        rates = {p: by_size[p][name] for p in sizes}
        efficiency = rates[sizes[-1]] / (sizes[-1] * rates[1]) if 1 in rates else None
        rows.append({"pattern": name, "rates": rates, "efficiency": efficiency})
    devices = torch.cuda.device_count() if shape.device == "cuda" else os.cpu_count() or 1
    return {"tokens": tokens, "devices": devices, "rows": rows}


def scaling_report(figures: dict[str, Any], repeats: int) -> Sheet:
    """Returns the table of `measure_scaling`, and which rings have more ranks than the machine has cores."""
    rows = figures["rows"]
    sizes = list(rows[0]["rates"])
    headings = ["pattern", *(f"p = {p}" for p in sizes)]
    cells = [[row["pattern"], *(f"{rate:.0f}" for rate in row["rates"].values())] for row in rows]
    if 1 in sizes:
        headings.append(f"efficiency of p = {sizes[-1]}")
        for row, line in zip(rows, cells):
            line.append(f"{row['efficiency']:.2f}")
    sharing = [str(p) for p in sizes if p > figures["devices"]]
    notes = []
    if sharing:
        notes.append(
            f"p = {', '.join(sharing)}: more ranks than cores ({figures['devices']}), which they share, so these rates are not "
            f"those of as many devices"
        )
    return Sheet(
        f"tokens a second, forward + backward of a row of {figures['tokens']} tokens, medians of {repeats} runs",
        headings,
        cells,
        notes,
    )
