"""Measures exact attention inside a model, against sdpa: what "ring_dilated" costs where it changes nothing."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ...hf.registration import IMPLEMENTATION
from ..output import Sheet
from .harness import CallShape, alternately, progress, timed
from .speed import SDPA

#: The number of first runs of each that do not count.
_UNCOUNTED_RUNS = 2


def measure_model(shape: CallShape, tokens: int, repeats: int) -> dict[str, Any]:
    """Returns the median seconds of a forward pass by both implementations, and the median of the paired ratios."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8
    )
    config.max_position_embeddings = max(tokens, config.max_position_embeddings)
    model: Any = LlamaForCausalLM(config)
    model.to(shape.device, getattr(torch, shape.dtype)).eval()
    ids = torch.randint(0, config.vocab_size, (1, tokens), device=shape.device)
    seconds: dict[str, list[float]] = {SDPA: [], IMPLEMENTATION: []}
    with torch.no_grad():
        for number in progress(range(repeats + _UNCOUNTED_RUNS), "model"):
            for name in alternately([*seconds], number):
                model.set_attn_implementation(name)
                elapsed, _ = timed(lambda: model(ids, use_cache=False), shape.device)
                if number >= _UNCOUNTED_RUNS:
                    seconds[name].append(elapsed)
    ratio = statistics.median(ring / sdpa for sdpa, ring in zip(*seconds.values()))
    return {"tokens": tokens, **{name: statistics.median(runs) for name, runs in seconds.items()}, "ratio": ratio}


def model_report(figures: dict[str, Any], repeats: int) -> Sheet:
    """Returns the table of `measure_model`."""
    return Sheet(
        f"exact attention in a 4-layer model, median of {repeats} paired runs",
        ("tokens", "sdpa s", "ring_dilated s", "ratio"),
        [
            (
                str(figures["tokens"]),
                f"{figures[SDPA]:.3f}",
                f"{figures[IMPLEMENTATION]:.3f}",
                f"{figures['ratio']:.3f}",
            )
        ],
    )
