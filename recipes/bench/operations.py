"""How many operations one attention call starts, and how long the host takes to start them.

A small CPU:        python recipes/bench/operations.py
As in the figures:  python recipes/bench/operations.py --tokens 16k

On a GPU the host starts one operation after another, views included, and a short operation ends before the next one starts.
Rings are simulated in this process, and the rank with the most operations is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from timing import Shape, options, table
from torch.utils._python_dispatch import TorchDispatchMode

import hf_ring_attention as ra

PATTERNS = ["exact", "window:512+4", "pyramid:512,3", "longnet:2048/1,8192/4,32768/16"]
#: A call with so few tokens that its operations end as soon as they start, and its pattern.
SMALL = 128, "pyramid:4,3"
#: The keys by which torch finds an operator's implementation on a device.
KEYS = {name.lower(): torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in ("CPU", "CUDA")}


class Operations(TorchDispatchMode):
    """Counts the operations that torch dispatches for a call, without the operations inside those of torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if func.namespace != "hf_ring_attention":
            return func(*args, **(kwargs or {}))
        with self:  # An operator of ours, whose operations inside are counted too.
            return func.redispatch(KEYS[args[0].device.type], *args, **(kwargs or {}))


def count(shape: Shape, tokens: int, attend: Callable[..., Any]) -> tuple[int, int]:
    """Returns the operations of forward and of backward, in the second call: the first one makes the plan."""
    *inputs, dout = shape.tensors(tokens)
    torch.autograd.grad(attend(*inputs), inputs, dout)
    with Operations() as forward:
        out = attend(*inputs)
    with torch.autograd.set_multithreading_enabled(False), Operations() as backward:
        torch.autograd.grad(out, inputs, dout)
    return forward.count, backward.count


def seconds_of_one(shape: Shape, repeats: int) -> float:
    """Returns the seconds of an operation in a small call, forward and backward, in the fastest of its runs."""
    tokens, pattern = SMALL
    attend = partial(ra.ring_attention, pattern=pattern)
    operations = sum(count(shape, tokens, attend))
    *inputs, dout = shape.tensors(tokens)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.autograd.grad(attend(*inputs), inputs, dout)
        seconds.append(time.perf_counter() - start)
    return min(seconds) / operations


def measure(shape: Shape, tokens: int, patterns: Sequence[str], ranks: int) -> dict[tuple[str, str], tuple[int, int]]:
    """Returns the operations of forward and backward by pattern and by the way in which rows travel."""
    found = {}
    for pattern in patterns:
        attend = partial(ra.ring_attention, pattern=pattern)
        found[pattern, "one device"] = count(shape, tokens, attend)
        for transport in ("ring", "collective"):

            def of_rank(ring: ra.Ring, attend: Callable[..., Any] = attend) -> tuple[int, int]:
                return count(shape, tokens // ranks, partial(attend, ring=ring))

            found[pattern, transport] = max(ra.run_simulated(of_rank, ranks, transport=transport), key=sum)
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Measures, and prints the table."""
    numbers = {"tokens": "4k", "ranks": 8, "repeats": 50, "head_dim": 8}
    args, shape = options(__doc__ or "", words, patterns=PATTERNS, **numbers)
    torch.set_num_threads(1)  # One thread starts all operations, and others would only wait for it.
    one = seconds_of_one(shape, args.repeats)
    rows = [
        (pattern, way, *counts, *(1000 * one * number for number in counts))
        for (pattern, way), counts in measure(shape, args.tokens, args.patterns, args.ranks).items()
    ]
    table(
        f"Operations of a call, {args.tokens} tokens on one device, or on {args.ranks} ranks by ring or collective",
        "pattern|by|forward|back|forward\nms|back\nms",
        rows,
        f"ms: of the host, operations times {1e6 * one:.2f} microseconds, the time of one in a call with {SMALL[0]} tokens.",
    )


if __name__ == "__main__":
    main()
