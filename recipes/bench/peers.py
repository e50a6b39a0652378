"""Rings of processes: transports and layouts compared, how much delayed messages cost, and speed as a ring grows.

A small CPU:        python recipes/bench/peers.py
As in the figures:  python recipes/bench/peers.py --tokens 512 4k 16k --ring-tokens 8k --repeats 7
Eight GPUs:         python recipes/bench/peers.py --ranks 8 --sizes 1 2 4 8 --tokens 32k --ring-tokens 128k --dtype bfloat16

Each process has one thread, or one GPU. On a machine with fewer cores than processes, larger rings gain no speed.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from timing import Runs, Shape, alternate, forward_backward, launch, median, options, ratio, table

import hf_ring_attention as ra

PATTERNS = ["exact", "pyramid:512,3", "window:512"]
WAYS = ("ring", "collective", "heads", "zigzag")


def packed_row(tokens: int, share: int = 60) -> list[tuple[int, int]]:
    """Returns documents of log-normal lengths that fill a row; the row has `share` times their median."""
    draw, documents, end = random.Random(0), [], 0
    while end < tokens:
        stop = min(tokens, end + max(1, round(tokens / share * draw.lognormvariate(0, 1))))
        documents.append((end, stop))
        end = stop
    return documents


def call_over(ring: ra.Ring, shape: Shape, tokens: int, pattern: str, documents: Any = None) -> Callable[[], Any]:
    """Returns a call that measures forward and backward of a row over a ring."""
    layout = ring.layout_for(tokens, pattern, documents)
    attend = partial(ra.ring_attention, pattern=pattern, ring=ring, layout=layout, documents=documents)
    return partial(forward_backward, attend, shape.tensors(layout.local_len), shape.device)


def transports(shape: Shape, tokens: int, patterns: Sequence[str], repeats: int) -> list[list[Any]]:
    """Returns the ms of the ring, the ratios of other ways to it, and the choice of "auto"; runs on every rank."""
    p, rows = dist.get_world_size(), []
    sizes = {"num_heads": shape.heads, "num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "dtype": shape.dtype}
    for pattern, packed in [(pattern, packed) for pattern in patterns for packed in (False, True)]:
        documents = [packed_row(tokens)] if packed else [[(0, tokens)]]
        rings = {way: ra.Ring(transport=way) for way in WAYS[: 3 if shape.kv_heads % p == 0 else 2]}
        if packed:  # Its pieces are other ones than those that are made for the documents.
            rings["zigzag"] = ra.Ring(transport="ring", layout="zigzag")
        calls = {way: call_over(ring, shape, tokens, pattern, documents) for way, ring in rings.items()}
        runs = alternate(calls, repeats)
        chosen = ra.explain(pattern, seq_len=tokens, ring_size=p, documents=documents, **sizes).decision.choice
        ratios = [ratio(runs, way, "ring") if way in runs else float("nan") for way in WAYS[1:]]
        rows.append([pattern, tokens, len(documents[0]), 1000 * median(runs, "ring"), *ratios, chosen])
    return rows


def wait_until(earliest: float, work: Any) -> None:
    """Waits for a message, and not less than until this time."""
    time.sleep(max(0.0, earliest - time.perf_counter()))
    work.wait()


def overlap(shape: Shape, tokens: int, repeats: int) -> list[list[Any]]:
    """Returns how much of a delay of every hop shows in the time of exact attention; runs on every rank."""
    ring, send = ra.Ring(layout="zigzag", transport="ring"), dist.batch_isend_irecv
    call = call_over(ring, shape, tokens, "exact")

    def delayed(seconds: float) -> tuple[float, ...]:
        def late(operations: Any) -> list[Any]:
            wait = partial(wait_until, time.perf_counter() + seconds)
            return [SimpleNamespace(wait=partial(wait, work)) for work in send(operations)]

        with mock.patch.object(dist, "batch_isend_irecv", late):
            return call()

    q, k, v, _ = shape.tensors(tokens // ring.world_size)
    ra.ring_attention(q, k, v, pattern="exact", ring=ring)
    in_forward, p = ring.traffic().hops, ring.world_size
    call()
    ring.reset_traffic()
    forward, _ = call()
    hops = ring.traffic().hops
    step = forward / in_forward * (p - 1) / p  # Some heads after others take p - 1 hops, between p steps of equal work.
    rows = []
    for share in (0.4, 0.8):
        runs: Runs = alternate({"plain": partial(delayed, 0.0), "late": partial(delayed, share * step)}, repeats)
        shown = [(late[-1] - plain[-1]) / (hops * share * step) for plain, late in zip(runs["plain"], runs["late"])]
        rows.append([f"{share:.0%}", 1000 * share * step, hops, 1000 * median(runs, "plain"), statistics.median(shown)])
    return rows


def rates(shape: Shape, tokens: int, patterns: Sequence[str], repeats: int) -> list[float]:
    """Returns the tokens a second of forward and backward under each pattern; runs on every rank."""
    runs = alternate({pattern: call_over(ra.Ring(), shape, tokens, pattern) for pattern in patterns}, repeats)
    return [tokens / median(runs, pattern) for pattern in patterns]


def main(words: Sequence[str] | None = None) -> None:
    """Measures, and prints the three tables."""
    numbers = {"tokens": [512, 4096], "ring_tokens": "4k", "repeats": 3, "ranks": 2, "sizes": [1, 2, 4]}
    args, shape = options(__doc__ or "", words, patterns=PATTERNS, **numbers)
    rows = []
    for tokens in args.tokens:
        rows += launch(transports, args.ranks, shape, tokens, args.patterns, args.repeats, device=args.device)
    table(
        f"Transports of {args.ranks} processes, forward and backward, medians of {args.repeats} turns",
        "pattern|tokens|docu-\nments|ring\nms|collective\n/ ring|heads\n/ ring|zigzag\n/ ring|auto",
        rows,
        "auto: the transport that it chooses; zigzag: the ring, in that layout",
    )
    rows = launch(overlap, args.ranks, shape, args.ring_tokens, args.repeats, device=args.device)
    table(
        f"How much of a delay of every hop shows, exact attention of {args.ring_tokens} tokens, {args.ranks} processes",
        "delay, of a step|ms|hops|not delayed\nms|of the delay\nvisible",
        rows,
    )
    sizes = sorted({1, *args.sizes})
    setting = (shape, args.ring_tokens, args.patterns, args.repeats)
    by_size = zip(*(launch(rates, p, *setting, device=args.device) for p in sizes))
    table(
        f"Tokens a second, forward and backward, of a row of {args.ring_tokens}; {os.cpu_count()} cores",
        "|".join(["pattern", *(f"{p} ranks" for p in sizes), *(f"{p} ranks\n/ {p} alone" for p in sizes[1:])]),
        [
            [name, *numbers, *(rate / (p * numbers[0]) for p, rate in zip(sizes[1:], numbers[1:]))]
            for name, numbers in zip(args.patterns, by_size)
        ],
    )


if __name__ == "__main__":
    main()
