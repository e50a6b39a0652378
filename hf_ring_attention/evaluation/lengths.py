"""Perplexity by context length: texts are scored in windows of each length, one after the other or with a stride."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..hf.config import settings_of
from ..hf.patch import patch_model
from ..hf.registration import IMPLEMENTATION
from ..plan.patterns import Pattern
from ..ring.ring import Ring
from .calibration.result import Calibration
from .perplexity import perplexity
from .texts import TokenizedText


@dataclass(frozen=True)
class LengthFigures:
    """Sums over the scored tokens of a text, under one pattern and in windows of `length` tokens."""

    text: str
    pattern: str
    length: int
    nll: float  # in nats
    tokens: int
    size: int | None  # in bytes of UTF-8; None if the tokenizer does not give them
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(nll / tokens)."""
        return math.exp(self.nll / self.tokens)

    @property
    def bits_per_byte(self) -> float | None:
        """The bits that the model needs for a byte of the text; it compares models with different tokenizers."""
        return self.nll / math.log(2) / self.size if self.size else None


def sum_of_texts(name: str, figures: Sequence[LengthFigures]) -> LengthFigures:
    """Returns the sums over several texts, all under the same pattern and in windows of the same length."""
    sizes = [of_text.size for of_text in figures if of_text.size is not None]
    sums = {field: sum(getattr(of_text, field) for of_text in figures) for field in ("nll", "tokens", "seconds")}
    return replace(figures[0], text=name, size=sum(sizes) if len(sizes) == len(figures) else None, **sums)


def figures_by_length(
    model: PreTrainedModel,
    texts: Mapping[str, TokenizedText],
    patterns: Mapping[str, Pattern | Calibration | None],
    lengths: Sequence[int],
    stride: int | None = None,
    ring: Ring | None = None,
    after_each: Callable[[], Any] = lambda: None,
) -> list[LengthFigures]:
    """Measures texts in the windows of `windowed_nll`, alike on all ranks; a pattern of None is the config's present one."""
    config = model.config.get_text_config()
    before = settings_of(config)
    figures = []
    for name, pattern in patterns.items():
        if pattern is None:
            setattr(config, IMPLEMENTATION, before)
        patch_model(model, pattern, ring)
        for text, tokens in texts.items():
            for length in lengths:
                start = time.perf_counter()
                nll = windowed_nll(model, tokens.ids, length, stride, ring, opening=tokens.opening)
                seconds, scored = time.perf_counter() - start, ~nll.isnan()
                total, size = float(nll[scored].double().sum()), tokens.size_of(scored)
                figures.append(LengthFigures(text, name, length, total, int(scored.sum()), size, seconds))
                after_each()
    return figures


def windowed_nll(
    model: PreTrainedModel,
    ids: Tensor,
    window: int,
    stride: int | None = None,
    ring: Ring | None = None,
    *,
    opening: int = 0,
) -> Tensor:
    """Returns the nll of each token, given the tokens before it in the first window that contains it.

    With a stride, as in Hugging Face's guide to perplexity, windows begin at 0, stride, 2 * stride, ... until one reaches the
    end. Without a stride, they follow each other, and a shorter rest is left out, unless there is nothing else.
    The first `opening` of the tokens, ids [n], open each window and are not scored.

    The nll is [n] float32 on the CPU, NaN for tokens that are not scored: the rest, and the first token of a window without
    opening tokens, unless an earlier window scored it.
    """
    room, end = window - opening, len(ids)
    if room < 1 or window < 2:
        raise ValueError(f"a window of {window} tokens has no room: {opening} tokens open it: take a greater length")
    if stride is None:
        stride, end = window, min(end, opening + max(1, (end - opening) // room) * room)
    if not 1 <= stride <= window:
        raise ValueError(f"the stride must be from 1 to the window of {window} tokens, got {stride}")
    nll = torch.full((len(ids),), torch.nan)
    scored = opening
    for first in range(opening, end, min(stride, room)):
        stop = min(first + room, end)
        if stop - first + opening >= 2:
            row = torch.cat([ids[:opening], ids[first:stop]])
            nll[scored:stop] = perplexity(model, row, ring=ring).token_nll[0, opening + scored - first :]
        scored = stop
        if stop == end:
            break
    return nll
