"""One pass of a causal language model: its hidden states, and the function by which its head makes logits of them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..hf.heads import Head, HeadCall, running, watching
from ..ring.ring import Ring

logger = logging.getLogger(__name__)


def hidden_states(model: PreTrainedModel, ring: Ring, ids: Tensor, positions: Tensor) -> tuple[Tensor, Head]:
    """Runs a model over this rank's tokens, without forming their logits, if its head is one that can be inferred.

    Args:
        ids, positions: [1, n] this rank's tokens and their position ids.

    Returns:
        [1, n, width], and the function that makes logits of slices of it. For other heads these are the logits themselves,
        held at once, and the function returns its argument.
    """
    arguments = _accepted(model, {"input_ids": ids, "position_ids": positions, "use_cache": False})
    output = model.get_output_embeddings()
    call = HeadCall(output)
    with watching(output), running(call):
        formed = _logits(model(**arguments))
    head, hidden = call.head(formed, model.config), call.hidden
    head_unknown = torch.tensor(hidden is not None and head is None, device=ids.device)
    if any(bool(of_rank) for of_rank in ring.gather(head_unknown)):  # All ranks must decide alike.
        logger.warning(
            "%s forms its logits in a way of its own, so the logits of the whole sequence are held at once",
            type(model).__name__,
        )
        head, formed = None, _logits(model(**arguments))
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
