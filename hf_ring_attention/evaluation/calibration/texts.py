"""The texts of a calibration: texts as they are, and a text with needles that the model must find again far back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...transport.agreement import digest

#: The tokens of a needle. When it comes again at the end, its first `CUE` tokens lead to the others.
NEEDLE, CUE = 16, 4
#: The share of a retrieval text that needles take at its end, and again in its rest.
SHARE_OF_NEEDLES = 1 / 16
#: The fewest tokens of a retrieval text: a needle twice, and as much around it.
SHORTEST_RETRIEVAL_TEXT = 4 * NEEDLE


@dataclass(frozen=True)
class ScoredText:
    """A text, and which of its tokens are scored, by the prediction at the token before each."""

    ids: Tensor  # [n] int64, on the CPU
    scored: Tensor  # [n] bool; never the first
    #: Of the tokens that are drawn from predictions; None if the text's own tokens are answers to be found.
    seed: int | None

    @property
    def num_scored(self) -> int:
        return int(self.scored.sum())

    @property
    def digest(self) -> str:
        return digest([digest(self.ids), digest(self.scored), self.seed])


def plain_text(ids: Tensor, seed: int) -> ScoredText:
    """Returns a text whose tokens are all scored; `seed` is at least 0."""
    return ScoredText(ids, torch.arange(len(ids)) > 0, seed)


def drawn_tokens(logits: Tensor, seed: int, positions: Iterable[int]) -> Tensor:
    """Returns [m] int64: for each of the logits [m, vocabulary], a token drawn with the probability that it predicts.

    The token has the largest sum of logit and Gumbel noise, minus the logarithm of an exponential variable. A position in the
    text has the same noise on any number of ranks, so rounding matters only between the two largest sums. It would far more
    often move a draw from cumulated probabilities.
    """
    drawn = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    for number, (row, position) in enumerate(zip(logits.detach(), positions, strict=True)):
        noise = np.random.default_rng((seed, position)).standard_exponential(len(row))
        drawn[number] = (row - torch.from_numpy(np.log(noise)).to(row)).argmax()
    return drawn


def retrieval_text(ids: Tensor, seed: int) -> ScoredText:
    """Returns a text of the same length with needles in it, which come again at its end, in another order.

    A needle is `NEEDLE` random tokens of the text, so that only its first occurrence shows how it goes on. Needles are spread
    evenly over the text. At the end, all tokens of a needle but its first `CUE` are scored.
    """
    length = len(ids)
    count = max(1, int(length * SHARE_OF_NEEDLES) // NEEDLE)
    generator = torch.Generator().manual_seed(seed)
    needles = ids[torch.randint(length, (count, NEEDLE), generator=generator)]
    order = torch.randperm(count, generator=generator)
    hay = ids[: length - 2 * count * NEEDLE]
    pieces = [part for straw, needle in zip(hay.tensor_split(count), needles) for part in (straw, needle)]
    row = torch.cat([*pieces, needles[order].flatten()])
    scored = torch.zeros(length, dtype=torch.bool)
    scored[length - count * NEEDLE :] = (torch.arange(NEEDLE) >= CUE).repeat(count)
    return ScoredText(row, scored, None)
