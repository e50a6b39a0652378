"""Measures the peak memory of attention by pattern on one device, against torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..output import Sheet, mebibytes
from .harness import CallShape, launch, peak_memory, progress, reset_peak_memory
from .speed import SDPA, attention_named


def peak_of_attention(shape: CallShape, tokens: int, name: str) -> int:
    """Returns the most bytes that forward and backward held at once, inputs and gradients included."""
    device = torch.device(shape.device)
    # The first kernel calls load what is no memory of attention.
    small = torch.randn(1, shape.kv_heads, 64, shape.head_dim, device=device, requires_grad=True)
    attention_named(SDPA)(small, small, small).sum().backward()
    before = reset_peak_memory(device)
    q, k, v, dout = shape.tensors(tokens)
    attention_named(name)(q, k, v).backward(dout)
    return peak_memory(device) - before


def measure_peaks(shape: CallShape, tokens: int, patterns: Sequence[str]) -> list[dict[str, Any]]:
    """Runs `peak_of_attention` for sdpa and for each pattern, each in a process of its own."""
    return [
        {"attention": name, "bytes": launch(peak_of_attention, 1, shape, tokens, name, threads=None)}
        for name in progress((SDPA, *patterns), "memory")
    ]


def peak_report(rows: list[dict[str, Any]], tokens: int) -> Sheet:
    """Returns the table of `measure_peaks`."""
    return Sheet(
        f"peak memory of forward + backward on one device, {tokens} tokens",
        ("attention", "MiB", "of sdpa's"),
        [(row["attention"], mebibytes(row["bytes"]), f"{row['bytes'] / rows[0]['bytes']:.2f}") for row in rows],
    )
