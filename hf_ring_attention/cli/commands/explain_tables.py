"""The tables of `hf-ring-attention explain`."""

from __future__ import annotations

from typing import Any

from ...cost.attention import ModelAttention
from ...cost.explain import Explanation
from ..output import Sheet, layer_numbers, print_sheet, short_bytes, short_count, terminal

_BYTE_COLUMNS = ("forward_sent", "forward_received", "backward_sent", "backward_received", "buffers", "row_numbers")


def print_answer(attention: ModelAttention, base: Explanation, answer: dict[str, Any]) -> None:
    """Prints what `explain` says of the layers of a model: facts and reasons, FLOPs, and bytes of each transport."""
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
            if len(answer["layer_kinds"]) > 1 or answer["mixers"]
        ),
        *([("mixers", _mixers_in_words(answer["mixers"], layout.world_size))] if answer["mixers"] else []),
        ("layout", f"{layout.kind}: {answer['layout_reason']}"),
        ("imbalance", ", ".join(f"{kind} {of_kind:.2f}" for kind, of_kind in base.layouts.items())),
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
            rows.append((row["kind"], mark + name, *_byte_cells(row[f"{name}_bytes"])))
        for size, group in row["groups_that_exchange_heads"].items():
            rows.append((row["kind"], f"  heads {size} x ring {layout.world_size // int(size)}", *_byte_cells(group)))
    if answer["mixers"]:
        rows.append(("mixers", f"* {answer['mixers']['gathers']}", *_byte_cells(answer["mixers"]["bytes"])))
    for name in ("chosen", *base.row_numbers) if step["layers"] > 1 or answer["mixers"] else ():
        label = {"chosen": "* as chosen"}.get(name, f"  {name}")
        rows.append(("a step", label, *_byte_cells(step[f"{name}_bytes"])))
    headings = (
        "layers",
        "transport",
        "forward sent",
        "forward received",
        "backward sent",
        "backward received",
        "buffers",
        "row numbers",
        "imbalance",
    )
    notes = (
        "* marks what the call takes; row numbers are kept for equal calls, while a ring has at most 256 MiB of them",
    )
    print_sheet(Sheet(f"Bytes of the busiest rank in one layer{several}", headings, rows, notes, left=2), console)


def _mixers_in_words(mixers: dict[str, Any], ranks: int) -> str:
    """Returns what the mixers of a hybrid do over a ring, in a sentence."""
    where = f"in {_layers(len(mixers['layers']))} ({layer_numbers(mixers['layers'])})"
    if ranks == 1:
        return f"{where}, on one rank"
    sent = short_bytes(mixers["bytes"]["forward_sent"])
    if mixers["gathers"] == "rows":
        return (
            f"{where}; no states pass, so each rank gathers whole rows, sends {sent} a layer, and computes them up to its last "
            f"token: up to {mixers['most_work']} times the work of one device in all"
        )
    return (
        f"{where}; states of {mixers['runs_of_a_rank']} runs of each rank pass, {sent} sent a layer, whatever the length of "
        f"the runs is"
    )


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


def _byte_cells(figures: dict[str, Any]) -> tuple[str, ...]:
    sizes = (short_bytes(figures[key]) if key in figures else "" for key in _BYTE_COLUMNS)
    return (*sizes, f"{figures['imbalance']:.2f}" if "imbalance" in figures else "")
