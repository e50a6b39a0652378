"""Perplexity by context length: texts are scored in windows of each length, one after the other or with a stride."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..hf.model.config import settings_of
from ..hf.names import IMPLEMENTATION
from ..hf.patch import patch_model
from ..plan.patterns import Pattern
from ..ring.ring import Ring
from .calibration.result import Calibration
from .perplexity import perplexity
from .progress import moved_by_layers, progress_bar
from .texts import TokenizedText


@dataclass(frozen=True)
class LengthFigures:
    """Sums over the scored tokens of a text, under one pattern and in windows of `length` tokens, at most the text's own."""

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
    size, length = sum(sizes) if len(sizes) == len(figures) else None, max(of_text.length for of_text in figures)
    return replace(figures[0], text=name, length=length, size=size, **sums)


def figures_by_length(
    model: PreTrainedModel,
    texts: Mapping[str, TokenizedText],
    patterns: Mapping[str, Pattern | Calibration | None],
    lengths: Sequence[int],
    stride: int | None = None,
    ring: Ring | None = None,
    progress: bool = False,
) -> list[LengthFigures]:
    """Measures texts in the windows of `windows_of`, alike on all ranks; a pattern of None is the config's present one.

    With `progress`, a bar counts the tokens of all windows.
    """
    config = model.config.get_text_config()
    before = settings_of(config)
    windows = {
        (text, min(length, len(tokens.ids))): windows_of(len(tokens.ids), length, stride, tokens.opening)
        for text, tokens in texts.items()
        for length in lengths
    }
    sizes = {key: [stop - first + texts[key[0]].opening for first, stop in found] for key, found in windows.items()}
    figures = []
    with progress_bar("perplexity", len(patterns) * sum(map(sum, sizes.values())), silent=not progress) as bar:
        for name, pattern in patterns.items():
            if pattern is None:
                setattr(config, IMPLEMENTATION, before)
            patch_model(model, pattern, ring)
            for (text, length), found in windows.items():
                start, tokens = time.perf_counter(), texts[text]
                with moved_by_layers(bar, model, *sizes[text, length]):
                    nll = nll_of_windows(model, tokens.ids, found, ring, opening=tokens.opening)
                seconds, scored = time.perf_counter() - start, ~nll.isnan()
                total, size = float(nll[scored].double().sum()), tokens.size_of(scored)
                figures.append(LengthFigures(text, name, length, total, int(scored.sum()), size, seconds))
    return figures


def windows_of(end: int, window: int, stride: int | None = None, opening: int = 0) -> list[tuple[int, int]]:
    """Returns the tokens, first and stop, of each window of a text of `end` tokens, besides its opening tokens.

    With a stride, as in Hugging Face's guide to perplexity, windows begin at 0, stride, 2 * stride, ... until one reaches the
    end. Without a stride, they follow each other, and a shorter rest is left out, unless there is nothing else.
    """
    room = window - opening
    if room < 1 or window < 2:
        raise ValueError(f"a window of {window} tokens has no room: {opening} tokens open it: take a greater length")
    if stride is None:
        stride, end = window, min(end, opening + max(1, (end - opening) // room) * room)
    if not 1 <= stride <= window:
        raise ValueError(f"the stride must be from 1 to the window of {window} tokens, got {stride}")
    windows = [(first, min(first + room, end)) for first in range(opening, end, min(stride, room))]
    last = next((number for number, (_, stop) in enumerate(windows, 1) if stop == end), 0)
    return windows[:last]


def nll_of_windows(
    model: PreTrainedModel, ids: Tensor, windows: Sequence[tuple[int, int]], ring: Ring | None = None, opening: int = 0
) -> Tensor:
    """Returns the nll of each token, given the tokens before it in the first window that contains it.

    The first `opening` of the tokens, ids [n], open each window and are not scored. The nll is [n] float32 on the CPU, NaN for
    tokens that are not scored: those outside of windows, and the first token of a window without opening tokens, unless an
    earlier window scored it.
    """
    nll, scored = torch.full((len(ids),), torch.nan), opening
    for first, stop in windows:
        if stop - first + opening >= 2:
            row = torch.cat([ids[:opening], ids[first:stop]])
            nll[scored:stop] = perplexity(model, row, ring=ring).token_nll[0, opening + scored - first :]
        scored = stop
    return nll
