"""The command line, `hf-ring-attention`: what a call would do, and measurements of the ring on this machine."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import Any

import torch

from . import bench
from ._version import __version__
from .explain import explain
from .patterns import Pattern, Sink, Window

PATTERN_HELP = (
    "exact; window:LENGTH[+SINKS]; pyramid:WINDOW,LEVELS[,RATIO[,SINKS]]; longnet:LENGTH/RATE,... with 'all' for the whole "
    "document. For example window:512+4, pyramid:512,3 or longnet:512/1,2048/4,all/8"
)
DTYPES = ("float32", "bfloat16", "float16", "float64")


def parse_pattern(text: str) -> Pattern:
    """The pattern that a command line names; see PATTERN_HELP. What cannot be read ends the program with the reason."""
    name, _, rest = text.partition(":")
    try:
        if name == "exact" and not rest:
            return Pattern.exact()
        if name == "window":
            length, _, sinks = rest.partition("+")
            return Pattern((*([Sink(int(sinks))] if sinks else []), Window(int(length))))
        if name == "pyramid":
            return Pattern.pyramid(*(int(number) for number in rest.split(",")))
        if name == "longnet":
            pairs = [pair.split("/") for pair in rest.split(",")]
            lengths = [None if length == "all" else int(length) for length, _ in pairs]
            return Pattern.longnet(lengths, [int(rate) for _, rate in pairs])
    except (TypeError, ValueError) as error:
        raise SystemExit(f"pattern {text!r} cannot be read: {error}\nA pattern is one of: {PATTERN_HELP}") from None
    raise SystemExit(f"pattern {text!r} is not known. A pattern is one of: {PATTERN_HELP}")


def _explain(args: argparse.Namespace) -> None:
    print(
        explain(
            parse_pattern(args.pattern),
            seq_len=args.tokens,
            world_size=args.world_size,
            num_heads=args.heads,
            num_kv_heads=args.kv_heads,
            head_dim=args.head_dim,
            dtype=getattr(torch, args.dtype),
            batch_size=args.batch_size,
            causal=not args.bidirectional,
            layout=args.layout,
            transport=args.transport,
        )
    )


def _bench(args: argparse.Namespace) -> None:
    shape = bench.Shape(args.heads, args.kv_heads or args.heads, args.head_dim, args.dtype, args.device)
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU"
    print(
        f"{device}, {args.ranks} ranks, torch {torch.__version__}, {shape.heads}/{shape.kv_heads} heads x "
        f"{shape.head_dim}, {shape.dtype}"
    )
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        raise SystemExit(
            f"{args.ranks} ranks need {args.ranks} GPUs, there are {torch.cuda.device_count()}: pass --ranks"
        )
    chosen = [name for name in ("transport", "speed", "memory", "overlap") if getattr(args, name)]
    figures: dict[str, Any] = {}
    for name in chosen or ["transport", "speed", "memory", "overlap"]:
        print(f"\n{name}")
        if name == "transport":
            rows = bench.launch(bench.compare_transports, args.ranks, shape, args.lengths, args.repeats)
            report = bench.transport_report(rows, args.ranks)
        elif name == "speed":
            tokens = (args.exact_tokens, args.longnet_tokens)
            rows = bench.launch(bench.compare_with_ideal, args.ranks, shape, *tokens, args.repeats)
            report = bench.ideal_report(rows)
        elif name == "overlap":
            rows = bench.launch(bench.measure_overlap, args.ranks, shape, args.exact_tokens, (0.4, 0.8), args.repeats)
            report = bench.overlap_report(rows)
        else:
            rows = bench.measure_memory(shape, args.tokens_per_rank, args.memory_ranks)
            report = bench.memory_report(rows, args.tokens_per_rank)
        print(report, flush=True)
        figures[name] = rows
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; `arguments` are those of the process by default."""
    parser = argparse.ArgumentParser(prog="hf-ring-attention", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    about = commands.add_parser("explain", help="choices, bytes, FLOPs and balance of a call, before it runs")
    about.set_defaults(run=_explain)
    about.add_argument("--pattern", default="exact", help=PATTERN_HELP)
    about.add_argument("--tokens", type=int, required=True, help="of the whole row")
    about.add_argument("--world-size", type=int, required=True, help="ranks of the ring")
    about.add_argument("--heads", type=int, required=True)
    about.add_argument("--kv-heads", type=int, help="as many as heads, if not given")
    about.add_argument("--head-dim", type=int, default=128)
    about.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    about.add_argument("--batch-size", type=int, default=1)
    about.add_argument("--bidirectional", action="store_true", help="not causal")
    about.add_argument("--layout", choices=("auto", "contiguous", "zigzag"), default="auto")
    about.add_argument("--transport", choices=("auto", "ring", "collective", "local"), default="auto")

    measure = commands.add_parser("bench", help="time, memory and overlap of the ring on this machine")
    measure.set_defaults(run=_bench)
    for name, what in (
        ("transport", "ring against collective, and what auto chooses"),
        ("speed", "the ring against the ideal"),
        ("memory", "peak memory as the ring grows"),
        ("overlap", "how much of a delay of the messages shows"),
    ):
        measure.add_argument(f"--{name}", action="store_true", help=f"{what}; all four, if none is named")
    measure.add_argument("--ranks", type=int, default=2)
    measure.add_argument("--heads", type=int, default=8)
    measure.add_argument("--kv-heads", type=int)
    measure.add_argument("--head-dim", type=int, default=64)
    measure.add_argument("--dtype", choices=DTYPES, default="float32")
    measure.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    measure.add_argument(
        "--repeats", type=int, default=7, help="of each, alternating, after a first that does not count"
    )
    measure.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    measure.add_argument("--exact-tokens", type=int, default=16384)
    measure.add_argument("--longnet-tokens", type=int, default=32768)
    measure.add_argument("--tokens-per-rank", type=int, default=4096)
    measure.add_argument("--memory-ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    measure.add_argument("--json", help="file for the figures")

    args = parser.parse_args(arguments)
    try:
        args.run(args)
    except ValueError as error:
        sys.exit(f"hf-ring-attention: {error}")
