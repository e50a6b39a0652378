"""The loss of shards: it equals that of one device, and is computed for a slice of tokens at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..compute.private import version_of
from ..hf.heads import (
    RUNNING,
    Head,
    HeadCall,
    LogitsNotFormed,
    installed,
    probe_of,
    remover,
    running,
    watching,
    without_hooks,
)
from ..hf.rings import attached_ring
from ..hf.wrappers import unwrapped, wrapped_modules
from .loader_checks import check_schedules
from .next_tokens import (
    check_causal,
    check_loss_function,
    check_next_token_loss,
    loss_function_of,
    shift_labels_of,
    transformers_model,
)
from .sharded_weights import gather_weights, gathered_by_call, sharded_by_fsdp2
from .shards import IGNORED


def next_token_loss(
    model: nn.Module, shard: Mapping[str, Any], tokens: Tensor | int, *, tokens_at_once: int = 1024
) -> Tensor:
    """Returns this process's share of the mean loss over all `tokens`, for gradients that are averaged over the world.

    DDP and FSDP average gradients over all processes, so a share is (sum of its losses / tokens) * world size, and the
    mean of all shares is the loss. Where Accelerate or DeepSpeed accumulates gradients, it divides the loss of each
    `backward` by the number of batches of a step: multiply the share by that number, since `tokens` are those of all
    these batches already.

    Args:
        model: a causal language model, as `accelerator.prepare` or `fully_shard` returned it.
        shard: a shard that a ring's loader or `shard_batch` made.
        tokens: the number that `count_tokens` returned for the whole optimizer step.
        tokens_at_once: as in `sliced_loss`; 0 forms all logits of the shard at once.

    Raises:
        ValueError: a model whose loss is not that of next tokens, or a batch that no ring's loader made.
        NotImplementedError: as `sliced_loss`.

    Example:
        >>> model, ids = tiny_llama(), torch.arange(1, 9)[None]
        >>> shard = ra.shard_batch({"input_ids": ids, "labels": ids}, ra.Ring.alone())
        >>> loss = ra.next_token_loss(model, shard, ra.count_tokens(shard))
        >>> loss.backward()
        >>> torch.allclose(loss, model(input_ids=ids, labels=ids).loss)
        True
    """
    check_next_token_loss(model)
    shift_labels_of(shard, "next_token_loss")
    ring = attached_ring(unwrapped(model))
    if ring is not None:
        check_schedules(ring)
    with sliced_loss(model, tokens_at_once):
        output = model(**{"use_cache": False, **shard}, num_items_in_batch=tokens)
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output[0]
    return loss * (dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1)


# ---- a loss in slices


#: The innermost `sliced_loss` of this thread or task.
_SLICES: ContextVar[_Slices | None] = ContextVar("ring_dilated_slices", default=None)


@contextmanager
def sliced_loss(model: nn.Module, tokens_at_once: int = 1024) -> Iterator[None]:
    """A context in which a causal language model with labels computes its loss for a slice of tokens at a time.

    No more than the logits of `tokens_at_once` tokens exist at any time, also in backward, where they are computed again.
    The output has an object in place of its logits that raises an error when it is used. The loss is that of the model's
    own head, scaled or capped as the model does it. A call without labels has all its logits. Other threads, and other
    tasks of asyncio, are not affected. Liger's and TRL's fused losses are left alone: they form no logits.

    Args:
        model: a causal language model, bare or wrapped by DDP, FSDP, DeepSpeed, PEFT or torch.compile.
        tokens_at_once: counts the tokens of all rows together; 0 computes the loss as the model does, also inside of
            another such context.

    Raises:
        ValueError: a negative number, no Transformers model, or one with a loss function of its own, which slices would
            replace.
        NotImplementedError: in the forward pass: a head that this function does not know, or a loss that has other terms
            of the logits; use tokens_at_once=0.

    Example:
        >>> model, ids = tiny_llama(), torch.arange(64)[None]
        >>> with ra.sliced_loss(model, tokens_at_once=16):
        ...     output = model(input_ids=ids, labels=ids)
        >>> torch.allclose(output.loss, model(input_ids=ids, labels=ids).loss)
        True
        >>> output.logits
        LogitsNotFormed(...)
    """
    if tokens_at_once < 0:
        raise ValueError(f"sliced_loss: tokens_at_once must be at least 0, got {tokens_at_once}")
    with loss_in_slices(model, tokens_at_once, cross_entropy_of, "sliced_loss"):
        yield


#: The loss of a slice of tokens, as a sum: of the model's head, their hidden states [k, width], their labels [k], -100 for
#: those that do not count, and their places among the tokens of all rows.
SliceLoss = Callable[[Head, Tensor, Tensor, slice], Tensor]


@contextmanager
def loss_in_slices(model: nn.Module, tokens_at_once: int, of_slice: SliceLoss, caller: str) -> Iterator[None]:
    """Does what `sliced_loss` describes, for any loss that is a sum over tokens; no gradients flow to what it holds besides.

    Args:
        of_slice: runs again in backward, since the logits of a slice are not kept.
        caller: the name that error messages begin with.
    """
    inner = transformers_model(model)
    output = inner.get_output_embeddings()
    with ExitStack() as stack:
        if tokens_at_once and output is not None:
            check_causal(inner)
            check_loss_function(inner, caller)
            stack.enter_context(watching(output))
            for module in wrapped_modules(model):
                stack.enter_context(installed((module, "calls"), partial(_watch_calls, module)))
            stack.enter_context(installed((inner, "loss"), partial(_take_loss_function, inner)))
        slices, call_before = _Slices(inner, tokens_at_once, of_slice, _SLICES.get()), RUNNING.get()
        _SLICES.set(slices)
        try:
            yield
        finally:
            _SLICES.set(slices.outer)
            RUNNING.set(call_before)  # an interrupt may have left a call running


class _Slices:
    """The settings of one `sliced_loss`; `outer` are those of the one around it."""

    def __init__(self, model: PreTrainedModel, tokens_at_once: int, of_slice: SliceLoss, outer: _Slices | None) -> None:
        self.model, self.tokens_at_once, self.of_slice, self.outer = model, tokens_at_once, of_slice, outer


def _slices_of(model: nn.Module) -> _Slices | None:
    """Returns the innermost settings for a model in this thread or task; None if it is to compute its loss itself."""
    slices = _SLICES.get()
    while slices is not None and slices.model is not model:
        slices = slices.outer
    return slices if slices is not None and slices.tokens_at_once else None


class _LossCall(HeadCall):
    """A call of a model whose loss is computed in slices, if it is given labels.

    Attributes:
        begun_by: the outermost module around the model, with whose call this one begins and ends.
        result: the loss; None before it is computed.
    """

    def __init__(self, slices: _Slices, begun_by: nn.Module, outer: HeadCall | None) -> None:
        super().__init__(slices.model.get_output_embeddings(), outer, active=False)
        self.slices, self.begun_by, self.model = slices, begun_by, slices.model
        self.result: Tensor | None = None
        self._logits_shape: tuple[int, ...] = ()
        self._result_version = 0
        self._withheld = False

    def refuse(self, reason: str) -> None:
        raise self._unsliceable(reason)

    def _unsliceable(self, reason: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self.model).__name__} {reason}, so its loss cannot be computed in slices: compute it at once, with "
            f"tokens_at_once=0, or loss_tokens_at_once=0 of RingTrainingArguments"
        )

    def loss(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Computes the loss in place of the model's loss function, `ForCausalLMLoss`, with its arguments."""
        hidden = self.hidden
        assert hidden is not None
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
        if tuple(shift_labels.shape) != tuple(hidden.shape[:2]):
            raise ValueError(
                f"{type(self.model).__name__} was given labels {list(shift_labels.shape)}, and makes logits of "
                f"{list(hidden.shape[:2])} tokens: pass as many labels as tokens, and no logits_to_keep"
            )
        targets = shift_labels.to(hidden.device).flatten()
        with running(None):
            head = self._known_head(logits)
            output = self.output
            if torch.is_grad_enabled() and output is not None and sharded_by_fsdp2(output):
                # FSDP2 may hold the head in one group of weights with the norm before it. The group's forward pass ends
                # with the model's own call of the head. FSDP2 frees the weights in backward once the first call after that
                # has its gradients, and the norm needs them later. So the first call is one without gradients.
                with torch.no_grad():
                    output(probe_of(hidden))
            total = hidden.new_zeros((), dtype=torch.float32)
            options: Any = {"use_reentrant": False, "preserve_rng_state": False}
            count = self._count(len(targets), hidden.device)
            first = 0
            for part, target in zip(hidden.flatten(0, 1).tensor_split(count), targets.tensor_split(count), strict=True):
                target = target.masked_fill(target == ignore_index, IGNORED)
                place = slice(first, first + len(part))
                first += len(part)
                if torch.is_grad_enabled():
                    total = total + checkpoint(
                        _part, self.slices.of_slice, head, output, part, target, place, **options
                    )
                else:
                    total = total + _part(self.slices.of_slice, head, output, part, target, place)
        items = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        loss = total / (items.to(total.device) if isinstance(items, Tensor) else items)
        # These logits are of a few tokens only: a model that computes more from them must get no usable numbers.
        logits.detach().fill_(torch.nan)
        self.hidden, self.plain, self._logits_shape = None, None, tuple(logits.shape)
        self.result, self._result_version = loss, version_of(loss)
        return loss

    def _known_head(self, logits: Tensor) -> Head:
        head = self.head(logits, self.model.config)
        if head is None:
            raise self._unsliceable("forms its logits in a way of its own")
        return head

    def _count(self, tokens: int, device: torch.device) -> int:
        """Returns the number of slices, equal on all processes if each call of the head gathers its weights from them."""
        count = -(-tokens // self.slices.tokens_at_once)
        if dist.is_available() and dist.is_initialized() and gathered_by_call(self.output):
            most = torch.tensor(count, device=device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            count = int(most)
        return count

    def finished(self, output: Any) -> Any:
        """Returns the output of the call, without the logits of a few tokens."""
        if self.hidden is not None:
            self.hidden = None
            raise self._unsliceable("was given labels, and computed no loss of them by model.loss_function")
        if self.result is None or self._withheld:
            return output
        self._withheld = True
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output[0]
        changed = loss is not self.result or version_of(loss) != self._result_version
        if changed and not bool(torch.isfinite(loss).all()) and bool(torch.isfinite(self.result).all()):
            raise self._unsliceable("adds to its loss a term of its logits, which slices do not have")
        return _without_logits(output, self._logits_shape)


def _without_logits(output: Any, shape: tuple[int, ...]) -> Any:
    """Returns an output in which an object that refuses to be used stands in place of logits of this shape."""

    def are_logits(x: Any) -> bool:
        return isinstance(x, Tensor) and tuple(x.shape) == shape

    if isinstance(output, MutableMapping):
        for key in [key for key, x in output.items() if key == "logits" or are_logits(x)]:
            output[key] = LogitsNotFormed()
        return output
    return tuple(LogitsNotFormed() if are_logits(x) else x for x in output)


def _part(
    of_slice: SliceLoss, head: Head, output: nn.Module | None, hidden: Tensor, labels: Tensor, place: slice
) -> Tensor:
    with running(None):  # in backward, this function runs again, perhaps while another call is watched
        gather_weights(output)
        return of_slice(head, hidden, labels, place)


def cross_entropy_of(head: Head, hidden: Tensor, labels: Tensor, place: slice) -> Tensor:
    """The `SliceLoss` of next tokens."""
    return F.cross_entropy(head(hidden[None])[0].float(), labels, ignore_index=IGNORED, reduction="sum")


# ---- hooks and the loss function of a model, which all threads share


def _watch_calls(module: nn.Module) -> Callable[[], None]:
    without_hooks(module, _before_call, _after_call)
    return remover(
        module.register_forward_pre_hook(_before_call, with_kwargs=True),
        # This hook must be the first: others may cast the loss.
        module.register_forward_hook(_after_call, with_kwargs=True, always_call=True, prepend=True),
    )


@torch.compiler.disable(reason="it asks what is wanted in this thread")
def _before_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Begins a call, or goes on with the one that a module around this one has begun."""
    slices, call = _slices_of(unwrapped(module)), RUNNING.get()
    if slices is None:
        return
    has_labels = _has_labels(module, args, kwargs)
    if not isinstance(call, _LossCall) or call.slices is not slices:
        call = _LossCall(slices, module, call)
    elif call.begun_by is module:  # an interrupt ended the call that was running
        call = _LossCall(slices, module, call.outer)
    RUNNING.set(call)
    call.hidden = call.plain = None
    if has_labels is not None:
        call.active = has_labels


def _has_labels(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """Returns whether a call has labels; None if the module takes arguments by position that it has no names for."""
    if not args:
        return kwargs.get("labels") is not None
    signature = inspect.signature(module.forward)
    arguments = signature.bind_partial(*args, **kwargs).arguments
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    if kwargs.get("labels") is not None or arguments.get("labels") is not None:
        return True
    return None if any(kinds[name] is inspect.Parameter.VAR_POSITIONAL for name in arguments) else False


@torch.compiler.disable(reason="it belongs to _before_call")
def _after_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Takes the logits of a few tokens out of the output, and ends what `_before_call` began."""
    call = RUNNING.get()
    if not isinstance(call, _LossCall) or call.model is not unwrapped(module):
        return None
    if call.begun_by is module:
        RUNNING.set(call.outer)
    return None if output is None else call.finished(output)  # the output is None if the call raised


class _SlicedLossFunction:
    """A loss function that stands in place of a model's own while some thread computes the loss in slices."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.own_loss_function = model, loss_function_of(model)

    @torch.compiler.disable(reason="it asks what is wanted in this thread")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = RUNNING.get()
        if isinstance(call, _LossCall) and call.model is self.model and call.hidden is not None:
            return call.loss(*args, **kwargs)
        return self.own_loss_function(*args, **kwargs)


def _take_loss_function(model: PreTrainedModel) -> Callable[[], None]:
    """Puts a `_SlicedLossFunction` in place of a model's loss function; returns what puts the model's own back."""
    replacement = _SlicedLossFunction(model)
    model.loss_function = replacement

    def give_back() -> None:
        # The attribute is not deleted: another thread may just have seen that it is there.
        if model.loss_function is replacement:
            model.loss_function = replacement.own_loss_function

    return give_back
