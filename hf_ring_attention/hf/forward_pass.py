"""The running call of a patched model, for its masks, layers and head to look up; and calls without its pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compute.private import attentions_are_collected, is_running
from ..plan.layouts import SequenceLayout
from ..plan.problem import Documents
from ..ring.planned import outside
from ..ring.ring import Ring
from .model.config import Patterns, patterns_of
from .model.wrappers import attachment_of, inner_model, ring_of_calls, share_config

#: A function of hidden states [..., width] that gives logits [..., vocabulary].
Head = Callable[[Tensor], Tensor]

#: The loss of a slice, as a sum: of the model's head, hidden states [k, width], labels [k], and the place of these tokens among
#: all tokens of this rank.
SliceLoss = Callable[[Head, Tensor, Tensor, slice], Tensor]

#: The dtype of a number that names the rows of a call inside a graph; other masks have int64 numbers.
NUMBER_IN_GRAPHS = torch.int32

#: The argument of a patched model that takes a `RingCall`.
CALL = "ring_call"


@dataclass(frozen=True)
class RingCall:
    """What a caller of this package adds to a call of a patched model."""

    rows: WholeRows | None = None  # the rows of a batch that is cut already
    of_slice: SliceLoss | None = None  # the loss of a slice of tokens, in place of the cross entropy of next tokens


@dataclass(frozen=True)
class WholeRows:
    """The rows of a batch before they are cut."""

    batch: int
    length: int  # with padding
    documents: Documents | None  # the (start, stop) of each document of each row; None if only the mask describes them
    from_collator: bool = False  # whether a collator described the documents, not positions or the mask
    layout: SequenceLayout | None = None  # how the ranks of the ring divide the rows; None if they are whole
    positions: Tensor | None = field(
        default=None, compare=False, repr=False
    )  # [B or 1, n] or [axes, B, n], once they are cut
    checksum: str = ""  # of the tokens of rows that a loader has cut

    @property
    def packed(self) -> bool:
        """Whether a row holds several documents."""
        return self.documents is not None and any(len(row) > 1 for row in self.documents)

    @property
    def numbers(self) -> Tensor:
        """The number [B, n] of each token's document, from 1; 0 for padding."""
        numbers = torch.zeros(self.batch, self.length, dtype=torch.int64)
        for row, spans in enumerate(self.documents or ()):
            for number, (start, stop) in enumerate(spans, 1):
                numbers[row, start:stop] = number
        return numbers

    @property
    def mask(self) -> Tensor:
        """The mask [B, n] of the tokens that belong to a document."""
        return (self.numbers != 0).to(torch.int64)


@dataclass
class ForwardPass:
    """The facts about a call of a patched model that are known before its decoder runs."""

    runner: Any  # the decoder, whose config the masks and layers have; or a layer that is called outside of its model's call
    module: Any  # the module that was called: a model with its head, its base model, or the decoder of this
    ring: Ring  # the ring of `patch_model`; without it, or with a whole cache, a ring of this process only
    call: RingCall
    patterns: Patterns
    exact: bool = False  # whether its layers attend as they did before the model had patterns
    rows: WholeRows | None = None  # None in a step of generation
    kept: Any = None  # the `PatternCache` of the call; None for other caches
    skipped: tuple[int, ...] = ()  # by layer, as `tokens_skipped` returns it
    ring_cache: Any = None  # the `RingCache` of the call; None for models whose layers attend by ring_dilated
    whole: bool = False  # whether every rank computes whole rows by itself, because the call has a whole cache
    cacheless: bool = False  # whether the caller asked for no cache
    probes: bool = False  # whether layers leave attention out, for `hf/call/probe.py`
    #: Makes what the head gets of this rank's last hidden states [B, n local, width]; None for those of whole rows.
    join_last: Callable[[Tensor], Tensor] | None = None
    origin: Any = None  # the `Origin` of results that are formed when they are used; None if none are
    join_result: Callable[[Any], Any] | None = None  # makes the output of the call of the output for this rank's part
    tokens: list[Any] = field(default_factory=list)  # the facts of its masks, which last as long as it does
    decoder: Any = None  # the decoder while it runs: a replica of it in torch's DataParallel
    attended: bool = False  # whether a layer has attended by ring_dilated
    outer: ForwardPass | None = None  # the call around it
    frame: FrameType | None = None  # the call of the module that makes this pass, while it runs

    @cached_property
    def decides(self) -> tuple[Any, ...]:
        """The facts that decide the calls of attention of all its layers."""
        return outside(self.ring), attentions_are_collected(), self.exact, self.skipped

    @property
    def layout(self) -> SequenceLayout | None:
        return None if self.rows is None else self.rows.layout

    @property
    def documents(self) -> Documents | None:
        return None if self.rows is None else self.rows.documents

    def mark_running(self, runs: bool) -> None:
        """Sets whether this call runs, so that no part of it may begin in a graph."""
        for module in (self.runner, self.module):
            attachment_of(module).runs = runs

    def broken_off(self) -> bool:
        """Whether Ctrl-C interrupted this pass: torch then skips the hooks that would close it."""
        return self.frame is not None and not is_running(self.frame)


class Running(NamedTuple):
    """What runs in a thread or task."""

    forward_pass: ForwardPass | None = None  # the call of a patched model
    on_use: bool = False  # whether hidden states and logits are formed when they are used
    exact: tuple[Any, ...] = ()  # the text configs of the models that attend exactly
    chain: Any = None  # the chain of states along which mixers pass theirs


_RUNNING: ContextVar[Running] = ContextVar("ring_dilated", default=Running())  # noqa: B039


def running() -> Running:
    """Returns what runs in this thread or task."""
    return _RUNNING.get()


@contextmanager
def running_with(**changes: Any) -> Iterator[None]:
    """A context with other values of `Running`; afterwards the values before it are back."""
    token = _RUNNING.set(_RUNNING.get()._replace(**changes))
    try:
        yield
    finally:
        _RUNNING.reset(token)


def set_forward_pass(forward_pass: ForwardPass | None) -> None:
    """Makes this the call of a patched model that runs, until the next one is set."""
    _RUNNING.set(_RUNNING.get()._replace(forward_pass=forward_pass))


@torch.compiler.assume_constant_result  # Graphs ask when they are traced: what was broken off keeps none from beginning.
def drop_broken_passes() -> None:
    """Ends the forward passes of this thread that Ctrl-C broke off."""
    now = running().forward_pass
    while now is not None and now.broken_off():
        now.mark_running(False)
        now = now.outer
    set_forward_pass(now)


def forward_pass_of(config: Any, layer: nn.Module | None = None) -> ForwardPass | None:
    """Returns the running forward pass if its model has this config: an error may have left another one behind.

    Args:
        layer: the layer that asks; a copy of one has a copy of the config, until it asks.
    """
    now = _RUNNING.get().forward_pass
    if now is None or now.runner.config is config:
        return now
    if layer is None or all(module is not layer for module in now.runner.modules()):
        return None
    share_config(now.runner)
    return now


def pass_of_decoder(runner: nn.Module) -> ForwardPass | None:
    """Returns the running forward pass if it is one of this decoder; a teacher may share its config."""
    now = _RUNNING.get().forward_pass
    return now if now is not None and now.runner is runner else None


def new_pass(runner: Any, module: Any = None, call: RingCall = RingCall()) -> ForwardPass:
    """Returns a forward pass that begins, of a decoder, or of a layer that is called outside of its model's call."""
    config, now = getattr(runner, "config", None), running()
    exact = any(other is config for other in now.exact)
    return ForwardPass(runner, module, ring_of_calls(runner), call, patterns_of(config), exact, outer=now.forward_pass)


def number_of(mask: Any) -> int | None:
    """Returns the number in a mask of this package, or in a copy; None for other masks."""
    kinds = (torch.int64, NUMBER_IN_GRAPHS)
    own = isinstance(mask, Tensor) and mask.dim() == 4 and mask.numel() == 1 and mask.dtype in kinds
    return int(mask) if own else None


def names_rows_in_graph(mask: Any) -> bool:
    """Returns whether a mask is the number of the rows of a call inside a graph."""
    return isinstance(mask, Tensor) and mask.dim() == 4 and mask.numel() == 1 and mask.dtype == NUMBER_IN_GRAPHS


@contextmanager
def exact_attention(model: nn.Module) -> Iterator[None]:
    """A context where a patched model attends as it did before it had patterns: exactly, and by its layers' own windows.

    Other threads are not affected, and shards of a ring keep the layout of the model's own pattern. Gradients are not
    recorded, because a backward pass recomputes layers (gradient checkpointing) outside of the context.

    Args:
        model: a Transformers model, bare or wrapped by DDP, FSDP, DeepSpeed, PEFT or torch.compile.

    Raises:
        ValueError: no Transformers model, or gradients that are recorded all the same.

    Example:
        >>> model, ids = ra.patch_model(tiny_llama(), "window:4+2"), torch.arange(1, 33)[None]
        >>> sparse = model(ids).logits
        >>> with ra.exact_attention(model):
        ...     exact = model(ids).logits
        >>> torch.equal(exact, sparse), torch.allclose(exact, tiny_llama()(ids).logits, atol=1e-5)
        (False, True)
    """
    config = inner_model(model, "exact_attention").config.get_text_config()
    with running_with(exact=(*running().exact, config)), torch.no_grad():
        yield
