"""`hf-ring-attention explain`: the choices with their reasons, FLOPs, bytes and balance of attention, before it runs."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..cost.cache import CacheBytes, sum_of_caches
from ..cost.explain import Explanation, LayerTime, number_bytes, time_of_layer
from ..cost.layers import ModelAttention, ModelMixers, StepExplanation, explain_layers
from ..hf.model.models import why_not
from ..plan.choices import check_choices
from ..plan.patterns import Pattern
from ..plan.problem import Documents
from ..plan.traffic import RankTraffic, short_bytes
from .options import Parser, Refusal, at_least, checked
from .output import MOST_SHOWN, layer_numbers, plural, print_table, short_count, short_number, terminal, wrote_json

#: Another transport is named if it is at least this many times as fast.
WORTH_ANOTHER = 1.1
#: The times of a layer by each transport, over each link.
Times = dict[str, list[LayerTime]]


def add_explain(parser: Parser) -> None:
    parser.add_row()
    parser.add_pattern("A pattern, or calibration.json of --model (default: the model's, else exact).", file=True)
    parser.add_model("Take heads and layers from this model's config.json.")
    parser.add_heads()
    add = parser.add_argument
    parser.add_choice("--dtype", ("float32", "bfloat16", "float16", "float64"), "Data type", "bfloat16")
    add("--batch-size", metavar="N", type=at_least(1), default=1, help="Rows in a batch (default 1).")
    add("--bidirectional", action="store_true", help="Let queries also see later keys.")
    parser.add_speeds()
    parser.add_transport()
    parser.add_json()


def explain_command(args: Namespace) -> None:
    """Show what attention over a ring would do: layout, transport, FLOPs and bytes.

    It runs no attention and loads no weights.

    Examples:
      hf-ring-attention explain --tokens 128k --ranks 8 --model Qwen/Qwen3-8B
      hf-ring-attention explain --tokens 1M --ranks 8 --pattern pyramid:512,3 \\
          --heads 32 --kv-heads 8 --head-dim 128
      hf-ring-attention explain --tokens 1M --ranks 16 --model ./folder \\
          --transport heads --ring-heads 8
    """
    if args.ring_heads is not None:
        checked("--ring-heads", check_choices, args.layout, args.transport, args.ranks, args.ring_heads)
    attention = attention_of(args)
    rows = documents_of_lengths(args.documents, args.tokens)
    call = {name: getattr(args, name) for name in ("layout", "transport", "dtype", "batch_size")}
    call |= {"seq_len": args.tokens, "ring_size": args.ranks, "heads": args.ring_heads}
    call |= {"causal": not args.bidirectional, "documents": None if rows is None else rows * args.batch_size}
    step = checked(None, explain_layers, attention, **call)
    times = [_times(args, call) if args.ranks > 1 else {} for _, call in step.calls]
    if wrote_json(_figures(attention, step, times, args.gbps), args.json):
        return
    facts = _facts(args, attention, step)
    if args.ranks == 1:
        _print_step(step, facts)
    else:
        _print_step(step, [*facts, *_comparisons(args, step, times)])
        _print_times(args, step, times)


def _times(args: Namespace, call: Explanation) -> Times:
    """Returns the times of a layer by each transport, over each link."""
    speeds = [{"flops": args.tflops * 1e12, "bandwidth": link * 1e9 / 8} for link in args.gbps]
    return {name: [time_of_layer(call, name, **speed) for speed in speeds] for name in call.balance}


def _comparisons(args: Namespace, step: StepExplanation, times: list[Times]) -> Iterator[tuple[str, str]]:
    """Yields a line for each pattern, with its name, that compares the transports over the last link."""
    for (_, call), of_pattern in zip(_shown(step), times):
        last = {name: of_links[-1] for name, of_links in of_pattern.items()}
        pattern = f"{call.name}: " * (len(step.calls) > 1)
        yield "times", pattern + compared(call, last, f"{args.gbps[-1]:g} Gbit/s")


def compared(call: Explanation, times: dict[str, LayerTime], link: str) -> str:
    """Returns one sentence that compares the transports by their times over a link and by their buffers."""
    chosen, fastest = call.decision.choice, min(times, key=lambda name: times[name].total)
    if chosen not in times:
        return f"{chosen}: nothing moves"

    def described(name: str) -> str:
        return f"{name} {short_number(1e3 * times[name].total)} ms with buffers of {short_bytes(call.busiest(name).buffers)}"

    others = "; ".join(described(name) for name in times if name != chosen)
    text, ratio = (
        f"a layer over {link}: {described(chosen)}, as chosen{'; ' * bool(others)}{others}",
        times[chosen].total / times[fastest].total,
    )
    if ratio < WORTH_ANOTHER:
        return text
    return f"{text}; auto does not know the links: over these, --transport {fastest} is {ratio:.1f} times as fast"


def _print_times(args: Namespace, step: StepExplanation, times: list[Times]) -> None:
    headings = ["pattern", "transport", "computing"]
    for link in args.gbps:
        headings += [f"{link:g} Gbit/s", "hidden"]
    rows: list[list[Any]] = []
    for (_, call), of_pattern in zip(_shown(step), times):
        for name, of_links in of_pattern.items():
            rows.append([call.name, name + " *" * (name == call.decision.choice), *_time_cells(of_links)])
    # Where nothing moves, all transports take the same time.
    chosen = [of.get(call.decision.choice, next(iter(of.values()))) for (_, call), of in zip(step.calls, times)]
    counts = [len(layers) for layers, _ in step.calls]
    sums = [
        LayerTime(*(sum(n * x for n, x in zip(counts, column)) for column in zip(*of_link))) for of_link in zip(*chosen)
    ]
    rows.append(["a step", "as chosen *", *_time_cells(sums)])
    notes = [
        "hidden: the share of message time during which the rank also computes",
        f"arithmetic from the plan, for devices of {args.tflops:g} TFLOP/s (--tflops) and these links (--gbps)",
    ]
    title = "Milliseconds of one layer, and of a step, forward and backward, of the busiest rank"
    print_table(title, headings, rows, notes, left=2)


def _time_cells(of_links: Sequence[LayerTime]) -> Iterator[str]:
    yield short_number(1e3 * of_links[0].computing)
    for time in of_links:
        yield short_number(1e3 * time.total)
        yield f"{time.hidden / time.moving:.0%}" if time.moving else ""


def _shown(step: StepExplanation) -> list[tuple[list[int], Explanation]]:
    """Returns the patterns that are printed, with the numbers of their layers; none of many."""
    return step.calls if len(step.calls) <= MOST_SHOWN else []


def _figures(attention: ModelAttention, step: StepExplanation, times: list[Times], links: list[float]) -> Any:
    """Returns all figures, as JSON has them: bytes, seconds, and FLOPs of the busiest rank's forward pass."""
    layout, patterns = step.base.layout, []
    for (layers, call), of_pattern in zip(step.calls, times):
        of_layers: dict[str, Any] = {"pattern": str(call.pattern), "layers": layers}
        of_layers |= {"transport": call.decision.choice, "reason": call.decision.reason, "flop_share": call.flop_share}
        of_layers |= {"flops": max(share.forward_flops for share in call.ranks), "imbalance": call.balance}
        of_layers |= {"bytes": {name: call.busiest(name) for name in call.balance}, "seconds": of_pattern}
        patterns.append(of_layers | {"cache": call.cache and asdict(call.cache)})
    figures: dict[str, Any] = {"model": attention.name or None, "tokens": layout.seq_len, "ranks": layout.world_size}
    figures |= {"layout": layout.kind, "reason": step.base.layout_decision.reason, "imbalance": step.base.layouts}
    whole = {"flops": step.flops, "flop_share": step.flop_share, "imbalance": step.imbalance, "bytes": step.traffic}
    mixers = [{"layers": [*kind.layers], "bytes": of_layer} for kind, of_layer in step.mixers]
    return _in_dicts(figures | {"patterns": patterns, "step": whole, "gbps": links, "mixers": mixers})


def _in_dicts(value: Any) -> Any:
    """Returns a value with dicts in place of named tuples, which JSON would write as lists."""
    value = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, dict):
        return {name: _in_dicts(x) for name, x in value.items()}
    return [_in_dicts(x) for x in value] if isinstance(value, list) else value


def attention_of(args: Namespace) -> ModelAttention:
    """Returns the attention that options ask for: a model's, or heads in numbers."""
    if args.model is not None:
        return attention_of_config(args, args.pattern)
    if str(args.pattern).endswith(".json"):
        raise Refusal("a calibration belongs to a model: name that with --model", "--pattern")
    pattern = None if args.pattern is None else Pattern.parse(args.pattern)
    if args.heads is None or args.head_dim is None:
        raise Refusal("give --heads and --head-dim (and --kv-heads, if they are fewer), or --model")
    heads, pattern = (args.heads, key_value_heads(args.heads, args.kv_heads)), pattern or Pattern.exact()
    return ModelAttention("", "", *heads, args.head_dim, args.head_dim, pattern, (pattern,), (0,))


def attention_of_config(args: Namespace, pattern: Pattern | str | None) -> ModelAttention:
    """Returns the attention of --model; refuses models that are not computed on this number of ranks."""
    for option in ("heads", "kv_heads", "head_dim"):
        if getattr(args, option, None) is not None:
            raise Refusal("--model has it already: leave one of them out", f"--{option.replace('_', '-')}")
    from ..cost.models import attention_of_model, load_config  # It loads Transformers, which takes seconds.

    try:
        attention = attention_of_model(load_config(args.model, trust=args.trust_remote_code), args.model, pattern)
    except (ValueError, NotImplementedError) as error:
        raise Refusal(f"{error}; or, for attention alone, give --heads, --kv-heads and --head-dim", "--model") from None
    if reason := why_not(attention.model_type, getattr(args, "ranks", 1)):
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


def _print_step(step: StepExplanation, facts: list[tuple[str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, text in facts:
        grid.add_row(Text(name, style="bold"), Text(text))
    terminal().print(grid, "")
    flops: list[Any] = []
    moved: list[Any] = []
    for layers, call in _shown(step):
        most = max(share.forward_flops for share in call.ranks)
        flops.append((call.name, len(layers), *_flop_cells(most, call)))
        for name, balance in call.balance.items() if len(call.ranks) > 1 else ():
            mark = " *" * (name == call.decision.choice)
            moved.append((call.name, name + mark, *_byte_cells(call.busiest(name)), f"{balance:.2f}"))
    flops.append(("a step", sum(len(layers) for layers, _ in step.calls), *_flop_cells(step.flops, step)))
    for kind, of_layer in step.mixers:
        where = f" {layer_numbers(kind.layers)}" * (len(step.mixers) > 1)
        moved.append((f"mixers{where}", "always *", *_byte_cells(of_layer), ""))
    moved.append(("a step", "as chosen *", *_byte_cells(step.traffic), ""))
    headings = ["pattern", "layers", "TFLOP", "busiest rank / average", "share of exact FLOPs"]
    notes = ["TFLOP of the busiest rank; backward has 2.5 times as many"]
    print_table("Forward FLOPs of one layer, and of a step", headings, flops, notes)
    if len(step.base.ranks) == 1:
        return
    headings = ["pattern", "transport", "forward", "backward", "buffers", "busiest rank / average"]
    notes = ["* marks the chosen transport"]
    print_table("Bytes that the busiest rank receives in one layer, and in a step", headings, moved, notes, left=2)


def _facts(args: Namespace, attention: ModelAttention, step: StepExplanation) -> list[tuple[str, str]]:
    """Returns the lines above the tables, each with its name."""
    layout = step.base.layout
    padding = f", {layout.padded_len - layout.seq_len} of padding" if layout.padded_len > layout.seq_len else ""
    tokens = f"{short_count(args.tokens)} tokens over {plural(args.ranks, 'rank')}: {layout.local_len} each{padding}"
    values = "" if attention.value_dim == attention.head_dim else f" (values {attention.value_dim})"
    facts = [("model", f"{attention.name} ({attention.model_type})")] if attention.name else []
    facts.append(("sequence", f"{tokens}, {args.dtype}, batch size {args.batch_size}"))
    if attention.positions is not None and args.tokens > attention.positions:
        facts.append(("positions", f"{args.tokens} tokens are more than the model's {attention.positions} positions"))
    facts.append(("heads", f"{attention.num_heads}/{attention.num_kv_heads} of {attention.head_dim}{values}"))
    facts += [("layers", f"{layer_numbers(layers)}: {call.name}") for layers, call in _shown(step) if attention.name]
    if not _shown(step):
        facts.append(
            ("layers", f"{len(attention.layers)} with {len(step.calls)} patterns; --json has the figures of each")
        )
    facts += [("mixers", _mixers_in_words(*kind, args.ranks)) for kind in step.mixers]
    facts.append(("layout", f"{layout.kind}: {step.base.layout_decision.reason}"))
    facts.append(("imbalance", ", ".join(f"{kind} {imbalance:.2f}" for kind, imbalance in step.base.layouts.items())))
    facts += _facts_of_transports(step)
    if step.base.cache is not None:
        caches = attention.caches(args.tokens, args.batch_size, number_bytes(args.dtype)[0])
        if 1 < len(caches) <= MOST_SHOWN:
            facts += [("cache", f"{pattern}: {_cache_in_words(size)}") for pattern, (_, size) in caches.items()]
        facts.append(("cache", _cache_in_words(sum_of_caches(size for _, size in caches.values()))))
    return facts


def _facts_of_transports(step: StepExplanation) -> list[tuple[str, str]]:
    """Returns the choice of each pattern with its reason, or of many patterns the layers of each choice."""
    facts = []
    for _, call in _shown(step):
        of_pattern = f"{call.name}: " * (len(step.calls) > 1)
        facts.append(("transport", f"{of_pattern}{call.decision.choice}: {call.decision.reason}"))
    for choice in () if _shown(step) else sorted({call.decision.choice for _, call in step.calls}):
        layers = sorted(layer for layers, call in step.calls for layer in layers if call.decision.choice == choice)
        facts.append(("transport", f"{choice} in layers {layer_numbers(layers)}"))
    return facts


def _cache_in_words(size: CacheBytes) -> str:
    kept = f"{short_bytes(size.kept)} by ra.PatternCache, " if size.kept != size.whole else ""
    return f"{kept}{short_bytes(size.whole)} whole, on one device"


def _mixers_in_words(mixers: ModelMixers, of_layer: RankTraffic, ranks: int) -> str:
    where = f"in layers {layer_numbers(mixers.layers)}"
    if ranks == 1:
        return f"{where}, on one rank"
    sent = f"{short_bytes(of_layer.forward.sent)} sent a layer"
    if mixers.numbers is not None:
        return f"{where}; their states pass from rank to rank, {sent}"
    gathers = f"each rank gathers whole rows, {sent}"
    return f"{where}; {gathers}, and computes up to {ranks} times the work of one device in all"


def _flop_cells(most: int, work: Explanation | StepExplanation) -> tuple[str, ...]:
    return short_number(most / 1e12, 4), f"{work.imbalance:.3f}", f"{work.flop_share:.2%}"


def _byte_cells(traffic: RankTraffic) -> tuple[str, ...]:
    return tuple(map(short_bytes, (traffic.forward.received, traffic.backward.received, traffic.buffers)))
