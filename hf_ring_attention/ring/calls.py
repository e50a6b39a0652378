"""The calls of a rank, which all ranks of a ring make alike: compared in forward, and again in backward."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..transport.agreement import agree
from ..transport.communicators import Communicator

#: The values that a rank remembers: all layers of a step, and some batches.
_MOST_REMEMBERED = 256


class Calls:
    """The calls of one rank so far, and their comparison with the calls of the other ranks; a rank alone compares nothing.

    Before every call, each rank compares 8 bytes with each other rank. This holds for repeated calls too: another rank may
    refuse this one or do something else, and would leave this rank waiting for rows that never come. The bytes travel between
    CPUs (`ProcessGroupCommunicator`), so nobody waits for a device.
    """

    def __init__(self, communicator: Communicator | None) -> None:
        self._communicator = communicator
        self._alone = communicator is None or communicator.world_size == 1
        #: The digests of calls and their values, the least recently used first.
        self._digests: OrderedDict[Any, int] = OrderedDict()
        #: The number of calls whose gradients were recorded; it is equal on all ranks, since they compare their calls.
        self._count = 0

    def agree(self, call: str, values: Mapping[str, Any], error: Exception | None) -> list[Any]:
        """Checks that all ranks make this call with equal values and without an error."""
        return agree(self._communicator, "rank", call, values, error, digest=self.digest(call, values))

    def digest(self, call: str, values: Mapping[str, Any]) -> int:
        """Returns the number that stands for a call and its values; 0 for a rank alone."""
        if self._alone:
            return 0
        key = (call, *values.items())
        digest = self._digests.pop(key, None)
        if digest is None:  # Most calls repeat an earlier layer, or the step before.
            digest = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little", signed=True)
        self._digests[key] = digest
        if len(self._digests) > _MOST_REMEMBERED:  # Packed sequences differ from batch to batch.
            self._digests.popitem(last=False)
        return digest

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
