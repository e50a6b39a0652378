"""Peak memory of attention by pattern on one device, against torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..output import Sheet, mebibytes
from .harness import CallShape, launch, peak_memory, progress, reset_peak_memory
from .speed import SDPA, attention_named


def peak_of_attention(shape: CallShape, tokens: int, name: str) -> int:
    """Bytes that forward and backward held at most, inputs and gradients included."""
    device = torch.device(shape.device)
    # What the first kernel calls load is not the attention's.
    small = torch.randn(1, shape.kv_heads, 64, shape.head_dim, device=device, requires_grad=True)
    attention_named(SDPA)(small, small, small).sum().backward()
    before = reset_peak_memory(device)
    q, k, v, dout = shape.tensors(tokens)
    attention_named(name)(q, k, v).backward(dout)
    return peak_memory(device) - before


def measure_peaks(shape: CallShape, tokens: int, patterns: Sequence[str]) -> list[dict[str, Any]]:
    """`peak_of_attention` of sdpa and of each pattern, each in a process of its own."""
    return [
        {"attention": name, "bytes": launch(peak_of_attention, 1, shape, tokens, name, threads=None)}
        for name in progress((SDPA, *patterns), "memory")
    ]


def peak_report(rows: list[dict[str, Any]], tokens: int) -> Sheet:
    """Table of `measure_peaks`."""
    return Sheet(
        f"peak memory of forward + backward on one device, {tokens} tokens",
        ("attention", "MiB", "of sdpa's"),
        [(row["attention"], mebibytes(row["bytes"]), f"{row['bytes'] / rows[0]['bytes']:.2f}") for row in rows],
    )
