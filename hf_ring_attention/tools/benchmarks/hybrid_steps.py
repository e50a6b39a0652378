"""Measures training steps of hybrid models: one process, and a ring of several whose mixers pass their states.

Both compute by the same code, of the same weights and the same row, and take turns in one run. A ring whose losses or
gradients are others than those of one process is not shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...hf.patch import patch_model
from ...ring.ring import Ring
from ..output import Sheet, short_bytes
from .harness import CallShape, alternately, launch, progress, timed
from .peers import ERROR_LIMITS

#: The width of the residual stream, of four layers of which one attends.
_WIDTH = 512
_COMMON = {
    "vocab_size": 1024, "hidden_size": _WIDTH, "intermediate_size": 3 * _WIDTH, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
#: By model type: what kind of state its mixers have, and the numbers of its config besides the common ones.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": (
        "Mamba 2",
        {"attn_layer_indices": [3], "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_chunk_size": 128},
    ),
    "qwen3_5_text": (
        "gated delta rule",
        {
            "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_value_heads": 8,
            "linear_num_key_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        },
    ),
}  # fmt: skip


def _hybrid_model(model_type: str, tokens: int, shape: CallShape) -> Any:
    """Returns a model with random weights, always the same ones."""
    config = CONFIG_MAPPING[model_type](**{**_COMMON, **HYBRIDS[model_type][1], "max_position_embeddings": tokens})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dtype = getattr(torch, shape.dtype)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).to(shape.device).train()


def _gradients_of_step(
    shape: CallShape, model_type: str, tokens: int, ring: Ring
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Returns a function that computes a step, and returns its loss and all its gradients, averaged over the ranks."""
    model = patch_model(_hybrid_model(model_type, tokens, shape), ring=ring)
    ids = torch.randint(3, 1024, (1, tokens), generator=torch.Generator().manual_seed(1))
    ids = ids.to(shape.device)

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
        if ring.world_size > 1:
            dist.all_reduce(gradients)
            gradients /= ring.world_size
        return loss.detach(), gradients

    return step


def _steps_of_type(shape: CallShape, model_type: str, tokens: int, repeats: int) -> dict[str, Any]:
    ring = Ring()
    over_ring = _gradients_of_step(shape, model_type, tokens, ring)
    steps: dict[str, Callable[[], Any]] = {"one": lambda: None, "ring": over_ring}
    if ring.rank == 0:
        steps["one"] = _gradients_of_step(shape, model_type, tokens, Ring.alone())
    ring.reset_traffic()
    found, expected = steps["ring"](), steps["one"]()
    sent, error = ring.traffic().sent_bytes, 0.0
    for x, wanted in zip(found, expected or ()):
        error = max(error, float((x - wanted).double().norm() / wanted.double().norm()))
    del found, expected
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in progress(range(repeats), model_type):
        for name in alternately(list(steps), number):
            seconds[name].append(timed(steps[name], shape.device)[0])
    limit = ERROR_LIMITS[shape.dtype]
    return {
        "model_type": model_type,
        "ranks": ring.world_size,
        "tokens": tokens,
        **{name: statistics.median(runs) for name, runs in seconds.items()},
        "speedup": statistics.median(one / over for one, over in zip(seconds["one"], seconds["ring"])),
        "sent_bytes": sent,
        "error": error,
        "skipped": None if error <= limit else f"not shown: {error:.1e} off, and {limit:.0e} is allowed",
    }


def _steps_of_types(shape: CallShape, tokens: int, repeats: int) -> list[dict[str, Any]]:
    return [_steps_of_type(shape, model_type, tokens, repeats) for model_type in HYBRIDS]


def measure_hybrids(shape: CallShape, tokens: int, repeats: int, ranks: int) -> list[dict[str, Any]]:
    """Returns the seconds of a step of each of `HYBRIDS`, forward and backward, on one process and over a ring.

    Each process has one thread.

    Returns:
        Rows of "model_type", "ranks", "tokens", "one" and "ring" (median seconds), "speedup" (the median of the paired
        ratios), "sent_bytes" of rank 0 by states and attention, "error" (of the loss and of all gradients, relative)
        and "skipped", the reason of a row that is not shown.
    """
    rows: list[dict[str, Any]] = launch(_steps_of_types, ranks, shape, tokens, repeats)
    return rows


def hybrids_report(rows: list[dict[str, Any]], repeats: int) -> Sheet:
    """Returns the table of `measure_hybrids`."""
    cells = [
        (
            row["model_type"],
            HYBRIDS[row["model_type"]][0],
            *(
                (row["skipped"], "", "")
                if row["skipped"]
                else (f"{row['one']:.2f}", f"{row['ring']:.2f}", f"{row['speedup']:.2f}")
            ),
            short_bytes(row["sent_bytes"]),
            f"{row['error']:.1e}",
        )
        for row in rows
    ]
    return Sheet(
        f"a training step of a hybrid, {rows[0]['tokens']} tokens, medians of {repeats} paired runs",
        (
            "model",
            "mixers",
            "one process s",
            f"ring of {rows[0]['ranks']} s",
            "times as fast",
            "sent by rank 0",
            "error",
        ),
        cells,
        ("forward, backward and the mean of gradients; processes of one thread; error: of the loss and all gradients",),
        left=2,
    )
