"""What the running forward pass of a patched model knows before its masks are made."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..plan.layouts import SequenceLayout
from ..plan.problem import Documents, HeldKeys


@dataclass
class ForwardPass:
    """What the forward pass of a patched model knows before its masks are made.

    Either `documents`, and for shards of a row also `layout` and `last_position`, the greatest position id of all ranks;
    or `held`, for a row's last tokens against a sharded cache. `told`: a collator told the documents, which otherwise were
    read from positions. `config`: of the model, whose masks alone are meant; `outer`: the pass inside which this one runs.
    `attended`: a layer has attended by ring_dilated.
    """

    config: Any

    documents: Documents | None = None
    told: bool = False
    layout: SequenceLayout | None = None
    held: HeldKeys | None = None
    last_position: int | None = None
    attended: bool = False
    outer: ForwardPass | None = None


#: The one that runs in this thread; None outside of patched models.
FORWARD_PASS: ContextVar[ForwardPass | None] = ContextVar("ring_dilated_forward_pass", default=None)


def forward_pass_of(config: Any) -> ForwardPass | None:
    """The running forward pass, if it is that of a model with this config: one that was broken off leaves its own behind."""
    running = FORWARD_PASS.get()
    return running if running is not None and running.config is config else None
