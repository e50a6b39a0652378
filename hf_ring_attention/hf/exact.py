"""Exact attention for single forward passes: what a patched model computes without its pattern."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .forward_pass import running, running_with
from .wrappers import inner_model


@contextmanager
def exact_attention(model: nn.Module) -> Iterator[None]:
    """A context in which a patched model attends as it did before it had patterns: exactly, and by its layers' own windows.

    Other threads, and other tasks of asyncio, are not affected. Shards of a ring keep the layout of the model's own pattern.
    Gradients are not recorded, because a backward pass recomputes layers (gradient checkpointing) outside of the context.

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
    config = inner_model(model, "exact_attention").config.get_text_config()
    with running_with(exact=(*running().exact, config)), torch.no_grad():
        yield


def attends_exactly(config: Any) -> bool:
    """Returns whether the running pass of the model with this config is to ignore its patterns."""
    exact = any(other is config for other in running().exact)
    if exact and torch.is_grad_enabled():
        raise ValueError(
            "exact_attention: gradients are recorded, and a backward pass would recompute layers with the model's own pattern: "
            "compute without gradients, or patch the model with 'exact'"
        )
    return exact
