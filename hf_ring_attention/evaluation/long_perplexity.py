"""LongPPL (Fang et al., arXiv 2410.23771): the perplexity of those tokens that gain from a long context.

Two passes of one model find them, the judge: one sees the whole text before a token, the other a short context alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..ring.ring import Ring
from .perplexity import perplexity

#: The paper's thresholds: the least gain in nats, and the least log-likelihood with the long context.
ALPHA_GAIN, BETA_LIKELIHOOD = 2.0, -2.0
#: The paper's short context, and how many tokens share one, in tokens.
SHORT_CONTEXT, SHARING = 4096, 1024


def short_context_nll(
    model: PreTrainedModel, ids: Tensor, short: int, sharing: int, ring: Ring | None = None, *, opening: int = 0
) -> Tensor:
    """Returns the nll of each token from number `short` on, given `short` to `short + sharing - 1` tokens before it.

    Args:
        ids: [n] integers; n is more than `short`.
        opening: the first tokens of ids that open each context, as part of it.

    Returns:
        [n] float32 on the CPU, NaN for the tokens before.
    """
    nll = torch.full((len(ids),), torch.nan)
    for first in range(0, len(ids) - short, sharing):
        stop = min(first + short + sharing, len(ids))
        row = torch.cat([ids[:opening], ids[first + opening : stop]])
        nll[first + short : stop] = perplexity(model, row, ring=ring).token_nll[0, short:]
    return nll


def tokens_that_gain(
    long_nll: Tensor, short_nll: Tensor, alpha: float = ALPHA_GAIN, beta: float = BETA_LIKELIHOOD
) -> list[int]:
    """Returns the numbers of the tokens that a long context makes likelier by more than alpha nats, and than beta at all.

    Args:
        long_nll, short_nll: [n], NaN where a token is not compared.
    """
    gains = (short_nll - long_nll > alpha) & (long_nll < -beta)  # A comparison with NaN is false.
    return [int(number) for number in gains.nonzero().flatten()]
