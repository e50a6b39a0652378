"""One pass of a causal language model: its hidden states, and the function by which its head makes logits of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..hf.config import warn_once
from ..hf.cut import rows_to_cut
from ..hf.forward_pass import Head
from ..hf.heads import watched
from ..hf.positions import first_position
from ..hf.wrappers import runner_of
from ..plan.layouts import SequenceLayout
from ..ring.ring import Ring


def layout_of_rows(model: PreTrainedModel, ring: Ring, ids: Tensor) -> SequenceLayout:
    """Returns the layout by which a model with this ring cuts whole rows [B, n] of one document each."""
    layout = rows_to_cut(runner_of(model), ring, {"input_ids": ids}).layout
    assert layout is not None
    return layout


def hidden_states(model: PreTrainedModel, ring: Ring, ids: Tensor) -> tuple[Tensor, Head]:
    """Runs a model over whole rows without forming their logits, if its config describes its head.

    Args:
        ids: [B, n] tokens of one document a row, the same on every rank.

    Returns:
        [B, n local, width] this rank's part, and the function that makes logits of slices of it. For other heads the first is
        this rank's part of the logits, which every rank forms for whole rows, and the function returns its argument.
    """
    positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1) + first_position(runner_of(model))
    arguments = _accepted(model, {"input_ids": ids, "position_ids": positions, "use_cache": False})
    with watched(model.get_output_embeddings()) as call:
        formed = _logits(model(**arguments))
    head, hidden = call.head(formed, model.config), call.hidden
    head_unknown = torch.tensor(hidden is not None and head is None, device=ids.device)
    if any(bool(of_rank) for of_rank in ring.gather(head_unknown)):  # All ranks must decide alike.
        warn_once(
            f"{type(model).__name__} forms its logits in a way that its config does not name, so the logits of whole rows are "
            f"held at once"
        )
        return ring.shard(_logits(model(**arguments)), layout_of_rows(model, ring, ids)), _as_they_are
    return (formed, _as_they_are) if head is None or hidden is None else (hidden, head)


def _as_they_are(logits: Tensor) -> Tensor:
    return logits


def _accepted(model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a model takes; a model that takes no positions numbers the tokens of a row itself."""
    parameters = inspect.signature(model.forward).parameters
    if any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
        return arguments
    return {name: x for name, x in arguments.items() if name in parameters}


def _logits(output: Any) -> Tensor:
    logits: Tensor = output["logits"] if isinstance(output, Mapping) else output[0]
    return logits
