"""`hf-ring-attention explain`: the choices with their reasons, FLOPs, bytes and balance of attention, before it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ...plan.choices import check_choices
from ...plan.patterns import Pattern
from ...plan.traffic import RankTraffic
from ...ring.explain import Explanation, explain
from ..arguments import at_least, key_value_heads
from ..model_config import ModelAttention, model_attention
from ..options import (
    DTYPES,
    AsJson,
    Bidirectional,
    LayoutName,
    RingRanks,
    RowTokens,
    checked,
    choice_option,
    number_option,
    parsed,
    pattern_text,
    refuse,
)
from ..output import (
    Sheet,
    layer_numbers,
    print_json,
    print_sheet,
    short_bytes,
    short_count,
    spinner,
    terminal,
)
from .models import support_of

#: The floating point operations of backward over those of forward: five products of matrices against two.
BACKWARD = 2.5

EXAMPLES_OF_EXPLAIN = """\b
Examples:
  hf-ring-attention explain --tokens 128k --ranks 8 --model Qwen/Qwen3-8B
  hf-ring-attention explain --tokens 1M --ranks 8 --pattern pyramid:512,3 \\
      --heads 32 --kv-heads 8 --head-dim 128
  hf-ring-attention explain --tokens 1M --ranks 16 --model ./folder \\
      --transport heads --ring-heads 8
  hf-ring-attention explain --tokens 32k --ranks 4 --model ./folder --json
"""


@dataclass(frozen=True)
class LayerKind:
    """The layers that do the same: their numbers, and what one of them does."""

    name: str
    layers: tuple[int, ...]
    explanation: Explanation
    share_of_exact: float


def explain_command(
    tokens: RowTokens,
    ranks: RingRanks,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            parser=parsed(pattern_text),
            metavar="TEXT",
            help="The pattern of layers without a window of their own: window:512+4, pyramid:512,3, ... "
            "Default: what the model has saved, else exact.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="ID_OR_FOLDER", help="Take heads and layers from its config.json."),
    ] = None,
    heads: Annotated[int | None, number_option("--heads", "Query heads, without --model.")] = None,
    kv_heads: Annotated[
        int | None, number_option("--kv-heads", "Key/value heads, without --model; default: as --heads.")
    ] = None,
    head_dim: Annotated[int | None, number_option("--head-dim", "Size of a head, without --model.")] = None,
    layers: Annotated[
        int, typer.Option("--layers", parser=parsed(at_least(1)), metavar="N", help="Layers, without --model.")
    ] = 1,
    dtype: Annotated[str, choice_option("--dtype", DTYPES, "Type of numbers")] = "bfloat16",
    batch_size: Annotated[int, number_option("--batch-size", "Rows at once.")] = 1,
    bidirectional: Bidirectional = False,
    layout: LayoutName = "auto",
    transport: Annotated[
        str, choice_option("--transport", ("auto", "ring", "collective", "heads", "local"), "How keys travel")
    ] = "auto",
    ring_heads: Annotated[
        int | None,
        number_option("--ring-heads", "With --transport heads: neighbours that exchange heads; default: all ranks."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what attention over a ring would do: layout, transport, FLOPs and bytes.

    Nothing is computed and no weights are loaded.
    """
    if ring_heads is not None:
        try:
            check_choices(layout, transport, ranks, ring_heads)
        except ValueError as error:
            raise refuse(str(error), "--ring-heads") from None
    wanted = None if pattern is None else Pattern.parse(pattern)
    attention = asked_attention(model, wanted, heads, kv_heads, head_dim, layers, ranks)

    def explained(layer_pattern: Pattern, layout_kind: Any) -> Explanation:
        try:
            return explain(
                layer_pattern,
                seq_len=tokens,
                world_size=ranks,
                num_heads=attention.num_heads,
                num_kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim,
                value_dim=attention.value_dim,
                dtype=dtype,
                batch_size=batch_size,
                causal=not bidirectional,
                layout=layout_kind,
                transport=transport,  # type: ignore[arg-type]
                heads=ring_heads,
            )
        except ValueError as error:
            raise refuse(str(error)) from None

    with spinner(f"planning {tokens} tokens over {ranks} ranks"):
        base = explained(attention.base, layout)
        pairs = tokens * tokens if bidirectional else tokens * (tokens + 1) // 2
        exact = 2 * (attention.head_dim + attention.value_dim) * attention.num_heads * batch_size * pairs
        kinds = _kinds(attention, base, explained, exact)
    call = {"dtype": dtype, "batch_size": batch_size, "causal": not bidirectional, "ring_heads": ring_heads}
    answer = _answer(attention, base, kinds, **call)
    if as_json:
        print_json(answer)
    else:
        _print(attention, base, kinds, answer)


def asked_attention(
    model: str | None,
    pattern: Pattern | None,
    heads: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    layers: int,
    ranks: int,
) -> ModelAttention:
    """Returns the attention that options ask for: a model's, or heads in numbers."""
    if model is not None:
        for option, value in (("--heads", heads), ("--kv-heads", kv_heads), ("--head-dim", head_dim)):
            if value is not None:
                raise refuse("--model says it already: leave one of them out", option)
        attention = checked("--model", model_attention, model, pattern)
        support = support_of(attention.model_type)
        if support is not None and support.status == "refused":
            raise refuse(f"models of type {support.model_type!r} are not computed: {support.reason}", "--model")
        if support is not None and ranks > 1 and support.status == "supported" and not support.ring:
            raise refuse(f"models of type {support.model_type!r} run on one rank only: {support.reason}", "--ranks")
        return attention
    if heads is None or head_dim is None:
        raise refuse(
            "needed are --heads and --head-dim (and --kv-heads, where they are fewer), or --model with the id or the folder "
            "of a model, whose config.json has them"
        )
    base = pattern or Pattern.exact()
    return ModelAttention(
        name="",
        model_type="",
        num_heads=heads,
        num_kv_heads=checked("--kv-heads", key_value_heads, heads, kv_heads),
        head_dim=head_dim,
        value_dim=head_dim,
        base=base,
        layers=(base,) * layers,
        sliding=(False,) * layers,
    )


def _kinds(
    attention: ModelAttention, base: Explanation, explained: Callable[[Pattern, Any], Explanation], exact: int
) -> list[LayerKind]:
    """Groups layers by their pattern; all have the layout of the base pattern, as in a model."""
    numbers: dict[tuple[Pattern, bool], list[int]] = {}
    for number, key in enumerate(zip(attention.layers, attention.sliding)):
        numbers.setdefault(key, []).append(number)
    kinds = []
    for (pattern, sliding), layers in numbers.items():
        answer = base if pattern == attention.base else explained(pattern, base.layout.kind)
        flops = sum(share.forward_flops for share in answer.ranks)
        name = "sliding" if sliding else "full"
        kinds.append(LayerKind(name, tuple(layers), answer, flops / exact))
    return kinds


def _largest(traffic: Sequence[RankTraffic]) -> dict[str, int]:
    """Returns the bytes of the busiest rank."""
    return {
        "forward_sent": max(rank.forward.sent for rank in traffic),
        "forward_received": max(rank.forward.received for rank in traffic),
        "backward_sent": max(rank.backward.sent for rank in traffic),
        "backward_received": max(rank.backward.received for rank in traffic),
        "buffers": max(rank.buffers for rank in traffic),
    }


def _added(traffic: Sequence[tuple[int, RankTraffic]]) -> dict[str, int]:
    """Returns the bytes of one rank for pairs (number of layers, bytes of one); only one layer at a time has buffers."""
    return {
        "forward_sent": sum(count * one.forward.sent for count, one in traffic),
        "forward_received": sum(count * one.forward.received for count, one in traffic),
        "backward_sent": sum(count * one.backward.sent for count, one in traffic),
        "backward_received": sum(count * one.backward.received for count, one in traffic),
        "buffers": max(one.buffers for _, one in traffic),
    }


def _used(explanation: Explanation, rank: int, transport: str) -> RankTraffic:
    """Returns what a rank moves by a transport; "chosen" is the one that the call takes."""
    traffic: RankTraffic = getattr(explanation.ranks[rank], _choice(explanation, transport))
    return traffic


def _choice(explanation: Explanation, transport: str) -> str:
    choice = explanation.decision.choice if transport == "chosen" else transport
    return "collective" if choice == "local" else choice  # On one rank neither moves anything.


def _answer(attention: ModelAttention, base: Explanation, kinds: Sequence[LayerKind], **call: Any) -> dict[str, Any]:
    """Returns all figures, as JSON has them. Bytes and FLOPs are those of the busiest rank, unless a name says otherwise."""
    ranks = range(base.layout.world_size)
    layers = []
    for kind in kinds:
        flops = [share.forward_flops for share in kind.explanation.ranks]
        layers.append(
            {
                "kind": kind.name,
                "layers": list(kind.layers),
                "pattern": str(kind.explanation.pattern),
                "share_of_exact_flops": kind.share_of_exact,
                "transport": kind.explanation.decision.choice,
                "transport_reason": kind.explanation.decision.reason,
                "imbalance": kind.explanation.imbalance,
                "forward_flops": max(flops),
                "backward_flops": BACKWARD * max(flops),
                "forward_flops_of_all_ranks": sum(flops),
                **{
                    f"{name}_bytes": _largest([getattr(share, name) for share in kind.explanation.ranks])
                    | {"row_numbers": numbers}
                    for name, numbers in kind.explanation.row_numbers.items()
                },
            }
        )
    flops_of_ranks = [sum(len(k.layers) * k.explanation.ranks[rank].forward_flops for k in kinds) for rank in ranks]
    totals: dict[str, dict[str, int]] = {}
    for transport in ("chosen", *base.row_numbers):
        per_rank = [_added([(len(k.layers), _used(k.explanation, rank, transport)) for k in kinds]) for rank in ranks]
        totals[f"{transport}_bytes"] = {name: max(one[name] for one in per_rank) for name in per_rank[0]}
        # Layers that do the same share their row numbers.
        numbers = [k.explanation.row_numbers[_choice(k.explanation, transport)] for k in kinds]
        totals[f"{transport}_bytes"]["row_numbers"] = sum(numbers)
    count = len(attention.layers)
    return {
        "model": attention.name or None,
        "model_type": attention.model_type or None,
        "tokens": base.layout.seq_len,
        "ranks": base.layout.world_size,
        "tokens_of_a_rank": base.layout.local_len,
        "padding": base.layout.padded_len - base.layout.seq_len,
        "heads": attention.num_heads,
        "kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "value_dim": attention.value_dim,
        **call,
        "layout": base.layout.kind,
        "layout_reason": base.layout_decision.reason,
        "layer_kinds": layers,
        "step": {
            "layers": count,
            "share_of_exact_flops": sum(len(k.layers) * k.share_of_exact for k in kinds) / count,
            "imbalance": max(flops_of_ranks) * len(flops_of_ranks) / (sum(flops_of_ranks) or 1),
            "forward_flops": max(flops_of_ranks),
            "backward_flops": BACKWARD * max(flops_of_ranks),
            "forward_flops_of_all_ranks": sum(flops_of_ranks),
            **totals,
        },
    }


_BYTE_COLUMNS = ("forward_sent", "forward_received", "backward_sent", "backward_received", "buffers", "row_numbers")


def _print(attention: ModelAttention, base: Explanation, kinds: Sequence[LayerKind], answer: dict[str, Any]) -> None:
    from rich.text import Text

    console = terminal()
    layout, step = base.layout, answer["step"]
    padding = f", {answer['padding']} of padding" if answer["padding"] else ""
    shape = f"{attention.num_heads}/{attention.num_kv_heads} heads x {attention.head_dim}"
    if attention.value_dim != attention.head_dim:
        shape += f" (values {attention.value_dim})"
    facts = [
        (
            "sequence",
            f"{short_count(layout.seq_len)} tokens over {layout.world_size} ranks: {layout.local_len} each{padding}",
        ),
        ("attention", f"{_layers(step['layers'])}, {shape}, {answer['dtype']}, batch size {answer['batch_size']}"),
        *(
            (f"layers, {row['kind']}", layer_numbers(row["layers"]))
            for row in answer["layer_kinds"]
            if len(answer["layer_kinds"]) > 1
        ),
        ("layout", f"{layout.kind}: {answer['layout_reason']}"),
        *(
            (f"transport, {row['kind']}", f"{row['transport']}: {row['transport_reason']}")
            for row in answer["layer_kinds"]
        ),
    ]
    if answer["ring_heads"]:
        groups = layout.world_size // answer["ring_heads"]
        facts.append(
            ("heads", f"exchanged by {answer['ring_heads']} neighbours each; rings between groups: {groups} ranks")
        )
    if attention.name:
        facts.insert(0, ("model", f"{attention.name} ({attention.model_type})"))
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for name, text in facts:
        grid.add_row(Text(name, style="bold"), Text(text))
    console.print(grid)
    console.print()
    several = " and of a step of all layers" if step["layers"] > 1 else ""
    rows: list[tuple[str, ...]] = [
        (row["kind"], row["pattern"], str(len(row["layers"])), *_flop_cells(row)) for row in answer["layer_kinds"]
    ]
    if step["layers"] > 1:
        rows.append(("a step", "", str(step["layers"]), *_flop_cells(step)))
    headings: tuple[str, ...] = (
        "layers",
        "pattern",
        "number",
        "forward",
        "backward",
        "all ranks",
        "imbalance",
        "of exact",
    )
    notes = (
        "forward, backward: the busiest rank; all ranks: the sum of forward; imbalance: busiest / mean; of exact: the share of "
        "exact attention's FLOPs",
    )
    print_sheet(Sheet(f"TFLOP of one layer{several}", headings, rows, notes, left=2), console)
    rows = []
    for row in answer["layer_kinds"]:
        for name in base.row_numbers:
            mark = "* " if name == row["transport"] else "  "
            rows.append((row["kind"], mark + name, *(short_bytes(row[f"{name}_bytes"][key]) for key in _BYTE_COLUMNS)))
    for name in ("chosen", *base.row_numbers) if step["layers"] > 1 else ():
        label = {"chosen": "* as chosen"}.get(name, f"  {name}")
        rows.append(("a step", label, *(short_bytes(step[f"{name}_bytes"][key]) for key in _BYTE_COLUMNS)))
    headings = (
        "layers",
        "transport",
        "forward sent",
        "forward received",
        "backward sent",
        "backward received",
        "buffers",
        "row numbers",
    )
    notes = (
        "* marks what the call takes; row numbers are kept for equal calls, while a ring has at most 256 MiB of them",
    )
    print_sheet(Sheet(f"Bytes of the busiest rank in one layer{several}", headings, rows, notes, left=2), console)


def _layers(count: int) -> str:
    return f"{count} layer" + ("s" if count > 1 else "")


def _flop_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['forward_flops'] / 1e12:.4g}",
        f"{row['backward_flops'] / 1e12:.4g}",
        f"{row['forward_flops_of_all_ranks'] / 1e12:.4g}",
        f"{row['imbalance']:.3f}",
        f"{row['share_of_exact_flops']:.2%}",
    )
