"""`hf-ring-attention bench`: time, memory and overlap on this machine, one table a measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ..arguments import at_least, comma_list, device, key_value_heads, one_of, token_count
from ..options import DTYPES, AsJson, SomePatterns, checked, choice_option, number_option, parsed, refuse
from ..output import Sheet, print_json, print_sheet, stdout_left_alone, terminal

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
}
#: The measurements that need several ranks.
_OF_RINGS = {"transport", "ideal", "overlap"}

EXAMPLES_OF_BENCH = "\b\nParts:\n" + "".join(f"  {name:12} {text}\n" for name, (text, _) in PARTS.items())
EXAMPLES_OF_BENCH += """
\b
Examples:
  hf-ring-attention bench
  hf-ring-attention bench speed memory --tokens 128k --pattern pyramid:512,3
  hf-ring-attention bench transport ideal overlap --ranks 4 --json
"""


@dataclass(frozen=True)
class BenchOptions:
    """The options of the command line."""

    shape: Any
    tokens: int
    patterns: list[str]
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

    def times(self, part: str) -> int:
        """Returns how often a part runs."""
        return self.repeats or PARTS[part][1]


def bench_command(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PART]...", parser=parsed(one_of(*PARTS)), help="What to measure; default: everything."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", parser=parsed(token_count()), metavar="N", help="Tokens of speed and memory.")
    ] = "32k",  # type: ignore[assignment]
    pattern: SomePatterns = ["longnet:2048/1,8192/4,32768/16", "pyramid:512,3"],  # noqa: B006
    heads: Annotated[int, number_option("--heads", "Query heads.")] = 8,
    kv_heads: Annotated[int | None, number_option("--kv-heads", "Key/value heads; default: as --heads.")] = None,
    head_dim: Annotated[int, number_option("--head-dim", "Size of a head.")] = 64,
    dtype: Annotated[str, choice_option("--dtype", DTYPES, "Type of numbers")] = "float32",
    device_name: Annotated[
        str | None,
        typer.Option(
            "--device", parser=parsed(device), metavar="NAME", help="cpu or cuda; default: cuda if there is one."
        ),
    ] = None,
    repeats: Annotated[
        int | None, number_option("--repeats", "Runs of each that count; default: 3 to 30, by the part.")
    ] = None,
    ranks: Annotated[int, number_option("--ranks", "Ranks of transport, ideal and overlap.", 2)] = 2,
    lengths: Annotated[
        Any,
        typer.Option(
            "--lengths", parser=parsed(comma_list(token_count(16, 16))), metavar="N,N,...", help="Tokens of transport."
        ),
    ] = "512,1k,2k,4k,8k",
    ring_tokens: Annotated[
        int,
        typer.Option("--ring-tokens", parser=parsed(token_count(2)), metavar="N", help="Tokens of ideal and overlap."),
    ] = "16k",  # type: ignore[assignment]
    longnet_tokens: Annotated[
        int,
        typer.Option("--longnet-tokens", parser=parsed(token_count()), metavar="N", help="Tokens of LongNet in ideal."),
    ] = "32k",  # type: ignore[assignment]
    rank_tokens: Annotated[
        int,
        typer.Option(
            "--rank-tokens", parser=parsed(token_count(2, 2)), metavar="N", help="Tokens of a rank in ring-memory."
        ),
    ] = "4k",  # type: ignore[assignment]
    memory_ranks: Annotated[
        Any,
        typer.Option(
            "--memory-ranks", parser=parsed(comma_list(at_least(1))), metavar="N,N,...", help="Ranks of ring-memory."
        ),
    ] = "1,2,4,8",
    model_tokens: Annotated[
        int, typer.Option("--model-tokens", parser=parsed(token_count(2)), metavar="N", help="Tokens of model.")
    ] = "4k",  # type: ignore[assignment]
    decode_tokens: Annotated[
        int,
        typer.Option(
            "--decode-tokens", parser=parsed(token_count()), metavar="N", help="Tokens in the cache of decode."
        ),
    ] = "8k",  # type: ignore[assignment]
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="ID_OR_FOLDER", help="The model of decode; default: SmolLM2-135M's size, random weights."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure time, memory and overlap on this machine.

    Runs that are compared alternate, and medians are shown.
    """
    chosen = [part for part in PARTS if part in (parts or PARTS)]
    _check_division(chosen, heads, ranks, ring_tokens)
    groups = checked("--kv-heads", key_value_heads, heads, kv_heads)
    if model is not None:
        _check_model(model)
    console = terminal(stderr=as_json)
    with stdout_left_alone(as_json):
        where = device_name or _best_device()
        _check_devices(chosen, where, ranks, memory_ranks)
        import torch

        from ..benchmarks.harness import CallShape, machine_name

        options = BenchOptions(
            shape=CallShape(heads=heads, kv_heads=groups, head_dim=head_dim, dtype=dtype, device=where),
            tokens=tokens,
            patterns=pattern,
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
    if as_json:
        print_json(figures)


def _check_division(parts: list[str], heads: int, ranks: int, ring_tokens: int) -> None:
    """Refuses heads and tokens that the chosen parts cannot divide among the ranks."""
    if "ideal" in parts and heads % ranks:
        raise refuse(
            f"ideal gives each rank its share of the heads, and {heads} heads = {heads // ranks} * {ranks} ranks + "
            f"{heads % ranks}: take a multiple of {ranks}",
            "--heads",
        )
    pieces = 2 * ranks
    if {"ideal", "overlap"} & {*parts} and ring_tokens % pieces:
        raise refuse(
            f"zigzag cuts the row into 2 * {ranks} = {pieces} equal pieces, and {ring_tokens} = {ring_tokens // pieces} * "
            f"{pieces} + {ring_tokens % pieces}: take {ring_tokens + -ring_tokens % pieces}",
            "--ring-tokens",
        )


def _check_model(model: str) -> None:
    """Refuses a model without a config.json before anything is measured."""
    from ..model_config import read_config

    checked("--model", read_config, model)


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_devices(parts: list[str], where: str, ranks: int, memory_ranks: list[int]) -> None:
    if where != "cuda":
        return
    import torch

    count = torch.cuda.device_count()
    needed = [("--ranks", ranks if _OF_RINGS & {*parts} else 1)]
    needed.append(("--memory-ranks", max(memory_ranks) if "ring-memory" in parts else 1))
    for option, number in needed:
        if number > count:
            raise refuse(f"{number} ranks need {number} GPUs, there are {count}: take fewer, or --device cpu", option)


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
}
