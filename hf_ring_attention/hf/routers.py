"""The loss that balances the experts of a sharded model, from the counts and probabilities of all ranks.

Transformers computes it by a function of the module that defines the model: E sum_e f_e P_e, where f_e is the share of tokens
that are sent to expert e, and P_e the mean of its probabilities over tokens (arXiv 2101.03961, equations 4 to 6). Both are
means over the whole rows, so each rank sums over its own tokens, and the sums of all ranks, 2 E + 1 numbers, are gathered.
The function is replaced once in its module by one that does so for the calls of sharded models, and else calls it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..ring.attention import UNTRACEABLE
from ..ring.ring import Ring
from .forward_pass import ForwardPass
from .wrappers import class_of_transformers

#: The name of the function in the modules of Transformers.
_BALANCING = "load_balancing_loss_func"


@dataclass
class Routing:
    """A running call of a sharded model with a head, which may ask for the loss of its routers.

    Attributes:
        asked: whether it does.
        forward_pass: that of its decoder, once this is over.
    """

    ring: Ring
    asked: bool
    forward_pass: ForwardPass | None = None


#: The call that runs in this thread; None outside of sharded models with heads.
ROUTING: ContextVar[Routing | None] = ContextVar("ring_dilated_routing", default=None)


def begin_routing(model: nn.Module, ring: Ring, asked: bool) -> ValueError | None:
    """Begins a call of a model with a head, and returns the error of one whose loss of routers cannot be that of all ranks.

    Args:
        asked: whether the call asks for the logits of routers, from which models compute this loss.
    """
    ROUTING.set(Routing(ring, asked))
    if not asked or _can_balance(class_of_transformers(model)):
        return None
    return ValueError(
        f"{type(model).__name__} was asked for output_router_logits, and would balance its experts by the shard alone: the "
        f"loss of its routers is not the one of Mixtral, which is computed from all ranks: set "
        f"config.output_router_logits = False"
    )


def tell_routing(forward_pass: ForwardPass) -> None:
    """Tells the running call the forward pass of its decoder, which is over."""
    routing = ROUTING.get()
    if routing is not None:
        routing.forward_pass = forward_pass


def asks_for_routers() -> bool:
    """Returns whether the running call asks for the logits of routers."""
    routing = ROUTING.get()
    return routing is not None and routing.asked


@functools.cache
def _can_balance(model_class: type) -> bool:
    """Returns whether a class computes the loss that this module does, and replaces the function that it calls for it."""
    space = vars(sys.modules[model_class.__module__])
    function = space.get(_BALANCING)
    if function is None or isinstance(function, _OfAllRanks):
        return function is not None
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 4, generator=generator) for _ in range(2))
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])[:, :3]
    try:
        answers = [function(logits, 4, 2, given) for given in (None, mask)]
    except (TypeError, RuntimeError, IndexError):
        return False
    for given, answer in zip((torch.ones_like(mask), mask), answers):
        own = _loss_of_sums(_sums_over_tokens(logits, 4, 2, given.flatten()), 4)
        if not isinstance(answer, Tensor) or not torch.allclose(answer.to(own.dtype), own, rtol=1e-4):
            return False
    space[_BALANCING] = _OfAllRanks(function)
    return True


def _sums_over_tokens(gate_logits: Sequence[Tensor], num_experts: int, top_k: int, valid: Tensor) -> Tensor:
    """Returns sums over the tokens of all layers: how often each expert is chosen, its probabilities, and the tokens.

    Args:
        gate_logits: those of each layer, [tokens, experts].
        valid: [tokens]; 0 for padding.

    Returns:
        [2 experts + 1], in float32 at least.
    """
    dtype = torch.promote_types(gate_logits[0].dtype, torch.float32)
    device = gate_logits[0].device
    weights = valid.to(device=device, dtype=dtype)
    chosen = torch.zeros(num_experts, dtype=dtype, device=device)
    probabilities = torch.zeros(num_experts, dtype=dtype, device=device)
    for logits in gate_logits:
        routed = logits.to(device).softmax(-1)
        experts = routed.topk(top_k, dim=-1).indices
        chosen = chosen.index_add(0, experts.flatten(), weights.repeat_interleave(top_k))
        probabilities = probabilities + (weights[:, None] * routed).sum(0)  # Autocast would round a matrix product.
    return torch.cat([chosen, probabilities, len(gate_logits) * weights.sum()[None]])


def _loss_of_sums(sums: Tensor, num_experts: int) -> Tensor:
    chosen, probabilities = sums[:num_experts] / sums[-1], sums[num_experts:-1] / sums[-1]
    return num_experts * (chosen * probabilities).sum()


class _OfAllRanks:
    """The function of a module of Transformers, which computes the loss of all ranks while a sharded model runs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    @torch.compiler.disable(reason=UNTRACEABLE)
    def __call__(
        self,
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """Returns this rank's share of the loss; the sum of the shares of all ranks is the loss of whole rows."""
        routing = ROUTING.get()
        forward_pass = None if routing is None else routing.forward_pass
        if routing is None or forward_pass is None or forward_pass.layout is None or not isinstance(gate_logits, tuple):
            # In a step of generation, all ranks have the same tokens.
            return self.function(gate_logits, num_experts, top_k, attention_mask)
        assert num_experts is not None
        valid = _tokens_of_documents(routing.ring, forward_pass)
        sums = routing.ring.side_by_side(
            _sums_over_tokens(gate_logits, num_experts, top_k, valid.flatten())[None], 0
        ).sum(0)
        return _loss_of_sums(sums, num_experts) / routing.ring.world_size


def _tokens_of_documents(ring: Ring, forward_pass: ForwardPass) -> Tensor:
    """Returns [B, n local]: 1 for this rank's tokens of documents, and 0 for padding."""
    layout, documents = forward_pass.layout, forward_pass.documents
    assert layout is not None and documents is not None
    whole = torch.zeros(len(documents), layout.seq_len)
    for row, spans in enumerate(documents):
        for start, stop in spans:
            whole[row, start:stop] = 1
    return ring.shard(whole, layout)
