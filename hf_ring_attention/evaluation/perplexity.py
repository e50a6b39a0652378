"""Perplexity of long documents in one pass: sums over tokens, logits in slices, rows sharded over a ring."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..hf.config import layer_pattern
from ..hf.heads import HeadCall, running, watching
from ..hf.patch import patch_model
from ..hf.positions import first_position, places_of
from ..hf.rings import attached_ring
from ..hf.support import check_predicts_next
from ..hf.wrappers import evaluating, runner_of, whole_model
from ..ring.ring import Ring
from ..training.shards import ASIDE, IGNORED
from ..transport.agreement import digest

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

    def __repr__(self) -> str:
        rows = len(self.token_nll)
        return (
            f"PerplexityReport(perplexity={self.perplexity:.4f}, nll={self.nll:.4f}, tokens={self.tokens}, rows={rows}, "
            f"seconds={self.seconds:.2f})"
        )


@torch.no_grad()
def perplexity(
    model: PreTrainedModel,
    input_ids: Tensor | Mapping[str, Any],
    ring: Ring | None = None,
    *,
    attention_mask: Tensor | None = None,
    logits_at_once: int = 512,
) -> PerplexityReport:
    """How well a causal language model predicts each token of whole rows from all those before it that it sees.

        report = ra.perplexity(model, tokenizer(text, return_tensors="pt"))
        print(report.perplexity, report.tokens)

    The model runs in evaluation mode, one row at a time and without its padding; logits are formed for a slice of tokens at
    a time, so that neither the vocabulary nor other rows set the memory. Several threads may do this with one model, but
    none may train it meanwhile.

    Args:
        model: a causal language model, with any attention implementation; on a ring it is patched to "ring_dilated".
        input_ids: [B, n] or [n] integers, whole rows, the same on every rank; n is at least 2. Or what a tokenizer returns:
            a mapping of input_ids and, if it has one, attention_mask.
        ring: the ranks over which each row is sharded; None for the ring the model was patched with, if any.
        attention_mask: like input_ids, of integers or bool: 1 for tokens, and 0 for padding before and after them, which is
            neither seen nor scored.
        logits_at_once: tokens of a slice.

    Returns:
        The report, the same on every rank.

    Raises:
        ValueError: on every rank, before anything is computed: a model with virtual tokens of PEFT, or one that does not
            predict tokens from those before them (masked language models, classifiers, encoders); rows of fewer than 2
            tokens, or of more than the model has positions for; tokens or masks that are no such integers, padding between
            tokens, shapes that differ, ranks that differ, or no token to score.
    """
    inner = whole_model(model, "perplexity")
    served = ring or attached_ring(inner) or Ring.alone()
    with served.agreement() as call:
        check_predicts_next(inner, "perplexity")
        ids, mask = _rows_of(input_ids, attention_mask)
        _check_rows(inner, ids, mask)
        if logits_at_once < 1:
            raise ValueError(f"perplexity: logits_at_once must be at least 1, got {logits_at_once}")
        call.same("the shape of input_ids", tuple(ids.shape))
        call.same("a checksum of input_ids", digest(ids))
        call.same("a checksum of attention_mask", digest(mask))
        call.same("logits_at_once", logits_at_once)
    if ring is not None and attached_ring(inner) is not ring:
        patch_model(inner, ring=ring)

    start = time.perf_counter()
    token_nll = torch.full(ids.shape, torch.nan)
    with evaluating(inner):
        for row, (first, stop) in enumerate(map(_extent, mask)):
            if stop - first > 1:
                token_nll[row, first + 1 : stop] = _row_nll(inner, served, ids[row, first:stop], logits_at_once)
    scored = ~token_nll.isnan()
    return PerplexityReport(
        nll=float(token_nll[scored].double().sum()),
        tokens=int(scored.sum()),
        token_nll=token_nll,
        seconds=time.perf_counter() - start,
    )


def _rows_of(given: Any, attention_mask: Any) -> tuple[Tensor, Tensor]:
    """Tokens and mask [B, n] int64 on the CPU, of what `perplexity` was given."""
    if isinstance(given, Mapping):
        others = {
            name: x
            for name, x in given.items()
            if name not in ("input_ids", "attention_mask", "special_tokens_mask", "offset_mapping", *ASIDE)
        }
        types = others.pop("token_type_ids", None)
        if others or (types is not None and bool(torch.as_tensor(types).any())):
            raise ValueError(
                f"perplexity: takes input_ids and attention_mask of a batch, got {sorted(map(str, given))}: it scores every "
                f"token of whole rows, and knows no labels, positions, kinds of tokens or other inputs"
            )
        if "input_ids" not in given:
            raise ValueError(f"perplexity: a batch must have input_ids, got {sorted(map(str, given))}")
        if attention_mask is not None and given.get("attention_mask") is not None:
            raise ValueError("perplexity: attention_mask was given twice, in the batch and beside it: pass one of them")
        attention_mask = given.get("attention_mask") if attention_mask is None else attention_mask
        given = given["input_ids"]
    ids = _token_ids("input_ids", given)
    if ids.dim() not in (1, 2) or ids.shape[-1] < 2 or ids.shape[0] < 1:
        raise ValueError(f"perplexity: input_ids must be [rows, tokens] with 2 tokens or more, got {tuple(ids.shape)}")
    mask = torch.ones_like(ids) if attention_mask is None else _token_ids("attention_mask", attention_mask)
    if mask.dim() == 1 and tuple(ids.shape) == (1, *mask.shape):
        mask = mask[None]
    if mask.shape != ids.shape:
        raise ValueError(
            f"perplexity: attention_mask must be like input_ids {tuple(ids.shape)}, got {tuple(mask.shape)}"
        )
    length = ids.shape[-1]
    return ids.reshape(-1, length), mask.reshape(-1, length)


def _token_ids(name: str, given: Any) -> Tensor:
    """What a tokenizer may give, as a tensor of int64 on the CPU."""
    if isinstance(given, (list, tuple, np.ndarray)):
        try:
            given = torch.as_tensor(given)
        except (ValueError, TypeError) as failed:
            raise ValueError(
                f"perplexity: {name} must be rows of integers of one length: {failed}; tokenize with padding=True and "
                f"return_tensors='pt', or pass one text at a time"
            ) from failed
    if not isinstance(given, Tensor):
        raise ValueError(
            f"perplexity: {name} must be a tensor of integers, or what a tokenizer returns, got {type(given).__name__}"
        )
    if given.is_floating_point() or given.is_complex() or (name == "input_ids" and given.dtype is torch.bool):
        remedy = "1 for tokens and 0 for padding" if name == "attention_mask" else "tokens of the model's tokenizer"
        raise ValueError(
            f"perplexity: {name} must be integers ({remedy}), got {given.dtype}: pass {name}.long() of those"
        )
    return given.detach().to("cpu", torch.int64).contiguous()


def _check_rows(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> None:
    """Refuses what the model could not compute, or what would not be scored as it was meant.

    Raises:
        ValueError: see `perplexity`.
    """
    table = model.get_input_embeddings()
    vocabulary = table.num_embeddings if isinstance(table, nn.Embedding) else None
    least, largest = int(ids.min()), int(ids.max())
    if least < 0 or (vocabulary is not None and largest >= vocabulary):
        raise ValueError(
            f"perplexity: input_ids must be from 0 to {'' if vocabulary is None else vocabulary - 1}, of which "
            f"{type(model).__name__} has embeddings, got {least} to {largest}: use the model's own tokenizer, and no labels "
            f"in place of tokens"
        )
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(
            f"perplexity: attention_mask must be 1 for tokens and 0 for padding, got values from {int(mask.min())} to "
            f"{int(mask.max())}"
        )
    for row, ones in enumerate(mask):
        first, stop = _extent(ones)
        if stop - first != int(ones.sum()):
            raise ValueError(
                f"perplexity: row {row} of attention_mask has padding inside: {int(ones.sum())} tokens between {first} and "
                f"{stop}: padding belongs before and after a row's tokens; pass packed documents as rows of their own"
            )
    longest, places = int(mask.sum(1).max()), places_of(runner_of(model))
    if places is not None and longest > places:
        raise ValueError(
            f"perplexity: {type(model).__name__} has learned positions for {places} tokens, and a row has {longest}: cut rows "
            f"to {places} tokens, or take a model with rotary positions"
        )
    if longest < 2:
        raise ValueError("perplexity: no token to score: every token is padding or the first of its row")


def _extent(mask: Tensor) -> tuple[int, int]:
    """From the first to behind the last token of a row that is not padding."""
    tokens = mask.nonzero().flatten()
    return (int(tokens[0]), int(tokens[-1]) + 1) if len(tokens) else (0, 0)


def _row_nll(model: PreTrainedModel, ring: Ring, row: Tensor, logits_at_once: int) -> Tensor:
    """[n - 1] float32 on the CPU: of each token [n] but the first one."""
    layout = ring.layout_for(len(row), layer_pattern(model.config.get_text_config(), None))
    ids = row[None].to(model.device)
    labels = F.pad(ids[:, 1:], (0, 1), value=IGNORED)  # of each token, the next one
    positions = torch.arange(len(row), device=ids.device)[None] + first_position(runner_of(model))
    nll = _next_token_nll(
        model,
        ring,
        ring.shard(ids, layout),
        ring.shard(labels, layout, fill=IGNORED),
        ring.shard(positions, layout),
        logits_at_once,
    )
    return ring.unshard(nll, layout)[0, :-1].cpu()


def _next_token_nll(
    model: PreTrainedModel, ring: Ring, ids: Tensor, labels: Tensor, positions: Tensor, logits_at_once: int
) -> Tensor:
    """[1, n] float32: of each token's label, NaN for ignored ones."""
    arguments = _accepted(model, {"input_ids": ids, "position_ids": positions, "use_cache": False})
    output = model.get_output_embeddings()
    call = HeadCall(output)
    with watching(output), running(call):
        made = _logits(model(**arguments))
    head, hidden = call.head(made, model.config), call.hidden
    unknown = torch.tensor(hidden is not None and head is None, device=ids.device)
    if any(bool(of_rank) for of_rank in ring.gather(unknown)):  # by all ranks together
        logger.warning("%s forms its logits in a way of its own: they are kept for the whole row", type(model).__name__)
        head, made = None, _logits(model(**arguments))
    nll = torch.empty(labels.shape, dtype=torch.float32, device=labels.device)
    for first in range(0, ids.shape[1], logits_at_once):
        part = slice(first, first + logits_at_once)
        logits = made[:, part] if head is None or hidden is None else head(hidden[:, part])
        nll[:, part] = F.cross_entropy(
            logits.float().transpose(1, 2), labels[:, part], ignore_index=IGNORED, reduction="none"
        )
    return nll.masked_fill_(labels == IGNORED, torch.nan)


def _accepted(model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Without what a model does not take; one that takes no positions numbers the tokens of a row itself."""
    parameters = inspect.signature(model.forward).parameters
    if any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
        return arguments
    return {name: x for name, x in arguments.items() if name in parameters}


def _logits(output: Any) -> Tensor:
    logits: Tensor = output["logits"] if isinstance(output, Mapping) else output[0]
    return logits
