"""The loss of a language model on this rank's part of the rows, for a slice of tokens at a time.

The gradients of a slice are computed with its loss, in forward, so that its logits are formed once (torchtitan's chunked loss
does so): backward only scales them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ring.ring import Ring
from ..forward_pass import Head, SliceLoss, WholeRows
from ..model.config import warn_once
from ..rows.join import whole_rows
from .layer_state import tensors_of
from .loss_bytes import tokens_at_once
from .values import Values

#: The label of a token that is not predicted, as in Transformers.
IGNORED = -100


def cross_entropy(
    head: Head, hidden: Tensor, labels: Tensor, place: slice, ignore_index: int = IGNORED, label_smoothing: float = 0.0
) -> Tensor:
    """The `SliceLoss` of labels."""
    logits = head(hidden[None])[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing)


def next_labels(arguments: Mapping[str, Any]) -> Tensor:
    """Returns for each token [B, n] the label of the next one, shifted by the caller or as Transformers' losses do it."""
    shifted: Tensor | None = arguments.get("shift_labels")
    return F.pad(arguments["labels"][:, 1:], (0, 1), value=IGNORED) if shifted is None else shifted


def sum_in_slices(values: Values, labels: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    """Returns the sum of the losses of all tokens, the same on every rank.

    Args:
        values: the logits, as `Values` of hidden states and their output layer.
        labels: [B, n] of whole rows.
    """
    origin, rows, vocabulary = values.origin, values.origin.rows, values.sample.shape[-1]
    of_slice = origin.of_slice or partial(cross_entropy, ignore_index=ignore_index, label_smoothing=label_smoothing)
    if rows is not None and rows.layout is not None:
        # All ranks refuse them; on a GPU, torch ends the process that computes with such a label.
        wrong = (labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))
        if labels.device.type == "cpu" and bool(wrong.any()):
            raise ValueError(
                f"labels must be from 0 to {vocabulary - 1}, or {ignore_index} for tokens to leave out, got {labels[wrong][0]}"
            )
        labels = origin.ring.shard(labels, rows.layout, fill=ignore_index)
    if not origin.sliced and origin.ring.rank == 0:
        warn_once(f"{origin.name} computes its loss in slices of tokens, on each rank's part of the rows", logging.INFO)
    origin.sliced = True
    run = partial(_sum, values, labels.to(values.part.device).flatten(), ignore_index, of_slice)
    with torch.set_grad_enabled(values.recorded and torch.is_grad_enabled()):
        total = values.in_layer(run)
    return origin.ring.side_by_side(total[None], 0).sum()


def _sum(values: Values, labels: Tensor, ignore_index: int, of_slice: SliceLoss, forward: Head) -> Tensor:
    """Returns the sum of the losses of this rank's tokens, by the forward of the output layer."""
    states, weights = values.part.flatten(0, 1), [] if values.head is None else tensors_of(values.head)
    leaves = {id(x): x.detach().requires_grad_() for x in values.scales}  # They may depend on the weights.
    inputs = [x for x in (states, *weights, *values.scales) if x.requires_grad] if torch.is_grad_enabled() else []
    wide = torch.promote_types(states.dtype, torch.float32)
    sums = [torch.zeros_like(x, dtype=x.dtype if x is states else wide) for x in inputs]
    total = states.new_zeros((), dtype=wide)
    length = tokens_at_once(len(states), states.shape[1], values.sample.shape[1])
    for first in range(0, len(states), length):
        place = slice(first, first + length)
        part = states[place].detach().requires_grad_(states.requires_grad)
        loss = of_slice(partial(values.of_states, head=forward, leaves=leaves), part, labels[place], place)
        total += loss.detach()
        parts = [part if x is states else leaves.get(id(x), x) for x in inputs]
        gradients = torch.autograd.grad(loss, parts, materialize_grads=True) if inputs else ()
        for x, of_x, gradient in zip(inputs, sums, gradients, strict=True):
            (of_x[place] if x is states else of_x).add_(gradient)
    if not inputs:
        return total
    saved = ((labels != ignore_index).any(), *sums)
    return WithGradients.apply(total.clone, partial(_scaled, [x.dtype for x in inputs]), saved, *inputs)


def _scaled(dtypes: list[torch.dtype], grad: Tensor, any_label: Tensor, *gradients: Tensor) -> list[Tensor]:
    """Returns the gradients of a loss that is scaled; without a label they are 0, whatever the scale."""
    grad = torch.where(any_label, grad, 0)
    return [(x * grad.to(x.dtype)).to(dtype) for x, dtype in zip(gradients, dtypes, strict=True)]


class WithGradients(torch.autograd.Function):
    """Gives a result the gradients of its inputs, by a function of the result's gradient and of saved tensors."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], of_grad: Any, saved: Any, *inputs: Tensor) -> Tensor:
        ctx.of_grad = of_grad
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        return make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:  # DDP asks for the gradients of all outputs, used or not.
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():  # They would lack a part.
            raise NotImplementedError(
                "gradients of gradients (create_graph=True) of a call with labels cannot be computed: call the model without "
                "labels"
            )
        return None, None, None, *ctx.of_grad(grad, *ctx.saved_tensors)


# ---- the fields of TRL's fused head


def join_of_fields(rows: WholeRows, ring: Ring, kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    """Replaces the labels among the arguments of a call with `fused_lm_head=True` by the labels of this rank's tokens.

    Returns a function that joins the output of the call: its fields [B, n - 1] of whole rows, or [B, n] for labels that the
    caller has shifted, and their loss.
    """
    layout, labels, items = rows.layout, next_labels(kwargs), kwargs.get("num_items_in_batch")
    assert layout is not None
    part, stop = (rows.batch, layout.local_len), rows.length - (kwargs.get("shift_labels") is None)
    if items is None:
        items = (labels != IGNORED).sum().clamp(min=1)
    kwargs["shift_labels"] = ring.shard(labels, layout, fill=IGNORED)
    kwargs["num_items_in_batch"] = items

    def joined(output: Any) -> Any:
        # What a head adds to the loss, such as the loss of routers, was computed from whole rows.
        added = output["loss"] + output["log_probs"].sum() / items
        for name, x in output.items():
            if isinstance(x, Tensor) and tuple(x.shape) == part:
                output[name] = whole_rows(x, rows, ring)[:, :stop]
        output["loss"] = added - output["log_probs"].sum() / items
        return output

    return joined
