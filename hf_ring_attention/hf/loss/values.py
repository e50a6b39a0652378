"""The values of each token of all rows, which form hidden states and logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...compute.private import version_of
from ...ring.ring import Ring
from ..forward_pass import Head, SliceLoss, WholeRows, running, running_with
from ..model.config import warn_once
from ..rows.join import kept, whole_rows
from .layer_state import LayerState

#: By the id of a tensor that needs gradients, the tensor that is computed with in its place.
Leaves = Mapping[int, Tensor]
_NO_LEAVES: Leaves = {}


@dataclass(eq=False)
class Origin:
    """The call whose results are formed on use."""

    name: str  # the class of its model
    rows: WholeRows | None  # None for a model that is not patched, whose rows are whole
    ring: Ring
    keeps_logits: bool = True  # whether logits are formed on use too, and not by the output layer
    of_slice: SliceLoss | None = None  # the loss of a slice of tokens, in place of a cross entropy
    sliced: bool = False  # whether a loss was computed in slices


@dataclass(eq=False)
class Values:
    """What an `OnUse` has for each token of all rows, whichever tokens it shows."""

    origin: Origin
    part: Tensor  # [B, n local, width] the hidden states of this rank's tokens
    numbers: Tensor  # [B, n] the numbers of all tokens
    sample: Tensor  # [0, vocabulary] no logits, with the dtype, device and width of all
    autocast: Callable[[], Any]  # makes the context of autocast of the layer's call
    version: int  # how often the part was written to, when the layer was called
    head: nn.Module | None = None  # the output layer; None for hidden states
    state: LayerState | None = None  # of the output layer in its call
    steps: tuple[Callable[[Tensor, Leaves], Tensor], ...] = ()  # functions that were applied to its logits
    recorded: bool = True  # whether gradients are recorded
    scales: tuple[Tensor, ...] = ()  # the tensors of the steps that need gradients
    hooks: list[Callable[[Tensor], Any]] = field(default_factory=list)  # of FSDP: they mark the beginning of backward

    def in_layer(self, use: Callable[[Head], Tensor]) -> Tensor:
        """Returns the result of a function of the layer's forward, in the layer as it was in its call.

        Raises:
            RuntimeError: its weights or settings have changed since.
        """
        layer, state = self.head, self.state
        same = version_of(self.part) == self.version
        if layer is None or state is None:
            self._check(same, "hidden states")
            return use(lambda states: states)
        now, recorded = running().forward_pass, bool(self.inputs)
        inside = now is not None and now.origin is self.origin  # Inside its call, numbers do not change unseen.
        self._check(state.has_settings_of(layer), "adapters or settings of its output layer")

        def with_weights(forward: Head) -> Tensor:
            unwritten = same and [*map(version_of, state.tensors)] == state.versions
            self._check(unwritten and (inside or state.has_weights_of(layer, recorded)), "weights of its output layer")
            return use(forward)

        with state.restored_modes(layer):
            result: Tensor = call_of(layer)(with_weights)
        return result

    def _check(self, same: bool, what: str) -> None:
        if not same:
            raise RuntimeError(
                f"{self.origin.name}: the {what} changed after the call that returned these logits: use them before, such as "
                f"logits.argmax(-1) before the optimizer's step"
            )

    def of_states(self, states: Tensor, head: Head | None = None, leaves: Leaves = _NO_LEAVES) -> Tensor:
        """Returns the values [..., vocabulary] of hidden states [..., width], by the forward of the layer, and by leaves."""
        if head is None:
            return self.in_layer(partial(self.of_states, states, leaves=leaves))
        with self.autocast(), running_with(on_use=False):
            values = head(states)
        for step in self.steps:
            values = step(values, leaves)
        return values

    def of_tokens(self, part: Tensor, numbers: Tensor, leaves: Leaves = _NO_LEAVES) -> Tensor:
        """Returns the values of tokens with these numbers from this rank's hidden states; all ranks call it together."""
        rows, ring = self.origin.rows, self.origin.ring

        def formed(head: Head) -> Tensor:
            if rows is None or rows.layout is None:
                states = part
            elif 2 * numbers.numel() < self.numbers.numel():
                return self.of_states(kept(part, rows, ring, numbers), head, leaves)
            else:
                states = whole_rows(part, rows, ring)
            return self.of_states(states if numbers is self.numbers else states.flatten(0, 1)[numbers], head, leaves)

        return self.in_layer(formed)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that get gradients."""
        weights = () if self.state is None else self.state.tensors
        return [x for x in (self.part, *weights, *self.scales) if x.requires_grad] if self.recorded else []

    def of_gradient(self, inputs: list[Tensor], numbers: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of inputs, from the gradient of the values of tokens with these numbers."""
        leaves = {id(x): x.detach().requires_grad_(x.requires_grad) for x in (self.part, *self.scales)}
        with torch.enable_grad():
            formed = self.of_tokens(leaves[id(self.part)], numbers, leaves)
        return torch.autograd.grad(formed, [leaves.get(id(x), x) for x in inputs], grad, materialize_grads=True)

    def unrecorded(self) -> Values:
        """Returns the values without gradients, which keep no graph alive."""
        return replace(self, recorded=False, part=self.part.detach())

    def warn(self) -> None:
        """Logs once for a class that logits of whole rows are formed over a ring."""
        rows, ring, width = self.origin.rows, self.origin.ring, self.sample.shape[-1]
        if self.head is not None and rows is not None and ring.world_size > 1 and ring.rank == 0:
            size = rows.batch * rows.length * width * self.sample.element_size()
            warn_once(
                f"{self.origin.name}: the logits of whole rows were used, so every rank forms them: {size / 2**30:.3f} GiB; "
                f"only a cross entropy of them is computed in slices"
            )


def autocast_of(x: Tensor) -> Callable[[], Any]:
    """Returns a function that makes the context of autocast that is active now."""
    device = x.device.type
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return partial(torch.autocast, device, dtype=dtype, enabled=enabled)


def call_of(head: nn.Module) -> Callable[..., Tensor]:
    """Returns how to call an output layer once more: with the hooks that gather its weights, if it has them for a call only.

    FSDP 2 and ZeRO 3 have such weights. Where FSDP 2 gathers several layers together, a call with hooks would count for all.
    """
    gathered = any(isinstance(x, DTensor) or hasattr(x, "ds_id") for x in head.parameters())
    return head if gathered else head.forward
