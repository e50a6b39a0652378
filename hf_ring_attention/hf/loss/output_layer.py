"""The output layer of a model, whose logits are formed when they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...compute.private import has_hooks, version_of
from ...ring.ring import Ring
from ..forward_pass import running
from .layer_state import LayerState, has_given_weights
from .on_use import OnUse
from .values import Origin, autocast_of


class HeadForward:
    """The forward of an output layer, by its `own` forward, None for the forward of its class.

    It runs inside the hooks of FSDP and ZeRO, which gather the layer's weights for its call.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self.module, self.own = module, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = partial(type(self.module).forward, self.module) if self.own is None else self.own
        here = len(args) > 0 and (isinstance(args[0], OnUse) or callable(args[0]))
        if here or (not torch.compiler.is_dynamo_compiling() and running().on_use):
            return _head(self.module, own, *args, **kwargs)
        return own(*args, **kwargs)


def wrap_head(head: nn.Module) -> None:
    """Has an output layer return logits that are formed on use for hidden states that are."""
    own = vars(head).get("forward")
    if not isinstance(own, HeadForward):
        head.forward = HeadForward(head, own)


@torch.compiler.disable(reason="it asks what was formed")
def _head(module: nn.Module, own: Callable[..., Any], states: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns logits that are formed on use, or the result of a function of the layer's forward that is called inside it."""

    def forward(states: Tensor) -> Any:
        return own(states, *args, **kwargs)

    if callable(states):
        return states(forward)
    if not isinstance(states, OnUse):
        states = OnUse.of_hidden(states, Origin("the model", None, Ring.alone()))
    hidden = states.deferred
    if has_hooks(module) or not (states.is_current and hidden.origin.keeps_logits):
        return forward(states.to_read())
    token = hidden.part[:1, :1].detach()
    generator = torch.cuda if token.is_cuda else torch.random
    drawn = generator.get_rng_state()
    sample = forward(token)  # It has the dtype and the width of all logits.
    if not isinstance(sample, Tensor) or sample.shape[:-1] != token.shape[:-1]:
        raise NotImplementedError(
            f"{type(module).__name__} is no output layer: it makes no logits of each token by itself"
        )
    used_here = running().on_use or hidden.origin.of_slice is not None  # by this package, before anything changes
    if not used_here and not torch.equal(drawn, generator.get_rng_state()):
        # The loss and all other uses have the same random numbers.
        generator.set_rng_state(drawn)
        whole = states.to_read()  # Ranks exchange them, and simulated ranks share a generator.
        with _same_random_numbers(hidden.origin.ring, token.device):
            return forward(whole)
    # Programs give such a layer other adapters or weights behind a call. If it learns in the call, its loss is in slices all
    # the same, and its logits are refused behind a change.
    if not (used_here or sample.requires_grad) and (any(module.children()) or has_given_weights(module)):
        return forward(states.to_read())
    values = replace(
        hidden,
        head=module,
        state=LayerState.of(module, with_numbers=not used_here),
        sample=sample.detach().flatten(0, 1)[:0],
        recorded=True,
        autocast=autocast_of(token),
        version=version_of(hidden.part),
    )
    states.memory.used = True
    return OnUse.of(values, states.numbers)


@contextmanager
def _same_random_numbers(ring: Ring, device: torch.device) -> Iterator[None]:
    """A context in which all ranks of a ring draw the same random numbers."""
    if ring.world_size == 1:
        yield
        return
    seed = ring.side_by_side(torch.randint(2**31, (1,), device=device), 0)[0]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield
