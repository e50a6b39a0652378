"""What a calibration chose and what it does, as tables: for the terminal, and for the report in its folder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..evaluation.calibration.result import Calibration
from ..evaluation.whole_files import write_whole
from .output import Sheet, in_markdown, layer_numbers, short_count


@dataclass(frozen=True)
class TextLosses:
    """The losses of a text under several patterns, in nats a token.

    Attributes:
        name: of the text.
        held_out: whether nothing was chosen by it.
        nlls: by the names of patterns; the first one is exact attention.
    """

    name: str
    held_out: bool
    nlls: dict[str, float]


def sheet_of_patterns(calibration: Calibration) -> Sheet:
    """Returns a table with a line for each pattern of the menu: its cost, and the layers and heads that have it."""
    heads = calibration.of_heads()
    counts = Counter(pattern for patterns in heads.values() for pattern in patterns)
    total = sum(counts.values())
    rows = []
    for pattern in sorted(calibration.menu, key=calibration.share_of):
        layers = [layer for layer in sorted(heads) if pattern in heads[layer]]
        share = calibration.share_of(pattern)
        rows.append(
            (
                str(pattern),
                f"{share:.1%}",
                str(counts[pattern]),
                f"{counts[pattern] / total:.0%}",
                layer_numbers(layers) if layers else "-",
            )
        )
    title = f"{total} groups of heads: {len(heads)} layers by key/value heads"
    headings = ("pattern", "FLOPs of exact's", "groups", "of all", "in layers")
    of_ring = calibration.ranks and (
        f", and {calibration.share('bytes'):.2%} of the bytes of a ring of {calibration.ranks}"
    )
    notes = [
        f"{calibration.flop_share:.2%} of exact attention's FLOPs at {short_count(calibration.seq_len)} tokens, and "
        f"{calibration.share('cache_reads'):.2%} of its reads of the cache for the next token{of_ring or ''}",
        f"the budget was {calibration.budget:.2%} of {_BUDGETS[calibration.budget_of]}",
    ]
    return Sheet(title, headings, rows, notes)


_BUDGETS = {"flops": "the FLOPs", "cache_reads": "the reads of the cache", "bytes": "the bytes of the ring"}


def sheet_of_layers(calibration: Calibration) -> Sheet:
    """Returns a table with the pattern of each layer, and what a single head of it costs on average."""
    rows = [
        (
            str(layer),
            str(pattern),
            f"{sum(map(calibration.share_of, calibration.of_heads()[layer])) / len(calibration.scores[layer]):.1%}",
        )
        for layer, pattern in sorted(calibration.layers.items())
    ]
    return Sheet("Patterns of layers", ("layer", "pattern", "FLOPs of exact's"), rows, left=2)


def sheet_of_losses(losses: Sequence[TextLosses]) -> Sheet:
    """Returns a table with the perplexity of each text under each pattern, and the mean excess over exact attention's."""
    exact, *others = losses[0].nlls
    headings = ("text", "held out", f"perplexity, {exact}", *(f"{name}, over exact's" for name in others))
    rows = [
        (
            text.name,
            "yes" if text.held_out else "no",
            f"{math.exp(text.nlls[exact]):.3f}",
            *(f"{math.exp(text.nlls[name] - text.nlls[exact]):.4f}" for name in others),
        )
        for text in losses
    ]
    if len(losses) > 1:
        means = [sum(math.exp(text.nlls[name] - text.nlls[exact]) for text in losses) / len(losses) for name in others]
        rows.append(("mean", "", "", *(f"{mean:.4f}" for mean in means)))
    return Sheet("Perplexity", headings, rows, left=2)


def write_report(file: Path, title: str, facts: Sequence[str], sheets: Sequence[Sheet], picture: str | None) -> None:
    """Writes a report in Markdown: facts, tables and a picture."""
    parts = [f"# {title}\n", "\n".join(f"- {fact}" for fact in facts) + "\n"]
    parts += [in_markdown(sheet, "## ") for sheet in sheets]
    if picture:
        parts.append(f"![The pattern of each layer and key/value head]({picture})\n")
    write_whole(file, "\n".join(parts))
