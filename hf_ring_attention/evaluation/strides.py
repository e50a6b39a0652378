"""Perplexity with a stride, as in Hugging Face's guide: windows that overlap, in each of which the new tokens are scored."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..ring.ring import Ring
from .perplexity import perplexity


def stride_nll(
    model: PreTrainedModel, ids: Tensor, window: int, stride: int, ring: Ring | None = None, *, opening: int = 0
) -> Tensor:
    """Returns the nll of each token, given those before it in the first window that it is in.

    Windows begin at 0, stride, 2 * stride, ... until one reaches the end. A token is scored once, and not at all where it is
    the first of its window, as each window's first token is where stride = window.

    Args:
        ids: [n] integers.
        window: the tokens of a window, of which `stride` are new ones in each but the first.
        opening: the first tokens of ids that open each window and are not scored; where they leave no room for `stride` new
            ones, there are fewer.

    Returns:
        [n] float32 on the CPU, NaN where a token was not scored.

    Raises:
        ValueError: a stride that is not from 1 to the window, or a window that has no room for a token.
    """
    if opening >= window:
        raise ValueError(f"stride_nll: a window of {window} tokens has no room behind the {opening} that open it")
    if not 1 <= stride <= window:
        raise ValueError(
            f"stride_nll: the stride must be from 1 to the window of {window} tokens, got {stride}: beyond it tokens between "
            f"windows would not be scored"
        )
    nll = torch.full((len(ids),), torch.nan)
    scored, room = opening, window - opening
    for first in range(opening, len(ids), min(stride, room)):
        stop = min(first + room, len(ids))
        if stop - first + opening >= 2:
            row = torch.cat([ids[:opening], ids[first:stop]])
            nll[scored:stop] = perplexity(model, row, ring=ring).token_nll[0, opening + scored - first :]
        scored = stop
        if stop == len(ids):
            break
    return nll
