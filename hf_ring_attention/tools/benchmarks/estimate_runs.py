"""Measures the peak memory of real training steps, beside what `ra.estimate` says of them.

A run is a step of a small model on processes of this machine; its peak is the resident set of the busiest process beyond what
that held before the model was made, so that nothing of the framework hides an error.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu

from ...cost.estimate import Estimate, estimate
from ...hf.patch import patch_model
from ...ring.ring import Ring
from ..output import Sheet, mebibytes
from .harness import CallShape, give_memory_back_at_once, held_memory, launch, peak_memory, progress, reset_peak_memory
from .step_memory import training_model


@dataclass(frozen=True)
class MeasuredRun:
    """A training step to measure; the names are those of `ra.estimate`."""

    tokens: int
    devices: int = 1
    ring_size: int = 1
    parallel: Any = "ddp"
    checkpointing: bool = True
    offload: bool = False
    pattern: str = "window:256"

    def __str__(self) -> str:
        how = [f"ring of {self.ring_size} of {self.devices}", self.parallel if self.devices > 1 else "alone"]
        how += ["checkpointing"] if self.checkpointing else []
        how += ["offload"] if self.offload else []
        return f"{self.tokens} tokens, {', '.join(how)}"


#: Sizes, checkpointing, offloading, rings of 1, 2 and 4, DDP, FSDP 2 and ZeRO 2.
RUNS = (
    MeasuredRun(2048, checkpointing=False),
    MeasuredRun(2048),
    MeasuredRun(8192),
    MeasuredRun(4096, offload=True),
    MeasuredRun(8192, 2, 2),
    MeasuredRun(4096, 2, 2, checkpointing=False, pattern="exact"),
    MeasuredRun(8192, 4, 4),
    MeasuredRun(8192, 2, 2, "fsdp2"),
    MeasuredRun(2048, 2, 1, "fsdp2", checkpointing=False),
    MeasuredRun(8192, 2, 2, "zero2"),
)
#: The kinds of runs that need DeepSpeed, which is not installed everywhere.
NEEDS_DEEPSPEED = ("zero1", "zero2", "zero3")


def estimate_of_run(shape: CallShape, run: MeasuredRun) -> Estimate:
    """Returns the estimate of a run, without what the process holds before."""
    return estimate(
        training_config(shape),
        run.tokens,
        devices=run.devices,
        ring_size=run.ring_size,
        pattern=run.pattern,
        parallel=run.parallel,
        checkpointing=run.checkpointing,
        offload=run.offload,
        dtype=shape.dtype,
        master_dtype=shape.dtype,
        device="cuda" if shape.device == "cuda" else "cpu",
    )


def training_config(shape: CallShape) -> dict[str, Any]:
    """Returns the config of the model that is measured."""
    with torch.device("meta"):
        config: dict[str, Any] = training_model(CallShape(**{**vars(shape), "device": "meta"}), 128).config.to_dict()
    return config


def peak_of_run(shape: CallShape, run: MeasuredRun) -> int:
    """Returns the most bytes that this rank, or another one, held beyond those before its model was made."""
    give_memory_back_at_once()
    if run.parallel in NEEDS_DEEPSPEED:
        import deepspeed

        # Without these it takes gloo's collectives; with them it would compile its own, over the memory of the host.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    # The first step loads what kernels and connections need.
    few = MeasuredRun(**{**vars(run), "tokens": 64 * run.ring_size})
    _step_of_run(shape, few)
    peaks: list[Any] = [None] * run.devices
    dist.all_gather_object(peaks, _step_of_run(shape, run))
    return int(max(peaks))


def _step_of_run(shape: CallShape, run: MeasuredRun) -> int:
    """Returns the bytes that the third step held at most: the first makes the optimizer's state, the second DDP's buckets."""
    device = torch.device(shape.device)
    gc.collect()
    start = held_memory(device)
    ring = _ring_of(run)
    model = patch_model(training_model(shape, run.tokens, run.checkpointing), run.pattern, ring=ring)
    trained, backward, step = _in_parallel(model, run)
    ids = torch.randint(model.config.vocab_size, (1, run.tokens), generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(3):
        gc.collect()
        reset_peak_memory(device)
        with save_on_cpu() if run.offload else nullcontext():
            loss = trained(input_ids=ids, labels=ids, use_cache=False).loss
        backward(loss)
        del loss
        step()
    return peak_memory(device) - start


def _ring_of(run: MeasuredRun) -> Ring:
    """Returns the ring of this rank; every rank must call this, since each makes all groups."""
    if run.ring_size == run.devices:
        return Ring()
    if run.ring_size == 1:
        return Ring.alone()
    members = [range(first, first + run.ring_size) for first in range(0, run.devices, run.ring_size)]
    groups = [dist.new_group([*ranks]) for ranks in members]
    return Ring(groups[dist.get_rank() // run.ring_size])


def _in_parallel(model: Any, run: MeasuredRun) -> tuple[Any, Callable[[Any], None], Callable[[], None]]:
    """Returns the model as it is called, its backward pass, and the step of its optimizer, which frees the gradients."""
    if run.devices > 1 and run.parallel in NEEDS_DEEPSPEED:
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": int(run.parallel[-1])},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        )
        engine.train()
        return engine, engine.backward, engine.step
    if run.devices > 1 and run.parallel == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu" if model.device.type == "cpu" else "cuda", (run.devices,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
    elif run.devices > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return model, lambda loss: loss.backward(), step


def measure_estimates(shape: CallShape, runs: Sequence[MeasuredRun] = RUNS) -> list[dict[str, Any]]:
    """Returns {"run", "measured", "estimated", "error"} of each run, in bytes, and the share by which the estimate is off."""
    rows = []
    for run in progress(runs, "estimate"):
        measured = launch(peak_of_run, run.devices, shape, run)
        answer = estimate_of_run(shape, run)
        # On a CPU, what waits in host memory is in the same memory.
        estimated = max(answer.phases_with_host.values()) if shape.device == "cpu" else answer.peak
        error = estimated / measured - 1
        rows.append({"run": str(run), "measured": measured, "estimated": estimated, "error": error})
    return rows


def estimates_report(rows: Sequence[dict[str, Any]], shape: CallShape) -> Sheet:
    """Returns the table of `measure_estimates`."""
    worst = max(abs(row["error"]) for row in rows)
    return Sheet(
        f"peak memory of a training step in MiB, busiest process, without what it held before: a model of width "
        f"{shape.heads * shape.head_dim}",
        ("run", "measured", "estimated", "error"),
        [(row["run"], mebibytes(row["measured"]), mebibytes(row["estimated"]), f"{row['error']:+.1%}") for row in rows],
        [f"the estimate is off by {worst:.1%} at most"],
    )
