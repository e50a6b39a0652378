"""Refuses losses that are no numbers: sums that left them out would make a broken model look better than a sound one."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


def check_finite(losses: Tensor, model: PreTrainedModel, caller: str) -> None:
    """Refuses losses that are infinite or NaN.

    Args:
        losses: of any shape, the same on every rank.
        caller: the function that the error names.

    Raises:
        ValueError: one of them is.
    """
    wrong = int((~torch.isfinite(losses)).sum())
    if wrong:
        raise ValueError(
            f"{caller}: {wrong} of {losses.numel()} losses of {type(model).__name__} in {model.dtype} are infinite or NaN, so "
            f"that there is no figure to give: take another dtype, bfloat16 or float32, or look for such numbers in its weights"
        )
