"""Agreement: all ranks have equal values and no error, or all raise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .communicators import Communicator, Message
from .waits import named, naming_errors

#: The errors that refuse a call on one rank, and so end it on all ranks.
REFUSALS = (ValueError, TypeError, AttributeError, IndexError, KeyError, RuntimeError, OSError)

#: Stands for the digest of a rank that has not come.
_AWAITED = -1
#: What all ranks must do if they differ in a value with this name. Where one rank evaluates, three values differ.
_CALLS = "make the same calls in one order: evaluate on every rank, not only on the main process"
_BATCHES = "pass the same: use one data seed, and torch.random.fork_rng() where one rank alone draws numbers"
_REMEDIES = dict.fromkeys(("the call", "whether the model trains", "whether gradients are recorded"), _CALLS)
_REMEDIES |= dict.fromkeys(("input_ids", "labels", "attention_mask"), _BATCHES)


def digest(x: Any) -> str:
    """Returns a short text that ranks compare in place of x: a tensor's shape and checksum, or the checksum of its repr."""
    if not isinstance(x, Tensor):
        return hashlib.sha256(repr(x).encode()).hexdigest()[:12]
    content = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{list(x.shape)} {hashlib.sha256(content.tobytes()).hexdigest()[:12]}"


@lru_cache(maxsize=256)  # all layers of a step, and some batches: packed sequences differ from batch to batch
def _digest_of_call(call: tuple[Any, ...]) -> int:
    return int.from_bytes(hashlib.sha256(repr(call).encode()).digest()[:8], "little", signed=True)


@dataclass
class Agreement:
    """A call that ranks compare: the values that one rank brings to it, and the messages that it gets from it."""

    communicator: Communicator | None
    who: str  # the name of a rank in errors: "rank", or "process" beyond one ring
    call: str
    values: Mapping[str, Any] = field(default_factory=dict)  # must be equal on all ranks, by their names in an error
    message: Any = None  # to the other ranks; messages may differ
    answers: list[Any] = field(default_factory=list)  # the message of each rank, once all have agreed; empty by digest
    digest: int = 0  # stands for the call and its values if ranks compare digests
    late_values: Callable[[], Mapping[str, Any]] = dict  # more values, which are made if the digests differ
    remedies: dict[str, str] = field(default_factory=dict)

    def same(self, name: str, value: Any, remedy: str = "pass the same") -> None:
        """Requires all ranks to have this value; an error says that all must follow the remedy."""
        self.values = {**self.values, name: value}
        self.remedies[name] = remedy

    def settle(self, error: BaseException | None = None) -> None:
        """Checks in one or two small exchanges that all ranks make the same call with equal values and without an error.

        Every agreement begins with the same exchange of 8 bytes, so that ranks in different calls understand each other: unless
        all ranks have one `digest` other than 0, all go on and exchange everything, also their messages.

        Raises:
            ValueError: on every rank, if one has an error or the ranks differ; the message lists the values of the ranks.
            RuntimeError: a rank is gone, or too late.
        """
        communicator, who, plural = self.communicator, self.who, "ranks" if self.who == "rank" else "processes"
        if communicator is None or communicator.world_size == 1:
            if error is not None:
                raise error
            self.answers = [self.message]
            return
        digest = 0 if error is not None else self.digest
        refusal = None if error is None else (type(error).__name__, str(error))
        numbers = torch.full((communicator.world_size,), _AWAITED)

        def late() -> str:
            return named(who, [rank for rank, x in enumerate(numbers.tolist()) if x == _AWAITED])

        where = f"comparing the calls of all {plural}, on {who} {communicator.rank}, in {self.call}"
        with naming_errors(where, late):
            _exchange(communicator, digest, numbers)
            if {*numbers.tolist()} == {digest} != {0}:
                return
            values = {"the call": self.call, **self.values, **self.late_values()}
            reports = communicator.gather_objects((values, refusal, self.message))
        if error is not None:
            raise error
        self._raise_first_refusal([refusal for _, refusal, _ in reports])
        self._raise_first_difference([values for values, _, _ in reports])
        self.answers = [message for _, _, message in reports]

    def _raise_first_refusal(self, refusals: Sequence[tuple[str, str] | None]) -> None:
        """Raises the error of the first rank that has one; refusals are kinds and texts of errors."""
        for rank, refusal in enumerate(refusals):
            if refusal is not None:
                together = "of the ring" if self.who == "rank" else f"of {len(refusals)}"
                raise (NotImplementedError if refusal[0] == "NotImplementedError" else ValueError)(
                    f"{self.who} {rank} {together} refused the call: {refusal[1]}"
                )

    def _raise_first_difference(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Raises an error if ranks that do something else differ; all name the same of many values, which says most."""
        for name in dict.fromkeys([*_REMEDIES, *(name for of_rank in values for name in of_rank)]):
            by_rank = [of_rank.get(name) for of_rank in values]
            if any(value != by_rank[0] for value in by_rank):
                listed = ", ".join(f"{self.who} {rank}: {value}" for rank, value in enumerate(by_rank))
                whom = "ranks of the ring" if self.who == "rank" else "processes"
                remedy = {**_REMEDIES, **self.remedies}.get(name, "pass the same")
                raise ValueError(f"the {whom} disagree on {name}: {listed}; all must {remedy}")


@contextmanager
def agreement(communicator: Communicator | None, who: str, call: str, by_digest: bool = False) -> Iterator[Agreement]:
    """Collects the values and an error of this rank in a call, and then raises on all ranks or on none (`Agreement.settle`).

    with ring.agreement("a product") as call:
        check(x)                                # an error here is raised on all ranks
        call.same("the shape of x", x.shape)    # and so is one for a difference
    """
    agreed, error = Agreement(communicator, who, call), None
    try:
        yield agreed
    except REFUSALS as refusal:
        error = refusal
    if by_digest and communicator is not None and communicator.world_size > 1:
        agreed.digest = _digest_of_call((call, *agreed.values.items()))
    agreed.settle(error)


class Calls:
    """The calls of one rank of a ring so far, and their comparison with the calls of the other ranks.

    Before every call, each rank compares 8 bytes with each other rank. This holds for repeated calls too: another rank may
    refuse this call or do something else, and would leave this rank waiting for rows that never come. The bytes travel between
    CPUs (`ProcessGroupCommunicator`), so nobody waits for a device.
    """

    def __init__(self, communicator: Communicator | None) -> None:
        self._communicator, self._alone = communicator, communicator is None or communicator.world_size == 1
        #: The number of calls whose gradients were recorded; it is equal on all ranks, since they compare their calls.
        self._count = 0
        #: The call that the ranks have just compared, and that comes next.
        self.compared: Any = None

    def compare(self, call: str, values: Callable[[], Mapping[str, Any]] = dict, digest: int = 0) -> None:
        """Checks that all ranks make this call with equal values; 0 if their digest is not known yet."""
        if not self._alone:
            digest = digest or _digest_of_call((call, *values().items()))
            Agreement(self._communicator, "rank", call, digest=digest, late_values=values).settle()

    def next_number(self) -> int:
        """Returns the number of a call among those that recorded gradients; 0 for a ring of one rank."""
        if self._alone:
            return 0
        self._count += 1
        return self._count

    def take_back(self, number: int) -> None:
        """Takes back the last number, because the ranks disagree on its call."""
        self._count -= bool(number)

    def compare_backward(self, number: int) -> None:
        """Checks, as the first act of a call's backward pass, that all ranks run the backward pass of this call.

        Backward passes in different orders would exchange each other's gradients.
        """
        if number:
            self.compare(f"the backward pass of call {number}, of those that recorded gradients", digest=number)


def _exchange(communicator: Communicator, number: int, numbers: Tensor) -> None:
    """Fills in the numbers [p] of all ranks, each sent directly, so that an error names a missing rank."""
    numbers[communicator.rank] = number
    others = [*map(Message, range(len(numbers)), numbers.split(1))]
    own = others.pop(communicator.rank)
    communicator.exchange([Message(rank, own.tensor) for rank, _ in others], others)()
