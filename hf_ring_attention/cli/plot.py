"""`hf-ring-attention plot`: who attends to whom, who holds what, and what a ring does when; a picture, or text."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..cost.timeline import ring_timeline
from ..plan.choices import decide_layout
from ..plan.patterns import Pattern
from ..plan.plans import plan_rank
from ..plan.problem import Problem
from .explain import attention_of, attention_of_config
from .options import (
    Parser,
    Refusal,
    add_choice,
    add_heads,
    add_json,
    add_layout,
    add_model_of_config,
    add_row,
    at_least,
    checked,
    documents_of_lengths,
    existing_file,
    key_value_heads,
    pattern_text,
    picture_file,
    positive,
    token_count,
)
from .output import layer_numbers, print_json, short_count, spinner, terminal

EXAMPLES_OF_PLOT = """\
Examples:
  hf-ring-attention plot pattern pyramid:512,3 window:512+4 --tokens 8k
  hf-ring-attention plot pattern pyramid:512,3 --tokens 128k --output a.png
  hf-ring-attention plot pattern --model ./folder --tokens 32k --output b.png
  hf-ring-attention plot layout --tokens 128k --ranks 8
  hf-ring-attention plot ring --tokens 128k --ranks 8 --model ./folder \\
      --tflops 400 --gbps 400 --output ring.png
  hf-ring-attention plot calibration calibration.json --output layers.png
"""


def _add_output(parser: Parser) -> None:
    text = "The file of a picture; without it, text is printed."
    parser.add_argument("--output", metavar="FILE.png", type=picture_file, help=text)
    add_json(parser)


def _show(args: Namespace, figures: Any, lines: Sequence[str], draw: Callable[[Path], None]) -> None:
    """Draws a picture if a file is named, and prints figures as JSON, or lines if there is no picture."""
    from rich.text import Text

    if args.output is not None:
        with spinner("drawing"):
            draw(args.output)
    if args.json:
        print_json(figures)
    elif args.output is not None:
        print(f"wrote {args.output}")
    else:
        for line in lines:
            text = Text(line)
            text.highlight_regex("┃", "bold cyan")  # sinks
            terminal().print(text, soft_wrap=True)


def add_plot_pattern(parser: Parser) -> None:
    """Adds the options of `plot pattern`."""
    add, text = parser.add_argument, "Patterns such as exact, window:512+4, pyramid:512,3."
    add("patterns", metavar="PATTERN", nargs="*", type=pattern_text, help=text)
    add_model_of_config(parser, "Show the patterns of this model's layers, and its heads.")
    add("--tokens", metavar="N", type=token_count(), default="4k", help="Tokens of the document (default 4k).")
    add("--heads", metavar="N", type=at_least(1), help="Query heads, without --model (default 8).")
    add("--kv-heads", metavar="N", type=at_least(1), help="Key/value heads, without --model; default: as --heads.")
    add("--head", metavar="N", type=at_least(0), help="What this head sees (default: what any of them sees).")
    _add_output(parser)


def plot_pattern_command(args: Namespace) -> None:
    """Show who attends to whom under patterns, in a causal document of any length."""
    patterns, heads = {text: Pattern.parse(text) for text in args.patterns}, args.heads or 8
    if args.model is not None:
        attention = attention_of_config(args, None)
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        layers: dict[Pattern, list[int]] = {}
        for number, pattern in zip(attention.numbers, attention.layers):
            layers.setdefault(pattern, []).append(number)
        patterns |= {f"{pattern}, layers {layer_numbers(numbers)}": pattern for pattern, numbers in layers.items()}
    else:
        kv_heads = checked("--kv-heads", key_value_heads, heads, args.kv_heads)
    if not patterns:
        raise Refusal("a pattern such as window:512+4, or --model, was expected", "PATTERN")
    if args.head is not None and args.head >= heads:
        raise Refusal(f"heads are numbered 0 to {heads - 1}, got {args.head}", "--head")
    from .text_plots import COLUMNS, PATTERN_LEGEND, pattern_lines, shares_seen
    from .visible import visible_pairs

    shape: dict[str, Any] = {"head": args.head, "num_heads": heads, "num_kv_heads": kv_heads}
    visible = {name: visible_pairs(pattern, args.tokens, COLUMNS, **shape) for name, pattern in patterns.items()}
    shares = {name: shares_seen(patterns[name], pairs, **shape) for name, pairs in visible.items()}
    lines = []
    for name, pairs in visible.items():
        lines += [f"{name}, {short_count(args.tokens)} tokens: {shares[name]}", *pattern_lines(pairs), ""]
    figures = [
        {
            "pattern": name,
            "tokens": args.tokens,
            "head": args.head,
            "heads": heads,
            "kv_heads": kv_heads,
            "share_of_causal_pairs": pairs.share_of_causal,
            "sinks": pairs.sinks,
            "edges": pairs.edges.tolist(),
            "share_of_squares": pairs.share.round(6).tolist(),
        }
        for name, pairs in visible.items()
    ]

    def draw(path: Path) -> None:
        from .plots import plot_patterns

        plot_patterns(patterns, args.tokens, path, **shape)

    _show(args, figures, [*lines, PATTERN_LEGEND], draw)


def add_plot_layout(parser: Parser) -> None:
    """Adds the options of `plot layout`."""
    add_row(parser)
    text = "A pattern, such as window:512+4 (default exact)."
    parser.add_argument("--pattern", metavar="TEXT", type=pattern_text, default="exact", help=text)
    add_layout(parser)
    _add_output(parser)


def plot_layout_command(args: Namespace) -> None:
    """Show which tokens of a row each rank holds, and the work that a pattern gives it."""
    from .text_plots import layout_lines

    with spinner("planning"):
        pattern, rows = Pattern.parse(args.pattern), documents_of_lengths(args.documents, args.tokens)
        layout, decision = decide_layout(args.layout, args.tokens, args.ranks, pattern, rows)
        heads = pattern.num_kv_heads or 1
        problem = Problem(pattern, layout, rows or (((0, args.tokens),),), num_heads=heads, num_kv_heads=heads)
        pairs = [plan_rank(problem, rank).pairs for rank in range(args.ranks)]
    work = [count * args.ranks / (sum(pairs) or 1) for count in pairs]
    pieces = [[[piece.start, piece.stop] for piece in layout.pieces(rank)] for rank in range(args.ranks)]
    figures = {
        "tokens": args.tokens,
        "layout": layout.kind,
        "reason": decision.reason,
        "padded_tokens": layout.padded_len,
        "ranks": [{"pieces": of_rank, "work": share} for of_rank, share in zip(pieces, work)],
    }

    def draw(path: Path) -> None:
        from .plots import plot_layout

        plot_layout(layout, work, pattern, path)

    _show(args, figures, [f"{layout.kind}: {decision.reason}", *layout_lines(layout, work)], draw)


def add_plot_ring(parser: Parser) -> None:
    """Adds the options of `plot ring`."""
    add_row(parser)
    add = parser.add_argument
    add("--tflops", metavar="X", type=positive, required=True, help="10^12 operations a second of a device.")
    add("--gbps", metavar="X", type=positive, required=True, help="Gigabits a second from a rank to the next one.")
    add("--pattern", metavar="TEXT", type=pattern_text, help="Default: the model's, else exact.")
    add_model_of_config(parser, "Take heads from its config.json.")
    add_heads(parser)
    add_choice(parser, "--dtype", ("float32", "bfloat16", "float16"), "Type of numbers", "bfloat16")
    add_layout(parser)
    _add_output(parser)


def plot_ring_command(args: Namespace) -> None:
    """Show when each rank computes, sends and waits in one layer's forward pass.

    This is arithmetic from the plan and the two speeds that you state, no measurement.
    """
    from .text_plots import RING_LEGEND, ring_lines, timeline_summary

    if args.ranks < 2:
        raise Refusal(f"a ring needs 2 ranks or more, got {args.ranks}", "--ranks")
    attention = attention_of(args)
    pattern, widths = attention.base, attention.head_dim + attention.value_dim
    with spinner("planning"):
        rows = documents_of_lengths(args.documents, args.tokens)
        layout, _ = decide_layout(args.layout, args.tokens, args.ranks, pattern, rows)
        heads: dict[str, Any] = {"num_heads": attention.num_heads, "num_kv_heads": attention.num_kv_heads}
        timeline = ring_timeline(
            Problem(pattern, layout, rows or (((0, args.tokens),),), **heads),
            pair_flops=2 * widths,
            row_bytes=widths * (4 if args.dtype == "float32" else 2),
            flops=args.tflops * 1e12,
            bandwidth=args.gbps * 1e9 / 8,
        )
    title = (
        f"{pattern} over {short_count(args.tokens)} tokens, {args.ranks} ranks, {layout.kind}, {args.tflops:g} TFLOP/s, "
        f"{args.gbps:g} Gbit/s: one layer forward"
    )
    figures = {
        "title": title,
        "seconds": timeline.seconds,
        "share_computing": timeline.share("compute"),
        "share_waiting": timeline.share("wait"),
        "spans": [asdict(span) for span in timeline.spans],
    }

    def draw(path: Path) -> None:
        from .plots import plot_ring

        plot_ring(timeline, title, path)

    _show(args, figures, [title, timeline_summary(timeline), "", *ring_lines(timeline), "", RING_LEGEND], draw)


def add_plot_calibration(parser: Parser) -> None:
    """Adds the options of `plot calibration`."""
    parser.add_argument("file", metavar="FILE", type=existing_file, help="A calibration.json.")
    text = "The file of the picture."
    parser.add_argument("--output", metavar="FILE.png", type=picture_file, required=True, help=text)


def plot_calibration_command(args: Namespace) -> None:
    """Draw the pattern of each layer and key/value head that a calibration chose."""
    from ..evaluation.calibration.result import Calibration  # It imports torch.
    from .plots import plot_calibration

    plot_calibration(checked("FILE", Calibration.load, args.file), args.output)
    print(f"wrote {args.output}")
