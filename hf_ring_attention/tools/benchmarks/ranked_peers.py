"""Measures attention over several ranks: the transports of this package, and ring-attention-pytorch, beside one rank alone.

All take turns in one run, each process with one thread (on a GPU machine: a GPU). What one rank computes alone, it computes
while the others wait. Every rank has the same whole tensors, of which a contestant gets this rank's part; its outputs and
gradients are put together, and compared with the oracle as in `peers`.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compute.private import TorchDispatchMode
from ...plan.heads import heads_fit
from ...plan.layouts import SequenceLayout
from ...plan.patterns import Pattern
from ...ring.attention import ring_attention
from ...ring.ring import Ring
from ...ring.simulation import run_simulated
from .contestants import DENSE, OURS, Contestant, first_line
from .harness import CallShape, give_memory_back_at_once, launch, progress
from .peers import (
    ERROR_LIMITS,
    Oracle,
    Tensors,
    laid_out,
    peak_of_contestant,
    peer_row,
    relative_error,
    time_contestants,
)
from .speed import SDPA, attention_named

PEER_RING = "ring-attention-pytorch"
#: The most keys that ring-attention-pytorch takes at once; it is slower with fewer, and 1024 is its own default.
_BUCKET = 1024


@dataclass(frozen=True)
class RankedContestant(Contestant):
    """An implementation over ranks.

    Attributes:
        layout: which tokens each rank has; None for one that rank 0 computes alone.
        ring: by which parts are cut and put together.
    """

    layout: SequenceLayout | None = None
    ring: Ring | None = None

    def part(self, x: Tensor) -> Tensor:
        """Returns this rank's part of whole tensors; of what rank 0 computes alone, others get a token that nobody reads."""
        if self.layout is None or self.ring is None:
            return x if dist.get_rank() == 0 else x[:, :, :1]
        return self.ring.shard(x, self.layout, dim=2)


class CountSent(TorchDispatchMode):
    """A mode that counts the bytes which this rank gives to torch.distributed to send to one other rank.

    Attributes:
        sent_bytes: those of all sends until now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            self.sent_bytes += sum(x.nbytes for x in args[0])
        return func(*args, **(kwargs or {}))


def ranked_contestants(pattern: str, tokens: int, shape: CallShape) -> tuple[list[RankedContestant], dict[str, str]]:
    """Returns what computes a pattern on one rank and on all of them, and why others are missing, by their names."""
    p, parsed = dist.get_world_size(), Pattern.parse(pattern)
    found = [RankedContestant(f"{OURS}, local", pattern, attention_named(pattern))]
    missing = {}
    for transport in ("ring", "collective", "heads"):
        if transport == "heads" and not heads_fit(shape.heads, shape.kv_heads, p):
            missing[f"{OURS}, heads"] = f"{shape.heads}/{shape.kv_heads} heads do not divide among {p} ranks"
            continue
        ring = Ring(layout="zigzag" if parsed == Pattern.exact() else "auto", transport=transport)
        layout = ring.layout_for(tokens, parsed)
        attend = partial(ring_attention, pattern=parsed, ring=ring, layout=layout)
        found.append(RankedContestant(f"{OURS}, {transport}", pattern, attend, layout=layout, ring=ring))
    if parsed == Pattern.exact():
        try:
            found.append(_ring_attention_pytorch(tokens, shape))
        except (ImportError, ValueError) as error:
            hint = f": pip install {PEER_RING}" if isinstance(error, ImportError) else ""
            missing[PEER_RING] = f"{first_line(error)}{hint}"
    return found, missing


def _ring_attention_pytorch(tokens: int, shape: CallShape) -> RankedContestant:
    """Returns ring-attention-pytorch with tokens in order: it computes all blocks, hidden or not, so none is idle."""
    from ring_attention_pytorch import ring_flash_attn

    p, groups = dist.get_world_size(), shape.heads // shape.kv_heads
    ring = Ring(layout="contiguous", transport="ring")
    layout = ring.layout_for(tokens, Pattern.exact())
    if layout.padded_len > tokens:
        raise ValueError(f"it takes whole rows alone, and {tokens} tokens over {p} ranks need padding")
    bucket = max(size for size in range(1, min(_BUCKET, layout.local_len) + 1) if layout.local_len % size == 0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return ring_flash_attn(q, k, v, causal=True, bucket_size=bucket, ring_reduce_col=True, ring_size=p)

    def lay_out(x: Tensor) -> Tensor:
        # Query head j reads key head j % Hkv there.
        own = x.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2) if x.shape[1] == shape.heads else x
        return own.transpose(1, 2)

    def lay_back(x: Tensor) -> Tensor:
        own = x.transpose(1, 2)
        return own.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2) if own.shape[1] == shape.heads else own

    name = f"{PEER_RING} {importlib.metadata.version(PEER_RING)}, buckets of {bucket}"
    return RankedContestant(name, "exact", attend, "", lay_out, lay_back, layout, ring)


def errors_over_ranks(contestant: RankedContestant, oracle: Oracle, tensors: Tensors) -> tuple[float, float]:
    """Returns the largest relative errors on any rank of the outputs, and of the gradients of q, k and v."""
    dout = tensors[3].clone()
    dout[:, :, oracle.tokens :] = 0
    q, k, v, own_dout = laid_out(contestant, (*tensors[:3], dout))
    out = contestant.attend(q, k, v)
    parts = (out.detach(), *torch.autograd.grad(out, (q, k, v), own_dout.detach()))
    wholes = [contestant.lay_back(x) for x in parts]
    errors = [0.0]
    if contestant.layout is not None and contestant.ring is not None:
        wholes = [contestant.ring.unshard(x, contestant.layout, dim=2) for x in wholes]
    if contestant.layout is not None or dist.get_rank() == 0:
        errors = [relative_error(x[:, :, : oracle.tokens], want) for x, want in zip(wholes, oracle.expected)]
    errors = [error if math.isfinite(error) else math.inf for error in errors]
    device = tensors[0].device
    return _largest_of_ranks(errors[0], device), _largest_of_ranks(max(errors[1:], default=0.0), device)


def _largest_of_ranks(number: float, device: torch.device) -> float:
    """Returns the largest of the ranks' numbers, on every rank."""
    tensor = torch.tensor(float(number), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def memory_and_bytes(contestant: RankedContestant, tensors: Tensors, device: str) -> tuple[int, int | None]:
    """Returns the peak memory and the sent bytes of a call with its backward, of the rank with the most of each."""
    ring, ours = contestant.ring, contestant.name.startswith(OURS)
    counter = CountSent()
    if ring is not None:
        ring.reset_traffic()
    with nullcontext() if ring is None or ours else counter:
        peak = peak_of_contestant(contestant, tensors, device)
    # `peak_of_contestant` makes two equal calls.
    sent = 0 if ring is None else (ring.traffic().sent_bytes if ours else counter.sent_bytes) // 2
    where = tensors[0].device
    return int(_largest_of_ranks(peak, where)), None if ring is None else int(_largest_of_ranks(sent, where))


def held_over_ranks(shape: CallShape, tokens: int, rows: Sequence[dict[str, Any]]) -> list[tuple[int, int | None]]:
    """Returns `memory_and_bytes` of the rows of `rows_over_ranks`, in processes that are for nothing else."""
    give_memory_back_at_once()
    tensors, held = shape.tensors(tokens), {}
    dense = RankedContestant(DENSE, "exact", attention_named(SDPA))
    for row in rows:
        key = row["computes"], row["attention"]
        if key not in held:
            by_name = {one.name: one for one in (*ranked_contestants(key[0], tokens, shape)[0], dense)}
            one = replace(by_name[key[1]], no_backward=row["no_backward"])
            held[key] = memory_and_bytes(one, tensors, shape.device)
    return [held[row["computes"], row["attention"]] for row in rows]


def measure_over_ranks(
    shape: CallShape, tokens: int, patterns: Sequence[str], repeats: int, ranks: int
) -> list[dict[str, Any]]:
    """Returns the rows of attention over `ranks` processes, with their memory and bytes from a second launch."""
    rows: list[dict[str, Any]] = launch(rows_over_ranks, ranks, shape, tokens, patterns, repeats)
    right = [row for row in rows if row["skipped"] is None]
    for row, (peak, sent) in zip(right, launch(held_over_ranks, ranks, shape, tokens, right)):
        row |= {"peak_bytes": peak, "sent_bytes": sent}
    return rows


def rows_over_ranks(shape: CallShape, tokens: int, patterns: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Returns the rows of `peers.peer_row` for attention over all ranks of the process group; ratios are to our ring's."""
    tensors = shape.tensors(tokens)
    dense = RankedContestant(DENSE, "exact", attention_named(SDPA))
    groups = {pattern: ranked_contestants(pattern, tokens, shape) for pattern in patterns}
    errors: dict[tuple[str, str], tuple[float, float]] = {}
    for pattern in progress(dict.fromkeys([*patterns, "exact"]), "checks over ranks"):
        oracle = Oracle(pattern, tensors)
        group = [*(groups[pattern][0] if pattern in groups else []), *([dense] if pattern == "exact" else [])]
        errors |= {(pattern, one.name): errors_over_ranks(one, oracle, tensors) for one in group}
    limit = ERROR_LIMITS[shape.dtype]

    def judged(one: RankedContestant) -> RankedContestant:
        """Returns one whose outputs alone are right without its backward, so that its forward pass is still compared."""
        wrong = errors[one.pattern, one.name][1]
        return one if wrong <= limit else replace(one, no_backward=f"gradients are {wrong:.1f} off")

    groups = {pattern: ([judged(one) for one in found], missing) for pattern, (found, missing) in groups.items()}
    everyone = [judged(dense), *(contestant for found, _ in groups.values() for contestant in found)]
    right = [one for one in everyone if errors[one.pattern, one.name][0] <= limit]
    runs = time_contestants(right, tensors, repeats, shape.device)
    floors, p = runs.get((dense.pattern, dense.name), []), dist.get_world_size()
    rows = []
    for pattern, (found, missing) in groups.items():
        own = runs.get((pattern, f"{OURS}, ring"), [])
        share = Pattern.parse(pattern).flop_share(tokens, num_heads=shape.heads, num_kv_heads=shape.kv_heads)
        for one in (*found, dense):
            key, ranks = (one.pattern, one.name), 1 if one.layout is None else p
            row = peer_row(pattern, one.name, runs.get(key, []), own, floors, share, ranks)
            error = errors[key][0] if one.no_backward else max(errors[key])
            row |= {"computes": one.pattern, "error": error}
            wrong = f"not timed: its relative error is {error:.1e}, and {limit:.0e} is allowed"
            rows.append(row | {"skipped": None if error <= limit else wrong, "no_backward": one.no_backward})
        rows += [
            peer_row(pattern, name, [], own, floors, share, p) | {"skipped": text} for name, text in missing.items()
        ]
    return rows


def simulated_rows(shape: CallShape, tokens: int, patterns: Sequence[str], world_size: int) -> list[dict[str, Any]]:
    """Returns rows of simulated ranks, which have errors and bytes, and no seconds: one device computes for all of them."""
    tensors, limit, rows = shape.tensors(tokens), ERROR_LIMITS[shape.dtype], []
    for pattern in progress(patterns, "simulated"):
        oracle = Oracle(pattern, tensors)
        transports = ["ring", "collective"]
        transports += ["heads"] if heads_fit(shape.heads, shape.kv_heads, world_size) else []
        for transport in transports:

            def attend(ring: Ring, pattern: str = pattern, oracle: Oracle = oracle) -> tuple[float, int]:
                layout = ring.layout_for(tokens, pattern)
                dout = tensors[3].clone()
                dout[:, :, oracle.tokens :] = 0
                q, k, v = (ring.shard(x.detach(), layout, dim=2).requires_grad_() for x in tensors[:3])
                out = ring_attention(q, k, v, pattern=pattern, ring=ring, layout=layout)
                grads = torch.autograd.grad(out, (q, k, v), ring.shard(dout, layout, dim=2))
                sent = ring.traffic().sent_bytes
                wholes = [ring.unshard(x, layout, dim=2) for x in (out.detach(), *grads)]
                pairs = zip(wholes, oracle.expected)
                return max(relative_error(x[:, :, : oracle.tokens], want) for x, want in pairs), sent

            answers = run_simulated(attend, world_size, transport=transport)
            error = max(error for error, _ in answers)
            row = peer_row(pattern, f"{OURS}, {transport}", [], [], [], 1.0, world_size)
            row |= {"simulated": True, "error": error, "sent_bytes": max(sent for _, sent in answers)}
            wrong = f"not shown: its relative error is {error:.1e}, and {limit:.0e} is allowed"
            rows.append(row | {"skipped": None if error <= limit else wrong})
    return rows
