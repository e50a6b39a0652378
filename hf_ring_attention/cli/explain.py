"""`hf-ring-attention explain`: the choices with their reasons, FLOPs, bytes and balance of attention, before it runs."""

from __future__ import annotations

import itertools
from argparse import Namespace
from typing import Any, get_args

from ..cost.layers import ModelAttention, explain_layers
from ..plan.choices import check_choices
from ..plan.patterns import Pattern
from ..plan.problem import Documents
from ..plan.traffic import TransportKind
from .models import why_not
from .options import Parser, Refusal, at_least, checked
from .output import layer_numbers, print_json, print_table, short_bytes, short_count, spinner, terminal


def add_explain(parser: Parser) -> None:
    """Adds the options of `explain`."""
    parser.add_row()
    parser.add_pattern("Pattern of layers without a window of their own; default: the model's, else exact.")
    parser.add_model("Take heads and layers from its config.json.")
    parser.add_heads()
    add = parser.add_argument
    parser.add_choice("--dtype", ("float32", "bfloat16", "float16", "float64"), "Type of numbers", "bfloat16")
    add("--batch-size", metavar="N", type=at_least(1), default=1, help="Rows at once (default 1).")
    add("--bidirectional", action="store_true", help="Queries also see keys after them.")
    parser.add_transport()
    parser.add_json()


def explain_command(args: Namespace) -> None:
    """Show what attention over a ring would do: layout, transport, FLOPs and bytes.

    Nothing is computed and no weights are loaded.

    Examples:
      hf-ring-attention explain --tokens 128k --ranks 8 --model Qwen/Qwen3-8B
      hf-ring-attention explain --tokens 1M --ranks 8 --pattern pyramid:512,3 \\
          --heads 32 --kv-heads 8 --head-dim 128
      hf-ring-attention explain --tokens 1M --ranks 16 --model ./folder \\
          --transport heads --ring-heads 8
      hf-ring-attention explain --tokens 32k --ranks 4 --model ./folder --json
    """
    if args.ring_heads is not None:
        checked("--ring-heads", check_choices, args.layout, args.transport, args.ranks, args.ring_heads)
    attention = attention_of(args)
    rows = documents_of_lengths(args.documents, args.tokens)
    call = {name: getattr(args, name) for name in ("layout", "transport", "dtype", "batch_size")}
    call |= {"seq_len": args.tokens, "world_size": args.ranks, "heads": args.ring_heads}
    call |= {"causal": not args.bidirectional, "documents": None if rows is None else rows * args.batch_size}
    with spinner(f"planning {args.tokens} tokens over {args.ranks} ranks"):
        figures = checked(None, explain_layers, attention, **call)
    answer: dict[str, Any] = {"model": attention.name or None, "model_type": attention.model_type or None}
    answer |= {name: getattr(args, name) for name in ("tokens", "ranks", "dtype", "batch_size", "ring_heads")}
    answer |= {"causal": not args.bidirectional, "heads": attention.num_heads, "kv_heads": attention.num_kv_heads}
    answer |= {"head_dim": attention.head_dim, "value_dim": attention.value_dim, **figures}
    if args.json:
        print_json(answer)
    else:
        _print_answer(answer)


def attention_of(args: Namespace) -> ModelAttention:
    """Returns the attention that options ask for: a model's, or heads in numbers."""
    pattern = None if args.pattern is None else Pattern.parse(args.pattern)
    if args.model is not None:
        return attention_of_config(args, pattern)
    if args.heads is None or args.head_dim is None:
        raise Refusal("needed are --heads and --head-dim (and --kv-heads, if they are fewer), or --model")
    heads, pattern = (args.heads, key_value_heads(args.heads, args.kv_heads)), pattern or Pattern.exact()
    return ModelAttention("", "", *heads, args.head_dim, args.head_dim, pattern, (pattern,), (0,), (False,))


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
    reason = why_not(attention.model_type, getattr(args, "ranks", 1))
    if reason:
        raise Refusal(reason, "--model")
    return attention


def documents_of_lengths(lengths: list[int] | None, tokens: int) -> Documents | None:
    """Returns one row of documents of these lengths, one behind the other; None for None."""
    if lengths is None:
        return None
    ends = list(itertools.accumulate(lengths, initial=0))
    if ends[-1] > tokens:
        numbers = " + ".join(map(str, lengths))
        raise Refusal(f"a row has {tokens} tokens, and the documents {numbers} = {ends[-1]}", "--documents")
    return (tuple(itertools.pairwise(ends)),)


def key_value_heads(heads: int, kv_heads: int | None) -> int:
    """Returns the number of key/value heads, which must divide the query heads; None for as many."""
    if kv_heads is not None and heads % kv_heads:
        numbers = f"{heads} = {heads // kv_heads} * {kv_heads} + {heads % kv_heads}"
        raise Refusal(f"a number that divides the {heads} query heads was expected, got {numbers}", "--kv-heads")
    return kv_heads or heads


def _print_answer(answer: dict[str, Any]) -> None:
    """Prints facts and reasons, FLOPs, and the bytes of each transport."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, text in _facts(answer):
        grid.add_row(Text(name, style="bold"), Text(text))
    terminal().print(grid, "")
    kinds, step, mixers = answer["layer_kinds"], answer["step"], answer["mixers"]
    flops = [(row["kind"], row["pattern"], len(row["layers"]), *_flop_cells(row)) for row in kinds]
    moved: list[Any] = []
    for row in kinds:
        for name in (name for name in get_args(TransportKind) if f"{name}_bytes" in row):
            mark = " *" * (name == row["transport"])
            moved.append((row["kind"], name + mark, *_byte_cells(row[f"{name}_bytes"])))
    if mixers:
        moved.append(("mixers", f"{mixers['gathers']} *", *_byte_cells(mixers["bytes"])))
    if step["layers"] > 1 or mixers:
        flops.append(("a step", "", step["layers"], *_flop_cells(step)))
        moved.append(("a step", "as chosen *", *_byte_cells(step["bytes"])))
    headings = ("layers", "pattern", "number", "forward", "backward", "imbalance", "of exact")
    notes = ["forward, backward: the busiest rank; imbalance: busiest / mean; of exact: the share of all ranks' FLOPs"]
    print_table("TFLOP of one layer, and of a step", headings, flops, notes, left=2)
    headings = ("layers", "transport", "forward", "backward", "buffers", "of mean")
    notes = ["* marks the chosen transport; of mean: the work of the busiest rank over the mean"]
    print_table("Bytes that the busiest rank receives in one layer, and in a step", headings, moved, notes, left=2)


def _facts(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the lines above the tables, each with its name."""
    ranks, kinds, mixers = answer["ranks"], answer["layer_kinds"], answer["mixers"]
    padding = f", {answer['padding']} of padding" if answer["padding"] else ""
    tokens = f"{short_count(answer['tokens'])} tokens over {ranks} ranks: {answer['tokens_of_a_rank']} each{padding}"
    values = "" if answer["value_dim"] == answer["head_dim"] else f" (values {answer['value_dim']})"
    shape = f"{answer['heads']}/{answer['kv_heads']} heads x {answer['head_dim']}{values}"
    facts = [("model", f"{answer['model']} ({answer['model_type']})")] if answer["model"] else []
    facts.append(("sequence", f"{tokens}, {answer['dtype']}, batch size {answer['batch_size']}"))
    facts.append(("attention", f"{answer['step']['layers']} layer(s), {shape}"))
    facts += [(f"layers, {row['kind']}", layer_numbers(row["layers"])) for row in kinds if answer["model"]]
    if mixers:
        facts.append(("mixers", f"in layers {layer_numbers(mixers['layers'])}{_mixers_in_words(mixers, ranks)}"))
    facts.append(("layout", f"{answer['layout']}: {answer['layout_reason']}"))
    balances = answer["imbalance_of_layouts"].items()
    facts.append(("imbalance", ", ".join(f"{kind} {imbalance:.2f}" for kind, imbalance in balances)))
    facts += [(f"transport, {row['kind']}", f"{row['transport']}: {row['transport_reason']}") for row in kinds]
    if answer["ring_heads"]:
        groups = f"rings between groups: {ranks // answer['ring_heads']} ranks"
        facts.append(("heads", f"exchanged by {answer['ring_heads']} neighbours each; {groups}"))
    return facts


def _mixers_in_words(mixers: dict[str, Any], ranks: int) -> str:
    """Returns the work of a hybrid's mixers over a ring, the end of a sentence."""
    if ranks == 1:
        return ", on one rank"
    sent = short_bytes(mixers["bytes"]["forward_sent"])
    if mixers["gathers"] == "states":
        return f"; states of {mixers['runs_of_a_rank']} runs of each rank pass, {sent} sent a layer"
    return (
        f"; no states pass: each rank gathers whole rows, sends {sent} a layer, and computes them up to its last token: up to "
        f"{mixers['most_work']} times the work of one device in all"
    )


def _flop_cells(row: dict[str, Any]) -> tuple[str, ...]:
    flops = (f"{row[name] / 1e12:.4g}" for name in ("forward_flops", "backward_flops"))
    return (*flops, f"{row['imbalance']:.3f}", f"{row['share_of_exact_flops']:.2%}")


def _byte_cells(figures: dict[str, Any]) -> tuple[str, ...]:
    sizes = (short_bytes(figures[name]) for name in ("forward_received", "backward_received", "buffers"))
    return (*sizes, f"{figures['imbalance']:.2f}" if "imbalance" in figures else "")
