"""The running forward pass of a patched model, for its masks and attention layers to look up."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ..plan.layouts import SequenceLayout
from ..plan.problem import Documents, HeldKeys


@dataclass
class ForwardPass:
    """The facts about a forward pass of a patched model that are known before its masks are made.

    Attributes:
        config: the config of the model; the masks of other models are not concerned.
        documents: the documents of each batch row, in the whole sequence where it is sharded.
        from_collator: whether a collator described the documents; otherwise they were read from positions.
        layout: how the sequence is sharded, if it is.
        held: what the cache of this rank holds, where the tokens are the last ones against a sharded cache.
        last_position: the greatest position id of all ranks, for shards.
        attended: whether a layer has attended by ring_dilated.
        outer: the forward pass inside which this one runs.
        frame: the call of the module that makes this pass, while it runs; None afterwards.
    """

    config: Any

    documents: Documents | None = None
    from_collator: bool = False
    layout: SequenceLayout | None = None
    held: HeldKeys | None = None
    last_position: int | None = None
    attended: bool = False
    outer: ForwardPass | None = None
    frame: FrameType | None = None

    def broken_off(self) -> bool:
        """Returns whether Ctrl-C ended the call that makes this pass; torch runs no hooks then that would end the pass."""
        frame = inspect.currentframe()
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is None and self.frame is not None


#: The forward pass that runs in this thread; None outside of patched models.
FORWARD_PASS: ContextVar[ForwardPass | None] = ContextVar("ring_dilated_forward_pass", default=None)


def drop_broken_passes() -> None:
    """Ends the forward passes of this thread that Ctrl-C broke off."""
    running = FORWARD_PASS.get()
    while running is not None and running.broken_off():
        running = running.outer
    FORWARD_PASS.set(running)


def forward_pass_of(config: Any) -> ForwardPass | None:
    """Returns the running forward pass, if it is that of a model with this config; else None.

    A pass that an error broke off stays behind, and is not that of the next model.
    """
    running = FORWARD_PASS.get()
    return running if running is not None and running.config is config else None


def with_forward_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs in the forward pass that runs now, whenever and in whichever thread it is called."""
    running = FORWARD_PASS.get()

    def run(*args: Any, **kwargs: Any) -> Any:
        token = FORWARD_PASS.set(running)
        try:
            return function(*args, **kwargs)
        finally:
            FORWARD_PASS.reset(token)

    return run
