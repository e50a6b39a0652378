"""Layers that every rank of a ring computes for whole rows: attention that neither a pattern nor gathered keys express.

A layer's hidden states are gathered, and its results cut again. So the work of its attention, and no other, is done by every
rank, and its memory is that of one device. Results and gradients are exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_masks_for_generate

from ...compute.private import tree_map
from ...ring.operator import UNTRACEABLE
from ...ring.shards import whole_of
from ..forward_pass import ForwardPass, forward_pass_of
from ..model.config import warn_once
from ..model.types import WHOLE_LAYERS
from ..model.wrappers import by_name, cache_names, class_of_transformers, tokens_in


def attach_whole_layers(decoder: nn.Module) -> None:
    """Has modules of a decoder compute whole rows over a ring, if its type needs it."""
    names = WHOLE_LAYERS.get(decoder.config.model_type, ())  # type: ignore[union-attr, arg-type]
    for module in decoder.modules():
        if class_of_transformers(module).__name__ in names:
            module.register_forward_pre_hook(_with_whole_rows, with_kwargs=True)
            module.register_forward_hook(_part_of_whole_rows, with_kwargs=True)


def with_whole_mask(now: ForwardPass, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a decoder for this rank's part, with the masks [B, 1, n, n] of whole rows."""
    rows, tokens = now.rows, tokens_in(kwargs)
    assert rows is not None and rows.layout is not None and tokens is not None
    weight = next(now.runner.parameters())
    empty = torch.empty(rows.batch, rows.length, 0, dtype=weight.dtype, device=tokens.device)
    masks = create_masks_for_generate(now.runner.config, empty, rows.mask.to(tokens.device), None)
    if isinstance(masks, dict):  # Those of recurrent layers have two dimensions, as padding has.
        masks = {
            kind: now.ring.shard(x, rows.layout) if x is not None and x.dim() == 2 else x for kind, x in masks.items()
        }
    now.attended = True
    return {**kwargs, "attention_mask": masks, "use_cache": False}


@torch.compiler.disable(reason=UNTRACEABLE)
def _with_whole_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gathers what a layer is given for each token."""
    now, kwargs = forward_pass_of(getattr(module, "config", None), module), by_name(module, args, kwargs)
    layout = None if now is None else now.layout
    if now is None or layout is None:
        return (), kwargs
    if now.ring.rank == 0:
        warn_once(f"{type(module).__name__} needs more than keys: every rank of the ring computes it for whole rows")

    def whole(x: Any) -> Any:
        by_token = isinstance(x, Tensor) and x.dim() in (2, 3) and x.shape[1] == layout.local_len
        return whole_of(now.ring.side_by_side(x.contiguous(), 1), layout, 1) if by_token else x

    caches = cache_names(type(module).forward)
    return (), {name: None if name in caches else tree_map(whole, x) for name, x in kwargs.items()}


@torch.compiler.disable(reason=UNTRACEABLE)
def _part_of_whole_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Returns this rank's part of a layer's results."""
    now = forward_pass_of(getattr(module, "config", None), module)
    layout = None if now is None else now.layout
    if now is None or layout is None:
        return output
    first, *others = output if isinstance(output, tuple) else (output,)
    part = now.ring.shard(first, layout)
    return (part, *others) if isinstance(output, tuple) else part
