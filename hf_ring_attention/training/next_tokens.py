"""Labels of next tokens: counts them, and checks that a model computes the loss of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ..hf.support import calls_loss_function, check_predicts_next
from ..hf.wrappers import unwrapped
from .shards import IGNORED

_NO_PREPARED_LOADER = (
    "labels must be those of the next token, shifted before rows are cut into shards: take batches from "
    "ring.prepare_data_loader(loader), or cut them with ra.shard_batch(batch, ring); accelerator.prepare(loader) and plain "
    "loaders do not shift labels"
)


def count_tokens(shards: Iterable[Mapping[str, Any]] | Mapping[str, Any]) -> Tensor:
    """Returns how many labels the shards of all processes have together: the divisor of an optimizer step's loss.

    Args:
        shards: all shards of this process that the step accumulates, or a single one.

    Raises:
        ValueError: on every process: no shards, shards without shift_labels, or no label at all.

    Example:
        >>> batch = ra.PaddingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
        >>> shard = ra.shard_batch(batch, ra.Ring.alone())
        >>> int(ra.count_tokens(shard))  # the first token of a document is not predicted
        3
    """
    total = sum_over_processes(shards, _labels_of, 1, "count_tokens")[0]
    if total == 0:
        raise ValueError(
            "count_tokens: no token of this step has a label: every label is -100, and the mean of no losses is no number: "
            "leave out documents of which nothing is learned"
        )
    return total


def _labels_of(shard: Mapping[str, Any]) -> Tensor:
    """Returns [1] the number of labels of a shard."""
    return (shift_labels_of(shard, "count_tokens") != IGNORED).sum()[None]


def sum_over_processes(
    shards: Iterable[Mapping[str, Any]] | Mapping[str, Any],
    count: Callable[[Mapping[str, Any]], Tensor],
    width: int,
    caller: str,
) -> Tensor:
    """Returns [width] the sum of the numbers that `count` has for each of the shards of all processes.

    Raises:
        ValueError: on every process: a process has no shards, or `count` refuses one of them.
    """
    shards = [shards] if isinstance(shards, Mapping) else list(shards)
    error: ValueError | None = None
    counts: list[Tensor] = []
    try:
        if not shards:
            raise ValueError(f"{caller}: got no shards: pass all shards of this process for one optimizer step")
        counts = [count(shard) for shard in shards]
    except ValueError as refusal:
        error = refusal
    device = counts[0].device if counts else _device(shards)
    total = torch.stack([*counts, torch.zeros(width, dtype=torch.int64, device=device)]).sum(0)
    sums = torch.cat([total, torch.tensor([int(error is not None)], device=device)])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(sums)
    if error is not None:
        raise error
    failures = int(sums[-1])
    if failures > 0:
        raise ValueError(f"{caller}: {failures} other processes refused their shards; their own errors say why")
    return sums[:-1]


def _device(shards: Iterable[Any]) -> torch.device:
    """Returns a device on which processes can exchange numbers, for shards without labels."""
    tensors = (x for shard in shards if isinstance(shard, Mapping) for x in shard.values() if isinstance(x, Tensor))
    tensor = next(tensors, None)
    if tensor is not None:
        return tensor.device
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def shift_labels_of(shard: Any, caller: str) -> Tensor:
    """Returns the labels of next tokens that a shard has.

    Raises:
        ValueError: the shard has none, so that no ring's loader has made it.
    """
    if not isinstance(shard, Mapping):
        raise ValueError(f"{caller}: a shard must be a mapping of tensors, got {type(shard).__name__}")
    labels = shard.get("shift_labels")
    if not isinstance(labels, Tensor):
        raise ValueError(
            f"{caller}: a batch has no shift_labels, only {sorted(map(str, shard))}: {_NO_PREPARED_LOADER}"
        )
    return labels


def loss_function_of(model: PreTrainedModel) -> Any:
    """Returns a model's own loss function, also while `losses._SlicedLossFunction` stands in its place."""
    function = model.loss_function
    return getattr(function, "own_loss_function", function)


# ---- which models have a loss of next tokens


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Returns the Transformers model inside its wrappers.

    Raises:
        ValueError: there is no Transformers model inside.
    """
    inner = unwrapped(model)
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(f"expected a Transformers model, got {type(model).__name__}")
    return inner


def check_loss_function(model: PreTrainedModel, caller: str) -> None:
    """Refuses a model whose loss function was replaced.

    Raises:
        ValueError: the loss function is not that of next tokens.
    """
    function = loss_function_of(model)
    if function is not ForCausalLMLoss:
        name = getattr(function, "__qualname__", None) or repr(function)
        raise ValueError(
            f"{caller}: the loss_function of {type(model).__name__} is {name}, and would be replaced by the cross entropy of "
            f"next tokens (transformers.loss.loss_utils.ForCausalLMLoss): to use it, form all logits, by "
            f"sliced_loss(model, 0) or a call of the model without labels, and compute the loss from them, in a Trainer by "
            f"overriding compute_loss; on shards it must be the sum over shift_labels, divided by the number of labels of "
            f"all processes"
        )


def check_next_token_loss(model: nn.Module) -> None:
    """Refuses a model whose own loss is not that of next tokens, divided by the number of tokens of all processes.

    Raises:
        ValueError: no Transformers model, or a model with another loss.
    """
    inner = transformers_model(model)
    name = type(inner).__name__
    check_causal(inner)
    check_loss_function(inner, name)
    if not any(x.kind is x.VAR_KEYWORD for x in inspect.signature(inner.forward).parameters.values()):
        raise ValueError(
            f"{name}.forward takes no num_items_in_batch, so each rank would average its shard by itself: compute the loss "
            f"from its logits and shift_labels, or override compute_loss of a Trainer"
        )


def check_causal(model: PreTrainedModel) -> None:
    """Raises ValueError for a model that is made for another loss than that of next tokens."""
    check_predicts_next(model, "training")
    if model.get_output_embeddings() is None or not calls_loss_function(type(model)):
        raise ValueError(
            f"{type(model).__name__} does not compute the loss of next tokens, and labels of shards are those of next tokens: "
            f"train a causal language model (...ForCausalLM), or override compute_loss of a Trainer"
        )
