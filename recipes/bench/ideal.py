"""How close a ring comes to the speed of the same FLOPs without communication.

A small CPU:        python recipes/bench/ideal.py
As in the figures:  python recipes/bench/ideal.py --tokens 16k --repeats 7
Eight GPUs:         python recipes/bench/ideal.py --ranks 8 --tokens 128k --dtype bfloat16

The ideal: every rank computes its share of the heads for the whole row, all ranks at the same time, and sends nothing.
The floor: the same with sdpa, times the share of its FLOPs that the pattern computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from peers import call_over
from speed import sdpa
from timing import Shape, alternate, forward_backward, launch, median, options, ratio, table

import hf_ring_attention as ra

PATTERNS = ["exact", "longnet:2048/1,8192/4,32768/16"]


def measure(shape: Shape, tokens: int, patterns: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Returns the seconds of each pattern over a ring, beside the ideal and the floor; runs on every rank."""
    own_heads, rows = shape.heads // dist.get_world_size(), []
    share = shape.tensors(tokens, own_heads)
    for text in patterns:
        pattern = ra.Pattern.parse(text)
        ring = ra.Ring(transport="ring")
        alone = partial(ra.ring_attention, pattern=pattern, ring=ra.Ring.alone())
        calls = {
            "ring": call_over(ring, shape, tokens, text),
            "ideal": partial(forward_backward, alone, share, shape.device),
            "sdpa": partial(forward_backward, sdpa, share, shape.device),
        }
        runs = alternate(calls, repeats)
        left = pattern.flop_share(tokens, num_heads=shape.heads, num_kv_heads=shape.kv_heads)
        row = {
            "pattern": text,
            "layout": ring.layout_for(tokens, pattern).kind,
            "ring": median(runs, "ring"),
            "ideal": median(runs, "ideal"),
        }
        row |= {"forward": ratio(runs, "ideal", "ring", 0), "of_ideal": ratio(runs, "ideal", "ring")}
        rows.append(row | {"of_floor": ratio(runs, "sdpa", "ring") * left})
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Measures, and prints the table."""
    args, shape = options(__doc__ or "", words, patterns=PATTERNS, tokens="4k", repeats=3, ranks=2)
    if args.heads % args.ranks:
        raise SystemExit(
            f"each rank of the ideal needs whole heads, and {args.heads} heads do not divide by {args.ranks}"
        )
    rows = launch(measure, args.ranks, shape, args.tokens, args.patterns, args.repeats, device=args.device)
    table(
        f"A ring of {args.ranks} against the same FLOPs without communication, {args.tokens} tokens, medians of "
        f"{args.repeats} turns, forward and backward",
        "pattern|layout|ring\ns|ideal\ns|of the ideal,\nforward|of the ideal,\nboth|of the\nfloor",
        [tuple(row.values()) for row in rows],
    )


if __name__ == "__main__":
    main()
