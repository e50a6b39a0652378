"""Measures layouts and transports against each other, and how good the automatic choice is."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...compute.merge import accumulation_dtype
from ...plan.branches import Window
from ...plan.heads import heads_fit
from ...plan.layouts import SequenceLayout
from ...plan.patterns import Pattern
from ...plan.plans import plan_rank
from ...plan.problem import Documents, Problem
from ...plan.times import KEYS_AT_ONCE, Speeds, computed_pairs, expected_seconds
from ...plan.traffic import RowBytes
from ...ring.attention import ring_attention
from ...ring.ring import Ring
from ..output import Sheet
from .harness import CallShape, forward_backward, progress

#: What the others are compared with: the ring, in the layout that "auto" chooses.
_BASE = "ring"

#: The tokens of each rank by which speeds are measured.
_TOKENS_OF_SPEED = 4096
#: Measured ratios are near the expected ones where they differ by at most this share.
_AS_EXPECTED = 0.1

#: Documents of packed rows are log-normal: with this median share of a row, and spread of its logarithm.
_MEDIAN_SHARE, _SPREAD = 1 / 60, 1.0


def patterns_for(tokens: int) -> dict[str, Pattern]:
    """Returns the patterns that the transports are compared on: all keys, sparse far ones, and near ones only."""
    return {
        "exact": Pattern.exact(),
        "longnet": Pattern.longnet([tokens // 16, tokens // 4, tokens], [1, 4, 16]),
        "window": Pattern((Window(max(1, tokens // 16)),)),
    }


def packed_row(tokens: int, seed: int = 0) -> Documents:
    """Returns documents of log-normal lengths that fill a row, about 30 to 60 of them."""
    rng, documents, end = random.Random(seed), [], 0
    while end < tokens:
        stop = min(tokens, end + max(1, round(tokens * _MEDIAN_SHARE * rng.lognormvariate(0, _SPREAD))))
        documents.append((end, stop))
        end = stop
    return (tuple(documents),)


class Way(NamedTuple):
    """A ring and the layout that it computes a row in."""

    ring: Ring
    layout: SequenceLayout


def ways_for(shape: CallShape, tokens: int, pattern: Pattern, documents: Documents) -> dict[str, Way]:
    """Returns the ways to compute a row, by their names."""
    world_size = dist.get_world_size()
    rings = {_BASE: Ring(transport="ring"), "collective": Ring(transport="collective")}
    if heads_fit(shape.heads, shape.kv_heads, world_size):
        rings["heads"] = Ring(transport="heads")
    for size in range(2, world_size):
        if world_size % size == 0 and heads_fit(shape.heads, shape.kv_heads, size):
            rings[f"heads {size} x ring {world_size // size}"] = Ring(transport="heads", heads=size)
    ways = {name: Way(ring, ring.layout_for(tokens, pattern, documents)) for name, ring in rings.items()}
    if ways[_BASE].layout.kind == "documents":
        zigzag = Ring(transport="ring", layout="zigzag")
        ways["ring in zigzag"] = Way(zigzag, zigzag.layout_for(tokens, pattern, documents))
    return ways


def compare_transports(shape: CallShape, lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Returns the seconds of forward + backward in each way, and what "auto" takes, for each pattern, row and length.

    Calls alternate; a ratio is the median of the ratios to the base's call of the same turn.
    """
    speeds = measured_speeds(shape, repeats)
    cells = [(tokens, name, packed) for tokens in lengths for name in patterns_for(tokens) for packed in (False, True)]
    return [
        _cell(shape, tokens, name, packed_row(tokens) if packed else (((0, tokens),),), repeats, speeds)
        for tokens, name, packed in progress(cells, "transports")
    ]


def measured_speeds(shape: CallShape, repeats: int) -> Speeds:
    """Returns how fast this rank computes dense attention of one sequence, and exchanges rows, while the others do the same.

    And, of the first rank, how much faster it computes while the others wait.

    Rows are exchanged, forward and backward, by calls whose queries see themselves alone.
    """
    world_size, near, exact = dist.get_world_size(), Pattern((Window(1),)), Pattern.exact()
    shape = replace(shape, heads=4 * world_size, kv_heads=4 * world_size)
    tensors, ring = shape.tensors(_TOKENS_OF_SPEED), Ring(transport="heads", layout="contiguous")
    calls: dict[str, Callable[..., Any]] = {
        "computing": lambda *x: ring_attention(*x, pattern=exact),
        "near": lambda *x: ring_attention(*x, pattern=near),
        "exchanging": lambda *x: ring_attention(*x, pattern=near, ring=ring),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    while_others_wait = []
    for _ in range(repeats + 1):
        for name, call in calls.items():
            times[name].append(sum(forward_backward(call, tensors, shape.device)))
        call = calls["computing" if dist.get_rank() == 0 else "near"]
        while_others_wait.append(sum(forward_backward(call, tensors, shape.device)))
    computing, near_seconds, exchanging = (statistics.median(turns[1:]) for turns in times.values())
    ratios = [a / b for a, b in zip(while_others_wait[1:], times["computing"][1:])]
    alone = torch.tensor([min(1.0, statistics.median(ratios))], device=shape.device)
    dist.broadcast(alone, 0)
    received = ring.traffic().received_bytes / (repeats + 1)
    layout, documents = SequenceLayout("contiguous", _TOKENS_OF_SPEED, 1), (((0, _TOKENS_OF_SPEED),),)
    problem = Problem(exact, layout, documents, num_heads=shape.heads, num_kv_heads=shape.kv_heads)
    keys_at_once = KEYS_AT_ONCE[shape.device]
    pairs = computed_pairs(plan_rank(problem, 0).own, problem.group, keys_at_once)
    return Speeds(computing / pairs, max(0.0, exchanging - near_seconds) / received, keys_at_once, float(alone))


def _cell(
    shape: CallShape, tokens: int, name: str, documents: Documents, repeats: int, speeds: Speeds
) -> dict[str, Any]:
    pattern = patterns_for(tokens)[name]
    ways = ways_for(shape, tokens, pattern, documents)
    tensors = {way: shape.tensors(layout.local_len) for way, (_, layout) in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    number, least = 0, repeats
    while number <= least:
        for way in list(ways)[:: 1 if number % 2 else -1]:
            ring, layout = ways[way]
            elapsed = forward_backward(
                lambda *x, ring=ring, at=layout: ring_attention(
                    *x, pattern=pattern, ring=ring, layout=at, documents=documents
                ),
                tensors[way],
                shape.device,
            )
            if number:
                times[way].append(sum(elapsed))
        if number == 1:  # Short calls scatter more, and are repeated for a second, equally often on every rank.
            pairs = torch.tensor([1 / sum(map(sum, times.values()))], device=shape.device)
            dist.broadcast(pairs, 0)
            least = max(repeats, min(100, int(pairs)))
        number += 1
    to_base = {way: statistics.median(a / b for a, b in zip(times[way], times[_BASE])) for way in ways}
    problems = {way: _problem_of(shape, pattern, layout, documents, ring) for way, (ring, layout) in ways.items()}
    widths, dtype = 2 * shape.head_dim, getattr(torch, shape.dtype)
    sizes = RowBytes(widths * dtype.itemsize, widths * accumulation_dtype(dtype).itemsize)
    decision = Ring().decide(problems[_BASE], sizes)
    chosen = _BASE if decision.choice == "local" else decision.choice  # "local" has nothing to move.
    return {
        "pattern": name,
        "tokens": tokens,
        "documents": len(documents[0]),
        "layout": ways[_BASE].layout.kind,
        "seconds": {way: statistics.median(calls) for way, calls in times.items()},
        "turns": len(times[_BASE]),
        "to_ring": to_base,
        "expected_seconds": {
            way: expected_seconds(
                problem, "heads" if way.startswith("heads") else ways[way].ring.transport, sizes, speeds
            )
            for way, problem in problems.items()
        },
        "auto": decision.choice,
        "reason": decision.reason,
        "auto_over_best": to_base[chosen] / min(to_base.values()),
    }


def _problem_of(
    shape: CallShape, pattern: Pattern, layout: SequenceLayout, documents: Documents, ring: Ring
) -> Problem:
    return Problem(
        pattern, layout, documents, num_heads=shape.heads, num_kv_heads=shape.kv_heads, settings=ring.settings
    )


def _expected(row: dict[str, Any], way: str) -> float:
    return row["expected_seconds"][way] / row["expected_seconds"][_BASE]


def transport_report(rows: list[dict[str, Any]], world_size: int) -> Sheet:
    """Returns the table, and how good the automatic choice was."""
    ways = list(dict.fromkeys(way for row in rows for way in row["seconds"]))
    lines = [
        "ms of forward + backward; in brackets the paired ratio to the ring | the one that the plan lets expect",
    ]
    good = sum(row["auto_over_best"] <= 1.1 for row in rows)
    ratios = [(row["to_ring"][way], _expected(row, way)) for row in rows for way in row["seconds"] if way != _BASE]
    near = sum(abs(measured / expected - 1) <= _AS_EXPECTED for measured, expected in ratios)
    lines.append(
        f"{near} of {len(ratios)} ratios are within {_AS_EXPECTED:.0%} of what the plan lets expect (a call costs it nothing)"
    )
    lines.append(f"auto is within 10 % of the best way in {good} of {len(rows)} cells")
    table = []
    for row in rows:
        cells = []
        for way in ways:
            if way not in row["seconds"]:
                cells.append("")
                continue
            ratio = "" if way == _BASE else f" ({row['to_ring'][way]:.2f}|{_expected(row, way):.2f})"
            cells.append(f"{1e3 * row['seconds'][way]:.1f}{ratio}")
        table.append(
            (
                row["pattern"],
                row["tokens"],
                row["documents"],
                row["layout"],
                *cells,
                row["auto"],
                f"{row['auto_over_best']:.2f}",
            )
        )
    return Sheet(
        f"layouts and transports, forward + backward, {world_size} ranks",
        ("pattern", "tokens", "documents", "layout", *ways, "auto", "auto/best"),
        table,
        lines,
    )
