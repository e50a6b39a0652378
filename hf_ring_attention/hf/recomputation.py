"""Lets checkpointed layers, which repeat their forward pass in backward, find the `ForwardPass` in which they ran first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from ..compute.private import checkpointing_of, set_checkpointing
from .forward_pass import with_forward_pass


def remember_for_recomputation(model: PreTrainedModel) -> None:
    """Makes layers that recompute their forward pass in backward find the documents of the pass that they repeat."""
    if not torch.is_grad_enabled():  # There will be no backward.
        return
    for module in model.modules():
        checkpoint = checkpointing_of(module)
        if checkpoint is not None and not isinstance(checkpoint, _Remembering):
            set_checkpointing(module, _Remembering(checkpoint))


class _Remembering:
    """A function that checkpoints others, and sets for their recomputation the `ForwardPass` in which they ran first."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(with_forward_pass(function), *args, **kwargs)
