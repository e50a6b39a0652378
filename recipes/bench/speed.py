"""Time of attention on one device: patterns against scaled_dot_product_attention (sdpa) and flex_attention.

A small CPU:        python recipes/bench/speed.py
As in the figures:  python recipes/bench/speed.py --tokens 32k --no-flex
Beside flex:        python recipes/bench/speed.py --tokens 16k --repeats 5 --pattern window:512+4 pyramid:512,3

All implementations take turns on the same tensors. Before timing, some outputs of each are compared with the definition of the
pattern; an implementation that computes something else is not timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timing import Shape, alternate, clock, forward_backward, median, options, ratio, table
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import hf_ring_attention as ra

PATTERNS = ["longnet:2048/1,8192/4,32768/16", "pyramid:512,3", "window:512", "exact"]
OURS, FLEX = "ours", "flex"
#: Relative errors of rounding; a key too many or too few in a window of 512 makes a larger one.
LIMITS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 1e-2}


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention to all keys, by torch."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def mask_of(pattern: ra.Pattern, group: int) -> Callable[..., Tensor]:
    """Returns the mask function of a pattern for flex_attention.

    Raises:
        ValueError: a pattern for which no mask is written here.
    """
    windows = [branch for branch in pattern.branches if not isinstance(branch, ra.Sink)]
    if pattern != ra.Pattern.exact() and not all(isinstance(b, ra.Window) and b.queries == "all" for b in windows):
        raise ValueError("a mask is written for windows and sinks alone")
    if pattern.kv_heads or (pattern.overlap == "count" and len(pattern.branches) > 1):
        raise ValueError("a mask can neither count a key twice nor differ by head")
    sinks = max((branch.tokens for branch in pattern.branches if isinstance(branch, ra.Sink)), default=0)
    rules = [(branch.length, branch.dilation) for branch in windows]  # torch.compile makes constants of tuples.

    def mask(row: Any, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = key < sinks
        for length, dilation in rules:
            near = key <= query if length is None else query - key < length
            visible = visible | (near & (key % dilation == head // group % dilation) if dilation > 1 else near)
        return visible & (key <= query)

    return mask


def flex(pattern: ra.Pattern, tokens: int, shape: Shape, **kernel_options: Any) -> Callable[..., Any]:
    """Returns compiled flex_attention under a pattern, with its `kernel_options`, such as BACKEND="FLASH"."""
    dilated = any(getattr(branch, "dilation", 1) > 1 for branch in pattern.branches)
    heads = shape.heads if dilated else None  # Heads differ by the phase of a dilation alone.
    mask = mask_of(pattern, shape.heads // shape.kv_heads)
    blocks = create_block_mask(mask, None, heads, tokens, tokens, device=shape.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        gqa: Any = {"enable_gqa": q.shape[1] != k.shape[1], "kernel_options": kernel_options or None}
        return flex_attention(q, k, v, block_mask=blocks, **gqa)

    # torch.compile keeps few results for one code object, so each pattern has its own.
    attend.__code__ = attend.__code__.replace(co_name=f"attend_{id(blocks)}")
    return torch.compile(attend, dynamic=False, fullgraph=True)


def error_of(out: Tensor, pattern: ra.Pattern, q: Tensor, k: Tensor, v: Tensor, queries: Sequence[int]) -> float:
    """Returns the relative error of some outputs against the definition: a softmax over keys, as often as they are shown."""
    heads, kv_heads, errors = q.shape[1], k.shape[1], []
    for query in queries:
        shown = [
            [
                pattern.multiplicity(query, key, head=h, num_heads=heads, num_kv_heads=kv_heads)
                for key in range(query + 1)
            ]
            for h in range(heads)
        ]
        keys, values = (x[0, :, : query + 1].double().repeat_interleave(heads // kv_heads, 0) for x in (k, v))
        scores = (keys @ q[0, :, query, :, None].double()).squeeze(-1) * q.shape[-1] ** -0.5
        weights = torch.tensor(shown, device=q.device) * (scores - scores.amax(-1, keepdim=True)).exp()
        expected = (weights[:, None] @ values).squeeze(1) / weights.sum(-1, keepdim=True)
        errors.append(float((out[0, :, query].double() - expected).norm() / expected.norm()))
    return max(errors)


def measure(
    shape: Shape, tokens: int, patterns: Sequence[str], repeats: int, with_flex: bool = True
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns a row of figures for each implementation and pattern, and why others have none."""
    tensors, refused = shape.tensors(tokens), []
    inputs = [x.detach() for x in tensors[:3]]
    queries = [min(tokens, 4096) // 5, min(tokens, 4096) - 1]  # the definition takes seconds for later ones
    attend: dict[tuple[str, str], Callable[..., Any]] = {("sdpa", "all keys"): sdpa}
    for text in patterns:
        pattern = ra.Pattern.parse(text)
        attend[OURS, text] = partial(ra.ring_attention, pattern=pattern)
        if with_flex:
            try:
                attend[FLEX, text] = flex(pattern, tokens, shape)
            except ValueError as error:
                refused.append(f"flex has no row of {text}: {error}")
        for key in [key for key in attend if key[1] == text]:
            with torch.no_grad():
                error = error_of(attend[key](*inputs), pattern, *inputs, queries)
            if error > LIMITS[shape.dtype]:
                refused.append(f"{key[0]} has no row of {text}: its relative error is {error:.0e}")
                del attend[key]

    def seconds(key: tuple[str, str]) -> tuple[float, float]:
        if key[0] == FLEX and shape.device == "cpu":  # flex_attention has no backward there.
            with torch.no_grad():
                return clock(lambda: attend[key](*inputs), shape.device)[0], math.nan
        return forward_backward(attend[key], tensors, shape.device)

    runs = alternate({" ".join(key): partial(seconds, key) for key in attend}, repeats)
    rows = []
    for by, text in attend:
        name = f"{by} {text}"
        share = 1.0
        if by != "sdpa":
            share = ra.Pattern.parse(text).flop_share(tokens, num_heads=shape.heads, num_kv_heads=shape.kv_heads)
        forward, both = (ratio(runs, "sdpa all keys", name, part) for part in (0, 1))
        row = {"attention": text, "by": by, "forward": median(runs, name, 0), "both": median(runs, name)}
        row |= {"forward_faster": forward, "faster": both, "flops": 1 / share, "of_floor": both * share}
        rows.append(row)
    return rows, refused


def main(words: Sequence[str] | None = None) -> None:
    """Measures, and prints the table."""
    args, shape = options(__doc__ or "", words, patterns=PATTERNS, tokens="8k", repeats=3, no_flex=False)
    rows, refused = measure(shape, args.tokens, args.patterns, args.repeats, not args.no_flex)
    table(
        f"Attention on one device, {args.tokens} tokens, medians of {args.repeats} turns",
        "pattern|by|forward\ns|and back\ns|sdpa / it,\nforward|sdpa / it,\nboth|FLOPs\n1 /|of the\nfloor",
        [tuple(row.values()) for row in rows],
        *refused,
        "sdpa / it: how many times as fast as sdpa, the median of ratios in the same turn. Of the floor: of the speed that "
        "the FLOPs of the pattern allow.",
    )


if __name__ == "__main__":
    main()
