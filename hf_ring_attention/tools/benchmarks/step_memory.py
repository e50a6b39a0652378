"""Measures what a training step holds in memory, by part, as rows get longer.

No part is a formula: weights, gradients and the optimizer's state are the bytes of their tensors, and the other parts are read
from torch's allocator on CUDA, and from the resident set of the process on the CPU.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ...compute.private import checkpoint_activations
from ...hf.patch import patch_model
from ...ring.ring import Ring
from ..bench_plots import extension_text
from ..output import Sheet, mebibytes
from .harness import CallShape, give_memory_back_at_once, held_memory, launch, peak_memory, progress, reset_peak_memory

_MODEL_LAYERS, _MODEL_VOCABULARY = 4, 8192
#: The tokens of each rank in the step that loads what kernels and connections need.
_TOKENS_OF_WARMING_UP = 32


def training_model(shape: CallShape, tokens: int, checkpointing: bool = True) -> Any:
    """Returns a small Llama of the shape's heads, with random weights, by default with checkpointing, for rows of `tokens`."""
    torch.manual_seed(0)
    hidden = shape.heads * shape.head_dim
    config = LlamaConfig(
        vocab_size=_MODEL_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=_MODEL_LAYERS,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=tokens,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(shape.device, getattr(torch, shape.dtype)).train()
    if checkpointing:
        checkpoint_activations(model)
    return model


def memory_of_step(shape: CallShape, tokens: int, pattern: str) -> dict[str, Any]:
    """Returns {"tokens", "ranks", "parts", "peak"} of the rank with the largest peak; its bytes add up to it."""
    give_memory_back_at_once()
    _parts_of_step(shape, _TOKENS_OF_WARMING_UP * dist.get_world_size(), pattern)
    parts = _parts_of_step(shape, tokens, pattern)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, parts)
    busiest = max(gathered, key=lambda parts: sum(parts.values()))
    return {"tokens": tokens, "ranks": len(gathered), "parts": busiest, "peak": sum(busiest.values())}


def _parts_of_step(shape: CallShape, tokens: int, pattern: str) -> dict[str, int]:
    """Returns the bytes of each part of this rank's second training step; the first one makes the optimizer's state.

    Gradients are kept between the steps, as they are while several batches are accumulated. So the first four parts are all
    held when the forward pass ends, and what the peak has beyond them is working memory.
    """
    device = torch.device(shape.device)
    gc.collect()
    start = held_memory(device)
    ring = Ring()
    model = patch_model(training_model(shape, tokens), pattern, ring=ring)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights)
    ids = torch.randint(_MODEL_VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)
    kept = 0
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        gc.collect()
        reset_peak_memory(device)
        before = held_memory(device)
        loss = model(ids, labels=ids, use_cache=False).loss
        kept = held_memory(device) - before
        loss.backward()
        for weight in weights:  # The gradients of all ranks are averaged, as DDP does it.
            dist.all_reduce(weight.grad)
            weight.grad.div_(dist.get_world_size())
        optimizer.step()
    peak = peak_memory(device) - start
    parts = {
        "weights": _tensor_bytes(weights),
        "gradients": _tensor_bytes(weight.grad for weight in weights),
        "optimizer state": _tensor_bytes(x for state in optimizer.state.values() for x in state.values()),
        "kept for backward": kept,
    }
    return parts | {"working memory": peak - sum(parts.values())}


def _tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def memory_of_rank(device: str, ranks: int) -> int:
    """Returns the bytes that each rank has: all of a GPU's memory, or its share of the main memory."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks


def measure_step_memory(
    shape: CallShape, lengths: Sequence[int], ranks: int, pattern: str, memory: int | None
) -> dict[str, Any]:
    """Returns `memory_of_step` for each length, each measured in processes of its own.

    Args:
        memory: the bytes of a rank's device; None for what it has.

    Returns:
        {"pattern", "ranks", "rank_memory": bytes, "rows": those of `memory_of_step`, by ascending length}.
    """
    return {
        "pattern": pattern,
        "ranks": ranks,
        "rank_memory": memory or memory_of_rank(shape.device, ranks),
        "rows": [
            launch(memory_of_step, ranks, shape, tokens, pattern)
            for tokens in progress(sorted(set(lengths)), "step memory")
        ],
    }


def step_memory_report(figures: dict[str, Any], shape: CallShape) -> Sheet:
    """Returns the table of `measure_step_memory`, and where the memory of a rank would end."""
    rows = figures["rows"]
    return Sheet(
        f"memory of a checkpointed training step in MiB, {figures['pattern']}, busiest rank of {figures['ranks']}: "
        f"{_MODEL_LAYERS} layers of width {shape.heads * shape.head_dim}",
        ("tokens", *rows[0]["parts"], "total"),
        [(row["tokens"], *map(mebibytes, row["parts"].values()), mebibytes(row["peak"])) for row in rows],
        [extension_text(figures)],
    )
