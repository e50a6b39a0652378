"""The times of `make gpu`: attention, training steps, long rows, decoding, a simulated ring, other implementations."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from memory import STEP, model_of, times_of_step
from peers import packed_row
from report import CUDA, DEVICE, DTYPE, Report
from speed import LIMITS, flex, sdpa
from timing import Shape, apart, as_models_store, held_memory, kernel_ms, reset_peak, table, timed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

import hf_ring_attention as ra

GIB = 2**30
#: The kernel that is timed beside the one that auto takes, if their results differ.
OTHER = "fused" if CUDA else "math"
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION if CUDA else SDPBackend.MATH)
#: Patterns, whether rows have many documents, and goals: shares of the speed of SDPA's faster backend, 0 for no goal.
GOALS = [("exact", False, 0.95), ("exact", True, 0.5), ("window:512+4", False, 0.45), ("window:512+4", True, 0.45)]
GOALS += [("window:4096+4", False, 0), ("pyramid:512,3", False, 0.45), ("pyramid:512,3", True, 0.45)]
GOALS += [("longnet:2048/1,8192/4,32768/16", False, 0.55)]
SPEED = ("forward ms", "both ms", "forward TF/s", "both TF/s", "host ms", "peak GiB")
WAYS = ("sdpa", "exact", "window:512+4", "pyramid:512,3")
#: Head sizes and other sizes of the models that are trained.
LLAMAS: dict[str, tuple[int, dict[str, Any]]] = {
    "1B": (64, {"intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256, "tie_word_embeddings": True}),
    "8B, 4 layers": (128, {"intermediate_size": 14336, "vocab_size": 128256}),
}
TINY = {"vocab_size": 128, "num_hidden_layers": 1}
#: Ways, tokens (and in a dry run), and seconds with both models on an H100. The last one is left out first.
LONG = [("window:512+4", 131072, 256, 12), ("pyramid:512,3", 131072, 256, 12), ("window:512+4", 262144, 512, 20)]
LONG += [("exact", 131072, 256, 32)]
#: The ranks that one device simulates.
RANKS = 8


def results(tensors: Sequence[Tensor], ring: ra.Ring, **call: Any) -> list[Tensor]:
    """Returns out, lse, dq, dk and dv over a ring; tensors are q, k, v, and the gradient of out."""
    *leaves, dout = (x.detach().requires_grad_() for x in tensors)
    out, lse = ra.ring_attention(*leaves, ring=ring, return_lse=True, **call)
    return [out, lse, *torch.autograd.grad(out, leaves, dout)]


def times_of(attend: Callable[..., Any], tensors: Sequence[Tensor], flops: float) -> dict[str, float]:
    """Returns the times and rates of a call, and its peak of memory beside its inputs."""
    *inputs, dout = tensors
    forward, _ = timed(lambda: attend(*inputs))
    leaves = [x.detach().requires_grad_() for x in inputs]
    held = reset_peak(DEVICE)
    both, host = timed(lambda: torch.autograd.grad(attend(*leaves), leaves, dout))
    peak = (held_memory(DEVICE, peak=True) - held) / GIB if CUDA else math.nan
    return dict(zip(SPEED, (forward, both, flops / forward / 1e9, 3.5 * flops / both / 1e9, host, peak)))


def pairs_of(text: str, shape: Shape, documents: Sequence[tuple[int, int]]) -> float:
    """Returns the pairs of a query and a key that a pattern shows, as the mean of heads."""
    share = partial(ra.Pattern.parse(text).flop_share, num_heads=shape.heads, num_kv_heads=shape.kv_heads)
    return sum(share(n) * n * (n + 1) / 2 for n in (stop - start for start, stop in documents))


def speed(report: Report, tokens: int) -> None:
    """Times attention, forward and backward."""
    shape, every, rows = report.shape, report.figures["speed"], []
    tensors = as_models_store(shape, tokens)

    def measure(name: str, attend: Callable[..., Any], pairs: float, goal: float = 0) -> None:
        before = next((x for x in reversed(every) if x["name"] == name), {"both ms": 0, "pairs": 1})
        seconds = 3 + 0.002 * before["both ms"] * pairs / before["pairs"]
        flops = 4 * shape.head_dim * shape.heads * pairs
        if times := report.run(f"{name}, {tokens} tokens", seconds, times_of, attend, tensors, flops):
            best = max((x["both TF/s"] for x in rows if "sdpa" in x["name"]), default=times["both TF/s"])
            share = math.nan if "sdpa" in name else times["both TF/s"] / best
            reached = f"{goal} {'met' if share >= goal else 'missed'}" if goal else ""
            rows.append({"name": name, "tokens": tokens, "pairs": pairs, **times, "of SDPA": share, "goal": reached})
            every.append(rows[-1])

    for backend in BACKENDS:
        measure(f"sdpa {backend.name.split('_')[0].lower()}", sdpa_kernel(backend)(sdpa), tokens * (tokens + 1) / 2)
    for text, packed, goal in GOALS:
        documents = packed_row(tokens, 5 if report.small else 190) if packed else [(0, tokens)]
        pairs = pairs_of(text, shape, documents)
        name = f"{text}, {len(documents)}" if packed else text
        call = partial(ra.ring_attention, pattern=text, documents=[documents])
        calls = [partial(call, ring=ra.Ring.alone(kernel=kernel)) for kernel in ("auto", OTHER)]
        measure(name, calls[0], pairs, goal)
        if f"kernel {OTHER}, exact" in report.figures["left out"]:
            continue
        other = f"kernel {OTHER}, {name}"
        part = f"{other}, {tokens} tokens"
        ends = report.run(part, 30, lambda *ways: [x(*tensors[:3])[:, :, -1024:] for x in ways], *calls)
        if ends and not apart(*ends) <= LIMITS[DTYPE]:
            report.note("wrong", part, "its results are not those of the kernel that auto takes")
        if ends and not torch.equal(*ends):  # The same kernel would give the same bits.
            measure(other, calls[1], pairs, goal)
    table(
        f"Attention of {tokens} tokens, {shape.heads} / {shape.kv_heads} heads x {shape.head_dim}, {DTYPE}",
        "pattern|fwd\nms|both\nms|fwd\nTF/s|both\nTF/s|of\nSDPA|\ngoal|host\nms|peak\nGiB",
        [[row[x] for x in ("name", *SPEED[:4], "of SDPA", "goal", *SPEED[4:])] for row in rows],
        "Both: forward and backward. TF/s: TFLOP/s of the pairs that queries see. Of SDPA: of its faster backend's.",
    )


def steps(report: Report) -> None:
    """Times training steps with checkpointing, and compares their peaks with the estimate."""
    tokens, rows = 256 if report.small else 32768, report.figures["steps"]
    for name, (head_dim, sizes) in LLAMAS.items():
        model = (report.shape, tokens, TINY) if report.small else (Shape(32, 8, head_dim, DTYPE, DEVICE), tokens, sizes)
        for way in WAYS:
            if step := report.run(f"step of {name}, {way}", 25, times_of_step, way, *model):
                rows.append({"name": f"{name}, {way}", **step})
        losses = [x["loss"] for x in rows if x["name"] in (f"{name}, sdpa", f"{name}, exact")]
        if losses and not max(losses) / min(losses) - 1 <= LIMITS[DTYPE]:
            report.note("wrong", f"step of {name}", f"the losses of sdpa and of exact attention differ: {losses}")
    title = f"A training step of {tokens} tokens with checkpointing, {DTYPE}; sdpa forms all logits at once"
    table(title, "|".join(("model, attention", *STEP)), [[x[y] for y in ("name", *STEP)] for x in rows])


def long_rows(report: Report) -> None:
    """Times training steps of long rows, and compares their peaks with the estimate; MLPs run in slices."""
    small, (head_dim, sizes), rows = report.small, LLAMAS["1B"], report.figures["long rows"]
    shape, at_once = (report.shape, 64) if small else (Shape(32, 8, head_dim, DTYPE, DEVICE), 32768)
    for way, tokens, few, seconds in LONG:
        model = (shape, few if small else tokens, TINY if small else sizes, at_once)
        if step := report.run(f"step of {model[1]} tokens, {way}", seconds, times_of_step, way, *model):
            rows.append({"name": f"{model[1]}, {way}", **step})
    title = f"A training step of 1B on one long row, with checkpointing, MLPs in slices of {at_once} tokens, {DTYPE}"
    table(title, "|".join(("tokens, attention", *STEP)), [[x[y] for y in ("name", *STEP)] for x in rows])


def cache_name(model: Any) -> str:
    """Returns the name of a model's argument for its cache, which Transformers 5.24 renamed."""
    named = "cache" in inspect.signature(model.prepare_inputs_for_generation).parameters
    return "cache" if named else "past_key_values"


def times_of_decoding(way: str, shape: Shape, tokens: int, sizes: dict[str, Any]) -> dict[str, float]:
    """Returns the milliseconds of a step of one token behind a row in the cache, and those of its kernels."""
    model = model_of(shape, tokens + 64, checkpointing=False, **sizes).eval()
    if way != "sdpa":
        ra.patch_model(model, way, ring=ra.Ring.alone())
    cache: dict[str, Any] = {cache_name(model): DynamicCache(config=model.config)}
    ids = torch.arange(tokens, device=shape.device)[None] % model.config.vocab_size
    with torch.no_grad():
        model(ids, use_cache=True, logits_to_keep=1, **cache)
        step = partial(model, ids[:, :1], use_cache=True, **cache)
        return {"ms": timed(step)[0], "GPU ms": kernel_ms(step)}


def decoding(report: Report) -> None:
    """Times the steps of generation with a long row in the cache."""
    head_dim, sizes = LLAMAS["1B"]
    large = (Shape(32, 8, head_dim, DTYPE, DEVICE), 16384, sizes)
    shape, tokens, sizes = (report.shape, 256, TINY) if report.small else large
    rows = report.figures["decoding"]
    for way in ("sdpa", "exact", "window:512+4"):
        if times := report.run(f"decoding, {way}", 8, times_of_decoding, way, shape, tokens, sizes):
            rows.append({"name": way, "tokens": tokens, **times})
    table(
        f"Decoding of 1B with {tokens} tokens in the cache, {DTYPE}",
        "attention|ms a\ntoken|GPU\nms",
        [[row[x] for x in ("name", "ms", "GPU ms")] for row in rows],
        "GPU ms: the time of the kernels. The rest of a token's time is the host's.",
    )


def times_of_ring(pattern: str, shape: Shape, tokens: int) -> dict[str, float]:
    """Returns the kernels' milliseconds on one device and on all ranks of a ring that it simulates, and the ring's error."""
    tensors, rings = as_models_store(shape, tokens), ra.simulate(RANKS, transport="ring")
    layout = rings[0].layout_for(tokens, pattern)
    parts = [[ring.shard(x, layout, dim=2) for x in tensors] for ring in rings]

    def of_rank(ring: ra.Ring) -> list[Tensor]:
        return results(parts[ring.rank], ring, pattern=pattern, layout=layout)

    calls = (
        partial(results, tensors, ra.Ring.alone(), pattern=pattern),
        partial(ra.run_simulated, of_rank, RANKS, transport="ring"),
    )
    whole, of_ranks = (call() for call in calls)  # Kernels compile.
    expected = [[ring.shard(x, layout, dim=2) for x in whole] for ring in rings]
    far = max(apart(x, y) for found, right in zip(of_ranks, expected) for x, y in zip(found, right))
    one, ring = map(kernel_ms, calls)
    return {"one device ms": one, "ring ms": ring, "ratio": ring / one, "error": far}


def ring_on_one_device(report: Report) -> None:
    """Times the kernels of a ring that this device simulates, and compares its results with those of one device."""
    tokens, rows = 512 if report.small else 65536, report.figures["ring"]
    for pattern in ("exact", "window:512+4", "pyramid:512,3"):
        name = f"ring of {RANKS}, {pattern}"
        if row := report.run(name, 10, times_of_ring, pattern, report.shape, tokens):
            rows.append({"name": pattern, "tokens": tokens, **row})
            if not row["error"] <= LIMITS[DTYPE]:
                report.note("wrong", name, f"its results differ from one device's by {row['error']:.1e}")
    table(
        f"Kernels of a simulated ring of {RANKS}, forward and backward of {tokens} tokens, {DTYPE}",
        "pattern|one device\nms|all ranks\nms|ranks /\ndevice|error",
        [[row[x] for x in ("name", "one device ms", "ring ms", "ratio", "error")] for row in rows],
        "One device computes all ranks, one after another: this is never a speed-up. The ratio shows what a ring's smaller "
        "tiles and merges cost; copies in place of messages are left out.",
    )


def checked_times(attend: Any, pattern: str, tensors: Sequence[Tensor], flops: float) -> dict[str, float]:
    """Returns the times of another implementation, and how far its output is from this package's."""
    with torch.no_grad():
        far = apart(attend(*tensors[:3]), ra.ring_attention(*tensors[:3], pattern=pattern))
    return {**times_of(attend, tensors, flops), "error": far}


def flash(report: Report) -> None:
    """Times FlashAttention 3 and 4 where they are installed, by torch, by this package and under flex_attention."""
    tokens, shape, rows = 512 if report.small else 32768, report.shape, report.figures["flash"]
    tensors, window = as_models_store(shape, tokens), "window:512+4"
    for name in ("FA3", "FA4"):
        try:
            torch.nn.attention.activate_flash_attention_impl(name)
        except (ImportError, RuntimeError, ValueError) as error:  # Not installed, not for this GPU, unknown to torch.
            report.note("left out", name, f"{type(error).__name__}: {error}")
            continue
        by_torch = {f"sdpa by {name}": ("exact", sdpa_kernel(SDPBackend.FLASH_ATTENTION)(sdpa))}
        call = partial(ra.ring_attention, ring=ra.Ring.alone(kernel="flash"))
        ours = {f"kernel flash by {name}, {text}": (text, partial(call, pattern=text)) for text in ("exact", window)}
        blocks: dict[str, Any] = {}
        if name == "FA4":  # The library that flex_attention needs for it.
            by_flex = flex(ra.Pattern.parse(window), tokens, shape, BACKEND="FLASH")
            blocks[f"flex by {name}, {window}"] = (window, by_flex)
        for part, (text, attend) in {**by_torch, **ours, **blocks}.items():
            flops = 4 * shape.head_dim * shape.heads * pairs_of(text, shape, [(0, tokens)])
            if times := report.run(part, 30, checked_times, attend, text, tensors, flops):
                rows.append({"name": part, "tokens": tokens, **times})
                if not times["error"] <= LIMITS[DTYPE]:
                    report.note("wrong", part, f"its output differs from this package's by {times['error']:.1e}")
        torch.nn.attention.restore_flash_attention_impl()
    table(
        f"Other implementations, {tokens} tokens, {DTYPE}",
        "attention|fwd\nms|both\nms|fwd\nTF/s|both\nTF/s|host\nms|peak\nGiB|error",
        [[row[x] for x in ("name", *SPEED, "error")] for row in rows],
    )
