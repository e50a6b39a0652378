"""Peak memory of attention by pattern, of a rank as its ring grows, and of a training step by part.

A small CPU:        python recipes/bench/memory.py
As in the figures:  python recipes/bench/memory.py --tokens 32k --rank-tokens 4k --ranks 1 2 4 8 --all-steps
Only the steps:     python recipes/bench/memory.py --parts steps --step-tokens 2k 8k 16k

Every peak is measured in new processes; on a CPU, it is their resident memory. Estimates come from `ra.estimate`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from speed import sdpa
from timing import Shape, held_memory, launch, of_all_ranks, options, reset_peak, return_memory_at_once, table, timed
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ring_attention as ra

PATTERNS = ["longnet:2048/1,8192/4,32768/16", "pyramid:512,3", "window:512", "exact"]
MIB = 2**20
#: The figures of `times_of_step`.
STEP = ("ms", "tokens/s", "host ms", "peak GiB", "estimate", "loss")


def peak_of_call(shape: Shape, tokens: int, name: str, transport: str) -> int:
    """Returns the most bytes that forward and backward held beside inputs, on the busiest rank; runs on every rank."""
    return_memory_at_once()
    ring = ra.Ring(layout="zigzag" if name == "exact" else "auto", transport=transport)
    held = 0
    for length in (64, tokens, tokens):  # The plan is made in the second call, once for all layers and steps.
        q, k, v, dout = shape.tensors(length)
        before = reset_peak(shape.device)
        out = sdpa(q, k, v) if name == "sdpa" else ra.ring_attention(q, k, v, pattern=name, ring=ring)
        out.backward(dout)
        held = held_memory(shape.device, peak=True) - before
        del q, k, v, dout, out
    return max(of_all_ranks(held))


@dataclass(frozen=True)
class Step:
    """A training step, by arguments of `ra.estimate`."""

    seq_len: int
    devices: int = 1
    ring_size: int = 1
    parallel: Any = "ddp"
    checkpointing: bool = True
    keep_attention: bool = True
    offload: bool = False
    pattern: str = "exact"
    layer_tokens_at_once: int = 0

    def __str__(self) -> str:
        of = "" if self.ring_size == self.devices else f" of {self.devices}"
        words = [f"{self.seq_len} on {self.ring_size}{of}", "fsdp2" * (self.parallel == "fsdp2")]
        words += [
            "saved" * (not self.checkpointing),
            "attention twice" * (not self.keep_attention),
            "offload" * self.offload,
            "slices" * (self.layer_tokens_at_once > 0),
        ]
        return ", ".join(filter(None, words))


#: A row that gets longer; other rings; what holds weights and gradients; activations saved, or in host memory; slices.
ALL_STEPS = [
    *(Step(tokens, 2, 2) for tokens in (2048, 4096, 8192)),
    *(Step(4096), Step(4096, 4, 4), Step(4096, 2, 2, "fsdp2"), Step(4096, offload=True)),
    *(Step(2048, checkpointing=False), Step(4096, 2, 2, checkpointing=False)),
    Step(2048, checkpointing=False, layer_tokens_at_once=256),
    Step(2048, 2, 1, "fsdp2", checkpointing=False),
]


def model_of(
    shape: Shape, tokens: int, checkpointing: bool = True, keep_attention: bool = True, **sizes: Any
) -> LlamaForCausalLM:
    """Returns a Llama of 4 layers, or other `sizes`, with the heads of the shape and always the same random weights."""
    torch.manual_seed(0)
    width, few = shape.heads * shape.head_dim, {"vocab_size": 8192, "num_hidden_layers": 4}
    heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
    few |= {"hidden_size": width, "intermediate_size": 3 * width, **heads, "max_position_embeddings": tokens}
    with torch.device(shape.device):
        model = LlamaForCausalLM(LlamaConfig(**few | sizes, use_cache=False)).to(getattr(torch, shape.dtype)).train()
    if checkpointing:
        options = {"use_reentrant": False} | ({"context_fn": ra.keep_attention} if keep_attention else {})
        model.activation_checkpointing_enable(options)
    return model


def estimate_of(shape: Shape, step: Step) -> int:
    """Returns the peak that `ra.estimate` expects of a device; on a CPU, host memory is the same memory."""
    config = model_of(replace(shape, device="meta"), step.seq_len).config
    dtypes = {"dtype": shape.dtype, "master_dtype": shape.dtype}
    answer = ra.estimate(config, accumulate=True, device=shape.device, **dtypes, **vars(step))
    return max(answer.phases_with_host.values()) if shape.device == "cpu" else answer.peak


def parts_of_step(shape: Shape, step: Step) -> dict[str, int]:
    """Returns the bytes of the busiest rank by part, in the third step: DDP makes its buckets in the second.

    Gradients stay between steps, as they do while batches are accumulated, so the forward pass ends with all parts but the
    last one in memory. That one is what the peak has beyond them: layers that backward computes again, logits, buckets.
    """
    return_memory_at_once()
    _parts(shape, replace(step, seq_len=64 * step.ring_size))  # loads what every step needs
    return max(of_all_ranks(_parts(shape, step)), key=lambda parts: sum(parts.values()))


def _parts(shape: Shape, step: Step) -> dict[str, int]:
    gc.collect()
    start = held_memory(shape.device)
    ring = ra.Ring() if step.ring_size == step.devices else ra.Ring.alone()
    model = model_of(shape, step.seq_len, step.checkpointing, step.keep_attention)
    model = ra.sliced_layers(ra.patch_model(model, step.pattern, ring=ring), step.layer_tokens_at_once or None)
    ids = torch.randint(8192, (1, step.seq_len), generator=torch.Generator().manual_seed(1)).to(shape.device)
    trained, backward, optimizer = in_parallel(model, step)
    kept = 0
    for _ in range(3):
        before = reset_peak(shape.device)
        with save_on_cpu() if step.offload else nullcontext():
            loss = trained(input_ids=ids, labels=ids).loss
        kept = held_memory(shape.device) - before
        backward(loss)
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    peak = held_memory(shape.device, peak=True) - start
    parts = {
        "weights": _bytes_of(model.parameters()),
        "gradients": _bytes_of(x.grad for x in model.parameters() if x.grad is not None),
        "optimizer": _bytes_of(x for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x)),
        "kept": kept,
    }
    return parts | {"working": peak - sum(parts.values())}


def times_of_step(
    way: str, shape: Shape, tokens: int, sizes: dict[str, Any], layer_tokens_at_once: int = 0
) -> dict[str, float]:
    """Returns the first loss under an attention, and the time, the peak and its estimate of later steps."""
    reset_peak(shape.device)  # It collects the last model.
    model = model_of(shape, tokens, keep_attention=way != "sdpa", **sizes)
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=random).to(shape.device)
    optimizer, estimate = torch.optim.AdamW(model.parameters(), 1e-6), math.nan
    if way != "sdpa":
        ra.sliced_layers(ra.patch_model(model, way, ring=ra.Ring.alone()), layer_tokens_at_once or None)
        setting: Any = {"dtype": shape.dtype, "master_dtype": shape.dtype, "device": shape.device, "parallel": "ddp"}
        setting["layer_tokens_at_once"] = layer_tokens_at_once
        estimate = ra.estimate(model.config, tokens, pattern=way, **setting).peak / 2**30

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    loss = float(step())
    reset_peak(shape.device)
    ms, host = timed(step)
    peak = held_memory(shape.device, peak=True) / 2**30 if shape.device == "cuda" else math.nan
    return dict(zip(STEP, (ms, 1000 * tokens / ms, host, peak, estimate, loss)))


def in_parallel(model: Any, step: Step) -> tuple[Any, Callable[[Any], None], Any]:
    """Returns the model as it is called, its backward pass, and its optimizer."""
    trained = model
    if step.parallel == "fsdp2" and step.devices > 1:
        for part in (*model.model.layers, model):
            fully_shard(part)
    elif step.devices > 1:
        trained = torch.nn.parallel.DistributedDataParallel(model)
    return trained, torch.Tensor.backward, torch.optim.AdamW(model.parameters())


def _bytes_of(tensors: Iterable[Any]) -> int:
    return sum((x.to_local() if hasattr(x, "to_local") else x).nbytes for x in tensors)


def measure_step(shape: Shape, step: Step) -> dict[str, Any]:
    """Returns the parts of a step, their sum, and the estimate and its error, in bytes."""
    parts = launch(parts_of_step, step.devices, shape, step, device=shape.device)
    total, estimate = sum(parts.values()), estimate_of(shape, step)
    return {**parts, "total": total, "estimate": estimate, "error": estimate / total - 1}


def main(words: Sequence[str] | None = None) -> None:
    """Measures, and prints the tables of the chosen parts."""
    numbers = {"tokens": "8k", "rank_tokens": "1k", "ranks": [1, 2, 4], "step_tokens": [2048, 4096], "all_steps": False}
    args, shape = options(__doc__ or "", words, patterns=PATTERNS, parts=["attention", "rings", "steps"], **numbers)
    if "attention" in args.parts:
        names, call = ("sdpa", *args.patterns), (peak_of_call, 1, shape, args.tokens)
        peaks = {name: launch(*call, name, "auto", device=args.device) for name in names}
        table(
            f"Peak of forward and backward beside inputs on one device, {args.tokens} tokens",
            "attention|MiB|of sdpa's",
            [(name, peak / MIB, peak / peaks["sdpa"]) for name, peak in peaks.items()],
        )
    if "rings" in args.parts:
        rows = []
        for way in ("ring", "collective"):
            ways = [(p, way if p > 1 else "auto") for p in args.ranks]
            sizes = [launch(peak_of_call, p, shape, args.rank_tokens, "exact", w, device=args.device) for p, w in ways]
            rows.append((way, *(size / MIB for size in sizes)))
        table(
            f"Peak of exact attention beside inputs, {args.rank_tokens} tokens a rank, busiest rank, MiB",
            "|".join(["transport", *(f"{p} ranks" for p in args.ranks)]),
            rows,
        )
    if "steps" in args.parts:
        steps = ALL_STEPS if args.all_steps else [Step(tokens, 2, 2) for tokens in args.step_tokens]
        rows = []
        for step in steps:
            *sizes, error = measure_step(shape, step).values()
            rows.append((step, *(size / MIB for size in sizes), f"{error:+.1%}"))
        table(
            f"A training step of 4 layers of width {args.heads * args.head_dim}, busiest rank, MiB",
            "tokens, ring|weights|grads|optim.|kept|work|total|estim.|error",
            rows,
            "kept: for backward; work: what the peak has beyond the other parts; saved: not checkpointed; slices: of layers",
        )


if __name__ == "__main__":
    main()
