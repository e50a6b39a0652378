"""The perplexity of long documents in one pass: rows sharded over a ring, and logits in slices."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..hf.loss.lm_loss import IGNORED
from ..hf.model.support import check_predicts_next
from ..hf.model.wrappers import attachment_of, evaluating, runner_of, whole_model
from ..hf.patch import patch_model
from ..hf.rows.cut import places_of
from ..plan.branches import check_count
from ..ring.ring import Ring
from ..transport.agreement import digest
from .logits import check_finite, label_nll
from .progress import moved_by_layers, progress_bar

#: The entries of a tokenizer's result; scoring needs the first two. Those of a processor are 0 for text.
_TAKEN = {
    "input_ids", "attention_mask", "special_tokens_mask", "offset_mapping", "length", "overflow_to_sample_mapping",
    "num_truncated_tokens", "overflowing_tokens",
}  # fmt: skip
_TYPES = ("token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class PerplexityReport:
    """Sums over all scored tokens of all rows.

    Attributes:
        nll: the negative log-likelihood of all scored tokens, in nats.
        tokens: how many tokens were scored.
        token_nll: [B, n] float32 on the CPU: the nll of each token, given the tokens before it; NaN if it was not scored.
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
        """exp(nll / tokens)."""
        return math.exp(self.nll / self.tokens)

    def __repr__(self) -> str:
        figures = f"perplexity={self.perplexity:.4f}, nll={self.nll:.4f}, tokens={self.tokens}"
        return f"PerplexityReport({figures}, rows={len(self.token_nll)}, seconds={self.seconds:.2f})"


@torch.no_grad()
def perplexity(
    model: PreTrainedModel,
    input_ids: Tensor | Mapping[str, Any],
    ring: Ring | None = None,
    *,
    attention_mask: Tensor | None = None,
    logits_at_once: int = 512,
    progress: bool = False,
) -> PerplexityReport:
    """Measures how well a causal language model predicts each token of whole sequences from the earlier tokens that it sees.

    The model runs in evaluation mode, one row at a time and without its padding. Logits exist for a slice of tokens at a time.
    Several threads may score one model at once, but none may train it meanwhile.

    Args:
        model: a causal language model, with any attention implementation; on a ring it is patched to "ring_dilated".
        input_ids: [B, n] or [n] integers, whole sequences, the same on every rank; n is at least 2. Or a tokenizer's result: a
            mapping with input_ids and perhaps attention_mask.
        ring: the ranks over which each row is sharded; None for the ring that the model was patched with, if any.
        attention_mask: like input_ids, of integers or bool: 1 for tokens, and 0 for padding before and after them, which is
            neither seen nor scored.
        logits_at_once: the number of tokens in a slice.
        progress: whether a bar counts the tokens, layer by layer; a file gets a line of it every half minute.

    Returns:
        The report, the same on every rank.

    Raises:
        ValueError: on every rank, before anything is computed: a model that does not predict tokens from earlier ones (masked
            language models, classifiers, encoders) or has virtual tokens of PEFT; rows longer than the model's positions;
            wrong tokens or masks, padding between tokens, or ranks that differ. After the pass of a row: losses that are
            infinite or NaN.

    Example:
        >>> ids = torch.arange(1, 65)[None]  # or tokenizer(text, return_tensors="pt")
        >>> whole = ra.perplexity(tiny_llama(), ids)
        >>> models = [tiny_llama(), tiny_llama()]  # the same on each rank
        >>> sharded, _ = ra.run_simulated(lambda ring: ra.perplexity(models[ring.rank], ids, ring=ring), 2)
        >>> sharded.tokens, abs(sharded.perplexity / whole.perplexity - 1) < 1e-4
        (63, True)
    """
    inner = whole_model(model, "perplexity")
    served = ring or attachment_of(inner).ring or Ring.alone()
    with served.agreement("perplexity") as call:
        check_predicts_next(inner, "perplexity")
        ids, mask = _rows_of(input_ids, attention_mask)
        check_token_rows(inner, ids, mask)
        check_count("perplexity", "logits_at_once", logits_at_once)
        call.values = {"the shape of input_ids": tuple(ids.shape), "a checksum of input_ids": digest(ids)}
        call.values |= {"a checksum of attention_mask": digest(mask), "logits_at_once": logits_at_once}
    if ring is not None and attachment_of(inner).ring is not ring:
        patch_model(inner, ring=ring)

    start = time.perf_counter()
    token_nll = torch.full(ids.shape, torch.nan)
    with evaluating(inner), progress_bar("perplexity", int(mask.sum()), not progress or served.rank > 0) as bar:
        for row, (first, stop) in enumerate(map(_extent, mask)):
            if stop - first > 1:
                tokens = ids[row, first:stop].to(inner.device)[None]
                labels = nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED)
                with moved_by_layers(bar, inner, tokens.numel()):
                    nll = label_nll(inner, served, tokens, labels, logits_at_once)[0, :-1]
                check_finite(nll, inner, "perplexity")
                token_nll[row, first + 1 : stop] = nll
    scored, seconds = ~token_nll.isnan(), time.perf_counter() - start
    return PerplexityReport(float(token_nll[scored].double().sum()), int(scored.sum()), token_nll, seconds)


def _rows_of(batch: Any, attention_mask: Any) -> tuple[Tensor, Tensor]:
    """Returns tokens and mask, [B, n] int64 on the CPU."""
    if isinstance(batch, Mapping):
        given = {k for k, x in batch.items() if x is not None and (k not in _TYPES or torch.as_tensor(x).any())}
        if not given <= _TAKEN or "input_ids" not in given:
            raise ValueError(
                f"perplexity: expected input_ids and perhaps attention_mask, because it scores every token of whole "
                f"sequences, got {sorted(map(str, batch))}"
            )
        if attention_mask is not None and batch.get("attention_mask") is not None:
            raise ValueError("perplexity: got an attention_mask in the batch and another beside it: pass one of them")
        attention_mask = batch.get("attention_mask") if attention_mask is None else attention_mask
        batch = batch["input_ids"]
    ids = token_ids("input_ids", batch)
    if ids.dim() not in (1, 2) or ids.shape[-1] < 2 or ids.shape[0] < 1:
        raise ValueError(f"perplexity: input_ids must be [rows, tokens] with 2 tokens or more, got {tuple(ids.shape)}")
    mask = torch.ones_like(ids) if attention_mask is None else token_ids("attention_mask", attention_mask)
    if mask.shape not in (ids.shape, ids.shape[1:] if len(ids) == 1 else ids.shape):
        raise ValueError(
            f"perplexity: attention_mask must have the shape of input_ids {tuple(ids.shape)}, got {tuple(mask.shape)}"
        )
    return torch.atleast_2d(ids), torch.atleast_2d(mask)


def token_ids(name: str, values: Any, caller: str = "perplexity") -> Tensor:
    """Returns integers as a tensor of int64 on the CPU, from any type that tokenizers return."""
    try:
        values = torch.as_tensor(values)
    except (ValueError, TypeError, RuntimeError) as error:
        kind = f"{type(values).__name__} ({error}): tokenize with padding=True, or one by one"
        raise ValueError(f"{caller}: {name} must be rows of integers of one length, got {kind}") from error
    if values.is_floating_point() or values.is_complex() or (name == "input_ids" and values.dtype is torch.bool):
        meaning = "1 for tokens and 0 for padding" if name == "attention_mask" else "tokens of the model's tokenizer"
        raise ValueError(f"{caller}: {name} must be integers ({meaning}), got {values.dtype}: pass {name}.long()")
    return values.detach().to("cpu", torch.int64).contiguous()


def check_token_rows(model: PreTrainedModel, ids: Tensor, mask: Tensor, caller: str = "perplexity") -> None:
    """Refuses rows that the model cannot compute, or that would not be scored as their author expects, as `perplexity` does."""
    table = model.get_input_embeddings()
    name, least, largest = type(model).__name__, int(ids.min()), int(ids.max())
    most = table.num_embeddings - 1 if isinstance(table, nn.Embedding) else largest
    if least < 0 or largest > most:
        raise ValueError(
            f"{caller}: input_ids must be from 0 to {most}, as {name} has embeddings, got {least} to {largest}: use its own "
            f"tokenizer, and tokens instead of labels"
        )
    if bool(((mask != 0) & (mask != 1)).any()):
        values = f"{int(mask.min())} to {int(mask.max())}"
        raise ValueError(f"{caller}: attention_mask must be 1 for tokens and 0 for padding, got values from {values}")
    for row, tokens in enumerate(mask):
        (first, stop), count = _extent(tokens), int(tokens.sum())
        if stop - first != count:
            raise ValueError(
                f"{caller}: batch row {row} of attention_mask has padding inside: it marks {count} of the tokens {first} to "
                f"{stop - 1}: pass packed documents as separate rows"
            )
    longest, places = int(mask.sum(1).max()), places_of(runner_of(model))
    if places is not None and longest > places:
        got = f"learned positions for {places} tokens, and a row has {longest}"
        raise ValueError(f"{caller}: {name} has {got}: cut rows to {places} tokens")
    if longest < 2:
        raise ValueError(f"{caller}: no token to score: every token is padding or the first of its row")


def _extent(mask: Tensor) -> tuple[int, int]:
    """Returns the first token of a row that is not padding, and the end of its tokens."""
    tokens = mask.nonzero().flatten()
    return (int(tokens[0]), int(tokens[-1]) + 1) if len(tokens) else (0, 0)
