"""Measures attention by pattern on one device, against torch's scaled_dot_product_attention in the same run.

The floor is the FLOPs: a pattern with 1/12 of exact attention's query-key pairs can be 12 times as fast at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...plan.patterns import Pattern
from ...ring.attention import ring_attention
from ..output import Sheet
from .harness import CallShape, forward_backward, medians, progress

#: The name that torch's own attention has in tables.
SDPA = "sdpa"


def attention_named(name: str) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """Returns causal attention by a pattern's text, or by torch for `SDPA`."""
    if name == SDPA:
        return lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
    pattern = Pattern.parse(name)
    return lambda q, k, v: ring_attention(q, k, v, pattern=pattern)


def measure_speed(shape: CallShape, tokens: int, patterns: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Returns the median seconds of forward and backward of each, after a first run that does not count."""
    tensors = shape.tensors(tokens)
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in (SDPA, *patterns)}
    for number in progress(range(repeats + 1), "speed"):
        for name, seconds in runs.items():
            if name == SDPA and number == 0 and shape.device == "cpu":
                continue  # It needs no warming up on the CPU, and is by far the slowest.
            elapsed = forward_backward(attention_named(name), tensors, shape.device)
            if number > 0:
                seconds.append(elapsed)
    median = {name: medians(seconds) for name, seconds in runs.items()}
    rows = []
    for name, (forward, backward) in median.items():
        share = 1.0
        if name != SDPA:
            share = Pattern.parse(name).flop_share(tokens, num_heads=shape.heads, num_kv_heads=shape.kv_heads)
        rows.append(
            {
                "attention": name,
                "forward": forward,
                "backward": backward,
                "flop_ratio": 1 / share,
                "speed_up": sum(median[SDPA]) / (forward + backward),
            }
        )
    return rows


def speed_report(rows: list[dict[str, Any]], shape: CallShape, tokens: int) -> Sheet:
    """Returns the table of `measure_speed`; its last column says how much of what the FLOPs allow is reached."""
    return Sheet(
        f"attention on one device, {tokens} tokens, {shape.heads}/{shape.kv_heads} heads x {shape.head_dim}, {shape.dtype}",
        ("attention", "forward s", "backward s", "FLOP ratio", "speed-up", "of the floor"),
        [
            (
                row["attention"],
                f"{row['forward']:.3f}",
                f"{row['backward']:.3f}",
                f"{row['flop_ratio']:.2f}",
                f"{row['speed_up']:.2f}",
                f"{row['speed_up'] / row['flop_ratio']:.2f}",
            )
            for row in rows
        ],
    )
