"""The loss of self-distillation: a model with a pattern learns what it computes itself with exact attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..hf.forward_pass import CALL, Head, RingCall, exact_attention, running_with
from ..hf.loss.lm_loss import IGNORED
from ..hf.loss.on_use import values_of
from ..hf.loss.output_layer import wrap_head
from ..hf.loss.values import Values
from ..hf.model.config import warn_once
from ..hf.model.support import check_predicts_next
from ..hf.model.wrappers import ATTACHMENT, evaluating, unwrapped, whole_model, wrapped_modules


def distillation_loss(
    model: nn.Module, batch: Mapping[str, Any], num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Returns the mean divergence of a model's predictions from its predictions under exact attention.

    The divergence of a token is KL(p || q) = sum p log(p / q) over the vocabulary, in nats. The teacher p predicts with exact
    attention and without gradients, the student q with the model's pattern. The teacher of a model with adapters of PEFT is
    the model without them. Without adapters, the teacher moves with the weights that are being trained, and the divergence
    falls while both may predict texts worse. The logger warns of this once.

    The loss takes the place of `model(**batch).loss`: it has the same value on every rank of a ring, and includes the terms
    that a model adds itself, such as the loss of routers. Logits exist for a slice of tokens at a time.

    Args:
        model: a causal language model that `patch_model` has patched, bare or as `accelerator.prepare` returned it.
        batch: the arguments of the model, whole rows; labels choose the tokens that count, and nothing else.
        num_items_in_batch: the divisor of the sum, as in Transformers; None for the number of labels in the batch.

    Raises:
        ValueError: a model that `patch_model` has not patched, that does not predict next tokens, or that has virtual tokens
            of PEFT; or a batch without labels.
        NotImplementedError: a model that computes with its logits beyond each number, such as a softmax in its forward.

    Example:
        >>> model, ids = ra.patch_model(tiny_llama(), "window:4+2"), torch.arange(1, 33)[None]
        >>> loss = ra.distillation_loss(model, {"input_ids": ids, "labels": ids})
        >>> loss.backward()
        >>> exact = ra.patch_model(tiny_llama(), "exact")  # the teacher itself has nothing to learn
        >>> loss.item() > 0, ra.distillation_loss(exact, {"input_ids": ids, "labels": ids}).abs().item() < 1e-6
        (True, True)
    """
    inner = whole_model(model, "distillation_loss")
    check_predicts_next(inner, "distillation_loss")
    if not hasattr(inner, ATTACHMENT):
        raise ValueError(f"distillation_loss: {type(inner).__name__} has no pattern to learn: call ra.patch_model")
    if not any(isinstance(batch.get(name), Tensor) for name in ("labels", "shift_labels")):
        raise ValueError(f"distillation_loss: expected labels in the batch, got {sorted(map(str, batch))}")
    if _peft_of(model) is None:
        warn_once(
            f"distillation_loss: {type(inner).__name__} has no adapters of PEFT, so the teacher has the weights that are being "
            f"trained, and moves with them: add adapters, or watch the loss of texts that are held out"
        )
    call = {"use_cache": False, **batch}
    inputs = {name: x for name, x in call.items() if not name.endswith("labels")}
    with exact_attention(model), _without_adapters(model), evaluating(inner):
        teacher = logits_on_use(model, inner.get_output_embeddings(), inputs)[1]
    if teacher is None:
        raise NotImplementedError(
            f"distillation_loss: {type(inner).__name__} computes with its logits beyond each number, so they cannot be formed "
            f"in slices"
        )
    if num_items_in_batch is not None:
        call["num_items_in_batch"] = num_items_in_batch
    result = model(**call, **{CALL: RingCall(of_slice=partial(_divergence, model, teacher.part.flatten(0, 1)))})
    loss: Tensor = result["loss"] if isinstance(result, Mapping) else result[0]
    return loss


def _peft_of(model: nn.Module) -> Any:
    """Returns the module with which PEFT wraps a model; None if it does not."""
    return next((module for module in wrapped_modules(model) if hasattr(module, "disable_adapter")), None)


def logits_on_use(model: nn.Module, head: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Values | None]:
    """Runs a model, whose output layer is `head`, if it has one. Returns its logits, which are formed when they are used.

    The values hold this rank's hidden states; None if the model has formed its logits already.
    """
    if head is not None:
        wrap_head(head)
    with running_with(on_use=True):
        output = model(**inputs)
    logits: Tensor = output["logits"] if isinstance(output, Mapping) else output[0]
    return logits, values_of(logits)


def _divergence(model: nn.Module, teacher: Tensor, head: Head, hidden: Tensor, labels: Tensor, place: slice) -> Tensor:
    """Returns the sum of the divergences of tokens with labels; `teacher` has its hidden states, [tokens, width]."""
    with torch.no_grad(), _without_adapters(model):  # The output layer may have adapters too.
        expected = F.log_softmax(head(teacher[place][None])[0].float(), dim=-1)
    predicted = F.log_softmax(head(hidden[None])[0].float(), dim=-1)
    return divergences(predicted, expected).masked_fill(labels == IGNORED, 0).sum()


def divergences(predicted: Tensor, expected: Tensor) -> Tensor:
    """Returns [m]: the divergence in nats of predictions from the expected ones, both as log-probabilities [m, vocabulary]."""
    return F.kl_div(predicted, expected, reduction="none", log_target=True).sum(-1)


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
