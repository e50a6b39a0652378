"""The buffers of attention's exchange over a ring: exact integers from the plans of all ranks, and a bound without a plan."""

from __future__ import annotations

from typing import Any

from ..plan.choices import decide_layout
from ..plan.patterns import Pattern
from .attention import ModelAttention
from .explain import Explanation, explain
from .parts import MemoryPart, TrainingSetting


def exchanges_of_layers(attention: ModelAttention, setting: TrainingSetting) -> dict[Pattern, Explanation]:
    """Returns the attention call of each kind of layer, by its pattern; all layers have the layout of the base pattern."""
    tokens, ranks = setting.seq_len, setting.ring_size
    layout, _ = decide_layout(setting.layout, tokens, ranks, attention.base, None, setting.transport, setting.heads)
    call: dict[str, Any] = {"seq_len": tokens, "world_size": ranks, "layout": layout}
    call |= {name: getattr(attention, name) for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim")}
    call |= {name: getattr(setting, name) for name in ("dtype", "batch_size", "transport", "heads")}
    return {pattern: explain(pattern, **call) for pattern in dict.fromkeys(attention.layers)}


def chosen_buffers(call: Explanation) -> MemoryPart:
    """Returns the most bytes of other ranks that a rank holds by the transport of a call."""
    choice = call.decision.choice
    return buffers_part(choice, call.busiest(choice).buffers, "exact, from the plans of all ranks (plan/traffic.py)")


def buffers_part(transport: str, size: int, source: str) -> MemoryPart:
    """Returns the bytes of other ranks that a rank holds by a transport, as a part of an estimate."""
    return MemoryPart("exchange buffers", size, f"{transport}: {size:,} bytes", source)


def bound_of_buffers(attention: ModelAttention, setting: TrainingSetting) -> MemoryPart:
    """Returns a bound of the buffers of any transport that "auto" takes, without a plan, for searches over many lengths.

    The ring holds at most three payloads and three sets of float32 gradients, of at most the rows of a rank
    (`plan.traffic.ring_traffic`). An exchange of heads holds two pieces, sent and received, of queries, keys and values.
    """
    if setting.ring_size == 1:
        return buffers_part("local", 0, "one rank")
    size, tokens, kv_heads = setting.number_bytes, setting.local_tokens, attention.num_kv_heads
    widths = attention.head_dim + attention.value_dim
    ring = 3 * tokens * kv_heads * widths * (size + 4)
    if setting.transport != "heads":
        return buffers_part("any", ring, "a bound: three payloads with their gradients")
    group = setting.heads or setting.ring_size
    by_heads = 2 * tokens * (attention.num_heads + max(kv_heads, group)) * widths * size * (group - 1) // group
    rings = ring if group < setting.ring_size else 0
    return buffers_part("heads", by_heads + rings, "a bound: pieces of all heads, sent and received")
