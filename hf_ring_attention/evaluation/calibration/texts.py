"""The texts of a calibration: the given ones, and texts made of them in which tokens must be found far back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...transport.agreement import digest

#: Tokens of a needle, and how many of its first ones lead to the others, when it comes again at the end.
NEEDLE, CUE = 16, 4
#: Of a retrieval text, the share that the needles take at its end, and again in its rest.
SHARE_OF_NEEDLES = 1 / 16


@dataclass(frozen=True)
class ScoredText:
    """A text, and what of it is scored.

    Attributes:
        ids: [n] int64, on the CPU.
        scored: [n] bool: the tokens whose predictions, made at the token before each, are scored; never the first.
        seed: what the tokens drawn from its predictions follow from; None where the tokens of the text are answers that are to
            be found.
    """

    ids: Tensor
    scored: Tensor
    seed: int | None

    @property
    def num_scored(self) -> int:
        """How many tokens are scored."""
        return int(self.scored.sum())

    @property
    def digest(self) -> str:
        """A checksum of the text, of what is scored, and of the seed."""
        return digest([digest(self.ids), digest(self.scored), self.seed])


def plain_text(ids: Tensor, seed: int) -> ScoredText:
    """Returns a text all of whose predictions are scored.

    Args:
        seed: of 0 or more.
    """
    scored = torch.ones(len(ids), dtype=torch.bool)
    scored[0] = False
    return ScoredText(ids, scored, seed)


def drawn_tokens(logits: Tensor, seed: int, positions: Iterable[int]) -> Tensor:
    """Returns [m] int64: of each prediction, a token drawn with the probability that it gives.

    It is the one with the largest sum of logit and noise (Gumbel's: minus the logarithm of an exponential variable). The noise
    of a position is the same on any number of ranks, and so is the draw, unless a rounding decides between the two largest. A
    place in cumulated probabilities would be moved by a rounding far more often, across some border of the whole vocabulary.

    Args:
        logits: [m, vocabulary].
        positions: of the m tokens in their text.
    """
    drawn = []
    for row, position in zip(logits.detach(), positions, strict=True):
        noise = np.random.default_rng((seed, position)).standard_exponential(len(row))
        drawn.append((row - torch.from_numpy(np.log(noise)).to(row)).argmax())
    return torch.stack(drawn)


def retrieval_text(ids: Tensor, seed: int) -> ScoredText:
    """Returns a text of the same length with needles in it, which come again at its end, in another order.

    A needle is `NEEDLE` tokens of the text, drawn at random, so that nothing but its first occurrence tells how it goes on. The
    needles are spread evenly over the text, and what comes again is scored but for the first `CUE` tokens of each.

    Args:
        ids: [n] the text, of at least `shortest_retrieval_text()` tokens.
        seed: what the needles follow from.
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


def shortest_retrieval_text() -> int:
    """Returns the fewest tokens of which a retrieval text can be made: a needle twice, and as much around it."""
    return 4 * NEEDLE
