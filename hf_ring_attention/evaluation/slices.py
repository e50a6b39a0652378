"""The logits of a forward pass, formed for a slice of tokens at a time, on each rank for its part of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..hf.forward_pass import Head
from ..hf.lm_loss import IGNORED
from ..ring.ring import Ring
from ..training.sharded_weights import whole_weights
from .hidden_states import hidden_states


def logits_in_slices(
    model: PreTrainedModel, ring: Ring, ids: Tensor, chosen: Tensor, tokens_at_once: int
) -> Iterator[tuple[slice, Tensor]]:
    """Runs a causal language model over whole rows, and yields the logits of chosen tokens, a slice of this rank's at a time.

    All ranks get equally many slices, since a head whose weights are divided among them is called by all together.

    Args:
        ids: [B, n] tokens of one document a row, the same on every rank.
        chosen, tokens_at_once: as for `head_in_slices`, which yields the same.
    """
    hidden, head = hidden_states(model, ring, ids)
    with whole_weights(model, model.get_output_embeddings()):
        yield from head_in_slices(hidden, head, chosen, tokens_at_once)


def head_in_slices(hidden: Tensor, head: Head, chosen: Tensor, tokens_at_once: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields the logits of chosen tokens, a slice of a rank's n tokens at a time.

    Args:
        hidden, head: what `hidden_states` returned, [B, n, width] and a function of slices of it.
        chosen: [B, n] bool, the tokens whose logits are wanted.
        tokens_at_once: the number of tokens of each batch row in a slice.

    Yields:
        The slice of the rank's n tokens, and [k, vocabulary] the logits of the k tokens that are chosen in it, in the
        order of `chosen[:, slice].nonzero()`.
    """
    for first in range(0, hidden.shape[1], tokens_at_once):
        part = slice(first, first + tokens_at_once)
        yield part, head(hidden[:, part][chosen[:, part]][None])[0]


def token_nll(logits: Iterable[tuple[slice, Tensor]], labels: Tensor) -> Tensor:
    """Returns [B, n] float32: the loss of the label of each token, in nats, NaN where the label is ignored.

    Args:
        logits: those of the tokens whose labels are not ignored, as `head_in_slices` yields them.
        labels: [B, n] the next token of each, or `IGNORED`.
    """
    nll = torch.full(labels.shape, torch.nan, device=labels.device)
    scored = labels != IGNORED
    for part, of_part in logits:
        of_labels = labels[:, part][scored[:, part]]
        nll[:, part][scored[:, part]] = F.cross_entropy(of_part.float(), of_labels, reduction="none")
    return nll
