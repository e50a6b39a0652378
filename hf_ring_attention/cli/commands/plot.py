"""`hf-ring-attention plot`: who attends to whom, who holds what, and what a ring does when; a picture, or text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ...cost.attention import ModelAttention
from ...cost.timeline import ring_timeline
from ...plan.choices import decide_layout
from ...plan.patterns import Pattern
from ...plan.plans import plan_rank
from ...plan.problem import Problem
from ..arguments import key_value_heads, pattern_text
from ..options import (
    AsJson,
    DocumentLengths,
    HeadDim,
    KeyValueHeads,
    LayoutName,
    ModelDtype,
    OnePattern,
    QueryHeads,
    RingRanks,
    RowTokens,
    checked,
    documents_of_lengths,
    model_option,
    number_option,
    parsed,
    pattern_option,
    picture_option,
    positive_option,
    refuse,
    tokens_option,
)
from ..output import layer_numbers, print_json, short_count, spinner, terminal
from .explain import asked_attention

Output = Annotated[
    Path | None,
    picture_option("--output", "The file of a picture; without it, text is printed."),
]

EXAMPLES_OF_PLOT = """\b
Examples:
  hf-ring-attention plot pattern pyramid:512,3 window:512+4 --tokens 8k
  hf-ring-attention plot pattern pyramid:512,3 --tokens 128k --output a.png
  hf-ring-attention plot pattern --model ./folder --tokens 32k --output b.png
  hf-ring-attention plot layout --tokens 128k --ranks 8
  hf-ring-attention plot ring --tokens 128k --ranks 8 --model ./folder \\
      --tflops 400 --gbps 400 --output ring.png
"""

plot_commands = typer.Typer(
    help="Pictures of patterns, layouts and rings.", rich_markup_mode=None, epilog=EXAMPLES_OF_PLOT
)


@plot_commands.command("pattern", epilog=EXAMPLES_OF_PLOT)
def plot_pattern_command(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATTERN]...",
            parser=parsed(pattern_text),
            help="Patterns such as exact, window:512+4, pyramid:512,3.",
        ),
    ] = None,
    model: Annotated[str | None, model_option("Show the patterns of this model's layers, and its heads.")] = None,
    tokens: Annotated[int, tokens_option("--tokens", "Tokens of the document.")] = "4k",  # type: ignore[assignment]
    heads: Annotated[int | None, number_option("--heads", "Query heads, without --model; default: 8.")] = None,
    kv_heads: KeyValueHeads = None,
    head: Annotated[
        int | None, number_option("--head", "What this head sees; default: what any of them sees.", 0)
    ] = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Show who attends to whom under patterns, in a causal document of any length."""
    parsed_patterns = {text: Pattern.parse(text) for text in patterns or ()}
    if model is not None:
        attention = asked_attention(model, None, heads, kv_heads, None, layers=1, ranks=1)
        heads, groups = attention.num_heads, attention.num_kv_heads
        parsed_patterns |= _patterns_of_layers(attention)
    else:
        heads = heads or 8
        groups = checked("--kv-heads", key_value_heads, heads, kv_heads)
    if not parsed_patterns:
        raise refuse("a pattern such as window:512+4, or --model, was expected", "PATTERN")
    if head is not None and head >= heads:
        raise refuse(f"heads are numbered 0 to {heads - 1}, got {head}", "--head")
    from ..plots import plot_patterns, shares_seen
    from ..text_plots import COLUMNS, PATTERN_LEGEND, pattern_lines
    from ..visible import visible_pairs

    if output is not None:
        with spinner("drawing"):
            plot_patterns(parsed_patterns, tokens, output, head=head, num_heads=heads, num_kv_heads=groups)
    visible = {
        text: visible_pairs(pattern, tokens, COLUMNS, head=head, num_heads=heads, num_kv_heads=groups)
        for text, pattern in parsed_patterns.items()
    }
    if as_json:
        rows = [
            {
                "pattern": text,
                "tokens": tokens,
                "head": head,
                "heads": heads,
                "kv_heads": groups,
                "share_of_causal_pairs": pairs.share_of_causal,
                "sinks": pairs.sinks,
                "edges": pairs.edges.tolist(),
                "share_of_squares": pairs.share.round(6).tolist(),
            }
            for text, pairs in visible.items()
        ]
        print_json(rows)
    elif output is None:
        console = terminal()
        for text, pairs in visible.items():
            shares = shares_seen(parsed_patterns[text], pairs, head, heads, groups)
            title = f"{text}, {short_count(tokens)} tokens: {shares}"
            _print_lines([title, *pattern_lines(pairs), ""], console)
        _print_lines([PATTERN_LEGEND], console)
    else:
        print(f"wrote {output}")


def _patterns_of_layers(attention: ModelAttention) -> dict[str, Pattern]:
    """Returns the different patterns of a model's layers, named by them and by their layers."""
    layers: dict[Pattern, list[int]] = {}
    for number, pattern in zip(attention.numbers, attention.layers):
        layers.setdefault(pattern, []).append(number)
    return {f"{pattern}, layers {layer_numbers(numbers)}": pattern for pattern, numbers in layers.items()}


@plot_commands.command("layout", epilog=EXAMPLES_OF_PLOT)
def plot_layout_command(
    tokens: RowTokens,
    ranks: RingRanks,
    pattern: OnePattern = "exact",
    documents: DocumentLengths = None,
    layout: LayoutName = "auto",
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Show which tokens of a row each rank holds, and the work that a pattern gives it."""
    with spinner("planning"):
        row_pattern = Pattern.parse(pattern)
        rows = None if documents is None else documents_of_lengths(documents, tokens)
        chosen, decision = decide_layout(layout, tokens, ranks, row_pattern, rows)
        heads = row_pattern.num_kv_heads or 1
        problem = Problem(row_pattern, chosen, rows or (((0, tokens),),), num_heads=heads, num_kv_heads=heads)
        pairs = [plan_rank(problem, rank).pairs for rank in range(ranks)]
    work = [count * ranks / (sum(pairs) or 1) for count in pairs]
    from ..plots import plot_layout
    from ..text_plots import layout_lines

    if output is not None:
        plot_layout(chosen, work, row_pattern, output)
    if as_json:
        pieces = [[[piece.start, piece.stop] for piece in chosen.pieces(rank)] for rank in range(ranks)]
        print_json(
            {
                "tokens": tokens,
                "layout": chosen.kind,
                "reason": decision.reason,
                "padded_tokens": chosen.padded_len,
                "ranks": [{"pieces": pieces_of_rank, "work": share} for pieces_of_rank, share in zip(pieces, work)],
            }
        )
    elif output is None:
        _print_lines([f"{chosen.kind}: {decision.reason}", *layout_lines(chosen, work)], terminal())
    else:
        print(f"wrote {output}")


@plot_commands.command("ring", epilog=EXAMPLES_OF_PLOT)
def plot_ring_command(
    tokens: RowTokens,
    ranks: RingRanks,
    tflops: Annotated[float, positive_option("--tflops", "10^12 operations a second of a device.")],
    gbps: Annotated[float, positive_option("--gbps", "Gigabits a second from a rank to the next one.")],
    pattern: Annotated[
        str | None,
        pattern_option("Default: the model's, else exact."),
    ] = None,
    model: Annotated[str | None, model_option("Take heads from its config.json.")] = None,
    heads: QueryHeads = None,
    kv_heads: KeyValueHeads = None,
    head_dim: HeadDim = None,
    dtype: ModelDtype = "bfloat16",
    documents: DocumentLengths = None,
    layout: LayoutName = "auto",
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Show when each rank computes, sends and waits in one layer's forward pass.

    This is arithmetic from the plan and the two speeds that you state, no measurement.
    """
    if ranks < 2:
        raise refuse(f"a ring needs 2 ranks or more, got {ranks}", "--ranks")
    wanted = None if pattern is None else Pattern.parse(pattern)
    attention = asked_attention(model, wanted, heads, kv_heads, head_dim, 1, ranks)
    from ..plots import plot_ring, timeline_summary
    from ..text_plots import RING_LEGEND, ring_lines

    widths = attention.head_dim + attention.value_dim
    with spinner("planning"):
        layer_pattern = attention.base
        rows = None if documents is None else documents_of_lengths(documents, tokens)
        chosen, _ = decide_layout(layout, tokens, ranks, layer_pattern, rows)
        timeline = ring_timeline(
            Problem(
                layer_pattern,
                chosen,
                rows or (((0, tokens),),),
                num_heads=attention.num_heads,
                num_kv_heads=attention.num_kv_heads,
            ),
            pair_flops=2 * widths,
            row_bytes=widths * (4 if dtype == "float32" else 2),
            flops=tflops * 1e12,
            bandwidth=gbps * 1e9 / 8,
        )
    title = (
        f"{layer_pattern} over {short_count(tokens)} tokens, {ranks} ranks, {chosen.kind}, {tflops:g} TFLOP/s, "
        f"{gbps:g} Gbit/s: one layer forward"
    )
    if output is not None:
        plot_ring(timeline, title, output)
    if as_json:
        print_json(
            {
                "title": title,
                "seconds": timeline.seconds,
                "share_computing": timeline.share("compute"),
                "share_waiting": timeline.share("wait"),
                "spans": [asdict(span) for span in timeline.spans],
            }
        )
    elif output is None:
        _print_lines([title, timeline_summary(timeline), "", *ring_lines(timeline), "", RING_LEGEND], terminal())
    else:
        print(f"wrote {output}")


def _print_lines(lines: list[str], console: Any) -> None:
    """Prints lines as they are, with sinks in their colour."""
    from rich.text import Text

    for line in lines:
        text = Text(line)
        text.highlight_regex("┃", "bold cyan")
        console.print(text, soft_wrap=True)
