"""The calls of a rank, which all ranks of a ring make alike: compared in forward, and again in backward."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from ..transport.agreement import agree
from ..transport.communicators import Communicator


class Calls:
    """The calls of one rank so far, and their comparison with the calls of the other ranks; a rank alone compares nothing.

    Before every call, each rank compares 8 bytes with each other rank. This holds for repeated calls too: another rank may
    refuse this one or do something else, and would leave this rank waiting for rows that never come. The bytes travel between
    CPUs (`ProcessGroupCommunicator`), so nobody waits for a device.
    """

    def __init__(self, communicator: Communicator | None) -> None:
        self._communicator = communicator
        self._alone = communicator is None or communicator.world_size == 1
        #: The number of calls whose gradients were recorded; it is equal on all ranks, since they compare their calls.
        self._count = 0

    def agree(self, call: str, values: Mapping[str, Any], error: Exception | None) -> list[Any]:
        """Checks that all ranks make this call with equal values and without an error."""
        return agree(self._communicator, "rank", call, values, error, digest=self.digest(call, values))

    def digest(self, call: str, values: Mapping[str, Any]) -> int:
        """Returns the number that stands for a call and its values; 0 for a rank alone."""
        return 0 if self._alone else _digest((call, *values.items()))

    def compare(self, call: str, values: Mapping[str, Any], digest: int) -> None:
        """Checks that all ranks make this call, whose digest is known."""
        if not self._alone:
            agree(self._communicator, "rank", call, values, None, digest=digest)

    def backward_check(self) -> Callable[[], None] | None:
        """Returns the first act of a call's backward pass: it checks that all ranks run the backward pass of this call.

        Backward passes in different orders would exchange each other's gradients.
        """
        if self._alone:
            return None
        self._count += 1
        call = f"the backward pass of call {self._count}, of those that recorded gradients"
        return partial(self.compare, call, {}, self._count)


@lru_cache(maxsize=256)  # all layers of a step, and some batches: packed sequences differ from batch to batch
def _digest(call: tuple[Any, ...]) -> int:
    return int.from_bytes(hashlib.sha256(repr(call).encode()).digest()[:8], "little", signed=True)
