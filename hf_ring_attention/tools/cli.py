"""The command line, `hf-ring-attention`: what a call would do, and measurements of the ring on this machine."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import Any

import torch

from .._version import __version__
from ..plan.notation import FORMS
from ..plan.patterns import Pattern
from ..ring.explain import explain
from .arguments import at_least, check_heads, device, new_file, pattern_text
from .benchmarks import choice, ideal, memory, overlap
from .benchmarks.harness import CallShape, launch

DTYPES = ("float32", "bfloat16", "float16", "float64")


def _explain(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    kv_heads = check_heads(parser, args.heads, args.kv_heads)
    print(
        explain(
            Pattern.parse(args.pattern),
            seq_len=args.tokens,
            world_size=args.world_size,
            num_heads=args.heads,
            num_kv_heads=kv_heads,
            head_dim=args.head_dim,
            dtype=getattr(torch, args.dtype),
            batch_size=args.batch_size,
            causal=not args.bidirectional,
            layout=args.layout,
            transport=args.transport,
        )
    )


PARTS = ("transport", "speed", "memory", "overlap")


def _check_bench(parser: argparse.ArgumentParser, args: argparse.Namespace, parts: list[str]) -> None:
    """Refuses what the chosen parts could not divide among the ranks."""
    ranks = max(args.ranks if parts != ["memory"] else 1, *(args.memory_ranks if "memory" in parts else [1]))
    if args.device == "cuda" and torch.cuda.device_count() < ranks:
        option = "--ranks" if ranks == args.ranks else "--memory-ranks"
        parser.error(
            f"argument {option}: {ranks} ranks need {ranks} GPUs, there are {torch.cuda.device_count()}: take fewer, or "
            f"--device cpu"
        )
    if "speed" in parts and args.heads % args.ranks:
        parser.error(
            f"argument --heads: the ideal of --speed gives each rank its share of the heads, and {args.heads} heads = "
            f"{args.heads // args.ranks} * {args.ranks} ranks + {args.heads % args.ranks}: take a multiple of {args.ranks}"
        )
    if {"speed", "overlap"} & {*parts} and args.exact_tokens % (2 * args.ranks):
        pieces = 2 * args.ranks
        parser.error(
            f"argument --exact-tokens: zigzag cuts the row into 2 * {args.ranks} = {pieces} equal pieces, and "
            f"{args.exact_tokens} = {args.exact_tokens // pieces} * {pieces} + {args.exact_tokens % pieces}: take "
            f"{args.exact_tokens + -args.exact_tokens % pieces}"
        )


def _bench(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    chosen = [name for name in PARTS if getattr(args, name)] or [*PARTS]
    shape = CallShape(
        args.heads, check_heads(parser, args.heads, args.kv_heads), args.head_dim, args.dtype, args.device
    )
    _check_bench(parser, args, chosen)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU"
    print(
        f"{machine}, {args.ranks} ranks, torch {torch.__version__}, {shape.heads}/{shape.kv_heads} heads x "
        f"{shape.head_dim}, {shape.dtype}"
    )
    figures: dict[str, Any] = {}
    for name in chosen:
        print(f"\n{name}")
        if name == "transport":
            rows = launch(choice.compare_transports, args.ranks, shape, args.lengths, args.repeats)
            report = choice.transport_report(rows, args.ranks)
        elif name == "speed":
            tokens = (args.exact_tokens, args.longnet_tokens)
            rows = launch(ideal.compare_with_ideal, args.ranks, shape, *tokens, args.repeats)
            report = ideal.ideal_report(rows)
        elif name == "overlap":
            rows = launch(overlap.measure_overlap, args.ranks, shape, args.exact_tokens, (0.4, 0.8), args.repeats)
            report = overlap.overlap_report(rows)
        else:
            rows = memory.measure_memory(shape, args.tokens_per_rank, args.memory_ranks)
            report = memory.memory_report(rows, args.tokens_per_rank)
        print(report, flush=True)
        figures[name] = rows
    if args.json:
        args.json.write_text(json.dumps(figures))


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; `arguments` are those of the process by default."""
    parser = argparse.ArgumentParser(prog="hf-ring-attention", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    _add_explain(commands.add_parser("explain", help="choices, bytes, FLOPs and balance of a call, before it runs"))
    _add_bench(commands.add_parser("bench", help="time, memory and overlap of the ring on this machine"))
    args = parser.parse_args(arguments)
    try:
        args.run(args.parser, args)
    except ValueError as error:
        sys.exit(f"hf-ring-attention: {error}")


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_explain, parser=parser)
    parser.add_argument("--pattern", type=pattern_text, default="exact", help=FORMS)
    parser.add_argument("--tokens", type=at_least(1), required=True, help="of the whole row")
    parser.add_argument("--world-size", type=at_least(1), required=True, help="ranks of the ring")
    parser.add_argument("--heads", type=at_least(1), required=True)
    parser.add_argument("--kv-heads", type=at_least(1), help="as many as heads, if not given")
    parser.add_argument("--head-dim", type=at_least(1), default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--batch-size", type=at_least(1), default=1)
    parser.add_argument("--bidirectional", action="store_true", help="not causal")
    parser.add_argument("--layout", choices=("auto", "contiguous", "zigzag"), default="auto")
    parser.add_argument("--transport", choices=("auto", "ring", "collective", "local"), default="auto")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_bench, parser=parser)
    for name, what in (
        ("transport", "ring against collective, and what auto chooses"),
        ("speed", "the ring against the ideal"),
        ("memory", "peak memory as the ring grows"),
        ("overlap", "how much of a delay of the messages shows"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=f"{what}; all four, if none is named")
    parser.add_argument("--ranks", type=at_least(2), default=2, help="of all but --memory")
    parser.add_argument("--heads", type=at_least(1), default=8)
    parser.add_argument("--kv-heads", type=at_least(1), help="as many as heads, if not given")
    parser.add_argument("--head-dim", type=at_least(1), default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--device", type=device, metavar="{cpu,cuda}", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--repeats", type=at_least(1), default=7, help="of each, alternating, after a first that does not count"
    )
    parser.add_argument(
        "--lengths",
        type=at_least(16, multiple_of=16),
        nargs="+",
        default=[512, 1024, 2048, 4096, 8192],
        help="tokens of --transport, multiples of 16",
    )
    parser.add_argument(
        "--exact-tokens", type=at_least(2), default=16384, help="of --speed and --overlap, a multiple of 2 * ranks"
    )
    parser.add_argument("--longnet-tokens", type=at_least(1), default=32768, help="of --speed")
    parser.add_argument(
        "--tokens-per-rank", type=at_least(2, multiple_of=2), default=4096, help="of --memory, an even number"
    )
    parser.add_argument("--memory-ranks", type=at_least(1), nargs="+", default=[1, 2, 4, 8], help="of --memory")
    parser.add_argument("--json", type=new_file, help="file for the figures")
