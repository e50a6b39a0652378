"""Errors, speed, memory and training steps on one GPU, in a run of at most nine minutes that installs nothing.

On a GPU:            make gpu
In less time:        make gpu GPU_ARGS="--seconds 300 --json figures.json"
A dry run, any CPU:  make gpu GPU_ARGS=--small

Each table is printed as soon as it is measured, and a JSON file has all figures so far. The run names every part that time,
memory or packages do not allow. It prints goals beside the results, and fails only for wrong numbers and errors.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from speed import LIMITS, sdpa
from timing import Shape, held_memory, reset_peak, table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM

import hf_ring_attention as ra

ROOT = Path(__file__).parents[2]
CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", "bfloat16") if CUDA else ("cpu", "float32")
#: Kernels that a device may have. A ring refuses the others, with its reason.
KERNELS = ("auto", "fused", "cudnn", "cuda_flash", "cuda_efficient", "math") if CUDA else ("auto", "cpu_flash", "math")
CHOOSABLE = "kernel" in inspect.signature(ra.Ring.alone).parameters
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION if CUDA else SDPBackend.MATH)
LONGNET = "longnet:2048/1,8192/4,32768/16"
#: The goals of patterns with so many documents, as shares of the speed of SDPA's faster backend; NaN for no goal.
GOALS = {
    ("exact", 1): 0.95, ("exact", 126): 0.5, ("window:512+4", 1): 0.45, ("window:512+4", 126): 0.45,
    ("window:4096+4", 1): math.nan, ("pyramid:512,3", 1): 0.45, ("pyramid:512,3", 126): 0.45, (LONGNET, 1): 0.55,
}  # fmt: skip
#: An error may be this many times the error of plain products of matrices in the same dtype.
FACTOR = 3
LLAMAS = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "8B, 4 layers": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4},
}
TINY = {"tiny": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 256}}


def ring_by(kernel: str) -> ra.Ring:
    """Returns the ring of this process alone, which computes by a kernel."""
    return ra.Ring.alone(kernel=kernel) if CHOOSABLE else ra.Ring.alone()


class Report:
    """The figures so far, the parts that were left out, and those that are wrong."""

    def __init__(self, seconds: float, small: bool, file: Path) -> None:
        self.end, self.small, self.file = time.monotonic() + seconds, small, file
        self.figures: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}
        self.wrong: dict[str, str] = {}

    def leave_out(self, name: str, reason: str) -> None:
        """Names a part that is not run."""
        self.left_out[name] = reason
        print(f"left out: {name}: {reason}", flush=True)

    def fail(self, name: str, reason: str) -> None:
        """Names a part that is wrong."""
        self.wrong[name] = reason
        print(f"WRONG: {name}: {reason}", flush=True)

    def left(self) -> float:
        """Returns the seconds that are left."""
        return max(0.0, self.end - time.monotonic())

    def allows(self, name: str, seconds: float) -> bool:
        """Returns whether a part of so many seconds can still be run; otherwise names it."""
        if enough := seconds <= self.left():
            return enough
        self.leave_out(name, f"it takes about {seconds:.0f} s, and {self.left():.0f} s are left")
        return enough

    def run(self, name: str, part: Callable[[], Any]) -> Any:
        """Returns the answer of a part, None after an error, and writes all figures to the file."""
        answer = None
        try:
            answer = part()
        except torch.OutOfMemoryError:
            self.leave_out(name, "the device has too little memory")
        except Exception as error:  # Other parts still have figures.
            self.fail(name, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        figures = {**self.figures, "left out": self.left_out, "wrong": self.wrong}
        text = re.sub(r"(?<=[ \[])(NaN|-?Infinity)(?=,?$)", "null", json.dumps(figures, indent=1), flags=re.MULTILINE)
        self.file.write_text(text + "\n", "utf-8")
        return answer


def timed(call: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """Returns the median milliseconds of a call on the device, and on the host until all its work is queued."""
    synchronize = torch.cuda.synchronize if CUDA else lambda: None
    begin, runs = time.perf_counter(), []
    call()  # Kernels compile, and plans are made.
    synchronize()
    least = 1 if time.perf_counter() - begin > 2 else 2
    while len(runs) < least or (time.perf_counter() - begin < seconds and len(runs) < 30):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if CUDA else (None, None)
        start = time.perf_counter()
        if first:
            first.record()
        call()
        if last:
            last.record()
        host = 1000 * (time.perf_counter() - start)
        synchronize()
        runs.append((first.elapsed_time(last) if first else host, host))
    device, hosts = zip(*runs)
    return statistics.median(device), statistics.median(hosts)


def machine(report: Report) -> None:
    """Prints versions, and the ceilings: a product of matrices, and a copy."""
    names = [name for name in ("torch", "transformers", "triton", "accelerate", "numpy", "pytest") if find_spec(name)]
    versions = {"python": sys.version.split()[0], **{name: importlib.import_module(name).__version__ for name in names}}
    versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()} if CUDA else {}
    side, size = (256, 1 << 20) if report.small else (8192, 1 << 30)
    a = torch.randn(side, side, device=DEVICE, dtype=getattr(torch, DTYPE))
    x, y = torch.empty(2, size, dtype=torch.uint8, device=DEVICE)
    product, copy = timed(lambda: a @ a, 0.5)[0], timed(lambda: y.copy_(x), 0.5)[0]
    ceilings = {"product TFLOP/s": 2 * side**3 / product / 1e9, "copy GB/s": 2 * size / copy / 1e6}
    name = torch.cuda.get_device_name() if CUDA else f"a CPU of {os.cpu_count()} cores"
    report.figures["machine"] = {"name": name, **versions, **ceilings}
    print(f"{name}\n{', '.join(f'{package} {version}' for package, version in versions.items())}")
    print("ceilings: " + ", ".join(f"{value:.3g} {unit} ({what})" for what, unit, value in (
        (*text.split(), value) for text, value in ceilings.items())))  # fmt: skip


def definition(tensors: Sequence[Tensor], counts: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Returns out, lse, dq, dk and dv by plain products of matrices, each key as often as it is seen."""
    q, k, v, dout = (x.detach().to(dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ keys.mT * q.shape[-1] ** -0.5 + counts.log().to(q.device, torch.promote_types(dtype, torch.float32))
    out = torch.softmax(scores, -1).to(dtype) @ values
    return [out.detach(), scores.detach().logsumexp(-1), *torch.autograd.grad(out, leaves, dout)]


def apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Returns the error of each tensor, relative to its norm."""
    return [float((x.detach().double() - y.double()).norm() / y.double().norm()) for x, y in zip(found, expected)]


@lru_cache
def case(text: str, packed: bool, small: bool) -> tuple[list[Tensor], Any, list[Tensor], list[float]]:
    """Returns tensors, their documents, the results by definition in float64, and the bounds of errors."""
    tokens, shape = (80, Shape(4, 2, 16, DTYPE, DEVICE)) if small else (400, Shape(8, 2, 128, DTYPE, DEVICE))
    ends = (0, 1, 2, tokens // 2, tokens // 2 + 1, tokens) if packed else (0, tokens)
    documents, tensors = [[*itertools.pairwise(ends)]], shape.tensors(tokens)
    counts = torch.zeros(shape.heads, tokens, tokens, dtype=torch.float64)
    seen = partial(ra.Pattern.parse(text).multiplicity, num_heads=shape.heads, num_kv_heads=shape.kv_heads)
    for head, (start, stop) in itertools.product(range(shape.heads), documents[0]):
        for i in range(stop - start):
            row = [float(seen(i, j, head=head)) for j in range(i + 1)]
            counts[head, start + i, start : start + i + 1] = torch.tensor(row)
    dtype = tensors[0].dtype
    expected, rounded = definition(tensors, counts, torch.float64), definition(tensors, counts, dtype)
    bounds = [FACTOR * error + 8 * torch.finfo(dtype).eps for error in apart(rounded, expected)]
    return tensors, documents, expected, bounds


def errors(report: Report) -> None:
    """Compares every kernel that the device has with the definition in float64."""
    rows: list[dict[str, Any]] = []
    report.figures["errors"] = rows
    texts = ("exact", "window:64+4", "pyramid:32,3", "longnet:64/1,256/4")
    for kernel, text, packed in itertools.product(KERNELS[: None if CHOOSABLE else 1], texts, (False, True)):
        name = f"{kernel}, {text}{', packed' * packed}"
        if f"kernel {kernel}" in report.left_out or not report.allows(name, 10):
            continue
        tensors, documents, expected, bounds = case(text, packed, report.small)
        *leaves, dout = tensors
        try:
            ring = ring_by(kernel)
            out, lse = ra.ring_attention(*leaves, pattern=text, documents=documents, ring=ring, return_lse=True)
            found = apart([out, lse, *torch.autograd.grad(out, leaves, dout)], expected)
        except (ValueError, NotImplementedError) as refusal:
            report.leave_out(f"kernel {kernel}", " ".join(str(refusal).split()))
            continue
        rows.append({"name": name, "errors": found, "bounds": bounds})
        if not all(x <= bound for x, bound in zip(found, bounds)):
            report.fail(name, f"errors of out, lse, dq, dk, dv {found} exceed {bounds}")
    most = max((x / bound for row in rows for x, bound in zip(row["errors"], row["bounds"])), default=math.nan)
    table(
        f"Errors relative to the norm of the definition in float64, {DTYPE}",
        "kernel, pattern|out|lse|dq|dk|dv",
        [(row["name"], *(f"{x:.1e}" for x in row["errors"])) for row in rows],
        f"The largest is {most:.2f} of its bound, {FACTOR} times the error of plain products of matrices in {DTYPE}.",
    )


def tests(report: Report, *files: str) -> None:
    """Runs the tests that are marked cuda; a file that imports a missing package is named."""
    if not find_spec("pytest"):
        return report.leave_out("tests", "pytest is missing")
    marked = [path for path in sorted(ROOT.glob("tests/*/test_*.py")) if "mark.cuda" in path.read_text("utf-8")]
    words = ["-m", "pytest", "-q", "-m", "cuda", "--all", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    words += ["-n", "4"] if CUDA and find_spec("xdist") else []
    limit = max(1.0, min(150.0, report.left() - 30))
    with tempfile.TemporaryFile("w+") as printed:
        command = [sys.executable, *words, *(files or map(str, marked[: 1 if report.small else None]))]
        process = subprocess.Popen(command, cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            report.leave_out("tests", f"those that had not ended after {limit:.0f} s")
            process.send_signal(signal.SIGINT)  # pytest then lists what has failed so far.
            process.wait(20)
        finally:
            process.kill()
        printed.seek(0)
        text = printed.read()
    for kind, name, reason in re.findall(r"^(FAILED|ERROR) (\S+)(?: - (.*))?$", text, re.MULTILINE):
        missing = re.search(r"No module named '(\w+)", reason) if kind == "ERROR" else None
        if missing:
            report.leave_out(name, f"{missing[1]} is missing")
        else:
            report.fail(name, reason)
    last = report.figures["tests"] = text.strip().rpartition("\n")[2].strip("= ")
    print(last)
    if not re.search(r"\d+ (passed|skipped|deselected|error)", last) and "tests" not in report.left_out:
        report.fail("tests", f"pytest did not run: {last}")


def documents_of(tokens: int, count: int) -> list[tuple[int, int]]:
    """Returns so many documents of a row, a few long and many short, as texts are."""
    rng = random.Random(0)
    sums = [*itertools.accumulate(rng.lognormvariate(0, 1) for _ in range(count))]
    ends = [0, *(round(tokens * x / sums[-1]) for x in sums)]
    return [(start, stop) for start, stop in itertools.pairwise(ends) if stop > start]


def by_backend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns exact attention by a backend of torch."""
    with sdpa_kernel(backend):
        return sdpa(q, k, v)


def calls_of(report: Report, shape: Shape, tensors: list[Tensor]) -> Iterator[tuple[str, Any, float, float]]:
    """Yields the name of each call, the call, the pairs that its queries see, and its goal."""
    tokens, bound = tensors[0].shape[2], LIMITS[DTYPE]
    for backend in BACKENDS:
        name = f"sdpa {backend.name.partition('_')[0].lower()}"
        yield name, partial(by_backend, backend), tokens * (tokens + 1) / 2, math.nan
    for (text, count), goal in GOALS.items():
        documents = documents_of(tokens, min(count, 9) if report.small else count)
        share = partial(ra.Pattern.parse(text).flop_share, num_heads=shape.heads, num_kv_heads=shape.kv_heads)
        pairs = sum(share(n) * n * (n + 1) / 2 for n in (stop - start for start, stop in documents))
        auto, fused = (
            partial(ra.ring_attention, pattern=text, documents=[documents], ring=ring_by(kernel))
            for kernel in (("auto", "fused") if CHOOSABLE else ("auto", "auto"))
        )
        name = text if count == 1 else f"{text}, {len(documents)}"
        yield name, auto, pairs, goal
        if CHOOSABLE and "kernel fused" not in report.left_out and report.allows(f"{name}, fused", 15):
            ends = [call(*tensors[:3])[:, :, -1024:].detach() for call in (auto, fused)]
            if not apart(ends[:1], ends[1:])[0] <= bound:
                report.fail(f"{name}, fused, {tokens} tokens", "the kernel that auto takes has other results")
            if not torch.equal(*ends):  # The same kernel would give the same bits.
                yield f"{name}, fused", fused, pairs, goal


def times_of(attend: Callable[..., Any], tensors: Sequence[Tensor]) -> dict[str, float]:
    """Returns the milliseconds of a call on the device and on the host, and its peak of memory beside its inputs."""
    *inputs, dout = tensors
    forward, _ = timed(lambda: attend(*inputs), 0.3)
    leaves = [x.detach().requires_grad_() for x in inputs]
    held = reset_peak(DEVICE)
    both, host = timed(lambda: torch.autograd.grad(attend(*leaves), leaves, dout), 0.6)
    peak = (held_memory(DEVICE, peak=True) - held) / 2**30
    return {"forward ms": forward, "both ms": both, "host ms": host, "peak GiB": peak}


def speed(report: Report, lengths: Sequence[int]) -> None:
    """Times attention, forward and backward, and prints a table for each length."""
    shape = Shape(4, 2, 16, DTYPE, DEVICE) if report.small else Shape(32, 8, 128, DTYPE, DEVICE)
    all_rows = report.figures.setdefault("speed", [])
    for tokens in lengths:
        # The numbers of a token lie side by side, as models store them.
        tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in shape.tensors(tokens)]
        rows: list[dict[str, Any]] = []
        for name, attend, pairs, goal in calls_of(report, shape, tensors):
            before = next((x for x in reversed(all_rows) if x["name"] == name), {"pairs": math.inf, "both ms": 0.0})
            seconds, of_length = 3 + 4 * before["both ms"] / 1000 * pairs / before["pairs"], f"{name}, {tokens} tokens"
            times = (
                report.run(of_length, partial(times_of, attend, tensors)) if report.allows(of_length, seconds) else None
            )
            if times is None:
                continue
            work = 4 * shape.head_dim * shape.heads * pairs / 1e9
            row = {
                "name": name,
                "tokens": tokens,
                "pairs": pairs,
                **times,
                "forward TFLOP/s": work / times["forward ms"],
            }
            row["both TFLOP/s"] = 3.5 * work / times["both ms"]
            best = max((x["both TFLOP/s"] for x in (*rows, row) if x["name"].startswith("sdpa")), default=math.nan)
            row["of SDPA"] = row["both TFLOP/s"] / best
            row["goal"] = "" if math.isnan(goal) else f"{goal} {'met' if row['of SDPA'] >= goal else 'missed'}"
            rows.append(row)
            all_rows.append(row)
        columns = ("forward ms", "both ms", "forward TFLOP/s", "both TFLOP/s", "of SDPA", "goal", "host ms", "peak GiB")
        if rows:
            table(
                f"Attention of {tokens} tokens, {shape.heads} / {shape.kv_heads} heads x {shape.head_dim}, {DTYPE}",
                "pattern, documents|forw.\nms|both\nms|forw.\nTF/s|both\nTF/s|of\nSDPA|\ngoal|host\nms|peak\nGiB",
                [(row["name"], *(row[column] for column in columns)) for row in rows],
            )
    print(
        "both: forward and backward; TF/s: TFLOP/s of the pairs that queries see; of SDPA: of its faster backend's TF/s"
    )


def loss_of(model: Any, ids: Tensor, way: str) -> Tensor:
    """Computes the loss and the gradients of a step; that of sdpa in slices too, so that both hold as few logits."""
    if way != "sdpa":
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()
    hidden = model.model(input_ids=ids).last_hidden_state
    leaf, loss = hidden.detach().requires_grad_(), torch.zeros((), device=DEVICE)
    for part, labels in zip(leaf[0, :-1].split(1024), ids[0, 1:].split(1024)):
        of_slice = F.cross_entropy(model.lm_head(part).float(), labels, reduction="sum") / (ids.shape[1] - 1)
        of_slice.backward()
        loss += of_slice.detach()
    hidden.backward(leaf.grad)
    return loss


def times_of_step(model: Any, ids: Tensor, way: str) -> dict[str, float]:
    """Returns the first loss of training by an attention, and the time and the peak of memory of later steps."""
    checkpointing = {"use_reentrant": False} | ({} if way == "sdpa" else {"context_fn": ra.keep_attention})
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(checkpointing)
    if way == "sdpa":
        model.set_attn_implementation("sdpa")
    else:
        ra.patch_model(model, way, ring=ring_by("auto"))
    optimizer, estimate = torch.optim.AdamW(model.parameters(), 1e-6), math.nan

    def step() -> Tensor:
        loss = loss_of(model, ids, way)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    loss = float(step())
    reset_peak(DEVICE)
    ms, host = timed(step, 3)
    peak = held_memory(DEVICE, peak=True) / 2**30
    if way != "sdpa":
        setting: Any = {"dtype": DTYPE, "master_dtype": DTYPE, "device": DEVICE, "parallel": "ddp"}
        estimate = ra.estimate(model.config, ids.shape[1], pattern=way, **setting).peak / 2**30
    rate = 1000 * ids.shape[1] / ms
    return {"loss": loss, "ms": ms, "tokens/s": rate, "host ms": host, "peak GiB": peak, "estimate GiB": estimate}


def llama(sizes: dict[str, Any], small: bool, **options: Any) -> Any:
    """Returns a Llama with random weights."""
    heads = {"num_attention_heads": 4 if small else 32, "num_key_value_heads": 2 if small else 8}
    config = LlamaConfig(**{"vocab_size": 128256, **heads, **sizes}, **options)
    with torch.device(DEVICE):
        return LlamaForCausalLM(config)


def steps(report: Report) -> None:
    """Times training steps with checkpointing, and compares their peaks with the estimate."""
    tokens, rows = 256 if report.small else 32768, report.figures.setdefault("steps", [])
    for name, sizes in (TINY if report.small else LLAMAS).items():
        model = llama(sizes, report.small, max_position_embeddings=tokens, use_cache=False).to(getattr(torch, DTYPE))
        ids = torch.randint(model.config.vocab_size, (1, tokens), device=DEVICE)
        losses: dict[str, float] = {}
        for way in ("sdpa", "exact", "window:512+4", "pyramid:512,3"):
            of_way = f"step of {name}, {way}"
            if report.allows(of_way, 25) and (
                times := report.run(of_way, partial(times_of_step, model.train(), ids, way))
            ):
                rows.append({"name": f"{name}, {way}", "tokens": tokens, **times})
                losses[way] = times["loss"]
        if not abs(losses.get("exact", 0) / losses.get("sdpa", math.inf) - 1) <= LIMITS[DTYPE] and len(losses) > 1:
            report.fail(f"losses of {name}", f"exact attention's is not sdpa's: {losses}")
    columns = ("ms", "tokens/s", "host ms", "peak GiB", "estimate GiB")
    title = f"A training step of {tokens} tokens with checkpointing, {DTYPE}"
    table(
        title,
        "model, attention|ms|tokens/s|host ms|peak GiB|estimate",
        [(x["name"], *(x[y] for y in columns)) for x in rows],
    )


def generated(model: Any, ids: Tensor, ring: ra.Ring) -> Tensor:
    """Returns the tokens that follow a prefill over a ring."""
    ra.patch_model(model.eval(), ring=ring)
    parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    cache = {"cache" if "cache" in parameters else "past_key_values": ra.prefill(model, ids[:, :-1])}
    return model.generate(ids, **cache, max_new_tokens=4, do_sample=False, pad_token_id=0)


def group(report: Report) -> None:
    """Uses a process group of this process alone: agreement, messages, a training step, prefill and decoding."""
    backend, same = "nccl" if CUDA else "gloo", {}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        ring, rows = ra.Ring(), torch.arange(8.0, device=DEVICE).view(4, 2)
        same["objects"] = ring.communicator.gather_objects({"a": 1}) == [{"a": 1}]
        same["gather"] = torch.equal(ring.communicator.gather(rows)[0], rows)
        received = torch.empty_like(rows)
        ring.communicator.all_to_all(received, rows, [4], [4])()
        same["exchange"] = torch.equal(received, rows)
        model, ids = llama(TINY["tiny"], True), torch.arange(3, 35, device=DEVICE)[None]
        ways = [
            ra.patch_model(model, "window:8+2", ring=x)(input_ids=ids, labels=ids).loss for x in (ring, ra.Ring.alone())
        ]
        ways[0].backward()
        same["a step"] = torch.equal(*ways)
        same["prefill and decoding"] = torch.equal(*(generated(model, ids, x) for x in (ring, ra.Ring.alone())))
        dist.destroy_process_group()
    report.figures["group"] = {"backend": backend, **same}
    print(f"{backend}, one process: {', '.join(f'{name} {chr(111)}{chr(107)}' for name, x in same.items() if x)}")
    for name in (name for name, x in same.items() if not x):
        report.fail(name, f"{backend} gives another result than no process group")


def main(words: Sequence[str] | None = None) -> None:
    """Runs all sections, and ends with status 1 for wrong numbers and errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540, help="the most seconds of the run (default: 540)")
    parser.add_argument("--small", action="store_true", help="every section at small sizes, also on a CPU")
    parser.add_argument(
        "--json", type=Path, default=Path(os.environ.get("OUT", "."), "gpu.json"), help="default: gpu.json"
    )
    args = parser.parse_args(words)
    if not (CUDA or args.small):
        parser.error("expected a GPU, found none: use --small for a dry run on the CPU")
    report = Report(args.seconds, args.small, args.json)
    lengths = (256, 512) if args.small else (8192, 32768, 131072)
    sections: dict[str, Callable[[Report], Any]] = {
        "machine": machine, "errors": errors, "tests marked cuda": tests, "speed": partial(speed, lengths=lengths),
        "training steps": steps, "process group": group,
        "speed of the longest rows": partial(speed, lengths=[1024 if args.small else 524288]),
    }  # fmt: skip
    for name, section in sections.items():
        print(f"== {name}, {report.left():.0f} s left", flush=True)
        report.run(name, partial(section, report))
        print(flush=True)
    goals = [row["goal"].endswith("met") for row in report.figures["speed"] if row["goal"]]
    print(
        f"{sum(goals)} of {len(goals)} goals met, {len(report.left_out)} parts left out, {len(report.wrong)} wrong: {args.json}"
    )
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
