"""A ring as a cache: gives stock attention the keys of whole rows, in models whose attention no pattern expresses.

Every attention module of Transformers hands its new keys to `cache.update`, and attends to what comes back. A cache that gives
back the keys of the whole row, gathered from all ranks, and whose tokens end where this rank's part begins, makes stock
attention compute this part under stock masks. A layer's keys are whole on every rank while it attends, and gathered again in
backward where it is recomputed.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from ...plan.layouts import SequenceLayout
from ...ring.operator import UNTRACEABLE
from ...ring.shards import whole_of
from ..forward_pass import ForwardPass, forward_pass_of
from ..model.config import warn_once
from ..model.types import WHOLE_LAYERS
from ..model.wrappers import attachment_of, by_name, cache_in, cache_names, modules_with_choices, takes


class RingCache(Cache):
    """Takes the keys and values of this rank's part of rows, in one call, and returns those of whole rows.

    It is differentiable: the gradient of a rank's keys is the sum of those that all ranks have for them.
    """

    def __init__(self, now: ForwardPass, layout: SequenceLayout) -> None:
        super().__init__(layers=[])
        self.now, self.layout = now, layout

    @torch.compiler.disable(reason=UNTRACEABLE)
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns the keys and values [B, heads, n, D] of whole rows, for those of this rank's part."""
        ring = self.now.ring
        whole = [whole_of(ring.side_by_side(x.contiguous(), 2), self.layout, 2) for x in (key_states, value_states)]
        if not self.now.attended and ring.rank == 0:
            size = sum(x[:, :, :1].numel() * x.element_size() for x in whole) // len(key_states)
            warn_once(
                f"{type(self.now.runner).__name__} has layers that no pattern expresses: over a ring, each of them gathers its "
                f"keys and values, {size} bytes a token, for contiguous parts of rows",
                logging.INFO,
            )
        self.now.attended = True
        return whole[0], whole[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of tokens before this rank's part."""
        return self.layout.pieces(self.now.ring.rank)[0].start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Returns the number of keys of a mask, and of the first one."""
        return self.layout.seq_len, 0


def in_ring_cache(now: ForwardPass, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Begins a call in a `RingCache`; returns the arguments of the decoder, with the mask [B, n] of whole rows."""
    rows, positions = now.rows, kwargs.pop("position_ids")
    assert rows is not None and rows.layout is not None
    if kwargs.get("output_attentions") or getattr(now.runner.config, "output_attentions", False):
        raise ValueError(
            f"{type(now.runner).__name__}: output_attentions=True was asked for, and a rank has only the weights of its "
            f"tokens: use one process (ring=None)"
        )
    now.ring_cache = RingCache(now, rows.layout)
    kwargs |= {
        "use_cache": True,
        "attention_mask": rows.mask.to(positions.device),
        _argument(now.runner): now.ring_cache,
    }
    return {**kwargs, "position_ids": positions} if takes(now.runner, "position_ids") else kwargs


def attach_ring_cache(decoder: nn.Module) -> None:
    """Has attention modules of a decoder get the `RingCache` of a call, also where checkpointing takes it away.

    Those are all of a decoder that keeps its own attention, else those that choose their keys.
    """
    config: Any = decoder.config
    own = attachment_of(decoder).own_attention and config.model_type not in WHOLE_LAYERS
    for module in decoder.modules() if own else modules_with_choices(decoder):
        checkpointed = isinstance(module, GradientCheckpointingLayer)
        if module is not decoder and not checkpointed and cache_names(type(module).forward):
            module.register_forward_pre_hook(_with_ring_cache, with_kwargs=True)


@torch.compiler.disable(reason=UNTRACEABLE)
def _with_ring_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gives a module the cache of the running call."""
    now, kwargs = forward_pass_of(getattr(module, "config", None), module), by_name(module, args, kwargs)
    if now is not None and now.layout is not None and not now.probes and cache_in(kwargs) is None:
        now.ring_cache = now.ring_cache or RingCache(now, now.layout)
        kwargs[_argument(module)] = now.ring_cache
    return (), kwargs


def _argument(module: nn.Module) -> str:
    return cache_names(type(module).forward)[0]
