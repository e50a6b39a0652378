"""Exact attention for single forward passes: what a patched model computes without its pattern."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .forward_pass import running, running_with
from .wrappers import unwrapped


@contextmanager
def exact_attention(model: nn.Module) -> Iterator[None]:
    """A context in which a patched model attends as it did before it had patterns: exactly, and by its layers' own windows.

    Its weights stay where they are, and other threads, and other tasks of asyncio, are not affected. Shards of a ring keep
    the layout that the model's own pattern has given them. Gradients are not recorded, because a backward pass recomputes
    layers (gradient checkpointing) when the context is gone.

    Args:
        model: a Transformers model, bare or wrapped by DDP, FSDP, DeepSpeed, PEFT or torch.compile.

    Raises:
        ValueError: no Transformers model; or, in a forward pass, gradients that are recorded all the same.

    Example:
        >>> model, ids = ra.patch_model(tiny_llama(), "window:4+2"), torch.arange(1, 33)[None]
        >>> sparse = model(ids).logits
        >>> with ra.exact_attention(model):
        ...     exact = model(ids).logits
        >>> torch.equal(exact, sparse), torch.allclose(exact, tiny_llama()(ids).logits, atol=1e-5)
        (False, True)
    """
    inner = unwrapped(model)
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(
            f"exact_attention: expected a Transformers model, or a wrapper of one, got {type(model).__name__}"
        )
    with running_with(exact=(*running().exact, inner.config.get_text_config())), torch.no_grad():
        yield


def attends_exactly(config: Any) -> bool:
    """Returns whether the running pass of the model with this config is to ignore its patterns.

    Raises:
        ValueError: gradients are recorded.
    """
    exact = any(other is config for other in running().exact)
    if exact and torch.is_grad_enabled():
        raise ValueError(
            "exact_attention: gradients are recorded in this context, and a backward pass that recomputes layers would do so "
            "with the model's own pattern: compute without gradients inside, or patch the model with 'exact'"
        )
    return exact
