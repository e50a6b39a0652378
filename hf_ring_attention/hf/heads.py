"""The heads of language models: forms only a few logits in a call of the model, and finds what it does to them.

A head makes logits [B, n, vocabulary], which are often the largest tensor of all. So a call may be watched: its output
layer is given one or two tokens of each batch row, the hidden states of all tokens are stored, and the watcher forms the
logits in slices. The few logits of the call tell what the model does to logits after its output layer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..compute.private import remove_hooks, version_of
from .forward_pass import Head, running, running_with

#: The names in configs for a number by which models multiply their logits, or divide them, and at which tanh caps them.
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")

#: The types that multiply by what others divide by.
_MULTIPLYING = ("hyperclovax",)


class HeadCall:
    """A call of a model that is watched.

    Attributes:
        output: the model's output layer; None if it has none, and then nothing is watched.
        hidden: [B, n, width] the hidden states that the output layer was called with: this rank's part of whole rows.
        plain: [B, 1 or 2, rows of the output layer] what the output layer returned for these tokens.
        unsuited: what the model does that a causal language model does not; None if nothing.
    """

    def __init__(self, output: nn.Module | None) -> None:
        self.output = output
        self.hidden: Tensor | None = None
        self.plain: Tensor | None = None
        self.unsuited: str | None = None
        self._version = 0
        self._autocast: torch.dtype | None = None

    def keep(self, hidden: Tensor) -> Tensor:
        """Stores all hidden states, and returns those of the few tokens that the model goes on with."""
        if self.hidden is not None or self.unsuited is not None:
            self.unsuited = "calls its output layer several times"
            return hidden
        if hidden.dim() != 3:
            self.unsuited = f"calls its output layer with hidden states {list(hidden.shape)}, not [rows, tokens, width]"
            return hidden
        self.hidden = hidden
        device = hidden.device.type
        self._autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return probe_of(hidden)

    def keep_plain(self, plain: Tensor) -> None:
        """Stores what the output layer returned, to be compared with the model's logits."""
        # Tensors made in inference mode do not count their changes, so a copy is compared instead.
        self.plain = plain.clone() if plain.is_inference() else plain
        self._version = version_of(self.plain)

    @property
    def expects_plain(self) -> bool:
        """Whether the output layer's result for the few tokens is still to come."""
        return self.hidden is not None and self.plain is None and self.unsuited is None

    @property
    def plain_is_intact(self) -> bool:
        """Whether the model has not written into what its output layer returned."""
        return self.plain is not None and version_of(self.plain) == self._version

    def head(self, logits: Tensor, config: PretrainedConfig) -> Head | None:
        """Returns the function that makes the model's logits of hidden states; None if it cannot be inferred.

        Args:
            logits: the logits that the model returned for its few tokens.
            config: the config of the model.
        """
        output, plain = self.output, self.plain
        if output is None or plain is None or self.unsuited is not None:
            return None
        change = fitting_change(config, plain, logits) if self.plain_is_intact else None
        if change is None:
            return None
        autocast = partial(torch.autocast, plain.device.type, dtype=self._autocast, enabled=self._autocast is not None)

        def head(hidden: Tensor) -> Tensor:
            with autocast():
                return change(output(hidden))

        return head


_LOCK = threading.Lock()
#: How many threads watch an output layer, whose hooks they share.
_WATCHERS: dict[nn.Module, int] = {}


@contextmanager
def watched(output: nn.Module | None) -> Iterator[HeadCall]:
    """A context for one call of a model, which leaves its hidden states in the `HeadCall` that the context yields.

    Args:
        output: the model's output layer.
    """
    call = HeadCall(output)
    with _hooked(output) if output is not None else nullcontext(), running_with(head=call):
        yield call


@contextmanager
def _hooked(output: nn.Module) -> Iterator[None]:
    with _LOCK:
        if output not in _WATCHERS:
            without_hooks(output, _before_watched, _after_watched)
            # These are its first and last hooks, because the calls for slices run all its other hooks again.
            output.register_forward_pre_hook(_before_watched, prepend=True)
            output.register_forward_hook(_after_watched)
        _WATCHERS[output] = _WATCHERS.get(output, 0) + 1
    try:
        yield
    finally:
        with _LOCK:
            _WATCHERS[output] -= 1
            if not _WATCHERS[output]:
                del _WATCHERS[output]
                without_hooks(output, _before_watched, _after_watched)


def without_hooks(module: nn.Module, *functions: Callable[..., Any]) -> None:
    """Removes hooks from a module, such as those that a copy of a module brought along."""
    remove_hooks(module, lambda hook: hook in functions)


@torch.compiler.disable(reason="it asks what is watched in this thread")
def _before_watched(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    call = running().head
    if call is None or call.output is not module or not args:
        return None
    return (call.keep(args[0]), *args[1:])


@torch.compiler.disable(reason="it asks what is watched in this thread")
def _after_watched(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    call = running().head
    if call is not None and call.output is module and call.expects_plain:
        call.keep_plain(output)


def probe_of(hidden: Tensor) -> Tensor:
    """Returns [B, 1 or 2, width]: of hidden states [B, n, width], the two largest of each batch row.

    Hidden states of padding may be 0, of which every head makes the same. Two tokens show whether all have one scale.
    """
    hidden = hidden.detach()
    largest = hidden.norm(dim=-1).topk(min(2, hidden.shape[1]), dim=1).indices
    return hidden.gather(1, largest[..., None].expand(-1, -1, hidden.shape[2]))


# ---- what a model does to logits


def named_change(config: PretrainedConfig) -> Head:
    """Returns what a model does to the logits of its output layer, by the scales and caps that its config names."""
    text = config.get_text_config()
    factor = math.prod(_numbers_of(text, _FACTORS))
    divisor = math.prod(_numbers_of(text, _DIVISORS))
    if text.model_type in _MULTIPLYING:
        factor, divisor = factor * divisor, 1.0
    caps = _numbers_of(text, _CAPS)

    def change(x: Tensor) -> Tensor:
        x = x if factor == 1 else x * factor
        x = x if divisor == 1 else x / divisor
        for cap in caps:
            x = torch.tanh(x / cap) * cap
        return x

    return change


def _numbers_of(config: PretrainedConfig, names: tuple[str, ...]) -> list[float]:
    """Returns the values that a config has for these names, without those that mean that there is none."""
    values = [getattr(config, name, None) for name in names]
    return [float(x) for x in values if isinstance(x, (int, float)) and not isinstance(x, bool) and x != 0]


def fitting_change(config: PretrainedConfig, plain: Tensor, logits: Tensor) -> Head | None:
    """Returns what a model does to the logits of its output layer; None if that is not what its config names.

    Models scale and cap in the dtype of their output layer, or in a larger one. The same bits are expected, but for logits that
    a compiled model rounds elsewhere. Logits beyond a model's vocabulary may be left out.

    Args:
        plain: [..., rows of the output layer] what that returned; logits: [..., vocabulary] the model's own.
    """
    width, dtype = logits.shape[-1], logits.dtype
    if plain.shape[:-1] != logits.shape[:-1] or width > plain.shape[-1]:
        return None
    named, wide = named_change(config), torch.promote_types(plain.dtype, torch.float32)
    changes: list[Head] = [
        lambda x: named(x[..., :width]).to(dtype),
        lambda x: named(x[..., :width].to(dtype)),
        lambda x: named(x[..., :width].to(wide)).to(dtype),
    ]
    with torch.no_grad():
        expected = logits.detach()
        return next((change for change in changes if _equal(change(plain.detach()), expected)), None) or _nearly(
            changes, plain.detach(), expected
        )


def _equal(x: Tensor, y: Tensor) -> bool:
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def _nearly(changes: list[Head], plain: Tensor, logits: Tensor) -> Head | None:
    """Returns the change that gives all logits up to their last bit, and most of them almost exactly; None if none does.

    Compiled models round at other places, so that even the right change is off by a bit in some logits.
    """
    eps = torch.finfo(logits.dtype).eps
    rounding = 16 * min(eps, torch.finfo(torch.float32).eps)
    best, most = None, 0.9
    for change in changes:
        error = (change(plain).double() - logits.double()).abs() / logits.double().abs().clamp_min(1e-30)
        close = float((error <= rounding).double().mean())
        if close > most and float(error.max()) <= max(1.01 * eps, rounding):
            best, most = change, close
    return best
