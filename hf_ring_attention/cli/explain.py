"""`hf-ring-attention explain`: the choices with their reasons, FLOPs, bytes and balance of attention, before it runs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..cost.attention import ModelAttention, ModelMixers
from ..cost.explain import Explanation, busiest_traffic, explain, number_bytes
from ..plan.branches import Segment
from ..plan.choices import check_choices
from ..plan.patterns import Pattern
from ..plan.problem import Documents
from ..plan.state_runs import linked_runs, runs_of
from ..plan.state_traffic import rows_traffic, states_traffic
from ..plan.traffic import RankTraffic
from .models import support_of
from .options import (
    Parser,
    Refusal,
    add_choice,
    add_heads,
    add_json,
    add_layout,
    add_model_of_config,
    add_row,
    add_transport,
    at_least,
    checked,
    documents_of_lengths,
    key_value_heads,
    pattern_text,
)
from .output import Sheet, layer_numbers, print_json, print_sheet, short_bytes, short_count, spinner, terminal

#: The floating point operations of backward over those of forward: five products of matrices against two.
BACKWARD = 2.5

EXAMPLES_OF_EXPLAIN = """\
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
    """Layers that do the same work: their numbers, and the work of one of them."""

    name: str
    layers: tuple[int, ...]
    explanation: Explanation
    share_of_exact: float

    @property
    def flops(self) -> list[int]:
        """The floating point operations of a forward pass on each rank."""
        return [share.forward_flops for share in self.explanation.ranks]

    @property
    def transport(self) -> str:
        """The transport that the call takes; on one rank, one that moves nothing."""
        choice = self.explanation.decision.choice
        return "collective" if choice == "local" else choice


def add_explain(parser: Parser) -> None:
    """Adds the options of `explain`."""
    add_row(parser)
    add, text = (
        parser.add_argument,
        "Pattern of layers without a window of their own; default: the model's, else exact.",
    )
    add("--pattern", metavar="TEXT", type=pattern_text, help=text)
    add_model_of_config(parser, "Take heads and layers from its config.json.")
    add_heads(parser)
    add("--layers", metavar="N", type=at_least(1), default=1, help="Layers, without --model (default 1).")
    add_choice(parser, "--dtype", ("float32", "bfloat16", "float16", "float64"), "Type of numbers", "bfloat16")
    add("--batch-size", metavar="N", type=at_least(1), default=1, help="Rows at once (default 1).")
    add("--bidirectional", action="store_true", help="Queries also see keys after them.")
    add_layout(parser)
    add_transport(parser)
    add_json(parser)


def explain_command(args: Namespace) -> None:
    """Show what attention over a ring would do: layout, transport, FLOPs and bytes.

    Nothing is computed and no weights are loaded.
    """
    if args.ring_heads is not None:
        checked("--ring-heads", check_choices, args.layout, args.transport, args.ranks, args.ring_heads)
    attention = attention_of(args)
    rows = documents_of_lengths(args.documents, args.tokens)
    documents = (rows or (((0, args.tokens),),)) * args.batch_size
    with spinner(f"planning {args.tokens} tokens over {args.ranks} ranks"):
        kinds = _kinds_of_layers(args, attention, None if rows is None else documents)
        answer = _answer(args, attention, kinds, documents)
    if args.json:
        print_json(answer)
    else:
        _print_answer(attention, kinds[0].explanation, answer)


def attention_of(args: Namespace) -> ModelAttention:
    """Returns the attention that options ask for: a model's, or heads in numbers."""
    pattern = None if args.pattern is None else Pattern.parse(args.pattern)
    if args.model is not None:
        return attention_of_config(args, pattern)
    if args.heads is None or args.head_dim is None:
        raise Refusal("needed are --heads and --head-dim (and --kv-heads, if they are fewer), or --model")
    pattern, layers = pattern or Pattern.exact(), getattr(args, "layers", 1)
    return ModelAttention(
        name="",
        model_type="",
        num_heads=args.heads,
        num_kv_heads=checked("--kv-heads", key_value_heads, args.heads, args.kv_heads),
        head_dim=args.head_dim,
        value_dim=args.head_dim,
        base=pattern,
        layers=(pattern,) * layers,
        numbers=tuple(range(layers)),
        sliding=(False,) * layers,
    )


def attention_of_config(args: Namespace, pattern: Pattern | None) -> ModelAttention:
    """Returns the attention of --model; refuses models that are not computed on so many ranks."""
    for option in ("heads", "kv_heads", "head_dim"):
        if getattr(args, option, None) is not None:
            raise Refusal("--model has it already: leave one of them out", f"--{option.replace('_', '-')}")
    from ..cost.models import attention_of_model, load_config  # It loads Transformers, which takes seconds.

    try:
        with spinner(f"reading the config of {args.model}"):
            attention = attention_of_model(load_config(args.model, trust=args.trust_remote_code), args.model, pattern)
    except ValueError as error:
        raise Refusal(f"{error}; or, for attention alone, give --heads, --kv-heads and --head-dim", "--model") from None
    support = support_of(attention.model_type)
    if support is not None and support.status == "refused":
        raise Refusal(f"models of type {support.model_type!r} are not computed: {support.reason}", "--model")
    if support is not None and getattr(args, "ranks", 1) > 1 and support.status == "supported" and not support.ring:
        raise Refusal(f"models of type {support.model_type!r} run on one rank only: {support.reason}", "--ranks")
    return attention


def _kinds_of_layers(args: Namespace, attention: ModelAttention, documents: Documents | None) -> list[LayerKind]:
    """Returns the layers by their pattern, the base pattern first; all have its layout, as in a model."""
    call: dict[str, Any] = {"seq_len": args.tokens, "world_size": args.ranks, "causal": not args.bidirectional}
    call |= {name: getattr(attention, name) for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim")}
    call |= {name: getattr(args, name) for name in ("dtype", "batch_size", "transport")}
    call |= {"documents": documents, "heads": args.ring_heads}
    try:
        base = explain(attention.base, layout=args.layout, **call)
        numbers: dict[tuple[Pattern, bool], list[int]] = {(attention.base, False): []}
        for number, pattern, has_window in zip(attention.numbers, attention.layers, attention.sliding):
            numbers.setdefault((pattern, has_window), []).append(number)
        lengths = args.documents or [args.tokens]
        pairs = sum(n * n if args.bidirectional else n * (n + 1) // 2 for n in lengths)
        exact = 2 * (attention.head_dim + attention.value_dim) * attention.num_heads * args.batch_size * pairs
        kinds = []
        for (pattern, has_window), layers in numbers.items():
            answer = base if pattern == attention.base else explain(pattern, layout=base.layout, **call)
            chunked = isinstance(pattern.branches[0], Segment)
            name = "full" if not has_window else "chunked" if chunked else "sliding"
            share = sum(rank.forward_flops for rank in answer.ranks) / exact
            kinds.append(LayerKind(name, tuple(layers), answer, share))
    except ValueError as error:
        raise Refusal(str(error)) from None
    return kinds


def _answer(
    args: Namespace, attention: ModelAttention, kinds: Sequence[LayerKind], documents: Documents
) -> dict[str, Any]:
    """Returns all figures, as JSON has them: bytes and FLOPs of the busiest rank, unless a name differs."""
    base, used = kinds[0].explanation, [kind for kind in kinds if kind.layers]
    mixers = None if attention.mixers is None else _figures_of_mixers(attention.mixers, base, args.dtype, documents)
    flops = [sum(len(kind.layers) * kind.flops[rank] for kind in used) for rank in range(args.ranks)]
    moved = [_bytes_of_step(used, mixers, rank) for rank in range(args.ranks)]
    sizes = {name: max(of_rank[name] for of_rank in moved) for name in moved[0]}
    layers = len(attention.layers)
    return {
        "model": attention.name or None,
        "model_type": attention.model_type or None,
        "tokens": args.tokens,
        "ranks": args.ranks,
        "tokens_of_a_rank": base.layout.local_len,
        "padding": base.layout.padded_len - base.layout.seq_len,
        "heads": attention.num_heads,
        "kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "value_dim": attention.value_dim,
        "dtype": args.dtype,
        "batch_size": args.batch_size,
        "causal": not args.bidirectional,
        "ring_heads": args.ring_heads,
        "layout": base.layout.kind,
        "layout_reason": base.layout_decision.reason,
        "imbalance_of_layouts": base.layouts,
        "layer_kinds": list(map(_figures_of_kind, used)),
        "mixers": mixers,
        "step": {
            "layers": layers,
            "share_of_exact_flops": sum(len(kind.layers) * kind.share_of_exact for kind in used) / layers,
            "imbalance": max(flops) * len(flops) / (sum(flops) or 1),
            **_figures_of_flops(flops),
            "bytes": sizes,
        },
    }


def _figures_of_kind(kind: LayerKind) -> dict[str, Any]:
    call = kind.explanation
    return {
        "kind": kind.name,
        "layers": list(kind.layers),
        "pattern": str(call.pattern),
        "share_of_exact_flops": kind.share_of_exact,
        "transport": call.decision.choice,
        "transport_reason": call.decision.reason,
        "imbalance": call.imbalance,
        **_figures_of_flops(kind.flops),
        "groups_that_exchange_heads": {
            str(size): _sizes(busiest_traffic(traffic)) | {"imbalance": balance}
            for size, (balance, traffic) in call.groups.items()
        },
        **{
            f"{name}_bytes": _sizes(call.busiest(name)) | {"imbalance": balance}
            for name, balance in call.balance.items()
        },
    }


def _figures_of_flops(flops: Sequence[int]) -> dict[str, float]:
    return {
        "forward_flops": max(flops),
        "backward_flops": BACKWARD * max(flops),
        "forward_flops_of_all_ranks": sum(flops),
    }


def _figures_of_mixers(mixers: ModelMixers, base: Explanation, dtype: str, documents: Documents) -> dict[str, Any]:
    """Returns the work of a hybrid's mixers over a ring, in the layout that its attention decides."""
    layout, (itemsize, accumulated) = base.layout, number_bytes(dtype)
    if mixers.numbers is None:
        traffic = rows_traffic(mixers.width, len(documents), layout, itemsize, mixers.with_positions)
    else:
        traffic = states_traffic(mixers.numbers, documents, layout, itemsize, accumulated)
    return {
        "layers": list(mixers.layers),
        "gathers": "rows" if mixers.numbers is None else "states",
        "runs_of_a_rank": linked_runs(runs_of(documents, layout))[1],
        "most_work": layout.world_size if mixers.numbers is None else 1,
        "bytes": _sizes(traffic),
    }


def _sizes(traffic: RankTraffic) -> dict[str, int]:
    """Returns bytes by the names that JSON has."""
    ways = {"forward": traffic.forward, "backward": traffic.backward}
    moved = {f"{way}_{name}": getattr(size, name) for way, size in ways.items() for name in ("sent", "received")}
    return moved | {"buffers": traffic.buffers}


def _bytes_of_step(kinds: Sequence[LayerKind], mixers: dict[str, Any] | None, rank: int) -> dict[str, int]:
    """Returns the bytes of a rank in all layers, by the chosen transports; one layer at a time has buffers."""
    parts = [(len(kind.layers), _sizes(getattr(kind.explanation.ranks[rank], kind.transport))) for kind in kinds]
    if mixers is not None:
        parts.append((len(mixers["layers"]), mixers["bytes"]))
    return {
        name: max(sizes[name] for _, sizes in parts)
        if name == "buffers"
        else sum(count * sizes[name] for count, sizes in parts)
        for name in parts[0][1]
    }


# ---- tables


def _print_answer(attention: ModelAttention, base: Explanation, answer: dict[str, Any]) -> None:
    """Prints facts and reasons, FLOPs, and the bytes of each transport."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, text in _facts(attention, base, answer):
        grid.add_row(Text(name, style="bold"), Text(text))
    terminal().print(grid, "")
    kinds, step, mixers = answer["layer_kinds"], answer["step"], answer["mixers"]
    several = step["layers"] > 1
    rows: list[Any] = [(row["kind"], row["pattern"], len(row["layers"]), *_flop_cells(row)) for row in kinds]
    if several:
        rows.append(("a step", "", step["layers"], *_flop_cells(step)))
    headings = ("layers", "pattern", "number", "forward", "backward", "imbalance", "of exact")
    notes = ["forward, backward: the busiest rank; imbalance: busiest / mean; of exact: the share of all ranks' FLOPs"]
    print_sheet(Sheet("TFLOP of one layer" + " and of all" * several, headings, rows, notes, left=2))
    rows = []
    for row in kinds:
        for name in base.balance:
            mark = " *" * (name == row["transport"])
            rows.append((row["kind"], name + mark, *_byte_cells(row[f"{name}_bytes"])))
        for size, group in row["groups_that_exchange_heads"].items():
            rows.append((row["kind"], f"heads {size} x ring {answer['ranks'] // int(size)}", *_byte_cells(group)))
    if mixers:
        rows.append(("mixers", f"{mixers['gathers']} *", *_byte_cells(mixers["bytes"])))
    if several or mixers:
        rows.append(("a step", "as chosen *", *_byte_cells(step["bytes"])))
    columns = ("layers", "transport", "forward", "backward", "buffers", "of mean")
    notes = ["* marks the chosen transport; of mean: the work of the busiest rank over the mean"]
    title = "Bytes that the busiest rank receives in one layer" + " and in all" * (several or bool(mixers))
    print_sheet(Sheet(title, columns, rows, notes, left=2))


def _facts(attention: ModelAttention, base: Explanation, answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the lines above the tables, each with its name."""
    layout, kinds, mixers = base.layout, answer["layer_kinds"], answer["mixers"]
    padding = f", {answer['padding']} of padding" if answer["padding"] else ""
    shape = f"{attention.num_heads}/{attention.num_kv_heads} heads x {attention.head_dim}"
    if attention.value_dim != attention.head_dim:
        shape += f" (values {attention.value_dim})"
    facts = [("model", f"{attention.name} ({attention.model_type})")] if attention.name else []
    spread = f"over {layout.world_size} ranks: {layout.local_len} each{padding}"
    facts.append(("sequence", f"{short_count(layout.seq_len)} tokens {spread}"))
    settings = f"{answer['dtype']}, batch size {answer['batch_size']}"
    facts.append(("attention", f"{answer['step']['layers']} layer(s), {shape}, {settings}"))
    if len(kinds) > 1 or mixers:
        facts += [(f"layers, {row['kind']}", layer_numbers(row["layers"])) for row in kinds]
    if mixers:
        facts.append(("mixers", _mixers_in_words(mixers, layout.world_size)))
    facts.append(("layout", f"{layout.kind}: {answer['layout_reason']}"))
    facts.append(("imbalance", ", ".join(f"{kind} {of_kind:.2f}" for kind, of_kind in base.layouts.items())))
    facts += [(f"transport, {row['kind']}", f"{row['transport']}: {row['transport_reason']}") for row in kinds]
    if answer["ring_heads"]:
        groups = f"rings between groups: {layout.world_size // answer['ring_heads']} ranks"
        facts.append(("heads", f"exchanged by {answer['ring_heads']} neighbours each; {groups}"))
    return facts


def _mixers_in_words(mixers: dict[str, Any], ranks: int) -> str:
    """Returns the work of a hybrid's mixers over a ring, in a sentence."""
    where = f"in layers {layer_numbers(mixers['layers'])}"
    if ranks == 1:
        return f"{where}, on one rank"
    sent = short_bytes(mixers["bytes"]["forward_sent"])
    if mixers["gathers"] == "states":
        return f"{where}; states of {mixers['runs_of_a_rank']} runs of each rank pass, {sent} sent a layer"
    return (
        f"{where}; no states pass: each rank gathers whole rows, sends {sent} a layer, and computes them up to its last "
        f"token: up to {mixers['most_work']} times the work of one device in all"
    )


def _flop_cells(row: dict[str, Any]) -> tuple[str, ...]:
    flops = (f"{row[name] / 1e12:.4g}" for name in ("forward_flops", "backward_flops"))
    return (*flops, f"{row['imbalance']:.3f}", f"{row['share_of_exact_flops']:.2%}")


def _byte_cells(figures: dict[str, Any]) -> tuple[str, ...]:
    sizes = (short_bytes(figures[name]) for name in ("forward_received", "backward_received", "buffers"))
    return (*sizes, f"{figures['imbalance']:.2f}" if "imbalance" in figures else "")
