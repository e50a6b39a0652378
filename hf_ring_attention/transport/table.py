"""The transports by their names: the function that binds a plan, and the class that moves its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..compute.binding import bind_own
from .communicators import Exchanger
from .heads import HeadsTransport, bind_heads
from .schedules import CollectiveBinding, bind_collective, bind_ring
from .transports import CollectiveTransport, LocalTransport, RingTransport, Traffic


class Spec(NamedTuple):
    """A kind of transport."""

    #: (problem, rank, device, joining) -> the rows of tensors for its plan.
    bind: Callable[..., Any]
    #: (binding, communicator, traffic) -> the transport.
    make: Callable[..., Any]


def _collective(
    binding: CollectiveBinding, communicator: Exchanger, traffic: Traffic
) -> CollectiveTransport | LocalTransport:
    """Returns the transport of one exchange, or a local one if no rank needs a row of another."""
    return CollectiveTransport(binding, communicator, traffic) if binding.used else LocalTransport(binding.own)


TRANSPORTS = {
    "local": Spec(bind_own, lambda binding, communicator, traffic: LocalTransport(binding)),
    "collective": Spec(bind_collective, _collective),
    "ring": Spec(bind_ring, RingTransport),
    "heads": Spec(bind_heads, HeadsTransport),
}
