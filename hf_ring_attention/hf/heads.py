"""The heads of language models: forms a few logits in a call of the model, and finds the change that the model makes to them.

A head makes logits [B, n, vocabulary], which are often the largest tensor of all. So a call may be watched: its output
layer gets one or two tokens of each batch row, the hidden states of all tokens are stored, and the watcher forms the logits
in slices. The few logits of the call show what the model does to logits after its output layer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig

from ..compute.private import version_of
from .forward_pass import Head, running, running_with

#: The names in configs for a number by which models multiply their logits, or divide them, and at which tanh caps them.
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")

#: The types that multiply by what others divide by, and the types that divide hidden states by it, before their output layer.
_MULTIPLYING = ("hyperclovax",)
_DIVIDING_BEFORE = ("minicpm3",)

#: torch gives hooks numbers, and two threads at a time could get the same one.
_HOOKING = threading.Lock()


class HeadCall:
    """A call of a model whose output layer is watched; without an output layer, nothing is."""

    #: Whether all other hooks run inside ours, because the calls for slices run them again.
    outside_of_hooks = True

    def __init__(self, output: nn.Module | None) -> None:
        self.output = output
        #: [B, n, width] the hidden states that the output layer was called with: this rank's part of whole rows.
        self.hidden: Tensor | None = None
        #: [B, 1 or 2, rows of the output layer] its results for the few tokens; and the same behind the hooks of others.
        self.plain: Tensor | None = None
        self.returned: Tensor | None = None
        #: What the model does that a causal language model does not.
        self.unsuited: str | None = None
        self._probe: Tensor | None = None
        self._version = 0
        self._autocast: torch.dtype | None = None
        self._handles: list[RemovableHandle] = []

    def watch(self) -> None:
        """Hooks the output layer, until `unwatch`; the hooks act in this call alone."""
        if self.output is not None:
            with _HOOKING:
                self._handles = [
                    self.output.register_forward_pre_hook(_before_output, prepend=self.outside_of_hooks),
                    self.output.register_forward_hook(_after_output, prepend=not self.outside_of_hooks),
                    self.output.register_forward_hook(_after_output),
                ]

    def unwatch(self) -> None:
        """Removes the hooks."""
        with _HOOKING:
            for handle in self._handles:
                handle.remove()

    def keep(self, hidden: Tensor) -> Tensor:
        """Stores all hidden states, and returns the hidden states of a few tokens, with which the model goes on."""
        if hidden is self._probe:  # Another thread has hooked the output layer too.
            return hidden
        if self.hidden is not None or self.unsuited is not None:
            self.unsuited = "calls its output layer several times"
            return hidden
        if hidden.dim() != 3:
            self.unsuited = f"calls its output layer with hidden states {list(hidden.shape)}, not [rows, tokens, width]"
            return hidden
        device = hidden.device.type
        self._autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        # Hidden states of padding may be 0, and every head gives them the same logits. So it goes on with the two largest
        # of each batch row, [B, 1 or 2, width]: two tokens show whether all have one scale.
        largest = hidden.detach().norm(dim=-1).topk(min(2, hidden.shape[1]), dim=1).indices
        self.hidden, self._probe = hidden, hidden.detach().gather(1, largest[..., None].expand(-1, -1, hidden.shape[2]))
        return self._probe

    def keep_plain(self, plain: Tensor) -> None:
        """Stores what the output layer returned, to be compared with the model's logits."""
        # Tensors made in inference mode do not count their changes, so a copy is compared instead.
        self.plain = plain.clone() if plain.is_inference() else plain
        self._version = version_of(self.plain)

    @property
    def plain_is_intact(self) -> bool:
        """Whether the model has not written into what its output layer returned."""
        return self.plain is not None and version_of(self.plain) == self._version

    def head(self, logits: Tensor, config: PretrainedConfig) -> Head | None:
        """Returns the function that makes logits of hidden states; None if the config does not name what the model does.

        It must give the model's own logits [B, 1 or 2, vocabulary] for the few tokens. Models scale and cap in the dtype of
        their output layer or in a larger one, and may leave out logits beyond their vocabulary. A compiled model rounds
        elsewhere, so a few logits may be off by their last bit.
        """
        output, named = self.output, named_change(config)
        if output is None or self.plain is None or self.unsuited is not None or not self.plain_is_intact:
            return None
        plain, logits = self.plain.detach(), logits.detach()
        width, dtype = logits.shape[-1], logits.dtype
        if plain.shape[:-1] != logits.shape[:-1] or width > plain.shape[-1]:
            return None
        autocast = partial(torch.autocast, plain.device.type, dtype=self._autocast, enabled=self._autocast is not None)
        eps, rounding = torch.finfo(dtype).eps, 16 * min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        for inner in (plain.dtype, dtype, torch.promote_types(plain.dtype, torch.float32)):

            def change(x: Tensor, inner: torch.dtype = inner) -> Tensor:
                return named(x[..., :width].to(inner)).to(dtype)

            close = partial(torch.isclose, change(plain).double(), logits.double(), atol=0, equal_nan=True)
            if bool(close(rtol=max(1.01 * eps, rounding)).all() & (close(rtol=rounding).double().mean() > 0.9)):

                def head(hidden: Tensor, change: Head = change) -> Tensor:
                    with autocast():
                        return change(output(hidden))

                return head
        return None


@contextmanager
def watched(output: nn.Module | None) -> Iterator[HeadCall]:
    """A context for one call of a model, whose output layer leaves its hidden states in the `HeadCall` that is yielded."""
    call = HeadCall(output)
    call.watch()
    try:
        with running_with(head=call):
            yield call
    finally:
        call.unwatch()


def _call_of(output: nn.Module) -> HeadCall | None:
    """Returns the running call, if it watches this output layer."""
    now = running()
    call = now.head if now.head is not None or now.forward_pass is None else now.forward_pass.head
    return call if isinstance(call, HeadCall) and call.output is output else None


# torch.compile keeps the hooks of the first call. So these are the same functions in all calls, and look up what runs.
@torch.compiler.disable(reason="it asks what is watched in this thread")
def _before_output(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    call = _call_of(module)
    return None if call is None or not args else (call.keep(args[0]), *args[1:])


@torch.compiler.disable(reason="it asks what is watched in this thread")
def _after_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    call = _call_of(module)
    if call is not None and call.hidden is not None and call.unsuited is None:
        if call.plain is None:
            call.keep_plain(output)
        call.returned = output


def unchanged(x: Tensor) -> Tensor:
    """The change of most models to the logits of their output layer: none."""
    return x


def named_change(config: PretrainedConfig) -> Head:
    """Returns what a model does to the logits of its output layer, by the scales and caps that its config names."""
    text = config.get_text_config()

    def numbers(names: tuple[str, ...]) -> list[float]:
        values = [getattr(text, name, None) for name in names]
        return [float(x) for x in values if isinstance(x, (int, float)) and not isinstance(x, bool) and x != 0]

    factor, divisor, caps = math.prod(numbers(_FACTORS)), math.prod(numbers(_DIVISORS)), numbers(_CAPS)
    if text.model_type in _MULTIPLYING:
        factor, divisor = factor * divisor, 1.0
    elif text.model_type in _DIVIDING_BEFORE:
        divisor = 1.0
    if factor == divisor == 1 and not caps:
        return unchanged

    def change(x: Tensor) -> Tensor:
        x = x if factor == 1 else x * factor
        x = x if divisor == 1 else x / divisor
        for cap in caps:
            x = torch.tanh(x / cap) * cap
        return x

    return change
