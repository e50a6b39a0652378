"""Measures training steps of a tiny model: one process with sdpa, and rings whose parameters are whole, FSDP2's or ZeRO's.

All steps take turns in one run, and start from the same weights and rows. What has other losses than one process with sdpa is
not shown: the second loss is that of the weights that the first step has changed.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from ...hf.patch import patch_model
from ...ring.ring import Ring
from .harness import (
    CallShape,
    alternately,
    give_memory_back_at_once,
    held_memory,
    launch,
    peak_memory,
    progress,
    reset_peak_memory,
    timed,
)
from .peers import ERROR_LIMITS, peer_row
from .step_memory import training_model

#: What holds the parameters, gradients and optimizer state of a ring, with the name that it has in the table.
HOLDERS = {
    "whole": "ring, gradients averaged",
    "fsdp2": "ring, FSDP2 (fully_shard)",
    "zero1": "ring, ZeRO 1 (ZeroRedundancyOptimizer)",
}
ONE_PROCESS = "sdpa, one process"
#: The most tokens of a step's row, which has the MLPs and the vocabulary of a model beside attention; its row says how many.
MOST_STEP_TOKENS = 1024
#: Steps before those that are timed: their losses are compared.
_COMPARED_STEPS = 2


def step_of(shape: CallShape, tokens: int, pattern: str | None, holder: str | None) -> Callable[[], float]:
    """Returns a function that makes a training step and returns its loss; the weights and the row are always the same ones.

    Args:
        pattern: that of a ring of all ranks; None for sdpa.
        holder: one of `HOLDERS`; None for one process.
    """
    model: Any = training_model(shape, tokens)
    ids = torch.randint(1, 100, (1, tokens), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids.to(shape.device), "labels": ids.to(shape.device)}
    if holder is None:
        model.set_attn_implementation("sdpa")
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    else:
        ring = Ring()
        model = patch_model(model, pattern, ring=ring)
        if holder == "fsdp2":
            for part in (*model.model.layers, model.lm_head, model):
                fully_shard(part)
        weights = list(model.parameters())
        optimizer = (
            ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=1e-2, momentum=0.9)
            if holder == "zero1"
            else torch.optim.SGD(weights, lr=1e-2, momentum=0.9)
        )

    def step() -> float:
        optimizer.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        if holder not in (None, "fsdp2"):  # FSDP 2 averages gradients itself.
            for weight in weights:
                dist.all_reduce(weight.grad)
                weight.grad.div_(dist.get_world_size())
        optimizer.step()
        return float(loss.detach())

    return step


def steps_over_ranks(shape: CallShape, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Returns rows as those of `peers.peer_row` for training steps: "both" is a step, and ratios are to the ring's.

    Attention is exact, since only that has the losses of sdpa; "error" is that of the losses of two steps.
    """
    p, rank = dist.get_world_size(), dist.get_rank()
    names: dict[str | None, str] = {None: ONE_PROCESS}
    names.update(HOLDERS)
    steps: dict[str, Callable[[], float]] = {}
    losses: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names.values()}
    for holder, name in names.items():
        steps[name] = step_of(shape, tokens, "exact", holder) if holder or rank == 0 else (lambda: 0.0)
        losses[name] = [steps[name]() for _ in range(_COMPARED_STEPS)]
    for number in progress(range(repeats), "steps"):
        for name in alternately(list(steps), number):
            seconds[name].append(timed(steps[name], shape.device)[0])
    rows, device = [], torch.device(shape.device)
    for holder, name in names.items():
        figures = torch.tensor(losses[ONE_PROCESS], dtype=torch.float64, device=device)
        dist.broadcast(figures, 0)
        error = max(abs(loss - want) / want for loss, want in zip(losses[name], figures.tolist())) if holder else 0.0
        row = peer_row("exact", f"train step of {tokens} tokens: {name}", [], [], [], 1.0, p if holder else 1)
        limit, ours = ERROR_LIMITS[shape.dtype], seconds[HOLDERS["whole"]]
        row |= {"both": statistics.median(seconds[name]), "error": error}
        row["both_ratio"] = statistics.median(theirs / own for theirs, own in zip(seconds[name], ours))
        wrong = f"not shown: its losses are {error:.1e} off, and {limit:.0e} is allowed"
        rows.append(row | {"skipped": None if error <= limit else wrong})
    return rows


def memory_of_steps(shape: CallShape, tokens: int) -> list[int]:
    """Returns what a second step of each kind held at most beyond what was there before its model, of the busiest rank."""
    give_memory_back_at_once()
    device, peaks = torch.device(shape.device), []
    for holder in (None, *HOLDERS):
        gc.collect()
        before = held_memory(device)
        if holder or dist.get_rank() == 0:
            step = step_of(shape, tokens, "exact", holder)
            step()
            reset_peak_memory(device)
            step()
            del step
        peak = torch.tensor(peak_memory(device) - before, dtype=torch.float64, device=device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        peaks.append(int(peak))
    return peaks


def measure_steps(shape: CallShape, tokens: int, repeats: int, ranks: int) -> list[dict[str, Any]]:
    """Returns the rows of training steps of at most `MOST_STEP_TOKENS`, with their memory from a second launch."""
    tokens = min(tokens, MOST_STEP_TOKENS)
    rows: list[dict[str, Any]] = launch(steps_over_ranks, ranks, shape, tokens, repeats)
    for row, peak in zip(rows, launch(memory_of_steps, ranks, shape, tokens)):
        row["peak_bytes"] = peak
    return rows
