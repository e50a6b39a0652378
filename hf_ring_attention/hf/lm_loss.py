"""The loss of a causal language model on this rank's part of the rows, for a slice of tokens at a time.

Labels are shifted in whole rows and cut like them. The hidden states stay parts, no more than the logits of a slice exist at
any time, and the sums of all ranks are added. The gradients of a slice are computed with it, in forward, so that its logits are
formed once (torchtitan's chunked loss does so): backward only scales them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ..compute.private import tree_map, without_numbers
from ..plan.choices import Decision
from ..ring.ring import Ring
from .forward_pass import Head, SliceLoss, WholeRows, running
from .heads import HeadCall, fitting_change, named_change, without_hooks
from .join import whole_rows
from .loss_bytes import BYTES_AT_ONCE
from .not_formed import logits_not_formed
from .support import calls_loss_function

logger = logging.getLogger(__name__)

#: The label of a token that is not predicted, as in Transformers.
IGNORED = -100


def cross_entropy(head: Head, hidden: Tensor, labels: Tensor, place: slice) -> Tensor:
    """The `SliceLoss` of next tokens."""
    return F.cross_entropy(head(hidden[None])[0].float(), labels, ignore_index=IGNORED, reduction="sum")


class LossInSlices(HeadCall):
    """The loss of one call, computed by its head from hidden states that stay parts.

    Attributes:
        model: the model that was called; its output layer is watched.
        labels: [B, n] labels of next tokens, -100 for none, of whole rows.
        rows: how the rows are cut; None or without a layout, they are not.
        of_slice: the loss of a slice.
        named_head: makes the logits of hidden states, by the scales and caps that the config names.
        result: the mean loss of whole rows; None before it is computed.
    """

    def __init__(
        self, model: PreTrainedModel, labels: Tensor, rows: WholeRows | None, ring: Ring | None, of_slice: SliceLoss
    ) -> None:
        super().__init__(model.get_output_embeddings())
        self.model, self.labels, self.rows, self.ring, self.of_slice = model, labels, rows, ring, of_slice
        self.named_head: Head | None = None
        self.result: Tensor | None = None
        #: What the output layer returned to the model, behind the hooks of others.
        self.returned: Tensor | None = None
        self._total: Tensor | None = None
        self._formed: Tensor | None = None

    def watch(self) -> None:
        """Hooks this call to its output layer; PEFT may have replaced the layer since the last call, or copied it."""
        output = self.output
        assert output is not None
        without_hooks(output, _before_output, _after_output, _behind_output)
        # FSDP 2 gathers weights before the first hook, and frees them behind the last one.
        output.register_forward_pre_hook(_before_output)
        output.register_forward_hook(_after_output, prepend=True)
        output.register_forward_hook(_behind_output)

    def keep_plain(self, plain: Tensor) -> None:
        """Stores the logits of two tokens, and computes the sum of the losses of all tokens, by a head that the config names.

        FSDP and ZeRO have gathered the weights of the output layer now, and free them when its call ends.
        """
        super().keep_plain(plain)
        assert self.output is not None
        change, forward = named_change(self.model.config), self.output.forward
        self.named_head = lambda hidden: change(forward(hidden))
        self._total = _sum_in_slices(self)

    # ---- the loss

    def loss(self, logits: Tensor, num_items_in_batch: Any, ignore_index: int) -> Tensor | None:
        """Returns the mean loss of whole rows; None if the model makes its logits in another way than its config names.

        Args:
            logits: what the model made of the output layer's result for two tokens.
        """
        if self._total is None or self.unsuited is not None:
            return None
        if ignore_index != IGNORED or not self._is_named(logits):
            self.unsuited = "forms its logits in a way that its config does not name"
            return None
        total, items = self._total, num_items_in_batch
        if self.returned is not None and self.returned.requires_grad:
            total = _Behind.apply(total, self.returned)
        if items is None:
            items = (self.labels != IGNORED).sum()
        if self.ring is not None and self.ring.world_size > 1:
            total = self.ring.side_by_side(total[None], 0).sum()
        self.result = total / (items.to(total.device) if isinstance(items, Tensor) else items)
        # The model's logits are those of two tokens: a model that computes more of them must get no usable numbers.
        logits.detach().fill_(torch.nan)
        return self.result

    def _is_named(self, logits: Tensor) -> bool:
        """Returns whether the logits of two tokens follow from the config, on every rank: all decide alike."""
        plain = self.plain
        assert plain is not None
        if logits is plain and self.plain_is_intact:
            return True
        known = self.plain_is_intact and plain.shape == logits.shape
        known = known and fitting_change(self.model.config, plain, logits) is not None
        flag = torch.tensor(known, device=logits.device)
        return all(bool(of_rank) for of_rank in ([flag] if self.ring is None else self.ring.gather(flag)))

    @property
    def targets(self) -> Tensor:
        """[tokens] the labels of this rank's tokens."""
        assert self.hidden is not None
        return _part_of(self.labels.to(self.hidden.device), self.rows, self.ring).flatten()

    # ---- the output of the call

    def joined_result(self, output: Any) -> Any:
        """Returns the output with the loss of whole rows, and without the logits of two tokens; None for an unsuited model."""
        if not self._is_loss_of(output):
            _UNSUITED[type(self.model)] = str(self.unsuited)
            if self.ring is None or self.ring.rank == 0:
                _log_unsuited(type(self.model).__name__, str(self.unsuited))
            return None
        plain = self.plain
        assert plain is not None

        def are_logits(x: Any) -> bool:
            return isinstance(x, Tensor) and x.dim() == 3 and x.shape[:2] == plain.shape[:2]

        instead: Any = logits_not_formed() if torch.is_grad_enabled() else _LogitsOnUse.of(self)
        if isinstance(output, MutableMapping):
            for name in [name for name, x in output.items() if name == "logits" or are_logits(x)]:
                output[name] = instead
            return output
        return tuple(instead if are_logits(x) else x for x in output)

    def _is_loss_of(self, output: Any) -> bool:
        """Returns whether an output has the loss computed here, with terms that the model adds, but for terms of its logits."""
        if self.result is None:
            self.unsuited = self.unsuited or "computes no loss by its loss_function"
            return False
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output[0]
        if loss is not self.result and not bool(torch.isfinite(loss).all()) and bool(torch.isfinite(self.result).all()):
            self.unsuited = "adds to its loss a term of its logits"
            return False
        return True

    def formed(self) -> Tensor:
        """Returns [B, n, vocabulary] the logits of whole rows, on every rank; all ranks call it together."""
        assert self.hidden is not None and self.output is not None
        if self._formed is None:
            hidden = self.hidden
            if self.ring is not None and self.rows is not None and self.rows.layout is not None:
                hidden = whole_rows(hidden, self.rows, self.ring)
            with torch.no_grad():  # ZeRO 3 gathers weights for a call of the layer.
                self._formed = named_change(self.model.config)(self.output(hidden))
        return self._formed


def _part_of(labels: Tensor, rows: WholeRows | None, ring: Ring | None) -> Tensor:
    if rows is None or rows.layout is None or ring is None:
        return labels
    return ring.shard(labels, rows.layout, fill=IGNORED)


def shifted(labels: Tensor) -> Tensor:
    """Returns for each token [B, n] the label of the next one, as Transformers' losses of next tokens shift labels."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Returns the tensors of a module that need gradients: its parameters, and views of weights that FSDP 1 puts there."""
    found: dict[int, Tensor] = {}
    for inner in module.modules():
        for x in (*inner.parameters(recurse=False), *vars(inner).values()):
            if isinstance(x, Tensor) and x.requires_grad:
                found.setdefault(id(x), x)
    return list(found.values())


def _sum_in_slices(call: LossInSlices) -> Tensor:
    hidden = call.hidden
    assert hidden is not None
    weights = _tensors_of(call.output) if call.output is not None and torch.is_grad_enabled() else []
    total: Tensor = _Slices.apply(call, hidden.flatten(0, 1), *weights)
    return total


class _Slices(torch.autograd.Function):
    """The sum of the losses of tokens, whose gradients are computed slice by slice in forward and scaled in backward."""

    @staticmethod
    def forward(ctx: Any, call: LossInSlices, hidden: Tensor, *weights: Tensor) -> Tensor:
        head, targets, plain = call.named_head, call.targets, call.plain
        assert head is not None and plain is not None
        needed = [x for x, needs in zip((hidden, *weights), ctx.needs_input_grad[1:]) if needs]
        recorded = bool(needed)
        own = [x for x in weights if x.requires_grad] if recorded else []
        of_hidden = torch.empty_like(hidden) if recorded and ctx.needs_input_grad[1] else None
        of_weights = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in own]
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        at_once = max(1, BYTES_AT_ONCE // (4 * plain.shape[-1]))
        for first in range(0, len(hidden), at_once):
            place = slice(first, min(first + at_once, len(hidden)))
            with torch.enable_grad() if recorded else nullcontext():
                part = hidden[place].detach().requires_grad_(of_hidden is not None)
                loss = call.of_slice(head, part, targets[place], place)
            total += loss.detach()
            if not recorded:
                continue
            wanted = [*([part] if of_hidden is not None else []), *own]
            gradients = list(torch.autograd.grad(loss, wanted, allow_unused=True))
            if of_hidden is not None:
                gradient = gradients.pop(0)
                of_hidden[place] = 0 if gradient is None else gradient
            for sums, gradient in zip(of_weights, gradients, strict=True):
                if gradient is not None:
                    sums += gradient
        ctx.dtypes = [x.dtype for x in own]
        ctx.has_hidden, ctx.needs_weights = of_hidden is not None, [x.requires_grad for x in weights]
        ctx.save_for_backward(*([of_hidden] if of_hidden is not None else []), *of_weights)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        of_hidden = saved.pop(0) if ctx.has_hidden else None
        of_hidden = None if of_hidden is None else of_hidden * grad.to(of_hidden.dtype)
        scaled = iter([(x * grad).to(dtype) for x, dtype in zip(saved, ctx.dtypes, strict=True)])
        return None, of_hidden, *(next(scaled) if needs else None for needs in ctx.needs_weights)


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


#: Classes whose heads are not known, with the reason; the first call finds out.
_UNSUITED: dict[type, str] = {}


def loss_in_slices(
    logits: Tensor,
    labels: Tensor | None = None,
    vocab_size: int | None = None,
    num_items_in_batch: Any = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The loss function of a patched model: in slices if the running call asks for it, else Transformers' own."""
    call = _running_loss(None)
    loss = None if call is None else call.loss(logits, num_items_in_batch, ignore_index)
    if loss is not None:
        return loss
    if call is not None:
        return logits.new_zeros(())  # The call is made again, with all logits.
    own: Tensor = ForCausalLMLoss(
        logits,
        labels,
        vocab_size,  # type: ignore[arg-type]  # models pass it
        num_items_in_batch,
        ignore_index,
        shift_labels,
        **kwargs,
    )
    return own


def way_of_loss(model: PreTrainedModel, arguments: Mapping[str, Any], shape: tuple[int, int]) -> Decision:
    """Decides how a call with labels computes its loss: "slices" on each rank's part, or by a "whole" head, with the reason.

    Args:
        shape: the batch rows and tokens of the call.
    """
    labels = next((arguments[x] for x in ("shift_labels", "labels") if isinstance(arguments.get(x), Tensor)), None)
    name, keep = type(model).__name__, arguments.get("logits_to_keep")
    if labels is None:
        return Decision("whole", "the call has no labels, so it returns logits or hidden states")
    if model.get_output_embeddings() is None or not calls_loss_function(type(model)):
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


def _running_loss(module: nn.Module | None) -> LossInSlices | None:
    """Returns the loss of the running call, if this is its output layer, or None is given."""
    now = running().forward_pass
    head = None if now is None else now.head
    return head if isinstance(head, LossInSlices) and (module is None or head.output is module) else None


@torch.compiler.disable(reason="it asks what is watched in this thread")
def _before_output(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    call = _running_loss(module)
    return None if call is None or not args else (call.keep(args[0]), *args[1:])


@torch.compiler.disable(reason="it asks what is watched in this thread")
def _after_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    call = _running_loss(module)
    if call is not None and call.expects_plain:
        call.keep_plain(output)


@torch.compiler.disable(reason="it asks what is watched in this thread")
def _behind_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    call = _running_loss(module)
    if call is not None and call.unsuited is None:
        call.returned = output


@lru_cache(maxsize=256)
def _log_unsuited(name: str, reason: str) -> None:
    logger.warning("%s %s, so the logits of whole rows are formed at once for its loss", name, reason)


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
