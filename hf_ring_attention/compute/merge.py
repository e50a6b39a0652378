"""Partial attention results, (out, lse), their merge, and sinks with learned logits.

Merging two parts of one softmax (Milakov & Gimelshein, arXiv 1805.02867; Ring Attention, arXiv 2310.01889): with
w = 1 / (1 + exp(lse_a - lse_b)), out = out_a + w (out_b - out_a) and lse = log(exp(lse_a) + exp(lse_b)).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns float32 for float16, bfloat16 and float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Returns a context in which products of x keep its dtype: autocast would round float32 products to 16 bits."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merges new_out, of any dtype, and new_lse into out [..., L, D] and lse [..., L], in place; lse is float32 or float64.

    An out of lse's dtype gets no rounding to 16 bits. An out of 16 bits is read and written without a float32 copy, at the
    cost of one more rounding: of out (1 - w). Rows without a key have lse = -inf and out = 0, and add nothing: two such rows
    make another such row, never NaN.
    """
    weight = torch.sigmoid(new_lse - lse)
    # -inf - -inf is NaN if neither row has a key; then both outs are 0.
    weight.nan_to_num_(nan=0.0)
    weights = weight.unsqueeze(-1)
    if out.dtype == lse.dtype:
        out.lerp_(new_out.to(out.dtype), weights)
    else:
        out.mul_(1 - weights).addcmul_(new_out, weights)
    torch.logaddexp(lse, new_lse, out=lse) if lse.is_contiguous() else lse.copy_(torch.logaddexp(lse, new_lse))


def add_sinks(out: Tensor, lse: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) with one more column of value 0 in the softmax (gpt-oss, arXiv 2508.10925), in rows with a key.

    For out [B, H, L, D] and lse [B, H, L], `logits` [H] are the scores of the column.
    """
    logits = logits.to(lse.dtype)[None, :, None]
    weight = torch.sigmoid(lse - logits)  # 0 where lse = -inf
    merged = torch.where(torch.isneginf(lse), lse, torch.logaddexp(lse, logits))
    return (out.to(lse.dtype) * weight.unsqueeze(-1)).to(out.dtype), merged


def sinks_grad(dout: Tensor, out: Tensor, lse: Tensor, logits: Tensor) -> Tensor:
    """Returns the [H] gradient of `add_sinks`' logits, from its results: the column's weight times (0 - dout . out)."""
    weight = torch.where(torch.isneginf(lse), 0.0, torch.exp(logits.to(lse.dtype)[None, :, None] - lse))
    return -(weight * (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 2)).to(logits.dtype)
