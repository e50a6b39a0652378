"""The parts of `make gpu` that decide about code: whether one graph is worth its pipeline, and what proofs on disk save."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
from gpu_times import LLAMAS, TINY
from memory import model_of
from report import CUDA, DEVICE, DTYPE, Report
from speed import LIMITS
from timing import Shape, table, timed

import hf_ring_attention as ra

#: How a patched model is called.
CALLS = ("eager", "compiled with breaks", "in one graph")
PATTERNS = ("window:512+4", "exact")  # A dry run has the first one.
#: One graph stays if its steps are faster than those with breaks by more than this share.
WORTH_A_PIPELINE = 0.03
#: The first call of attention in a process, forward and backward.
FIRST_CALL = """
import sys, time
import torch
import hf_ring_attention as ra

device, dtype, pattern, tokens = sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3], int(sys.argv[4])
q, k, v = (torch.randn(1, heads, tokens, 64, device=device, dtype=dtype, requires_grad=True) for heads in (8, 2, 2))
(q * 2).sum().item()  # The device has begun.
start = time.perf_counter()
ra.ring_attention(q, k, v, pattern=pattern).float().sum().backward()
q.grad.sum().item()
print(time.perf_counter() - start)
"""


def times_of_call(way: str, pattern: str, shape: Shape, tokens: int, sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the tokens a second of training steps without checkpointing, and the first loss."""
    model = model_of(shape, tokens, checkpointing=False, **sizes)
    # A Llama has no routers. With this setting, its calls stay out of graphs, so each layer's attention is a break.
    model.config.output_router_logits = way == "compiled with breaks"
    ra.patch_model(model, pattern, ring=ra.Ring.alone())
    backend = "inductor" if CUDA else "aot_eager"
    call = model if way == "eager" else torch.compile(model, fullgraph=way == "in one graph", backend=backend)
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def step() -> torch.Tensor:
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()
        return loss.detach()

    loss = float(step())
    ms, host = timed(step)
    torch.compiler.reset()
    return {"pattern": pattern, "way": way, "tokens/s": 1000 * tokens / ms, "host ms": host, "loss": loss}


def compiled(report: Report) -> None:
    """Times training steps of a patched model: eager, compiled with a break at each attention, and in one graph."""
    head_dim, sizes = LLAMAS["1B"]
    large = Shape(32, 8, head_dim, DTYPE, DEVICE), 8192, sizes
    shape, tokens, sizes = (report.shape, 64, TINY) if report.small else large
    rows = report.figures["compile"] = []
    for pattern in PATTERNS[: 1 if report.small else None]:
        found = [
            report.run(f"{way}, {pattern}", 45, times_of_call, way, pattern, shape, tokens, sizes) for way in CALLS
        ]
        rows += [row for row in found if row]
        losses = [row["loss"] for row in found if row]
        if losses and not max(losses) / min(losses) - 1 <= LIMITS[DTYPE]:
            report.note("wrong", f"compiled, {pattern}", f"the losses of {CALLS} differ: {losses}")
        if all(found):
            gain = found[2]["tokens/s"] / found[1]["tokens/s"] - 1
            found[2]["worth"] = f"{gain:+.1%}: one graph {'stays' if gain > WORTH_A_PIPELINE else 'may go'}"
    table(
        f"Training steps of {tokens} tokens without checkpointing, {DTYPE}",
        "attention|call|tokens/s|host ms|against breaks",
        [[row["pattern"], row["way"], row["tokens/s"], row["host ms"], row.get("worth", "")] for row in rows],
    )


def proofs(report: Report) -> None:
    """Times the first call of processes: nothing on disk, then compiled kernels without proofs, then with proofs."""
    tokens, rows = "64" if report.small else "8192", []
    report.figures["proofs"] = rows
    for pattern in PATTERNS[: 1 if report.small else None]:
        with tempfile.TemporaryDirectory() as kernels, tempfile.TemporaryDirectory() as first, \
                tempfile.TemporaryDirectory() as second:  # fmt: skip
            seconds = []
            for folder in (first, second, second):
                caches = {"TRITON_CACHE_DIR": kernels, "HF_RING_ATTENTION_CACHE": folder}
                words = [sys.executable, "-c", FIRST_CALL, DEVICE, DTYPE, pattern, tokens]
                ended = subprocess.run(
                    words, env={**os.environ, **caches}, capture_output=True, text=True, timeout=300, check=False
                )
                if ended.returncode:
                    return report.note("wrong", f"first call, {pattern}", ended.stderr.strip()[-300:])
                seconds.append(float(ended.stdout.split()[-1]))
        rows.append({"pattern": pattern, **dict(zip(("nothing kept", "kernels kept", "proofs kept"), seconds))})
    table(
        f"Seconds of the first call in a process, {tokens} tokens, {DTYPE}",
        "attention|nothing on disk|compiled kernels|kernels and proofs",
        [[*row.values()] for row in rows],
    )
