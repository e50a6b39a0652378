"""The transports by their names: the function that binds a plan, and the class that moves its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..compute.binding import bind_own
from .collective import CollectiveTransport, bind_collective
from .heads import HeadsTransport, bind_heads
from .ring import RingTransport, bind_ring
from .transports import LocalTransport


class Spec(NamedTuple):
    """A kind of transport."""

    bind: Callable[..., Any]  # (problem, rank, device, joining) -> the rows of tensors for its plan
    make: Callable[..., Any]  # (binding, communicator, traffic) -> the transport


TRANSPORTS = {
    "local": Spec(bind_own, lambda binding, communicator, traffic: LocalTransport(binding)),
    "collective": Spec(bind_collective, CollectiveTransport),
    "ring": Spec(bind_ring, RingTransport),
    "heads": Spec(bind_heads, HeadsTransport),
}
