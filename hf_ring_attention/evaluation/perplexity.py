"""The perplexity of long documents in one pass: sums over tokens, logits in slices, rows sharded over a ring."""

from __future__ import annotations

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

from ..hf.lm_loss import IGNORED
from ..hf.patch import patch_model
from ..hf.positions import places_of
from ..hf.rings import attached_ring
from ..hf.support import check_predicts_next
from ..hf.wrappers import evaluating, runner_of, whole_model
from ..ring.ring import Ring
from ..transport.agreement import digest
from .finite import check_finite
from .hidden_states import layout_of_rows
from .slices import logits_in_slices, token_nll

#: What tokenizers return beside the tokens and the mask, which scoring does without.
_ASIDE = (
    "special_tokens_mask", "offset_mapping", "length", "overflow_to_sample_mapping", "num_truncated_tokens",
    "overflowing_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class PerplexityReport:
    """The sums over all scored tokens of all rows.

    Attributes:
        nll: the negative log-likelihood of all scored tokens, in nats.
        tokens: how many tokens were scored.
        token_nll: [B, n] float32 on the CPU: the nll of each token, given those before it; NaN where it was not scored.
        seconds: the wall time of the passes.

    Example:
        >>> report = ra.perplexity(tiny_llama(), torch.arange(1, 65)[None])
        >>> report
        PerplexityReport(perplexity=..., nll=..., tokens=63, rows=1, seconds=...)
        >>> report.token_nll[0, :2].isnan().tolist()  # nothing predicts the first token
        [True, False]
    """

    nll: float
    tokens: int
    token_nll: Tensor
    seconds: float

    @property
    def perplexity(self) -> float:
        """The perplexity of all scored tokens, exp(nll / tokens)."""
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
    """Measures how well a causal language model predicts each token of whole sequences from the earlier tokens that it sees.

    The model runs in evaluation mode, one row at a time and without its padding; logits are formed for a slice of tokens at
    a time, so that neither the vocabulary nor other rows set the memory. Several threads may do this with one model, but
    none may train it meanwhile.

    Args:
        model: a causal language model, with any attention implementation; on a ring it is patched to "ring_dilated".
        input_ids: [B, n] or [n] integers, whole sequences, the same on every rank; n is at least 2. What a
            tokenizer returns will do: a mapping of input_ids and, if it has one, attention_mask.
        ring: the ranks over which each row is sharded; None for the ring that the model was patched with, if any.
        attention_mask: like input_ids, of integers or bool: 1 for tokens, and 0 for padding before and after them, which is
            neither seen nor scored.
        logits_at_once: the number of tokens in a slice.

    Returns:
        The report, the same on every rank.

    Raises:
        ValueError: on every rank, before anything is computed: a model with virtual tokens of PEFT, or one that does not
            predict tokens from those before them (masked language models, classifiers, encoders); rows of fewer than 2
            tokens, or of more than the model has positions for; tokens or masks that are no such integers, padding between
            tokens, shapes that differ, ranks that differ, or no token to score. On every rank, after the pass of a row:
            losses that are infinite or NaN.

    Example:
        >>> ids = torch.arange(1, 65)[None]  # or tokenizer(text, return_tensors="pt")
        >>> whole = ra.perplexity(tiny_llama(), ids)
        >>> models = [tiny_llama(), tiny_llama()]  # the same on each rank
        >>> sharded, _ = ra.run_simulated(lambda ring: ra.perplexity(models[ring.rank], ids, ring=ring), 2)
        >>> sharded.tokens, abs(sharded.perplexity / whole.perplexity - 1) < 1e-4
        (63, True)
    """
    inner = whole_model(model, "perplexity")
    served = ring or attached_ring(inner) or Ring.alone()
    with served.agreement("perplexity") as call:
        check_predicts_next(inner, "perplexity")
        ids, mask = _rows_of(input_ids, attention_mask)
        check_token_rows(inner, ids, mask)
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
                of_row = _row_nll(inner, served, ids[row, first:stop], logits_at_once)
                check_finite(of_row, inner, "perplexity")
                token_nll[row, first + 1 : stop] = of_row
    scored = ~token_nll.isnan()
    return PerplexityReport(
        nll=float(token_nll[scored].double().sum()),
        tokens=int(scored.sum()),
        token_nll=token_nll,
        seconds=time.perf_counter() - start,
    )


def _rows_of(batch: Any, attention_mask: Any) -> tuple[Tensor, Tensor]:
    """Returns tokens and mask, [B, n] int64 on the CPU, of what `perplexity` was given."""
    if isinstance(batch, Mapping):
        others = {name: x for name, x in batch.items() if name not in ("input_ids", "attention_mask", *_ASIDE)}
        types = others.pop("token_type_ids", None)
        if others or (types is not None and bool(torch.as_tensor(types).any())):
            raise ValueError(
                f"perplexity: takes input_ids and attention_mask of a batch, got {sorted(map(str, batch))}: it scores every "
                f"token of whole sequences, and knows no labels, positions, kinds of tokens or other inputs"
            )
        if "input_ids" not in batch:
            raise ValueError(f"perplexity: a batch must have input_ids, got {sorted(map(str, batch))}")
        if attention_mask is not None and batch.get("attention_mask") is not None:
            raise ValueError("perplexity: attention_mask was given twice, in the batch and beside it: pass one of them")
        attention_mask = batch.get("attention_mask") if attention_mask is None else attention_mask
        batch = batch["input_ids"]
    ids = token_ids("input_ids", batch)
    if ids.dim() not in (1, 2) or ids.shape[-1] < 2 or ids.shape[0] < 1:
        raise ValueError(f"perplexity: input_ids must be [rows, tokens] with 2 tokens or more, got {tuple(ids.shape)}")
    mask = torch.ones_like(ids) if attention_mask is None else token_ids("attention_mask", attention_mask)
    if mask.dim() == 1 and tuple(ids.shape) == (1, *mask.shape):
        mask = mask[None]
    if mask.shape != ids.shape:
        raise ValueError(
            f"perplexity: attention_mask must be like input_ids {tuple(ids.shape)}, got {tuple(mask.shape)}"
        )
    length = ids.shape[-1]
    return ids.reshape(-1, length), mask.reshape(-1, length)


def token_ids(name: str, values: Any, caller: str = "perplexity") -> Tensor:
    """Returns what a tokenizer may give as a tensor of int64 on the CPU."""
    if isinstance(values, (list, tuple, np.ndarray)):
        try:
            values = torch.as_tensor(values)
        except (ValueError, TypeError) as failed:
            raise ValueError(
                f"{caller}: {name} must be rows of integers of one length: {failed}; tokenize with padding=True and "
                f"return_tensors='pt', or pass one text at a time"
            ) from failed
    if not isinstance(values, Tensor):
        raise ValueError(
            f"{caller}: {name} must be a tensor of integers, or what a tokenizer returns, got {type(values).__name__}"
        )
    if values.is_floating_point() or values.is_complex() or (name == "input_ids" and values.dtype is torch.bool):
        remedy = "1 for tokens and 0 for padding" if name == "attention_mask" else "tokens of the model's tokenizer"
        raise ValueError(
            f"{caller}: {name} must be integers ({remedy}), got {values.dtype}: pass {name}.long(), if these are the numbers"
        )
    return values.detach().to("cpu", torch.int64).contiguous()


def check_token_rows(model: PreTrainedModel, ids: Tensor, mask: Tensor, caller: str = "perplexity") -> None:
    """Refuses what the model could not compute, or what would not be scored as it was meant.

    Raises:
        ValueError: as `perplexity`, in the name of `caller`.
    """
    table = model.get_input_embeddings()
    vocabulary = table.num_embeddings if isinstance(table, nn.Embedding) else None
    least, largest = int(ids.min()), int(ids.max())
    if least < 0 or (vocabulary is not None and largest >= vocabulary):
        raise ValueError(
            f"{caller}: input_ids must be from 0 to {'' if vocabulary is None else vocabulary - 1}, of which "
            f"{type(model).__name__} has embeddings, got {least} to {largest}: use the model's own tokenizer, and no labels "
            f"in place of tokens"
        )
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(
            f"{caller}: attention_mask must be 1 for tokens and 0 for padding, got values from {int(mask.min())} to "
            f"{int(mask.max())}"
        )
    for row, ones in enumerate(mask):
        first, stop = _extent(ones)
        if stop - first != int(ones.sum()):
            raise ValueError(
                f"{caller}: batch row {row} of attention_mask has padding inside: it marks {int(ones.sum())} of the tokens "
                f"{first} to {stop - 1}: padding belongs before and after the tokens of a row; pass packed documents as rows "
                f"of their own"
            )
    longest, places = int(mask.sum(1).max()), places_of(runner_of(model))
    if places is not None and longest > places:
        raise ValueError(
            f"{caller}: {type(model).__name__} has learned positions for {places} tokens, and a row has {longest}: cut rows "
            f"to {places} tokens, or take a model with rotary positions"
        )
    if longest < 2:
        raise ValueError(f"{caller}: no token to score: every token is padding or the first of its row")


def _extent(mask: Tensor) -> tuple[int, int]:
    """Returns where the tokens of a row that are not padding begin, and where they stop."""
    tokens = mask.nonzero().flatten()
    return (int(tokens[0]), int(tokens[-1]) + 1) if len(tokens) else (0, 0)


def _row_nll(model: PreTrainedModel, ring: Ring, row: Tensor, logits_at_once: int) -> Tensor:
    """Returns [n - 1] float32 on the CPU: the loss of each of n tokens but the first."""
    ids = row[None].to(model.device)
    layout = layout_of_rows(model, ring, ids)
    labels = ring.shard(F.pad(ids[:, 1:], (0, 1), value=IGNORED), layout, fill=IGNORED)
    nll = token_nll(logits_in_slices(model, ring, ids, labels != IGNORED, logits_at_once), labels)
    return ring.unshard(nll, layout)[0, :-1].cpu()
