"""Runs a causal language model over whole rows, and forms its logits for a slice of tokens at a time."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ..compute.merge import accumulation_dtype
from ..hf.forward_pass import Head
from ..hf.loss.lm_loss import IGNORED
from ..hf.model.config import warn_once
from ..hf.model.wrappers import runner_of
from ..hf.rows.cut import rows_to_cut
from ..hf.rows.documents import first_position
from ..plan.layouts import SequenceLayout
from ..ring.ring import Ring
from ..training.distillation import logits_on_use


def layout_of_rows(model: PreTrainedModel, ring: Ring, ids: Tensor) -> SequenceLayout:
    """Returns the layout by which a model with this ring cuts whole rows [B, n] of one document each."""
    layout = rows_to_cut(runner_of(model), ring, {"input_ids": ids}).layout
    assert layout is not None
    return layout


def hidden_states(model: PreTrainedModel, ring: Ring, ids: Tensor) -> tuple[Tensor, Head]:
    """Runs a model over whole rows [B, n] of one document each; returns this rank's hidden states, and the head for slices.

    If the model uses logits of other tokens too, every rank forms the logits of whole rows. The first result is then this
    rank's part of them, and the head returns its argument.
    """
    positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1) + first_position(runner_of(model))
    arguments = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    parameters = inspect.signature(model.forward).parameters
    if not any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
        # A model without position_ids numbers the tokens of a row itself.
        arguments = {name: x for name, x in arguments.items() if name in parameters}
    head = model.get_output_embeddings()
    logits, found = logits_on_use(model, head, arguments)
    if found is not None:
        return found.part, found.of_states
    if head is not None:
        warn_once(
            f"{type(model).__name__} computes with its logits beyond each number, so the logits of whole rows are held at once"
        )
    return ring.shard(logits, layout_of_rows(model, ring, ids)), lambda whole: whole


def label_nll(model: PreTrainedModel, ring: Ring, ids: Tensor, labels: Tensor, logits_at_once: int) -> Tensor:
    """Returns the loss of each token's label, with the logits of `logits_at_once` tokens of each batch row at a time.

    `ids` and `labels`, the same on every rank, are [B, n] tokens of one document a row, and the token after each, or `IGNORED`.
    The loss is [B, n] float32 or float64 on the CPU, in nats, the same on every rank; NaN for labels that are ignored.
    """
    layout = layout_of_rows(model, ring, ids)
    labels = ring.shard(labels.to(ids.device), layout, fill=IGNORED)
    hidden, head = hidden_states(model, ring, ids)
    nll = torch.full(labels.shape, torch.nan, dtype=accumulation_dtype(model.dtype), device=labels.device)
    with _whole_weights(model, model.get_output_embeddings()):
        # All ranks have equally many slices, because they gather divided weights of the head together.
        for first in range(0, hidden.shape[1], logits_at_once):
            part = slice(first, first + logits_at_once)
            scored = labels[:, part] != IGNORED
            logits = head(hidden[:, part][scored][None])[0].to(nll.dtype)
            nll[:, part][scored] = F.cross_entropy(logits, labels[:, part][scored], reduction="none")
    return ring.unshard(nll, layout).cpu()


def check_finite(losses: Tensor, model: PreTrainedModel, caller: str) -> None:
    """Refuses losses that are infinite or NaN: a sum without them would make a broken model look better than a sound one."""
    if wrong := int((~torch.isfinite(losses)).sum()):
        raise ValueError(
            f"{caller}: {wrong} of {losses.numel()} losses of {type(model).__name__} in {model.dtype} are infinite or NaN: use "
            f"bfloat16 or float32, or look for such numbers in its weights"
        )


@contextmanager
def _whole_weights(model: nn.Module, module: nn.Module | None) -> Iterator[None]:
    """Lets all processes call a module inside a model by itself, if a module around it holds its weights by FSDP 2."""
    around = [x for x in model.modules() if isinstance(x, FSDPModule) and any(inner is module for inner in x.modules())]
    if not around or around[-1] is module:  # The module's call gathers its weights.
        yield
        return
    around[-1].unshard()
    try:
        yield
    finally:
        around[-1].reshard()
