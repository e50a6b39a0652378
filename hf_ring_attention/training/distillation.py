"""The loss of self-distillation: a model with a pattern learns what it computes itself with exact attention."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..hf.exact import exact_attention
from ..hf.heads import Head, HeadCall, running, watching
from ..hf.rings import attached_ring
from ..hf.wrappers import evaluating, unwrapped, whole_model, wrapped_modules
from .loader_checks import check_schedules
from .losses import loss_in_slices
from .next_tokens import check_next_token_loss, shift_labels_of
from .shards import IGNORED

logger = logging.getLogger(__name__)


def distillation_loss(
    model: nn.Module, shard: Mapping[str, Any], tokens: Tensor | int, *, tokens_at_once: int = 1024
) -> Tensor:
    """Returns this process's share of the mean divergence of a model's predictions from its own under exact attention.

    The divergence of a token is KL(p || q) = sum p log(p / q) over the vocabulary, in nats, where p predicts with exact
    attention, without gradients (the teacher), and q with the model's pattern (the student). Both have the same weights, so
    there is no second model. Where PEFT has added adapters, the teacher is the model without them, which stays as it is.
    Without adapters, the teacher has the weights that are being trained: it moves towards the student, and the divergence
    falls while both may predict texts worse. The logger says so once.

    Each share is as `next_token_loss` describes it, and takes its place; what a model adds to its loss by itself, as for its
    routers, is in it too. Logits exist for a slice of tokens at a time, in backward too; the teacher leaves its last hidden
    states [B, n, width] until then.

    Args:
        model: a causal language model, as `accelerator.prepare` or `fully_shard` returned it.
        shard: a shard that a ring's loader or `shard_batch` made; labels say which tokens count, and nothing else.
        tokens: the number that `count_tokens` returned for the whole optimizer step.
        tokens_at_once: counts the tokens of all rows together.

    Raises:
        ValueError: as `next_token_loss`; a model with virtual tokens of PEFT; or tokens_at_once below 1.
        NotImplementedError: as `sliced_loss`.

    Example:
        >>> model, ids = ra.patch_model(tiny_llama(), "window:4+2"), torch.arange(1, 33)[None]
        >>> shard = ra.shard_batch({"input_ids": ids, "labels": ids}, ra.Ring.alone())
        >>> loss = ra.distillation_loss(model, shard, ra.count_tokens(shard))
        >>> loss.backward()
        >>> exact = ra.patch_model(tiny_llama(), "exact")  # the teacher itself has nothing to learn
        >>> loss.item() > 0, ra.distillation_loss(exact, shard, ra.count_tokens(shard)).abs().item() < 1e-6
        (True, True)
    """
    if tokens_at_once < 1:
        raise ValueError(f"distillation_loss: tokens_at_once must be at least 1, got {tokens_at_once}")
    check_next_token_loss(model)
    inner = whole_model(model, "distillation_loss")
    shift_labels_of(shard, "distillation_loss")
    ring = attached_ring(inner)
    if ring is not None:
        check_schedules(ring)
    if _peft_of(model) is None:
        _warn_of_moving(type(inner).__name__)
    call = {"use_cache": False, **shard}
    hidden = _hidden_of_teacher(model, inner, {name: x for name, x in call.items() if not name.endswith("labels")})
    output = inner.get_output_embeddings()
    # An output layer with adapters of its own is the teacher's only without them.
    adapted = any(hasattr(module, "disable_adapters") for module in output.modules())
    of_slice = partial(_divergence, hidden.flatten(0, 1), model if adapted else None)
    with loss_in_slices(model, tokens_at_once, of_slice, "distillation_loss"):
        result = model(**call, num_items_in_batch=tokens)
    loss: Tensor = result["loss"] if isinstance(result, Mapping) else result[0]
    return loss * (dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1)


def _peft_of(model: nn.Module) -> Any:
    """Returns the module with which PEFT wraps a model; None if it does not."""
    return next((module for module in wrapped_modules(model) if hasattr(module, "disable_adapter")), None)


@lru_cache(maxsize=256)
def _warn_of_moving(name: str) -> None:
    logger.warning(
        "distillation_loss: %s has no adapters of PEFT, so the teacher has the weights that are being trained, and moves with "
        "them: the divergence can fall while texts are predicted worse; add adapters, which the teacher does without, or watch "
        "the loss of texts that are held out",
        name,
    )


def _hidden_of_teacher(model: nn.Module, inner: PreTrainedModel, inputs: Mapping[str, Any]) -> Tensor:
    """Returns [B, n, width] the last hidden states of a model under exact attention, without its adapters and its dropout."""
    output = inner.get_output_embeddings()
    call = HeadCall(output)
    with exact_attention(model), _without_adapters(model), evaluating(inner), watching(output), running(call):
        model(**inputs)
    if call.hidden is None:
        raise NotImplementedError(
            f"{type(inner).__name__} {call.unsuited or 'does not call its output layer'}, so there are no hidden states to "
            f"make the teacher's predictions of"
        )
    return call.hidden


def _divergence(
    teacher: Tensor, adapted: nn.Module | None, head: Head, hidden: Tensor, labels: Tensor, place: slice
) -> Tensor:
    """Returns the sum of the divergences of tokens with labels.

    Args:
        teacher: [tokens, width] its hidden states, for all tokens.
        adapted: the model, if its output layer has adapters.
    """
    with torch.no_grad(), nullcontext() if adapted is None else _without_adapters(adapted):
        expected = F.log_softmax(head(teacher[place][None])[0].float(), dim=-1)
    predicted = F.log_softmax(head(hidden[None])[0].float(), dim=-1)
    divergences = F.kl_div(predicted, expected, reduction="none", log_target=True).sum(-1)
    return divergences.masked_fill(labels == IGNORED, 0).sum()


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """A context in which a model computes without the adapters of PEFT, if it has any; then all is as it was."""
    wrapper = _peft_of(model)
    if wrapper is None:
        yield
        return
    trained = [(parameter, parameter.requires_grad) for parameter in unwrapped(model).parameters()]
    try:
        with wrapper.disable_adapter():
            yield
    finally:
        for parameter, requires_grad in trained:  # PEFT takes all adapters that it turns on for trained ones.
            parameter.requires_grad_(requires_grad)
