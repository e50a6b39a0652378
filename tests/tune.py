"""Finds settings of the fused kernels for the GPU at hand, and prints them as a row of `_TUNED` in `compute/fused/choice.py`.

On a GPU, five minutes:  make gpu GPU_ARGS=--tune
A dry run, any CPU:      make gpu GPU_ARGS="--small --tune"

Candidates compile in parallel, into Triton's cache on disk. Then each takes turns with today's setting on workloads whose
queries see few keys, and many, after its results were compared with those of today's. The best setting has the smallest mean
ratio of its times to today's. It is proposed if this mean is below 1 by more than the noise: the largest distance from 1 of
the ratios of today's setting, which is a candidate too.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "bench"))

import torch
from peers import packed_row
from report import CUDA, DEVICE, DTYPE, Report
from speed import LIMITS
from timing import Shape, alternate, apart, as_models_store, ratio, table

import hf_ring_attention as ra
from hf_ring_attention.compute.binding import bind_own
from hf_ring_attention.compute.fused.choice import device_kind, settings_for, why_not_fused
from hf_ring_attention.compute.fused.settings import FEW_KEYS, Setting, Settings
from hf_ring_attention.compute.fused.tiles import Fused
from hf_ring_attention.compute.kernel import Saved, Work
from hf_ring_attention.plan.layouts import SequenceLayout
from hf_ring_attention.plan.problem import Problem

TITLE = "settings of the fused kernels"
#: The interpreter of Triton computes wrong products of bfloat16.
HALF = DTYPE if CUDA else "float16"
#: The shared memory of a block on an H100, which the interpreter stands for.
H100_SHARED = 227 << 10
#: The share of the time in which candidates compile.
COMPILING = 0.5


class Scale(NamedTuple):
    """The size of a run. Only the last pass of a turn is timed: its launches wait on the GPU for the pass before."""

    widths: tuple[int, ...]
    heads: tuple[int, int]  # of queries, and of keys and values
    tokens: int
    tokens_to_compile: int  # as many as have all kinds of launches
    processes: int
    turns: int
    passes: int
    candidates: int  # the most of a kernel
    every: int  # each n-th workload


LARGE = Scale((128, 64), (32, 8), 32768, 4096, 16, 5, 2, 99, 1)
SMALL = Scale((64,), (2, 1), 32, 32, 1, 1, 1, 2, 4)


class Workload(NamedTuple):
    """A row of tokens: one document, or documents with a median of its `share`-th part. Its queries see few keys, or many."""

    name: str
    pattern: str
    share: int
    many: bool


WORKLOADS = (
    Workload("window 512", "window:512+4", 0, False),
    Workload("packed window", "window:512+4", 190, False),
    Workload("packed short", "exact", 800, False),
    Workload("window 4096", "window:4096+4", 0, True),
    Workload("pyramid", "pyramid:512,3", 0, True),
    Workload("LongNet", "longnet:2048/1,8192/4,32768/16", 0, True),
    Workload("packed long", "exact", 40, True),
)
#: Candidates: rows, keys, warps and the most stages; how they loop over a tile; whether tiles of few keys take smaller blocks.
BLOCKS = {
    "forward": (
        "128 64 8 3, 64 64 4 3, 128 64 4 3, 64 32 4 3, 128 32 8 3, 128 128 8 2",
        "split edges one",
        (True, False),
    ),
    "dq": ("128 64 8 3, 64 32 4 3, 128 32 8 3, 64 64 4 3, 128 32 4 3", "staged edges one", (True, False)),
    "dkdv": (
        "32 64 4 3, 64 128 8 3, 64 64 4 2, 64 64 8 3, 64 128 8 2, 32 128 8 3, 32 32 4 3",
        "staged edges split one",
        (False,),
    ),
    "few_keys": (f"64 {FEW_KEYS} 4 2, 32 {FEW_KEYS} 4 2", "staged one", (False,)),
}
#: The most numbers of a sum that a warp holds: 64 registers of each of 32 threads.
MOST_OF_A_WARP = 2048
#: Results of a pass that a kernel computes: of out, lse, dq, dk and dv.
RESULTS = {"forward": slice(0, 2), "dq": slice(2, 3), "dkdv": slice(3, 5), "few_keys": slice(3, 5)}
#: The kernels that are timed, and the one that a setting is for.
TIMED = ("forward_kernel", "dq_kernel", "dkdv_kernel")
KERNEL_OF = dict(zip(BLOCKS, (*TIMED, "dkdv_kernel")))

#: Settings to try, by kernel.
Candidates = dict[str, list[Setting | None]]
#: Settings that run together, by kernel.
Chosen = dict[str, Setting | None]
#: A kernel's ratios to today's time, by setting and workload.
Ratios = dict[Setting | None, dict[str, float]]


def shared_bytes(kernel: str, setting: Setting, width: int, kind: str) -> int:
    """Returns about the shared memory that a kernel needs for 16 bit numbers; Triton has the last word.

    Each stage has two blocks of rows. NVIDIA's GPUs also hold a block of a gradient's kernel; AMD's have a stage in registers.
    """
    stays, moves = (setting.rows, setting.keys) if kernel in ("forward", "dq") else (setting.keys, setting.rows)
    if kind.startswith("gfx"):
        return 4 * width * moves * max(1, setting.stages - 1)
    return width * (4 * moves * setting.stages + (0 if kernel == "forward" else 2 * stays))


def candidates(now: Settings, width: int, kind: str, shared: int) -> Candidates:
    """Returns the settings to try of each kernel: today's first, then blocks with as many stages as fit into shared memory."""
    found: Candidates = {}
    for kernel, (blocks, loops, smalls) in BLOCKS.items():
        today = getattr(now, kernel)
        every = [today] if kernel == "few_keys" else [*today]
        for small, block, loop in itertools.product(smalls, blocks.split(", "), loops.split()):
            rows, keys, warps, most = map(int, block.split())
            stays = rows if kernel in ("forward", "dq") else keys
            staged = (Setting(rows, keys, warps, stages, loop, small) for stages in range(most, 0, -1))
            fits = (setting for setting in staged if shared_bytes(kernel, setting, width, kind) <= shared)
            every += [x for x in [next(fits, None)] if x and stays * width <= MOST_OF_A_WARP * warps]
        found[kernel] = [*dict.fromkeys([*every, None] if kernel == "few_keys" else every)]
    return found


def settings_with(now: Settings, many: bool, **chosen: Setting | None) -> Settings:
    """Returns today's settings of one kind of launches for both kinds, with other settings of some kernels."""
    pairs = {kernel: 2 * (chosen.get(kernel, getattr(now, kernel)[many]),) for kernel in ("forward", "dq", "dkdv")}
    return now._replace(**pairs, few_keys=chosen.get("few_keys", now.few_keys))


@dataclass(frozen=True)
class Watched:
    """A kernel of Triton whose launches go through a function of it, the grid and the arguments."""

    kernel: Any
    launch: Callable[..., Any]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self.launch, self.kernel, grid)


def work_of(workload: Workload, shape: Shape, tokens: int, settings: Settings) -> Work:
    """Returns the tiles of a row as launches."""
    documents = packed_row(tokens, min(workload.share, tokens // 8)) if workload.share else [(0, tokens)]
    heads = {"num_heads": shape.heads, "num_kv_heads": shape.kv_heads}
    layout, pattern = SequenceLayout("contiguous", tokens, 1), ra.Pattern.parse(workload.pattern)
    return bind_own(Problem(pattern, layout, (tuple(documents),), **heads), 0, torch.device(shape.device), settings)


def compiled(task: tuple[str, Setting | None, Settings, Shape, int]) -> int | str:
    """Compiles a candidate for all workloads; returns the bytes of shared memory that it needs, or an error.

    Tensors are on the CPU, and nothing is launched.
    """
    name, setting, now, shape, tokens = task
    needed = [0]

    def compile_only(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        program = kernel.warmup(*args, grid=grid, **constants)
        needed.append(program.metadata.shared if program else 0)  # The interpreter compiles nothing.

    torch.set_num_threads(1)
    settings = settings_with(now, True, **{name: setting})
    fused = Fused(settings)
    for kernel in (*TIMED, "sum_kernel"):
        launch = compile_only if kernel == KERNEL_OF[name] else lambda *_, **__: None
        setattr(fused, kernel, Watched(getattr(fused, kernel), launch))
    tensors = as_models_store(shape, tokens)
    try:
        for workload in WORKLOADS:
            results_of(work_of(workload, shape, tokens, settings), fused, tensors)
    except Exception as error:  # Compilers raise errors of any class.
        return f"{type(error).__name__}: {error}"
    return max(needed)


def results_of(work: Work, fused: Fused, tensors: Sequence[Any], saved: Sequence[Any] = ()) -> list[Any]:
    """Returns out, lse, dq, dk and dv; the gradients by `saved`, another pass's out and lse, if there are."""
    q, k, v, dout = tensors
    scale = q.shape[-1] ** -0.5
    results = work.forward(fused, q, k, v, scale)
    return [*results, *work.backward(fused, dout, Saved(q, k, v, *(saved or results)), scale)]


def compile_all(
    report: Report, scale: Scale, tasks: dict[tuple[int, str, Setting | None], Any], shared: int
) -> list[Any]:
    """Compiles candidates, a process for each core, and returns those that can run here; names the others."""
    end, ready, large = time.monotonic() + COMPILING * report.left, [], 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(cores, scale.processes)
    print(f"{len(tasks)} candidates compile in {processes} processes, {report.left:.0f} s left", flush=True)
    with mp.get_context("spawn").Pool(processes) as pool:  # Its end ends the processes.
        answers = {key: pool.apply_async(compiled, (task,)) for key, task in tasks.items()}
        for number, (key, answer) in enumerate(answers.items(), 1):
            answer.wait(max(0.0, end - time.monotonic()))
            needed = answer.get() if answer.ready() else None
            if needed is None:
                report.note("left out", named(*key), "there was no time to compile it")
            elif isinstance(needed, str):
                report.note("wrong", named(*key), needed)
            elif needed > shared:
                large += 1
            else:
                ready.append(key)
            if number % 20 == 0:
                print(f"{number} of {len(answers)}, {report.left:.0f} s left", flush=True)
    print(f"{len(ready)} compiled; {large} others need more than {shared >> 10} KiB of shared memory", flush=True)
    return ready


def named(width: int, kernel: str, setting: Setting | None) -> str:
    """Returns a name of a candidate."""
    return f"{kernel} {short(setting)}, width {width}"


def short(setting: Setting | None) -> str:
    """Returns a setting as a text of at most 21 letters, which leaves room for seven columns."""
    if setting is None:
        return "as others"
    return " ".join([*map(str, setting[:5]), *(["few"] if setting.small else [])])


def mark() -> Any:
    """Returns a moment of the GPU, or of the CPU without a GPU."""
    if not CUDA:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Trial:
    """Settings on a workload, and the times of their kernels."""

    def __init__(self, settings: Settings, workload: Workload, shape: Shape, tokens: int) -> None:
        self.fused, self.work = Fused(settings), work_of(workload, shape, tokens, settings)
        self.marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in TIMED}
        for name, marks in self.marks.items():
            setattr(self.fused, name, Watched(getattr(self.fused, name), partial(self._launch, marks)))

    @staticmethod
    def _launch(marks: list[tuple[Any, Any]], kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        begin = mark()
        kernel[grid](*args, **constants)
        marks.append((begin, mark()))

    def milliseconds(self, tensors: Sequence[Any], saved: Sequence[Any], passes: int) -> tuple[float, ...]:
        """Returns the milliseconds of forward, dq and dkdv in the last of some passes."""
        for marks in self.marks.values():
            marks.clear()
        for _ in range(passes):
            results_of(self.work, self.fused, tensors, saved)
        if CUDA:
            torch.cuda.synchronize()
        last = (marks[-(len(marks) // passes) :] for marks in self.marks.values())
        return tuple(sum(x.elapsed_time(y) if CUDA else 1000 * (y - x) for x, y in marks) for marks in last)


def trials_of(found: Candidates) -> list[Chosen]:
    """Returns the settings of trials: the n-th of the three kernels, which are timed apart, run together."""
    together = itertools.zip_longest(*(found[kernel] for kernel in ("forward", "dq", "dkdv")))
    trials = [dict(zip(("forward", "dq", "dkdv"), settings)) for settings in together]
    return [{k: x for k, x in trial.items() if x} for trial in trials] + [{"few_keys": x} for x in found["few_keys"]]


def ratios_on(
    report: Report, scale: Scale, workload: Workload, shape: Shape, now: Settings, trials: list[Chosen]
) -> dict[str, dict[Setting | None, float]]:
    """Returns the ratios of candidates to today's times on a workload; names wrong candidates and leaves them out."""
    tensors = as_models_store(shape, scale.tokens)

    def trial_of(**chosen: Setting | None) -> Trial:
        return Trial(settings_with(now, workload.many, **chosen), workload, shape, scale.tokens)

    today = trial_of()
    expected = results_of(today.work, today.fused, tensors)
    calls, right = {"today": partial(today.milliseconds, tensors, expected[:2], scale.passes)}, []
    for number, chosen in enumerate(trials):
        trial, names = trial_of(**chosen), ", ".join(named(shape.head_dim, *item) for item in chosen.items())
        found = report.run(names, 0, results_of, trial.work, trial.fused, tensors, expected[:2])
        for kernel, setting in chosen.items() if found else ():
            far = max(map(apart, found[RESULTS[kernel]], expected[RESULTS[kernel]]))
            if far <= LIMITS[HALF]:
                calls[str(number)] = partial(trial.milliseconds, tensors, expected[:2], scale.passes)
                right.append((str(number), kernel, setting))
            else:
                report.note("wrong", named(shape.head_dim, kernel, setting), f"it differs from today's by {far:.1e}")
    runs = alternate(calls, scale.turns)
    ratios: dict[str, dict[Setting | None, float]] = {kernel: {} for kernel in BLOCKS}
    for number, kernel, setting in right:
        ratios[kernel][setting] = ratio(runs, number, "today", TIMED.index(KERNEL_OF[kernel]))
    return ratios


def tune_width(
    report: Report, scale: Scale, kind: str, shape: Shape, now: Settings, found: Candidates, seconds: float
) -> None:
    """Times the candidates of a width; prints their ratios, a row of the code with the best ones, and what changes."""
    end, trials, workloads = time.monotonic() + seconds, trials_of(found), WORKLOADS[:: scale.every]
    for _ in range(2):  # Programs are loaded in the first round.
        begin = time.monotonic()
        for workload in workloads:
            ratios_on(report, scale, workload, shape, now, [])
    # A trial may take twice as long as today's.
    fits = int(max(0.0, end - time.monotonic()) / (time.monotonic() - begin) / 2)
    for item in itertools.chain.from_iterable(trial.items() for trial in trials[fits:]):
        report.note("left out", named(shape.head_dim, *item), "there was no time to time it")
    every = {x.name: ratios_on(report, scale, x, shape, now, trials[:fits]) for x in workloads}
    ratios: dict[str, Ratios] = {kernel: {} for kernel in BLOCKS}
    for kernel, setting in itertools.chain.from_iterable(trial.items() for trial in trials[:fits]):
        times = {name: some[kernel][setting] for name, some in every.items() if setting in some[kernel]}
        if len(times) == len(every):
            ratios[kernel][setting] = times
    for kernel, some in ratios.items():
        title = f"{kernel}, width {shape.head_dim}: times beside today's, by rows, keys, warps, stages, loops"
        rows = sorted(([short(x), *times.values()] for x, times in some.items()), key=lambda row: sum(row[1:]))
        headings = ("setting", *(name.replace(" ", "\n") for name in every))
        table(title, "|".join(headings), rows, "Few: tiles of few keys take smaller blocks.")
    settings, changes = best_settings(now, ratios)
    row = row_of(kind, shape.head_dim, settings)
    print("For _TUNED in compute/fused/choice.py:", row, *(changes or ["Nothing changes."]), "", sep="\n", flush=True)
    shown = {kernel: {short(x): times for x, times in some.items()} for kernel, some in ratios.items()}
    report.figures["settings"][f"{kind}, {shape.head_dim}"] = {"ratios": shown, "row": row, "changes": changes}


def best_of(ratios: Ratios, today: Setting | None, workloads: Sequence[str]) -> tuple[Setting | None, float, float]:
    """Returns the best setting on some workloads, or today's; the best mean ratio, and the noise."""
    noise = max(abs(ratios[today][name] - 1) for name in workloads)
    means = {x: statistics.fmean(times[name] for name in workloads) for x, times in ratios.items()}
    best = min(means, key=lambda x: means[x])
    return best if means[best] < 1 - noise else today, means[best], noise


def best_settings(now: Settings, ratios: dict[str, Ratios]) -> tuple[Settings, list[str]]:
    """Returns the settings to propose, and a line for each change. Kernels without times keep today's."""
    best, changes = now._asdict(), []
    kinds = {x.name: "many" if x.many else "few" for x in WORKLOADS}
    for kernel, some in ratios.items():
        chosen = []
        for kind, today in [("all", now.few_keys)] if kernel == "few_keys" else zip(("few", "many"), best[kernel]):
            names = [name for name in some.get(today, {}) if kind in ("all", kinds[name])]
            setting, mean, noise = best_of(some, today, names) if names else (today, 1.0, 0.0)
            chosen.append(setting)
            if setting != today:
                told = f"{mean:.3f} of the time, noise {noise:.3f}"
                changes.append(f"{kernel}, {kind} keys: {short(today)} -> {short(setting)}: {told}")
        best[kernel] = chosen[0] if kernel == "few_keys" else tuple(chosen)
    return Settings(**best), changes


def row_of(kind: str, width: int, settings: Settings) -> str:
    """Returns settings as a row of `_TUNED`."""

    def code(setting: Setting) -> str:
        words = [*map(str, setting[:4]), *([f'"{setting.loops}"'] if setting.loops != "one" else [])]
        return f"Setting({', '.join([*words, *(['small=True'] if setting.small else [])])})"

    lines = [f'    ("{kind}", {width}): Settings(']
    for kernel in BLOCKS:
        pair = getattr(settings, kernel)
        if kernel == "few_keys":
            lines += [f"        few_keys={code(pair)},"] if pair else []
        elif pair[0] == pair[1]:
            lines.append(f"        {kernel}=2 * ({code(pair[0])},),")
        else:
            lines.append(f"        {kernel}=({', '.join(map(code, pair))}),")
    return "\n".join([*lines, "    ),"])


def tune(report: Report) -> None:
    """Finds settings for the device of `report.py`."""
    device, dtype, scale = torch.device(DEVICE), getattr(torch, HALF), SMALL if report.small else LARGE
    against = why_not_fused(device, dtype, max(scale.widths), max(scale.widths))
    if against is not None:
        return report.note("left out", TITLE, against)
    kind, shared = device_kind(device), H100_SHARED
    if CUDA:
        facts = torch.cuda.get_device_properties(device)
        shared = getattr(facts, "shared_memory_per_block_optin", facts.shared_memory_per_block)
    shapes = {width: Shape(*scale.heads, width, HALF) for width in scale.widths}
    now = {width: settings_for(dtype, width, kind) for width in scale.widths}
    every = [
        (number, width, kernel, setting)
        for width in scale.widths
        for kernel, settings in candidates(now[width], width, kind, shared).items()
        for number, setting in enumerate(settings[: scale.candidates])
    ]
    tasks = {
        (width, kernel, setting): (kernel, setting, now[width], shapes[width], scale.tokens_to_compile)
        for _, width, kernel, setting in sorted(every, key=lambda x: x[0])  # the first of all kernels come first
    }
    ready = compile_all(report, scale, tasks, shared)
    for number, (width, shape) in enumerate(shapes.items()):
        found = {kernel: [x for w, k, x in ready if (w, k) == (width, kernel)] for kernel in BLOCKS}
        seconds = (report.left - 5) / (len(scale.widths) - number)
        arguments = (scale, kind if CUDA else "cpu", replace(shape, device=DEVICE), now[width], found, seconds)
        report.run(f"width {width}", 5, tune_width, report, *arguments)


def main(words: Sequence[str] | None = None) -> None:
    """Finds settings, writes figures, and ends with status 1 for wrong numbers and errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=290, help="the most seconds (default: 290)")
    parser.add_argument("--small", action="store_true", help="two candidates at small sizes, also on a CPU")
    parser.add_argument("--json", type=Path, default=Path("tune.json"), help="default: tune.json")
    args = parser.parse_args(words)
    report = Report(args.seconds, args.small, args.json)
    report.figures["settings"] = {}
    report.run(TITLE, 0, tune, report)
    sys.exit(bool(report.figures["wrong"]))


if __name__ == "__main__":
    main()
