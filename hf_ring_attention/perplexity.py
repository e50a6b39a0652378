"""Perplexity of long documents in one pass: sums over tokens, logits in slices, rows sharded over a ring."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from .batches import IGNORED
from .configuration import layer_pattern
from .gate import evaluating, whole_model
from .losses import head_of, probe_of
from .modeling import patch_model
from .ring import Ring
from .sharding import attached_ring

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PerplexityReport:
    """Sums over all scored tokens of all rows.

    nll: negative log-likelihood in nats; tokens: how many were scored; token_nll: [B, n] float32 on the CPU, of each
    token given those before it, NaN where not scored; seconds: wall time of the passes.
    """

    nll: float
    tokens: int
    token_nll: Tensor
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(nll / tokens)."""
        return math.exp(self.nll / self.tokens)


@torch.no_grad()
def perplexity(
    model: PreTrainedModel,
    input_ids: Tensor,
    ring: Ring | None = None,
    *,
    attention_mask: Tensor | None = None,
    logits_at_once: int = 512,
) -> PerplexityReport:
    """How well a causal language model predicts each token of whole rows from all those before it that it sees.

    The model runs in evaluation mode, one row at a time; its logits are formed for a slice of tokens at a time, so that
    neither the vocabulary nor other rows set the memory.

    Args:
        model: a causal language model, with any attention implementation; on a ring it is patched to "ring_dilated".
        input_ids: [B, n] or [n], whole rows, the same on every rank; n is at least 2.
        ring: the ranks over which each row is sharded; None for the ring the model was patched with, if any.
        attention_mask: like input_ids; 0 for padding, which is neither seen nor scored.
        logits_at_once: tokens of a slice.

    Returns:
        The report, the same on every rank.

    Raises:
        ValueError: a model with virtual tokens of PEFT, rows of fewer than 2 tokens, shapes that differ, or no token to score.
    """
    input_ids = input_ids[None] if input_ids.dim() == 1 else input_ids
    if input_ids.dim() != 2 or input_ids.shape[1] < 2:
        raise ValueError(
            f"perplexity: input_ids must be [rows, tokens] with 2 tokens or more, got {tuple(input_ids.shape)}"
        )
    if attention_mask is not None:
        attention_mask = attention_mask.reshape(input_ids.shape[0], -1)
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"perplexity: attention_mask must be like input_ids {tuple(input_ids.shape)}, got "
                f"{tuple(attention_mask.shape)}"
            )
    if logits_at_once < 1:
        raise ValueError(f"perplexity: logits_at_once must be at least 1, got {logits_at_once}")
    model = whole_model(model, "perplexity")
    if ring is not None and attached_ring(model) is not ring:
        patch_model(model, ring=ring)
    ring = attached_ring(model) or Ring.alone()
    layout = ring.layout_for(input_ids.shape[1], layer_pattern(model.config.get_text_config(), None))

    start = time.perf_counter()
    rows = []
    with evaluating(model):
        for row in range(input_ids.shape[0]):
            ids = input_ids[row : row + 1].to(model.device)
            mask = None if attention_mask is None else attention_mask[row : row + 1].to(model.device)
            labels = F.pad(ids[:, 1:], (0, 1), value=IGNORED)  # of each token, the next one
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            if mask is not None:
                scored = F.pad((mask[:, 1:] * mask[:, :-1]).bool(), (0, 1))
                labels = labels.masked_fill(~scored, IGNORED)
                positions = (mask.cumsum(-1) - 1).clamp_min(0)
            nll = _next_token_nll(
                model,
                ring,
                ring.shard(ids, layout),
                ring.shard(labels, layout, fill=IGNORED),
                ring.shard(positions, layout),
                None if mask is None else ring.shard(mask, layout),
                logits_at_once,
            )
            whole = ring.unshard(nll, layout)
            rows.append(F.pad(whole[:, :-1], (1, 0), value=torch.nan).cpu())
    token_nll = torch.cat(rows)
    scored = ~token_nll.isnan()
    if not scored.any():
        raise ValueError("perplexity: no token to score: every token is padding or the first of its row")
    return PerplexityReport(
        nll=float(token_nll[scored].double().sum()),
        tokens=int(scored.sum()),
        token_nll=token_nll,
        seconds=time.perf_counter() - start,
    )


def _next_token_nll(
    model: PreTrainedModel,
    ring: Ring,
    ids: Tensor,
    labels: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    logits_at_once: int,
) -> Tensor:
    """[1, n] float32: of each token's label, NaN for ignored ones."""
    hidden: list[Tensor] = []

    def keep(module: torch.nn.Module, args: tuple) -> tuple | None:
        """Before the head: keeps the hidden states and leaves the model a token of them."""
        hidden.append(args[0])
        return (probe_of(args[0]), *args[1:])

    arguments = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": False}
    output = model.get_output_embeddings()
    handle = None if output is None else output.register_forward_pre_hook(keep)
    try:
        made = model(**arguments).logits
    finally:
        if handle is not None:
            handle.remove()
    head = head_of(model, probe_of(hidden[0]), made) if hidden else None
    unknown = torch.tensor(bool(hidden) and head is None, device=ids.device)
    if any(bool(of_rank) for of_rank in ring.gather(unknown)):  # by all ranks together
        logger.warning("%s forms its logits in a way of its own: they are kept for the whole row", type(model).__name__)
        head, made = None, model(**arguments).logits
    nll = torch.empty(labels.shape, dtype=torch.float32, device=labels.device)
    for first in range(0, ids.shape[1], logits_at_once):
        part = slice(first, first + logits_at_once)
        logits = made[:, part] if head is None else head(hidden[0][:, part])
        nll[:, part] = F.cross_entropy(
            logits.float().transpose(1, 2), labels[:, part], ignore_index=IGNORED, reduction="none"
        )
    return nll.masked_fill_(labels == IGNORED, torch.nan)
