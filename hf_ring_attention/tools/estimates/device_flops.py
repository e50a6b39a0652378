"""Measures the floating point operations that a device does in a second, in products of matrices."""

from __future__ import annotations

import statistics
import time

import torch

#: The sides of the square matrices by device: they take milliseconds.
_SIDES = {"cpu": 1024, "cuda": 8192}
_RUNS = 7


def measured_flops(dtype: str) -> float:
    """Returns the operations a second of a product of square matrices, the median of some runs after a first one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    side = _SIDES[device]
    left, right = (torch.randn(side, side, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    seconds = []
    for _ in range(1 + _RUNS):
        start = time.perf_counter()
        product = left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        del product
    return 2 * side**3 / statistics.median(seconds[1:])
