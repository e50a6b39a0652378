"""A training step of a small model: sparse and exact, over rings, with a loader that cuts rows, data parallel, checkpointed.

A small CPU:        python recipes/bench/systems.py
As in the figures:  python recipes/bench/systems.py --tokens 8k --hybrid-tokens 8k --repeats 5
Checkpointing:      python recipes/bench/systems.py --parts checkpointing --checkpointed-tokens 16k --repeats 5
Eight GPUs:         python recipes/bench/systems.py --ranks 8 --tokens 64k --dtype bfloat16

All variants take turns from the same weights, and each process has one thread, or one GPU. While a single process computes, the
others wait. Plain DDP trains on one row per process, so compare tokens per second, not seconds.
A ring must compute what one process computes: the printed error compares their first two losses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from memory import MIB, model_of
from timing import (
    Shape,
    alternate,
    clock,
    held_memory,
    launch,
    median,
    of_all_ranks,
    options,
    ratio,
    reset_peak,
    return_memory_at_once,
    table,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

import hf_ring_attention as ra

PATTERNS = ["exact", "pyramid:512,3"]
ALONE, RING, CUTTING, SHARDED, PLAIN = "one process", "ring", "ring, cutting loader", "ring, FSDP 2", "plain DDP"
SIZES = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "head_dim": 64}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_chunk_size": 128}
LAYERS = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_value_head_dim": 64}
#: Small models by type; one layer in four attends.
HYBRIDS: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [3]},
    "qwen3_5_text": LAYERS | {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 64},
}


def hybrid(model_type: str, dtype: str, device: str) -> Any:
    """Returns a hybrid with random weights, which are always the same."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **HYBRIDS[model_type], use_cache=False)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).to(device).train()


def step_of(system: str, pattern: str, model: Any, tokens: int) -> Callable[[], float]:
    """Returns a function that trains a step and returns its loss.

    Args:
        pattern: "sdpa" leaves the model as it is.
    """
    p, rank, device = dist.get_world_size(), dist.get_rank(), model.device
    ids = torch.randint(3, 1024, (p, tokens), generator=torch.Generator().manual_seed(1))
    row = ids[rank if system == PLAIN else 0]
    loader: Any = DataLoader([{"input_ids": row, "labels": row}] * 4)
    ring = ra.Ring.alone() if system in (ALONE, PLAIN) else ra.Ring()
    if system == CUTTING:
        accelerator = Accelerator()
        ring = ra.Ring.from_accelerator(accelerator, p)
    if pattern != "sdpa":
        ra.patch_model(model, pattern, ring=ring)
    if system == CUTTING:
        loader = ring.prepare_data_loader(loader)
    trained = model
    if system == SHARDED:
        for part in (*model.model.layers, model):
            fully_shard(part)
    elif system != ALONE:
        trained = DistributedDataParallel(model)
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=1e-3), cycle(loader)

    def step() -> float:
        optimizer.zero_grad()
        batch = {name: x.to(device) if torch.is_tensor(x) else x for name, x in next(batches).items()}
        loss = trained(**batch).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def measure(make: Callable[[], Any], systems: Sequence[tuple[str, str]], tokens: int, repeats: int, device: str) -> Any:
    """Returns a row of figures for each system and pattern, the first is the base; runs on every rank."""
    p, rank, rows = dist.get_world_size(), dist.get_rank(), []
    steps = {key: step_of(*key, make(), tokens) if rank == 0 or key[0] != ALONE else (lambda: 0.0) for key in systems}
    losses = {key: torch.tensor([step(), step()]) for key, step in steps.items()}
    runs = alternate({" ".join(key): lambda step=step: clock(step, device)[:1] for key, step in steps.items()}, repeats)
    for system, pattern in systems:
        name, many, error = f"{system} {pattern}", p if system == PLAIN else 1, float("nan")
        if system in (RING, CUTTING, SHARDED):
            expected = of_all_ranks(losses[ALONE, pattern])[0]
            error = float(((losses[system, pattern] - expected) / expected).abs().max())
        faster = many * ratio(runs, " ".join(systems[0]), name)
        rows.append([system, pattern, median(runs, name), many * tokens / median(runs, name), faster, error])
    return rows


def steps_of_llama(shape: Shape, tokens: int, patterns: Sequence[str], repeats: int) -> Any:
    """Returns the rows of a Llama; runs on every rank."""
    systems = [(ALONE, "sdpa"), (PLAIN, "sdpa")]
    systems += [(system, pattern) for pattern in patterns for system in (ALONE, RING, CUTTING, SHARDED)]
    return measure(partial(model_of, shape, tokens, False), systems, tokens, repeats, shape.device)


def steps_of_hybrid(shape: Shape, tokens: int, model_type: str, repeats: int) -> Any:
    """Returns the rows of a hybrid, whose mixers pass their states along the ring; runs on every rank."""
    make = partial(hybrid, model_type, shape.dtype, shape.device)
    return measure(make, [(ALONE, "exact"), (RING, "exact")], tokens, repeats, shape.device)


def checkpointed_steps(shape: Shape, tokens: int, repeats: int) -> Any:
    """Returns seconds and processor seconds with their ratios, and the peak, of steps with kept attention and without it."""
    return_memory_at_once()
    ways = {"computed again": False, "kept": True}
    models = {name: model_of(shape, tokens, True, keeps) for name, keeps in ways.items()}
    steps = {name: step_of(RING, "exact", model, tokens) for name, model in models.items()}

    def measured(step: Callable[[], float]) -> tuple[float, float, float]:
        before, start = reset_peak(shape.device), time.process_time()
        seconds, _ = clock(step, shape.device)
        peak, busy = held_memory(shape.device, peak=True) - before, time.process_time() - start
        return max(of_all_ranks(peak)) / MIB, max(of_all_ranks(busy)), seconds

    runs = alternate({name: partial(measured, step) for name, step in steps.items()}, repeats)
    first = next(iter(ways))
    rows = []
    for name in ways:
        times = [of for part in (2, 1) for of in (median(runs, name, part), ratio(runs, first, name, part))]
        rows.append([name, *times, median(runs, name, 0)])
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Measures, and prints a table for each model of the chosen parts."""
    numbers = {"tokens": "1k", "hybrid_tokens": "512", "checkpointed_tokens": "1k", "repeats": 3, "ranks": 2}
    parts = ["systems", "hybrids", "checkpointing"]
    args, shape = options(__doc__ or "", words, patterns=PATTERNS, parts=parts, **numbers)
    setting = (
        f"{args.ranks} processes, medians of {args.repeats} turns; times as fast: tokens a second over the first row"
    )
    headings = "system|attention|step\ns|tokens\na second|times\nas fast|error of\nthe loss"
    llama = f"Llama, 4 layers of width {args.heads * args.head_dim}"
    if "systems" in args.parts:
        rows = launch(steps_of_llama, args.ranks, shape, args.tokens, args.patterns, args.repeats, device=args.device)
        table(f"{llama}, rows of {args.tokens}; {setting}", headings, rows)
    if "checkpointing" in args.parts:
        sizes = (args.checkpointed_tokens, args.repeats)
        rows = launch(checkpointed_steps, args.ranks, shape, *sizes, device=args.device)
        title = f"{llama}, checkpointed, exact, rows of {args.checkpointed_tokens} on a ring of {args.ranks}"
        title += f"; medians of {args.repeats} turns, ratios in the same turn"
        heads = "attention in backward|step\ns|times\nas fast|processor\ns|times\nas fast|peak of a step\nMiB"
        table(title, heads, rows, "processor: seconds of the busiest process, which other programs change least")
    for model_type in HYBRIDS if "hybrids" in args.parts else ():
        sizes = (args.hybrid_tokens, model_type, args.repeats)
        rows = launch(steps_of_hybrid, args.ranks, shape, *sizes, device=args.device)
        table(f"{model_type}, 4 layers of width 512, rows of {args.hybrid_tokens}; {setting}", headings, rows)


if __name__ == "__main__":
    main()
