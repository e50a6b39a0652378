"""The loss of a causal language model on this rank's part of the rows, for a slice of tokens at a time.

Labels are shifted in whole rows and cut like them. The gradients of a slice are computed with its loss, in forward, so that its
logits are formed once (torchtitan's chunked loss does so): backward only scales them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ..compute.private import tree_map, without_numbers
from ..plan.choices import Decision
from ..ring.ring import Ring
from .config import warn_once
from .forward_pass import Head, SliceLoss, WholeRows, running
from .heads import HeadCall, named_change, unchanged
from .join import LOGITS_NOT_FORMED, whole_rows
from .loss_bytes import BYTES_AT_ONCE
from .support import has_next_token_loss

#: The label of a token that is not predicted, as in Transformers.
IGNORED = -100

#: Classes whose heads are not known, with the reason; the first call finds out.
_UNSUITED: dict[type, str] = {}


def cross_entropy(head: Head, hidden: Tensor, labels: Tensor, place: slice) -> Tensor:
    """The `SliceLoss` of next tokens."""
    return F.cross_entropy(head(hidden[None])[0].float(), labels, ignore_index=IGNORED, reduction="sum")


def next_labels(arguments: Mapping[str, Any]) -> Tensor:
    """Returns for each token [B, n] the label of the next one, shifted by the caller or as Transformers' losses do it."""
    shifted: Tensor | None = arguments.get("shift_labels")
    return F.pad(arguments["labels"][:, 1:], (0, 1), value=IGNORED) if shifted is None else shifted


class LossInSlices(HeadCall):
    """The mean loss of one call, computed by its head from hidden states that stay parts; labels [B, n] are shifted already."""

    #: FSDP 2 gathers the layer's weights before our first hook, and frees them behind our last one.
    outside_of_hooks = False

    def __init__(
        self, model: PreTrainedModel, labels: Tensor, rows: WholeRows, ring: Ring | None, of_slice: SliceLoss
    ) -> None:
        super().__init__(model.get_output_embeddings())
        self.model, self.labels, self.rows, self.of_slice = model, labels, rows, of_slice
        self.ring = ring or Ring.alone()
        self.result: Tensor | None = None
        #: The sum of the losses of this rank's tokens.
        self._total: Tensor | None = None
        self._formed: Tensor | None = None

    def keep_plain(self, plain: Tensor) -> None:
        """Stores the logits of two tokens, and computes the sum of the losses of all tokens, by a head that the config names.

        FSDP and ZeRO have gathered the weights of the output layer now, and free them when its call ends.
        """
        super().keep_plain(plain)
        assert self.output is not None and self.hidden is not None
        hidden, labels, layout = self.hidden.flatten(0, 1), self.labels.to(self.hidden.device), self.rows.layout
        labels = (labels if layout is None else self.ring.shard(labels, layout, fill=IGNORED)).flatten()
        change, forward = named_change(self.model.config), self.output.forward
        inputs = [x for x in (hidden, *_tensors_of(self.output)) if x.requires_grad] if torch.is_grad_enabled() else []
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums = [torch.zeros_like(x, dtype=x.dtype if x is hidden else wide) for x in inputs]
        total, tokens = hidden.new_zeros((), dtype=wide), max(1, BYTES_AT_ONCE // (4 * plain.shape[-1]))
        for first in range(0, len(hidden), tokens):
            place = slice(first, min(first + tokens, len(hidden)))
            part = hidden[place].detach().requires_grad_(any(x is hidden for x in inputs))
            loss = self.of_slice(lambda x: change(forward(x)), part, labels[place], place)
            total += loss.detach()
            if inputs:
                parts = [part if x is hidden else x for x in inputs]
                gradients = torch.autograd.grad(loss, parts, materialize_grads=True)
                for x, of_x, gradient in zip(inputs, sums, gradients, strict=True):
                    (of_x[place] if x is hidden else of_x).add_(gradient)
        self._total = _Scaled.apply(total, sums, *inputs) if inputs else total

    def loss(self, logits: Tensor, items: Any, ignore_index: int) -> Tensor:
        """Returns the mean loss of whole rows, from logits of two tokens and the divisor, None for the number of labels.

        It is 0 if the model makes its logits in another way than its config names.
        """
        if self._total is None or self.unsuited is not None:
            return logits.new_zeros(())  # The call is made again, with all logits.
        if ignore_index != IGNORED or not self._is_named(logits):
            self.unsuited = "forms its logits in a way that its config does not name"
            return logits.new_zeros(())
        total = self._total
        if self.returned is not None and self.returned.requires_grad:
            total = _Behind.apply(total, self.returned)
        total = self.ring.side_by_side(total[None], 0).sum()
        items = (self.labels != IGNORED).sum() if items is None else items
        self.result = total / (items.to(total.device) if isinstance(items, Tensor) else items)
        # These are the logits of two tokens. A model that computes more with them must get no usable numbers.
        logits.detach().fill_(torch.nan)
        return self.result

    def _is_named(self, logits: Tensor) -> bool:
        """Returns whether the logits of two tokens follow from the config, on every rank: all decide alike."""
        if logits is self.plain and self.plain_is_intact and named_change(self.model.config) is unchanged:
            return True
        flag = torch.tensor(self.head(logits, self.model.config) is not None, device=logits.device)
        return all(bool(of_rank) for of_rank in self.ring.gather(flag))

    # ---- the output of the call

    def joined_result(self, output: Any) -> Any:
        """Returns the output with the loss of whole rows, and without the logits of two tokens; None for an unsuited model.

        Terms that the model adds to its loss stay, but for terms of its logits, which are NaN.
        """
        reason = None
        if self.result is None:
            reason = self.unsuited or "computes no loss by its loss_function"
        else:
            loss: Tensor = output["loss"] if isinstance(output, Mapping) else output[0]
            if loss is not self.result and bool(torch.isfinite(self.result).all() & ~torch.isfinite(loss).all()):
                reason = "adds to its loss a term of its logits"
        if reason is not None:
            _UNSUITED[type(self.model)], name = reason, type(self.model).__name__
            if self.ring.rank == 0:
                warn_once(f"{name} {reason}, so the logits of whole rows are formed at once for its loss")
            return None
        plain = self.plain
        assert plain is not None

        def are_logits(x: Any) -> bool:
            return isinstance(x, Tensor) and x.dim() == 3 and x.shape[:2] == plain.shape[:2]

        instead: Any = LOGITS_NOT_FORMED if torch.is_grad_enabled() else _LogitsOnUse.of(self)
        if isinstance(output, MutableMapping):
            for name in [name for name, x in output.items() if name == "logits" or are_logits(x)]:
                output[name] = instead
            return output
        return tuple(instead if are_logits(x) else x for x in output)

    def formed(self) -> Tensor:
        """Returns [B, n, vocabulary] the logits of whole rows, on every rank; all ranks call it together."""
        assert self.hidden is not None and self.output is not None
        if self._formed is None:
            hidden = self.hidden if self.rows.layout is None else whole_rows(self.hidden, self.rows, self.ring)
            with torch.no_grad():  # ZeRO 3 gathers weights for a call of the layer.
                self._formed = named_change(self.model.config)(self.output(hidden))
        return self._formed


# ---- gradients


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Returns the tensors of a module that need gradients: its parameters, and views of weights that FSDP 1 puts there."""
    tensors = (x for inner in module.modules() for x in (*inner.parameters(recurse=False), *vars(inner).values()))
    return list({id(x): x for x in tensors if isinstance(x, Tensor) and x.requires_grad}.values())


class _Scaled(torch.autograd.Function):
    """Returns a sum whose gradients are known; backward scales them."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.dtypes = [x.dtype for x in inputs]
        ctx.save_for_backward(*gradients)
        return total.view_as(total)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = ((x * grad.to(x.dtype)).to(dtype) for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return None, None, *scaled


class _Behind(torch.autograd.Function):
    """Returns its first argument; backward visits the second one first, without a gradient.

    The second is the result of the output layer, at which ZeRO 3 gathers the layer's weights before their gradients come.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, returned: Tensor) -> Tensor:
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# ---- which calls compute their loss so


def loss_in_slices(*args: Any, **kwargs: Any) -> Tensor:
    """The loss function of a patched model: in slices if the running call asks for it, else Transformers' own."""
    now = running().forward_pass
    if now is None or not isinstance(now.head, LossInSlices):
        own: Tensor = ForCausalLMLoss(*args, **kwargs)
        return own
    given = inspect.signature(ForCausalLMLoss).bind(*args, **kwargs).arguments
    return now.head.loss(given["logits"], given.get("num_items_in_batch"), given.get("ignore_index", IGNORED))


def way_of_loss(model: PreTrainedModel, arguments: Mapping[str, Any], shape: tuple[int, int]) -> Decision:
    """Decides how a call of [rows, tokens] computes its loss: "slices" on each rank's part, or by a "whole" head."""
    labels = next((arguments[x] for x in ("shift_labels", "labels") if isinstance(arguments.get(x), Tensor)), None)
    name, keep = type(model).__name__, arguments.get("logits_to_keep")
    if labels is None:
        return Decision("whole", "the call has no labels, so it returns logits or hidden states")
    if not has_next_token_loss(model):
        return Decision("whole", f"{name} computes its loss itself")
    if model.loss_function not in (ForCausalLMLoss, loss_in_slices):
        return Decision("whole", f"{name} has a loss function of its own")
    if tuple(labels.shape) != shape:
        return Decision("whole", f"its labels are {list(labels.shape)} for tokens {list(shape)}")
    if isinstance(keep, Tensor) or keep:
        return Decision("whole", "logits_to_keep was given")
    if type(model) in _UNSUITED:
        return Decision("whole", f"{name} {_UNSUITED[type(model)]}")
    return Decision("slices", f"{name} computes the loss of next tokens, which is a sum over tokens")


class _LogitsOnUse(Tensor):
    """The logits of an evaluation with labels, which are formed when they are used first; all ranks use them together."""

    call: LossInSlices

    @staticmethod
    def of(call: LossInSlices) -> _LogitsOnUse:
        plain, labels = call.plain, call.labels
        assert plain is not None
        shape = (*labels.shape, plain.shape[-1])
        logits: _LogitsOnUse = without_numbers(
            _LogitsOnUse, shape, dtype=torch.promote_types(plain.dtype, torch.float32), device=plain.device
        )
        logits.call = call
        return logits

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LogitsOnUse({list(self.shape)}, formed when they are used)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            # ZeRO 3 passes all outputs through such views, and uses none of them.
            return _LogitsOnUse.of(args[0].call)

        def formed(x: Any) -> Any:
            return x.call.formed().to(x.dtype) if isinstance(x, _LogitsOnUse) else x

        return function(*tree_map(formed, args), **tree_map(formed, kwargs or {}))


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
