"""Taps: they see each layer's call of attention, and the gradient of what it computed when that arrives in backward.

A tap lies on the modules of a model and in no context variable, since checkpointed layers run again in backward, where the
context of the forward pass is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...hf.attention import TAP
from ...hf.wrappers import decoder_of


@dataclass(frozen=True)
class TappedCall:
    """A layer's call of `ring_attention`, and what came of it.

    Attributes:
        layer: the number of the layer.
        query: [B, H, n, D]; key: [B, Hkv, n, D]; value: [B, Hkv, n, Dv]: this rank's tokens.
        out: [B, H, n, Dv] what was computed; grad: the gradient of a loss by it.
        settings: the other arguments of the call, its pattern and ring among them.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    grad: Tensor
    settings: dict[str, Any]


#: What a tap does with a call, once its gradient has come; it runs without recording gradients.
Tap = Callable[[TappedCall], None]


@contextmanager
def tapped(model: PreTrainedModel, tap: Tap) -> Iterator[None]:
    """Gives the attention layers of a model a tap, while the context lasts."""
    modules = list(decoder_of(model).modules())
    for module in modules:
        setattr(module, TAP, partial(_through_tap, tap))
    try:
        yield
    finally:
        for module in modules:
            delattr(module, TAP)


def _through_tap(
    tap: Tap, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, out: Tensor, settings: dict[str, Any]
) -> Tensor:
    """Returns the output of a layer's attention, whose gradient the tap will see."""
    layer = getattr(module, "layer_idx", None)
    if layer is None or not out.requires_grad:
        return out
    tapped_out: Tensor = _Tapped.apply(out, query.detach(), key.detach(), value.detach(), tap, layer, settings)
    return tapped_out


class _Tapped(torch.autograd.Function):
    """Returns its input as it is; what the tap needs is saved for backward, where checkpointing makes it again."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, query: Tensor, key: Tensor, value: Tensor, tap: Tap, layer: int, settings: dict[str, Any]
    ) -> Tensor:
        ctx.save_for_backward(out, query, key, value)
        ctx.tap, ctx.layer, ctx.settings = tap, layer, settings
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        out, query, key, value = ctx.saved_tensors
        ctx.tap(TappedCall(ctx.layer, query, key, value, out, grad, ctx.settings))
        return grad, None, None, None, None, None, None
