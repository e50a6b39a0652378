"""`hf-ring-attention bench`: time, memory and overlap on this machine, one table a measurement, and pictures of some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..arguments import MOST, at_least, key_value_heads, one_of, picture_folder, token_count
from ..options import (
    AnyDtype,
    AsJson,
    DeviceName,
    checked,
    folder_option,
    list_option,
    memory_option,
    model_option,
    number_option,
    parsed,
    pattern_option,
    refuse,
    tokens_option,
)
from ..output import Sheet, print_json, print_sheet, stdout_left_alone, terminal, write_tables
from .bench_checks import check_devices, check_division, check_model_folder, check_step, make_folder

#: The measurements, with what each is for and how often it runs without --repeats.
PARTS = {
    "speed": ("patterns against torch's attention, one device", 3),
    "memory": ("peak memory of the same", 1),
    "model": ("exact attention in a model against sdpa", 15),
    "decode": ("a token with a long cache against sdpa", 30),
    "transport": ("ring against collective, and what auto chooses", 7),
    "ideal": ("the ring against the same FLOPs on one device each", 7),
    "ring-memory": ("peak memory as the ring grows", 1),
    "overlap": ("how much of a delay of messages shows", 7),
    "step-memory": ("a training step by part, as rows get longer", 1),
    "estimate": ("peaks of training steps beside ra.estimate; only when named", 1),
    "scaling": ("tokens a second as the ring grows", 5),
    "hybrids": ("steps of hybrid models over a ring; only when named", 3),
    "peers": ("other implementations beside ours; only when named", 3),
}
#: The measurements that run only when they are named: they take minutes, and depend on what else is installed.
ONLY_NAMED = ("estimate", "hybrids", "peers")
#: The measurements that --plots draws.
_WITH_PICTURES = ("step-memory", "scaling", "peers")
_PATTERNS = ["longnet:2048/1,8192/4,32768/16", "pyramid:512,3"]

EXAMPLES_OF_BENCH = "\b\nParts:\n" + "".join(f"  {name:12} {text}\n" for name, (text, _) in PARTS.items())
EXAMPLES_OF_BENCH += """
\b
Examples:
  hf-ring-attention bench
  hf-ring-attention bench speed memory --tokens 128k --pattern pyramid:512,3
  hf-ring-attention bench transport ideal overlap --ranks 4 --json
  hf-ring-attention bench step-memory scaling --plots pictures --memory 80GB
  hf-ring-attention bench peers --pattern window:512 --ranks 1
  hf-ring-attention bench peers --tables tables --plots pictures
"""


@dataclass(frozen=True)
class BenchOptions:
    """The options of the command line."""

    shape: Any
    tokens: int
    patterns: list[str]
    step_pattern: str
    repeats: int | None
    ranks: int
    lengths: list[int]
    ring_tokens: int
    longnet_tokens: int
    rank_tokens: int
    memory_ranks: list[int]
    model_tokens: int
    decode_tokens: int
    model: str | None
    step_lengths: list[int]
    memory: int | None
    scaling_ranks: list[int]
    hybrid_tokens: int
    peer_tokens: int
    simulated_ranks: int
    peer_patterns: list[str] | None

    def times(self, part: str) -> int:
        """Returns how often a part runs."""
        return self.repeats or PARTS[part][1]


def bench_command(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PART]...",
            parser=parsed(one_of(*PARTS)),
            help="What to measure; default: all but estimate, hybrids and peers.",
        ),
    ] = None,
    tokens: Annotated[int, tokens_option("--tokens", "Tokens of speed and memory.")] = "32k",  # type: ignore[assignment]
    pattern: Annotated[
        list[str] | None,
        pattern_option(
            "A pattern; may be given several times. step-memory takes the first one, and exact without any; peers has "
            "windows, a pyramid and exact.",
            default=", ".join(_PATTERNS),
        ),
    ] = None,
    heads: Annotated[int, number_option("--heads", "Query heads.")] = 8,
    kv_heads: Annotated[int | None, number_option("--kv-heads", "Key/value heads; default: as --heads.")] = None,
    head_dim: Annotated[int, number_option("--head-dim", "Size of a head.")] = 64,
    dtype: AnyDtype = "float32",
    device_name: DeviceName = None,
    repeats: Annotated[
        int | None, number_option("--repeats", "Runs of each that count; default: 3 to 30, by the part.")
    ] = None,
    ranks: Annotated[
        int, number_option("--ranks", "Ranks of transport, ideal, overlap, step-memory, hybrids, peers.")
    ] = 2,
    lengths: Annotated[Any, list_option("--lengths", token_count(16, 16), "Tokens of transport.")] = "512,1k,2k,4k,8k",
    ring_tokens: Annotated[int, tokens_option("--ring-tokens", "Tokens of ideal, overlap and scaling.", 2)] = "16k",  # type: ignore[assignment]
    longnet_tokens: Annotated[int, tokens_option("--longnet-tokens", "Tokens of LongNet in ideal.")] = "32k",  # type: ignore[assignment]
    rank_tokens: Annotated[int, tokens_option("--rank-tokens", "Tokens of a rank in ring-memory.", 2, 2)] = "4k",  # type: ignore[assignment]
    memory_ranks: Annotated[
        Any, list_option("--memory-ranks", at_least(1, most=MOST), "Ranks of ring-memory.")
    ] = "1,2,4,8",
    model_tokens: Annotated[int, tokens_option("--model-tokens", "Tokens of model.", 2)] = "4k",  # type: ignore[assignment]
    decode_tokens: Annotated[int, tokens_option("--decode-tokens", "Tokens in the cache of decode.")] = "8k",  # type: ignore[assignment]
    model: Annotated[
        str | None, model_option("The model of decode; default: SmolLM2-135M's size, random weights.")
    ] = None,
    step_lengths: Annotated[
        Any, list_option("--step-lengths", token_count(16), "Tokens of step-memory.")
    ] = "4k,8k,16k",
    memory: Annotated[
        int | None,
        memory_option(
            "--memory", "What a rank of step-memory has, such as 80GB; default: its GPU, or its share of main memory."
        ),
    ] = None,
    scaling_ranks: Annotated[
        Any, list_option("--scaling-ranks", at_least(1, most=MOST), "Ranks of scaling.")
    ] = "1,2,4",
    hybrid_tokens: Annotated[int, tokens_option("--hybrid-tokens", "Tokens of hybrids.", 64)] = "8k",  # type: ignore[assignment]
    peer_tokens: Annotated[int, tokens_option("--peer-tokens", "Tokens of peers.")] = "16k",  # type: ignore[assignment]
    simulated_ranks: Annotated[int, number_option("--simulated-ranks", "Simulated ranks of peers; 1 for none.")] = 8,
    tables: Annotated[
        Path | None,
        folder_option("--tables", "Write each table to a CSV and a Markdown file in this folder."),
    ] = None,
    plots: Annotated[
        Path | None,
        folder_option("--plots", "Draw step-memory, scaling and peers to PNG files in this folder.", picture_folder),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure time, memory and overlap on this machine.

    Runs that are compared alternate, and medians are shown.
    """
    chosen = [part for part in PARTS if (part in parts if parts else part not in ONLY_NAMED)]
    check_division(chosen, heads, ranks, ring_tokens, scaling_ranks)
    check_step(chosen, head_dim, ranks, step_lengths)
    groups = checked("--kv-heads", key_value_heads, heads, kv_heads)
    if model is not None:
        check_model_folder(model)
    if plots is not None and not {*_WITH_PICTURES} & {*chosen}:
        raise refuse(f"{', '.join(chosen)}: no picture; {', '.join(_WITH_PICTURES)} have one", "--plots")
    console = terminal(stderr=as_json)
    with stdout_left_alone(as_json):
        from ..loading import device_or_best

        where = device_or_best(device_name)
        check_devices(chosen, where, ranks, memory_ranks, scaling_ranks)
        for folder, option in ((plots, "--plots"), (tables, "--tables")):
            if folder is not None:
                make_folder(folder, option)
        import torch

        from ..benchmarks.harness import CallShape, machine_name

        options = BenchOptions(
            shape=CallShape(heads=heads, kv_heads=groups, head_dim=head_dim, dtype=dtype, device=where),
            tokens=tokens,
            patterns=pattern or _PATTERNS,
            step_pattern=pattern[0] if pattern else "exact",
            repeats=repeats,
            ranks=ranks,
            lengths=lengths,
            ring_tokens=ring_tokens,
            longnet_tokens=longnet_tokens,
            rank_tokens=rank_tokens,
            memory_ranks=memory_ranks,
            model_tokens=model_tokens,
            decode_tokens=decode_tokens,
            model=model,
            step_lengths=step_lengths,
            memory=memory,
            scaling_ranks=scaling_ranks,
            hybrid_tokens=hybrid_tokens,
            peer_tokens=peer_tokens,
            simulated_ranks=simulated_ranks,
            peer_patterns=pattern,
        )
        figures: dict[str, Any] = {
            "machine": machine_name(where),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "heads": heads,
            "kv_heads": groups,
            "head_dim": head_dim,
            "dtype": dtype,
        }
        console.print(f"{figures['machine']}, {figures['threads']} threads, torch {figures['torch']}\n")
        for part in chosen:
            figures[part], sheet = MEASUREMENTS[part](options)
            print_sheet(sheet, console)
            if tables is not None:
                for file in write_tables(sheet, tables / part.replace("-", "_")):
                    console.print(f"wrote {file}", soft_wrap=True, markup=False)
            if plots is not None and part in _WITH_PICTURES:
                from ..bench_plots import draw_part

                console.print(f"wrote {draw_part(part, figures[part], plots)}\n", soft_wrap=True, markup=False)
    if as_json:
        print_json(figures)


def _speed(options: BenchOptions) -> tuple[Any, Sheet]:
    from ..benchmarks.speed import measure_speed, speed_report

    rows = measure_speed(options.shape, options.tokens, options.patterns, options.times("speed"))
    return rows, speed_report(rows, options.shape, options.tokens)


def _memory(options: BenchOptions) -> tuple[Any, Sheet]:
    from ..benchmarks.peak import measure_peaks, peak_report

    patterns = [*options.patterns, *(["exact"] if "exact" not in options.patterns else [])]
    rows = measure_peaks(options.shape, options.tokens, patterns)
    return rows, peak_report(rows, options.tokens)


def _model(options: BenchOptions) -> tuple[Any, Sheet]:
    from ..benchmarks.whole_model import measure_model, model_report

    figures = measure_model(options.shape, options.model_tokens, options.times("model"))
    return figures, model_report(figures, options.times("model"))


def _decode(options: BenchOptions) -> tuple[Any, Sheet]:
    from ..benchmarks.decode import decoding_model, decoding_report, measure_decoding

    try:
        model = decoding_model(options.model, options.shape)
    except (OSError, ValueError) as error:
        raise refuse(f"{options.model!r} cannot be loaded: {error}", "--model") from None
    patterns = [*options.patterns, *(["exact"] if "exact" not in options.patterns else [])]
    repeats = options.times("decode")
    rows = measure_decoding(options.shape, model, options.decode_tokens, patterns, repeats)
    return rows, decoding_report(rows, options.model, options.decode_tokens, repeats)


def _transport(options: BenchOptions) -> tuple[Any, Sheet]:
    from ..benchmarks.choice import compare_transports, transport_report
    from ..benchmarks.harness import launch

    rows = launch(compare_transports, options.ranks, options.shape, options.lengths, options.times("transport"))
    return rows, transport_report(rows, options.ranks)


def _ideal(options: BenchOptions) -> tuple[Any, Sheet]:
    from ..benchmarks.harness import launch
    from ..benchmarks.ideal import compare_with_ideal, ideal_report

    tokens = options.ring_tokens, options.longnet_tokens
    rows = launch(compare_with_ideal, options.ranks, options.shape, *tokens, options.times("ideal"))
    return rows, ideal_report(rows, options.ranks)


def _ring_memory(options: BenchOptions) -> tuple[Any, Sheet]:
    from ..benchmarks.ring_memory import measure_memory, memory_report

    peaks = measure_memory(options.shape, options.rank_tokens, options.memory_ranks)
    return peaks, memory_report(peaks, options.rank_tokens)


def _overlap(options: BenchOptions) -> tuple[Any, Sheet]:
    from ..benchmarks.harness import launch
    from ..benchmarks.overlap import measure_overlap, overlap_report

    shares, repeats = (0.4, 0.8), options.times("overlap")
    rows = launch(measure_overlap, options.ranks, options.shape, options.ring_tokens, shares, repeats)
    return rows, overlap_report(rows, options.ranks)


def _step_memory(options: BenchOptions) -> tuple[Any, Sheet]:
    from ..benchmarks.step_memory import measure_step_memory, step_memory_report

    figures = measure_step_memory(
        options.shape, options.step_lengths, options.ranks, options.step_pattern, options.memory
    )
    return figures, step_memory_report(figures, options.shape)


def _estimate(options: BenchOptions) -> tuple[Any, Sheet]:
    from ..benchmarks.estimate_runs import estimates_report, measure_estimates

    rows = measure_estimates(options.shape)
    return rows, estimates_report(rows, options.shape)


def _scaling(options: BenchOptions) -> tuple[Any, Sheet]:
    from ..benchmarks.scaling import measure_scaling, scaling_report

    patterns = list(dict.fromkeys(["exact", *options.patterns]))
    repeats = options.times("scaling")
    figures = measure_scaling(options.shape, options.ring_tokens, patterns, options.scaling_ranks, repeats)
    return figures, scaling_report(figures, repeats)


def _hybrids(options: BenchOptions) -> tuple[Any, Sheet]:
    from ..benchmarks.hybrid_steps import hybrids_report, measure_hybrids

    repeats = options.times("hybrids")
    rows = measure_hybrids(options.shape, options.hybrid_tokens, repeats, options.ranks)
    return rows, hybrids_report(rows, repeats)


def _peers(options: BenchOptions) -> tuple[Any, Sheet]:
    from ..benchmarks.parallel_steps import measure_steps
    from ..benchmarks.peer_table import peers_report
    from ..benchmarks.peers import PEER_PATTERNS, measure_peers
    from ..benchmarks.ranked_peers import measure_over_ranks, simulated_rows

    patterns, repeats = list(dict.fromkeys(options.peer_patterns or PEER_PATTERNS)), options.times("peers")
    size: tuple[Any, int] = (options.shape, options.peer_tokens)
    rows = measure_peers(*size, patterns, repeats)
    if options.ranks > 1:
        rows += measure_over_ranks(*size, patterns, repeats, options.ranks)
        rows += measure_steps(*size, repeats, options.ranks)
    if options.simulated_ranks > 1:
        rows += simulated_rows(*size, patterns, options.simulated_ranks)
    return rows, peers_report(rows, *size, repeats)


#: The function of each part, which returns figures for JSON and the table that shows them.
MEASUREMENTS: dict[str, Callable[[BenchOptions], tuple[Any, Sheet]]] = {
    "speed": _speed,
    "memory": _memory,
    "model": _model,
    "decode": _decode,
    "transport": _transport,
    "ideal": _ideal,
    "ring-memory": _ring_memory,
    "overlap": _overlap,
    "step-memory": _step_memory,
    "estimate": _estimate,
    "scaling": _scaling,
    "hybrids": _hybrids,
    "peers": _peers,
}
