"""The calls of a rank, which all ranks of a ring make alike: compared in forward, and again in backward."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..transport.agreement import agree
from ..transport.communicators import Communicator, Message

#: The values that a rank remembers: those of all layers of a step, and of some batches.
_MOST_REMEMBERED = 256


class Calls:
    """The calls of one rank so far, and their comparison with those of the other ranks.

    Args:
        communicator: reaches the other ranks; None for a rank alone, which compares nothing.
    """

    def __init__(self, communicator: Communicator | None) -> None:
        self._communicator = communicator
        #: The digests of values that were agreed on, those used longest ago first: the same ones on all ranks.
        self._digests: OrderedDict[Any, int] = OrderedDict()
        #: The number of calls whose gradients were recorded; it is equal on all ranks, as they compare their calls.
        self._count = 0
        #: The number of the call whose backward pass ran last; None if a call was recorded since.
        self._last_backward: int | None = None

    def agree(self, values: Mapping[str, Any], error: Exception | None, device: torch.device) -> list[Any]:
        """Checks that all ranks came with equal values and without an error.

        It costs 8 bytes a rank on the CPU, and nothing on other devices once values were agreed on.

        On the CPU every call compares digests first: a rank that makes a call it has made before then learns that
        another one came with something else, where it would have waited for rows that never come. On other devices the
        comparison would have to wait for the device, so it is made once for equal values.

        Raises:
            ValueError: on every rank, if one came with an error or the ranks differ.
        """
        if self._communicator is None or self._communicator.world_size == 1:
            return agree(None, "rank", values, error)
        key = tuple(values.items())
        if device.type == "cpu":
            digest = self._digests.get(key)
            if digest is not None:
                self._digests.move_to_end(key)
            else:
                digest = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little", signed=True)
                self._remember(key, digest)
            self._compare(0 if error is not None else digest, values, error)
        elif error is not None or key not in self._digests:
            agree(self._communicator, "rank", values, error)
            self._remember(key, 0)
        else:
            self._digests.move_to_end(key)
        return []

    def _remember(self, key: Any, digest: int) -> None:
        self._digests[key] = digest
        if len(self._digests) > _MOST_REMEMBERED:  # Packed sequences differ from batch to batch.
            self._digests.popitem(last=False)

    def _compare(self, number: int, values: Mapping[str, Any], error: Exception | None = None) -> None:
        """Goes on if all ranks came with this number and without an error; otherwise `agree` says what differs."""
        others = self._from_others(torch.tensor([number]))
        if error is not None or any(other != number for other in others):
            agree(self._communicator, "rank", values, error)

    def backward_check(self, device: torch.device) -> Callable[[], None] | None:
        """Returns what the backward pass of a call does first, so that it meets that of the same call on all ranks.

        Two backward passes in another order on another rank would exchange each other's gradients. On the CPU ranks
        compare the number of the call, 8 bytes each. On other devices a comparison has to wait for the device, so ranks
        compare each step from one backward pass to the next only once, by how many calls the two lie back: nothing in a
        training loop after its first step. A rank that leaves that order later compares alone, and ends by the process
        group's timeout.
        """
        if self._communicator is None or self._communicator.world_size == 1:
            return None
        self._count += 1
        self._last_backward = None
        return partial(self._check_backward, self._count, device)

    def _check_backward(self, number: int, device: torch.device) -> None:
        if device.type == "cpu":
            self._compare(number, {"the call": f"the backward pass of call {number}, of those that recorded gradients"})
            return
        last = self._last_backward
        before = "a forward pass" if last is None else f"that of the call {self._count - last} before it"
        self._last_backward = number
        call = f"the backward pass of the call {self._count - number} before the last, after {before}"
        self.agree({"the call": call}, None, device)

    def _from_others(self, own: Tensor) -> list[int]:
        """Returns a number of every rank, from each directly, so that an error names a rank that does not come."""
        assert self._communicator is not None
        numbers = [
            torch.empty_like(own) if rank != self._communicator.rank else own
            for rank in range(self._communicator.world_size)
        ]
        others = [rank for rank in range(self._communicator.world_size) if rank != self._communicator.rank]
        try:
            self._communicator.exchange(
                [Message(rank, own) for rank in others], [Message(rank, numbers[rank]) for rank in others]
            ).wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"comparing the calls of all ranks, on rank {self._communicator.rank}: {error}"
            ) from error
        return [int(number) for number in numbers]
