"""The loss of shards, equal to one device's, for a slice of tokens at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from .batches import IGNORED
from .gate import unwrapped

#: A function of hidden states [..., width] that gives logits [..., vocabulary].
Head = Callable[[Tensor], Tensor]


def count_tokens(shards: Iterable[Mapping[str, Any]]) -> Tensor:
    """How many labels the shards of all processes of the world have together: the divisor of an optimizer step's loss.

    Args:
        shards: of this process, all that the step accumulates.

    Raises:
        ValueError: on every process: no label at all.
    """
    counts = [(shard["shift_labels"] != IGNORED).sum() for shard in shards]
    total = torch.stack(counts).sum()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    if total == 0:
        raise ValueError(
            "no token of this step has a label: every label is -100, and the mean of no losses is no number"
        )
    return total


def next_token_loss(
    model: nn.Module, shard: Mapping[str, Any], tokens: Tensor | int, *, tokens_at_once: int = 1024
) -> Tensor:
    """This process's share of the mean loss over all `tokens`, for gradients that are averaged over the world.

    DDP and FSDP average gradients over all processes, so a share is (sum of its losses / tokens) * world size; the mean
    of all shares is the loss. Where Accelerate or DeepSpeed accumulates gradients, it divides what `backward` is given by
    the number of batches of a step: multiply by that number, since `tokens` are those of all of them already.

    Args:
        model: a causal language model, as `accelerator.prepare` or `fully_shard` returned it.
        shard: what a ring's loader or `shard_batch` made.
        tokens: what `count_tokens` returned for the whole optimizer step.
        tokens_at_once: see `sliced_loss`; 0 forms all logits of the shard at once.

    Raises:
        ValueError: a model whose loss is not that of next tokens.
        NotImplementedError: see `sliced_loss`.
    """
    check_next_token_loss(model)
    with sliced_loss(model, tokens_at_once):
        loss: Tensor = model(**{"use_cache": False, **shard}, num_items_in_batch=tokens).loss
    return loss * (dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1)


@contextmanager
def sliced_loss(model: nn.Module, tokens_at_once: int = 1024) -> Iterator[None]:
    """Inside, a causal language model that is given labels computes its loss for a slice of tokens at a time.

    Logits of `tokens_at_once` tokens exist at any time, in backward too, where they are computed again; the model's
    output has the logits of one token of each row, without a gradient. The loss is that of the model's own head, scaled or
    capped as the model does it. Liger's fused loss, where a Trainer has put it in, is left alone: it forms no logits.

    Args:
        model: a causal language model, bare or wrapped by DDP, FSDP, DeepSpeed, PEFT or torch.compile.
        tokens_at_once: of all rows together; 0 changes nothing.

    Raises:
        ValueError: a negative number, or no Transformers model.
        NotImplementedError: in the forward pass: a head that this function does not know; use tokens_at_once=0.
    """
    if tokens_at_once < 0:
        raise ValueError(f"sliced_loss: tokens_at_once must be at least 0, got {tokens_at_once}")
    inner = _transformers_model(model)
    output = inner.get_output_embeddings()
    if tokens_at_once == 0 or output is None:
        yield
        return
    slices = _Slices(inner, tokens_at_once)
    own = inner.__dict__.get("_loss_function")
    handle = output.register_forward_pre_hook(slices.keep)
    inner.loss_function = slices.loss
    try:
        yield
    finally:
        handle.remove()
        if own is None:
            del inner._loss_function
        else:
            inner.loss_function = own


class _Slices:
    """The hidden states that a model's head was called with, and the loss of them."""

    def __init__(self, model: PreTrainedModel, tokens_at_once: int) -> None:
        self.model, self.tokens_at_once = model, tokens_at_once
        self.own_loss = model.loss_function
        self.hidden: Tensor | None = None
        self.busy = False

    def keep(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before the head: keeps the hidden states and leaves the model a token of each row."""
        if self.busy:
            return None
        self.hidden = args[0]
        return (probe_of(args[0]), *args[1:])

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
        """In place of the model's loss function, whose arguments these are (`ForCausalLMLoss`)."""
        hidden, self.hidden = self.hidden, None
        if hidden is None:  # the model went another way to its logits
            return self.own_loss(
                logits=logits, labels=labels, vocab_size=vocab_size, num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index, shift_labels=shift_labels, **kwargs,
            )  # fmt: skip
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
        self.busy = True
        try:
            head = self._head(probe_of(hidden), logits)
            targets = shift_labels.to(hidden.device).flatten()
            total = hidden.new_zeros((), dtype=torch.float32)
            how: Any = {"use_reentrant": False, "preserve_rng_state": False}
            count = self._count(len(targets), hidden.device)
            for part, target in zip(hidden.flatten(0, 1).tensor_split(count), targets.tensor_split(count), strict=True):
                if torch.is_grad_enabled():
                    total = total + checkpoint(self._part, head, part, target, ignore_index, **how)
                else:
                    total = total + self._part(head, part, target, ignore_index)
        finally:
            self.busy = False
        items = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return total / (items.to(total.device) if isinstance(items, Tensor) else items)

    def _count(self, tokens: int, device: torch.device) -> int:
        """How many slices: as many on all processes, where each call of the head gathers its weights from them."""
        count = -(-tokens // self.tokens_at_once)
        if dist.is_available() and dist.is_initialized() and _gathered_by_call(self.model.get_output_embeddings()):
            most = torch.tensor(count, device=device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            count = int(most)
        return count

    def _part(self, head: Head, hidden: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        busy, self.busy = self.busy, True  # backward calls this again, when the context may still be open
        try:
            return F.cross_entropy(head(hidden[None])[0].float(), labels, ignore_index=ignore_index, reduction="sum")
        finally:
            self.busy = busy

    def _head(self, hidden: Tensor, logits: Tensor) -> Head:
        with torch.no_grad():
            head = head_of(self.model, hidden, logits.detach())
        if head is None:
            name = type(self.model).__name__
            raise NotImplementedError(
                f"{name} forms its logits in a way of its own, so its loss cannot be computed in slices: compute it at once, "
                f"with tokens_at_once=0, or loss_tokens_at_once=0 of RingTrainingArguments"
            )
        return head


def _gathered_by_call(module: nn.Module) -> bool:
    """Whether FSDP or ZeRO-3 holds a module's weights apart, so that a call of it is one of all processes."""
    sharded = any(isinstance(inner, (FSDPModule, FullyShardedDataParallel)) for inner in module.modules())
    return sharded or any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def probe_of(hidden: Tensor) -> Tensor:
    """[B, 1, width] of hidden states [B, n, width] those of each row's largest token: those of padding may be 0, of which
    every head makes the same."""
    largest = hidden.detach().norm(dim=-1).argmax(1)
    return hidden.detach()[torch.arange(len(hidden), device=hidden.device), largest][:, None]


def head_of(model: PreTrainedModel, hidden: Tensor, logits: Tensor) -> Head | None:
    """What makes logits of hidden states, tried on some; None if it is not the output layer, scaled or capped.

    Args:
        hidden: what `probe_of` gives; logits: [B, 1, vocabulary], the model's own.
    """
    output: Any = model.get_output_embeddings()
    if output is None:
        return None
    plain = output(hidden)  # once: a call of all processes, where the weights are sharded
    if not torch.isfinite(logits).all():  # the loss will say so
        return output
    tolerance = 4 * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    scale = float((logits.float() * plain.float()).sum() / plain.float().square().sum().clamp_min(1e-30))
    changes: list[Head] = [lambda x: x, lambda x: x * scale]
    if cap is not None:  # first: small logits are hardly changed by it
        changes.insert(0, lambda x: torch.tanh(x / cap) * cap)
    for change in changes:
        if float((change(plain).float() - logits.float()).abs().max()) <= tolerance:
            return lambda x, change=change: change(output(x))  # type: ignore[misc]
    return None


def _transformers_model(model: nn.Module) -> PreTrainedModel:
    inner = unwrapped(model)
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(f"expected a Transformers model, got {type(model).__name__}")
    return inner


def check_next_token_loss(model: nn.Module) -> None:
    """Refuses a model whose own loss is not that of next tokens, divided by the number of tokens of all processes.

    Raises:
        ValueError: no Transformers model, or another loss.
    """
    inner = _transformers_model(model)
    name = type(inner).__name__
    causal = LOSS_MAPPING.get(inner.loss_type or "ForCausalLM", ForCausalLMLoss) is ForCausalLMLoss
    if not causal or inner.get_output_embeddings() is None:
        raise ValueError(
            f"{name} does not compute the loss of next tokens, and labels of shards are those of next tokens: train a "
            f"causal language model (...ForCausalLM), or override compute_loss of a Trainer"
        )
    if not any(x.kind is x.VAR_KEYWORD for x in inspect.signature(inner.forward).parameters.values()):
        raise ValueError(
            f"{name}.forward takes no num_items_in_batch, so each rank would average its shard by itself: compute the loss "
            f"from its logits and shift_labels, or override compute_loss of a Trainer"
        )
