"""The calls of a rank, which all ranks of a ring make alike: compared in forward, and again in backward."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..transport.agreement import agree
from ..transport.communicators import Communicator

#: The values that a rank remembers: those of all layers of a step, and of some batches.
_MOST_REMEMBERED = 256


class Calls:
    """The calls of one rank so far, and their comparison with those of the other ranks.

    Every call compares 8 bytes with each other rank before it begins: a rank that makes a call it has made before must learn
    that another one refused it or does something else, or it would wait for rows that never come. The bytes travel between
    CPUs (`ProcessGroupCommunicator`), so nobody waits for another device.

    Args:
        communicator: reaches the other ranks; None for a rank alone, which compares nothing.
    """

    def __init__(self, communicator: Communicator | None) -> None:
        self._communicator = communicator
        #: The digests of calls and their values, those used longest ago first.
        self._digests: OrderedDict[Any, int] = OrderedDict()
        #: The number of calls whose gradients were recorded; it is equal on all ranks, as they compare their calls.
        self._count = 0

    def agree(self, call: str, values: Mapping[str, Any], error: Exception | None) -> list[Any]:
        """Checks that all ranks make this call with equal values and without an error.

        Raises:
            ValueError: on every rank, if one came with an error or the ranks differ.
        """
        if self._communicator is None or self._communicator.world_size == 1:
            return agree(None, "rank", call, values, error)
        return agree(self._communicator, "rank", call, values, error, digest=self.digest(call, values))

    def digest(self, call: str, values: Mapping[str, Any]) -> int:
        """Returns the number that stands for a call and its values."""
        key = (call, *values.items())
        digest = self._digests.pop(key, None)
        if digest is None:  # Most calls are those of another layer, or of the step before.
            digest = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little", signed=True)
        self._digests[key] = digest
        if len(self._digests) > _MOST_REMEMBERED:  # Packed sequences differ from batch to batch.
            self._digests.popitem(last=False)
        return digest

    def backward_check(self) -> Callable[[], None] | None:
        """Returns what the backward pass of a call does first, so that it meets that of the same call on all ranks.

        Two backward passes in another order on another rank would exchange each other's gradients.
        """
        if self._communicator is None or self._communicator.world_size == 1:
            return None
        self._count += 1
        return partial(self._check_backward, self._count)

    def _check_backward(self, number: int) -> None:
        call = f"the backward pass of call {number}, of those that recorded gradients"
        agree(self._communicator, "rank", call, {}, None, digest=number)
