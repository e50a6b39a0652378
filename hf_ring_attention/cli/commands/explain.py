"""`hf-ring-attention explain`: the choices with their reasons, FLOPs, bytes and balance of attention, before it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from ...cost.attention import ModelAttention, ModelMixers
from ...cost.explain import Explanation, busiest_traffic, explain, number_bytes
from ...plan.branches import Segment
from ...plan.choices import check_choices
from ...plan.patterns import Pattern
from ...plan.problem import Documents
from ...plan.state_runs import linked_runs, runs_of
from ...plan.state_traffic import rows_traffic, states_traffic
from ...plan.traffic import RankTraffic
from ..arguments import key_value_heads
from ..options import (
    AnyDtype,
    AsJson,
    Bidirectional,
    DocumentLengths,
    HeadDim,
    KeyValueHeads,
    LayoutName,
    QueryHeads,
    RingHeads,
    RingRanks,
    RowTokens,
    TransportName,
    TrustRemoteCode,
    checked,
    documents_of_lengths,
    model_option,
    number_option,
    pattern_option,
    refuse,
)
from ..output import print_json, spinner
from .explain_tables import print_answer
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
        pattern_option(
            "The pattern of layers without a window of their own: window:512+4, pyramid:512,3, ... "
            "Default: what the model has saved, else exact."
        ),
    ] = None,
    model: Annotated[str | None, model_option("Take heads and layers from its config.json.")] = None,
    heads: QueryHeads = None,
    kv_heads: KeyValueHeads = None,
    head_dim: HeadDim = None,
    layers: Annotated[int, number_option("--layers", "Layers, without --model.")] = 1,
    dtype: AnyDtype = "bfloat16",
    batch_size: Annotated[int, number_option("--batch-size", "Rows at once.")] = 1,
    documents: DocumentLengths = None,
    bidirectional: Bidirectional = False,
    layout: LayoutName = "auto",
    transport: TransportName = "auto",
    ring_heads: RingHeads = None,
    trust_remote_code: TrustRemoteCode = False,
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
    attention = asked_attention(model, wanted, heads, kv_heads, head_dim, layers, ranks, trust_remote_code)

    rows = None if documents is None else documents_of_lengths(documents, tokens) * batch_size
    spans = (((0, tokens),),) * batch_size if rows is None else rows

    def explained(layer_pattern: Pattern, asked_layout: Any) -> Explanation:
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
                documents=rows,
                layout=asked_layout,
                transport=transport,  # type: ignore[arg-type]
                heads=ring_heads,
            )
        except ValueError as error:
            raise refuse(str(error)) from None

    with spinner(f"planning {tokens} tokens over {ranks} ranks"):
        base = explained(attention.base, layout)
        lengths = [tokens] if documents is None else documents
        pairs = sum(n * n if bidirectional else n * (n + 1) // 2 for n in lengths)
        exact = 2 * (attention.head_dim + attention.value_dim) * attention.num_heads * batch_size * pairs
        kinds = _kinds(attention, base, explained, exact)
    call = {"dtype": dtype, "batch_size": batch_size, "causal": not bidirectional, "ring_heads": ring_heads}
    answer = _answer(attention, base, kinds, spans, **call)
    if as_json:
        print_json(answer)
    else:
        print_answer(attention, base, answer)


def asked_attention(
    model: str | None,
    pattern: Pattern | None,
    heads: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    layers: int,
    ranks: int,
    trust: bool = False,
) -> ModelAttention:
    """Returns the attention that options ask for: a model's, or heads in numbers."""
    if model is not None:
        for option, value in (("--heads", heads), ("--kv-heads", kv_heads), ("--head-dim", head_dim)):
            if value is not None:
                raise refuse("--model says it already: leave one of them out", option)
        attention = checked("--model", _attention_of, model, pattern, trust)
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
        numbers=tuple(range(layers)),
        sliding=(False,) * layers,
    )


def _attention_of(model: str, pattern: Pattern | None, trust: bool) -> ModelAttention:
    from ...cost.models import attention_of_model, load_config  # It loads Transformers, which takes seconds.

    try:
        with spinner(f"reading the config of {model}"):
            return attention_of_model(load_config(model, trust=trust), model, pattern)
    except ValueError as error:
        raise ValueError(f"{error}; or, for attention alone, give --heads, --kv-heads and --head-dim") from None


def _kinds(
    attention: ModelAttention, base: Explanation, explained: Callable[[Pattern, Any], Explanation], exact: int
) -> list[LayerKind]:
    """Groups layers by their pattern; all have the layout of the base pattern, as in a model."""
    numbers: dict[tuple[Pattern, bool], list[int]] = {}
    for number, layer_pattern, has_window in zip(attention.numbers, attention.layers, attention.sliding):
        numbers.setdefault((layer_pattern, has_window), []).append(number)
    kinds = []
    for (pattern, sliding), layers in numbers.items():
        answer = base if pattern == attention.base else explained(pattern, base.layout)
        flops = sum(share.forward_flops for share in answer.ranks)
        name = "full"
        if sliding:
            name = "chunked" if isinstance(pattern.branches[0], Segment) else "sliding"
        kinds.append(LayerKind(name, tuple(layers), answer, flops / exact))
    return kinds


def _sizes(traffic: RankTraffic) -> dict[str, int]:
    """Returns bytes by the names that JSON has."""
    return {
        "forward_sent": traffic.forward.sent,
        "forward_received": traffic.forward.received,
        "backward_sent": traffic.backward.sent,
        "backward_received": traffic.backward.received,
        "buffers": traffic.buffers,
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


def _of_mixers(mixers: ModelMixers, base: Explanation, dtype: str, documents: Documents) -> dict[str, Any]:
    """Returns what the mixers of a hybrid do over a ring, by the layout that its attention decides."""
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


def _answer(
    attention: ModelAttention, base: Explanation, kinds: Sequence[LayerKind], documents: Documents, **call: Any
) -> dict[str, Any]:
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
                "groups_that_exchange_heads": {
                    str(size): _sizes(busiest_traffic(traffic)) | {"imbalance": balance}
                    for size, (balance, traffic) in kind.explanation.groups.items()
                },
                **{
                    f"{name}_bytes": _sizes(kind.explanation.busiest(name))
                    | {"row_numbers": numbers, "imbalance": kind.explanation.balance[name]}
                    for name, numbers in kind.explanation.row_numbers.items()
                },
            }
        )
    mixers = None if attention.mixers is None else _of_mixers(attention.mixers, base, call["dtype"], documents)
    flops_of_ranks = [sum(len(k.layers) * k.explanation.ranks[rank].forward_flops for k in kinds) for rank in ranks]
    totals: dict[str, dict[str, int]] = {}
    for transport in ("chosen", *base.row_numbers):
        per_rank = [_added([(len(k.layers), _used(k.explanation, rank, transport)) for k in kinds]) for rank in ranks]
        totals[f"{transport}_bytes"] = {name: max(one[name] for one in per_rank) for name in per_rank[0]}
        if mixers is not None:
            total = totals[f"{transport}_bytes"]
            for name, size in mixers["bytes"].items():
                total[name] = (
                    max(total[name], size) if name == "buffers" else total[name] + len(mixers["layers"]) * size
                )
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
        "imbalance_of_layouts": base.layouts,
        "layer_kinds": layers,
        "mixers": mixers,
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
