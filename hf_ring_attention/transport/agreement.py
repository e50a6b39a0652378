"""Agreement: all ranks come with equal values and without an error, or all raise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .communicators import Communicator


def digest(x: Any) -> str:
    """What ranks compare instead of a tensor: its shape and a checksum of its content; of other things, of their text."""
    if not isinstance(x, Tensor):
        return hashlib.sha256(repr(x).encode()).hexdigest()[:12]
    content = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{list(x.shape)} {hashlib.sha256(content.tobytes()).hexdigest()[:12]}"


class Agreement:
    """What one rank brings to an agreement, and what it learns from it.

    Attributes:
        values: what must be equal on all ranks, by the name that an error gives it.
        told: something for the other ranks, which may differ.
        answers: what each rank told, once all have agreed.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.told: Any = None
        self.answers: list[Any] = []

    def same(self, name: str, value: Any) -> None:
        """Asks all ranks to have this value."""
        self.values[name] = value


#: What a wrong call may end in on one rank, and what then ends all of them.
_REFUSALS = (ValueError, TypeError, AttributeError, IndexError, KeyError, RuntimeError)


@contextmanager
def agreement(settle: Callable[[Mapping[str, Any], Exception | None, Any], list[Any]]) -> Iterator[Agreement]:
    """Collects an error of this rank, lets all ranks compare what they came with, and raises on every rank or on none.

        with ring.agreement() as call:
            check(x)                                # an error here ends all ranks
            call.same("the shape of x", x.shape)    # and so does a difference

    Args:
        settle: compares (values, error, told) of all ranks, and returns what each told: `agree`, or `Calls.agree`.

    Raises:
        ValueError: on every rank, if one came with an error or the ranks differ.
    """
    call, error = Agreement(), None
    try:
        yield call
    except _REFUSALS as refused:
        error = refused
    call.answers = settle(call.values, error, call.told)


def agree(
    communicator: Communicator | None,
    who: str,
    values: Mapping[str, Any],
    error: BaseException | None,
    tell: Any = None,
) -> list[Any]:
    """Checks that all ranks came with equal values and without an error; one small exchange.

    Args:
        communicator: None for a process alone.
        who: what an error calls a rank.
        values: what must be equal, by the name an error gives it.
        error: what this rank came with, raised on all.
        tell: something for the other ranks, which may differ.

    Returns:
        What each rank tells.

    Raises:
        ValueError: on every rank, if a rank came with an error or the ranks differ; says which rank has which value.
    """
    if communicator is None or communicator.world_size == 1:
        if error is not None:
            raise error
        return [tell]
    message = None if error is None else (type(error).__name__, str(error))
    said = communicator.gather_objects((dict(values), message, tell))
    if error is not None:
        raise error
    refusals = {rank: message for rank, (_, message, _) in enumerate(said) if message is not None}
    together = "of the ring" if who == "rank" else f"of {communicator.world_size}"
    if refusals:
        rank, (kind, text) = min(refusals.items())
        raise (NotImplementedError if kind == "NotImplementedError" else ValueError)(
            f"{who} {rank} {together} refused the call: {text}"
        )
    for name in values:
        by_rank = [theirs.get(name) for theirs, _, _ in said]
        if any(value != by_rank[0] for value in by_rank):
            listed = ", ".join(f"{who} {rank}: {value}" for rank, value in enumerate(by_rank))
            whom = "ranks of the ring" if who == "rank" else "processes"
            raise ValueError(f"the {whom} disagree on {name}: {listed}; all must pass the same")
    return [told for _, _, told in said]
