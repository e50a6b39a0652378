"""`hf-ring-attention plot`: who attends to whom, who holds what, and what a ring does when; a picture, or text."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from ..cost.explain import explain, number_bytes
from ..cost.timeline import ring_timeline
from ..plan.choices import decide_layout
from ..plan.patterns import Pattern
from ..plan.problem import Problem
from .explain import attention_of, attention_of_config, documents_of_lengths, key_value_heads
from .options import Parser, Refusal, at_least, checked, token_count
from .output import layer_numbers, short_count, terminal
from .pictures import layout_lines, lines_of_patterns, timeline_summary


def _print_lines(lines: Iterable[str]) -> None:
    from rich.text import Text

    text = Text("\n".join(lines))
    text.highlight_regex("┃", "bold cyan")  # sinks
    terminal().print(text, soft_wrap=True)


def add_plot_pattern(parser: Parser) -> None:
    add, text = parser.add_argument, "Patterns such as exact or window:512+4."
    add("words", metavar="PATTERN", nargs="*", help="Short for --pattern PATTERN.")
    parser.add_pattern(text, several=True)
    parser.add_model("Show the patterns of this model's layers and heads.")
    add("--tokens", metavar="N", type=token_count(), default="4k", help="Tokens in the document (default 4k).")
    add("--heads", metavar="N", type=at_least(1), help="Query heads, without --model (default 8).")
    add("--kv-heads", metavar="N", type=at_least(1), help="Key/value heads, without --model (default: --heads).")
    add("--head", metavar="N", type=at_least(0), help="Show what this head sees (default: what any head sees).")
    parser.add_picture("--plot", "Save a picture to this file; without it, print text.")


def plot_pattern_command(args: Namespace) -> None:
    """Show who attends to whom under patterns, in a causal document of any length.

    Examples:
      hf-ring-attention plot pattern --pattern pyramid:512,3 --tokens 8k
      hf-ring-attention plot pattern --pattern window:512+4 --plot a.png
      hf-ring-attention plot pattern --model ./folder --tokens 32k --plot b.png
    """
    patterns = {text: checked("--pattern", Pattern.parse, text) for text in [*(args.pattern or ()), *args.words]}
    attention = None if args.model is None else attention_of_config(args, None)
    heads = attention.num_heads if attention else args.heads or 8
    kv_heads = attention.num_kv_heads if attention else key_value_heads(heads, args.kv_heads)
    if args.head is not None and args.head >= heads:
        raise Refusal(f"heads are numbered 0 to {heads - 1}, got {args.head}", "--head")
    kv_shown = range(kv_heads) if args.head is None else [args.head * kv_heads // heads]
    layers: dict[Pattern, list[int]] = {}
    for number, pattern in zip(attention.numbers, attention.layers) if attention else ():
        for of_head in dict.fromkeys(map(pattern.of_kv_head, kv_shown)):
            layers.setdefault(of_head, []).append(number)
    patterns |= {f"{pattern}, layers {layer_numbers(numbers)}": pattern for pattern, numbers in layers.items()}
    if not patterns:
        raise Refusal("a pattern such as window:512+4, or --model, was expected", "--pattern")
    for pattern in patterns.values():
        checked("--pattern", pattern.check_heads, kv_heads, "the picture")
    shape: dict[str, Any] = {"head": args.head, "num_heads": heads, "num_kv_heads": kv_heads}
    if args.plot is None:
        _print_lines(lines_of_patterns(patterns, args.tokens, **shape))
        return
    from .plots import plot_patterns  # It imports matplotlib.

    plot_patterns(patterns, args.tokens, args.plot, **shape)
    print(f"wrote {args.plot}")


def add_plot_layout(parser: Parser) -> None:
    parser.add_row()
    parser.add_pattern("A pattern, such as window:512+4 (default exact).", default="exact")


def plot_layout_command(args: Namespace) -> None:
    """Show which tokens of a row each rank holds, and the work that a pattern gives it.

    Examples:
      hf-ring-attention plot layout --tokens 128k --ranks 8
    """
    row: dict[str, Any] = {"seq_len": args.tokens, "ring_size": args.ranks, "layout": args.layout}
    row |= {"documents": documents_of_lengths(args.documents, args.tokens), "transport": "ring"}
    heads = Pattern.parse(args.pattern).num_kv_heads or 1
    call = checked(None, explain, args.pattern, num_heads=heads, head_dim=1, **row)
    _print_lines([f"{call.layout.kind}: {call.layout_decision.reason}", *layout_lines(call)])


def add_plot_ring(parser: Parser) -> None:
    parser.add_row()
    parser.add_speeds()
    parser.add_pattern("A pattern (default: the model's, else exact).")
    parser.add_model("Take heads from this model's config.json.")
    parser.add_heads()
    parser.add_choice("--dtype", ("float32", "bfloat16", "float16"), "Data type", "bfloat16")
    parser.add_picture("--plot", "Save a picture to this file.")


def plot_ring_command(args: Namespace) -> None:
    """Show when each rank computes, sends and waits in one layer's forward pass.

    It computes this from the plan and the speeds that you give; it measures nothing.

    Examples:
      hf-ring-attention plot ring --tokens 128k --ranks 4 --heads 4 --kv-heads 1 \\
          --head-dim 128 --tflops 400 --gbps 400 10 --plot ring.png
    """
    if args.ranks < 2:
        raise Refusal(f"a ring needs 2 ranks or more, got {args.ranks}", "--ranks")
    attention, rows = attention_of(args), documents_of_lengths(args.documents, args.tokens)
    layout, _ = decide_layout(args.layout, args.tokens, args.ranks, attention.base, rows)
    heads: dict[str, Any] = {"num_heads": attention.num_heads, "num_kv_heads": attention.num_kv_heads}
    problem = Problem(attention.base, layout, rows or (((0, args.tokens),),), **heads)
    widths = attention.head_dim + attention.value_dim
    rates = {"pair_flops": 2 * widths, "row_bytes": widths * number_bytes(args.dtype)[0], "flops": args.tflops * 1e12}
    bandwidths = {f"{gbps:g} Gbit/s": gbps * 1e9 / 8 for gbps in args.gbps}
    timelines = {name: ring_timeline(problem, **rates, bandwidth=speed) for name, speed in bandwidths.items()}
    speeds = f"{args.tflops:g} TFLOP/s, {' and '.join(f'{gbps:g}' for gbps in args.gbps)} Gbit/s: one layer forward"
    title = f"{attention.base} over {short_count(args.tokens)} tokens, {args.ranks} ranks, {layout.kind}, {speeds}"
    _print_lines([title, *(f"{timeline_summary(timeline)}, at {name}" for name, timeline in timelines.items())])
    if args.plot is not None:
        from .plots import plot_ring  # It imports matplotlib.

        plot_ring(timelines, title, args.plot)
        print(f"wrote {args.plot}")
