"""The time of one layer's attention by each transport, from the plan and two assumed speeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .explain import Explanation

#: The backward pass takes this many times the operations of the forward pass (FlashAttention, arXiv 2205.14135).
BACKWARD = 2.5


class LayerTime(NamedTuple):
    """Seconds of the busiest rank, forward and backward."""

    computing: float
    moving: float
    hidden: float  # of `moving`: while the rank computes

    @property
    def total(self) -> float:
        return self.computing + self.moving - self.hidden


def time_of_layer(call: Explanation, transport: str, *, flops: float, bandwidth: float) -> LayerTime:
    """Returns the time of an explained call by a transport, at `flops` operations and `bandwidth` bytes a second.

    Links carry messages both ways at once. All messages of the ring travel while it computes. The collective's keys and
    values travel while a rank computes with its own, and its gradients afterwards. With heads, the first piece arrives and the
    last one leaves while nothing is computed.
    """
    moved, shares = call.busiest(transport), call.ranks
    mean = sum(share.forward_flops for share in shares) / len(shares) / flops
    forward = mean * call.balance[transport]
    computing = [forward, BACKWARD * forward]
    moving = [max(way) / bandwidth for way in (moved.forward, moved.backward)]
    if transport == "ring":
        hidden = [*map(min, moving, computing)]
    elif transport == "collective":
        own = min(share.own_flops for share in shares) / flops
        hidden = [min(moving[0], own), min(moving[0], BACKWARD * own)]
    else:
        behind = 1 - 1 / call.pieces_of_heads
        hidden = [min(behind * of_pass, rest) for of_pass, rest in zip(moving, computing)]
    return LayerTime(sum(computing), sum(moving), sum(hidden))


def compared(call: Explanation, times: dict[str, LayerTime], link: str) -> str:
    """Returns one sentence that compares the transports by their times over a link and by their buffers."""
    chosen = call.decision.choice

    def described(name: str) -> str:
        return f"{name} {1e3 * times[name].total:.3g} ms and {call.busiest(name).buffers / 2**20:.4g} MiB"

    others: Sequence[str] = [name for name in times if name != chosen]
    if chosen not in times:
        return f"{chosen}: nothing moves"
    return f"over {link}, {described(chosen)} a layer, as chosen; {'; '.join(map(described, others))}"
