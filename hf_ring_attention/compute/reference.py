"""The dense oracle: the definition of `Pattern`, evaluated with n x n matrices in float64.

Tests and `hf-ring-attention check` use it; the engine never imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..plan.patterns import Pattern


@lru_cache(maxsize=64)
def multiplicity_matrix(pattern: Pattern, length: int, num_heads: int, num_kv_heads: int, causal: bool) -> Tensor:
    """Returns `Pattern.multiplicity` of every head, query position and key position: [H, length, length] float64."""
    heads: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    group = num_heads // num_kv_heads
    matrices: dict[Any, list[list[int]]] = {}
    kinds = [(pattern.of_kv_head(head // group), head // group) for head in range(num_heads)]
    for head, kind in enumerate(kinds):
        if kind not in matrices:
            options = {"head": head, "causal": causal, **heads}
            matrices[kind] = [[pattern.multiplicity(q, k, **options) for k in range(length)] for q in range(length)]
    return torch.tensor([matrices[kind] for kind in kinds], dtype=torch.float64)


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern,
    documents: Sequence[Sequence[tuple[int, int]]] | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Computes attention of whole sequences by the definition; autograd can differentiate it.

    Args:
        q: [B, H, n, D]; k: [B, Hkv, n, D]; v: [B, Hkv, n, Dv].
        documents: the (start, stop) of the documents of each batch row; None for one document of n tokens.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: [H] logits of one more column of the softmax, of value 0.
        dtype: the dtype of the whole computation; a narrower dtype shows its rounding errors.

    Returns:
        out [B, H, n, Dv] and lse [B, H, n], in `dtype`.
    """
    batch, num_heads, n, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    counts = q.new_zeros(batch, num_heads, n, n, dtype=dtype)
    for row in range(batch):
        for start, stop in [(0, n)] if documents is None else documents[row]:
            counts[row, :, start:stop, start:stop] = multiplicity_matrix(
                pattern, stop - start, num_heads, num_kv_heads, causal
            )
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    scores = scale * q.to(dtype) @ k.mT  # [B, H, n, n]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    top = scores.masked_fill(counts == 0, -torch.inf).amax(-1, keepdim=True).clamp_min(torch.finfo(dtype).min).detach()
    column = None if sinks is None else sinks.to(dtype)[None, :, None, None]
    if column is not None:
        top = top.maximum(column.detach())  # If all scores are far below, their weights are 0 and the column's is 1.
    weights = counts * torch.exp(torch.where(counts > 0, scores - top, 0.0))
    total = weights.sum(-1, keepdim=True)
    if column is not None:
        has_key = (counts > 0).any(-1, keepdim=True)
        total = torch.where(has_key, total + torch.exp(column - top), total)
    out = weights @ v / torch.where(total > 0, total, 1.0)
    lse = torch.where(total > 0, top + torch.log(torch.where(total > 0, total, 1.0)), -torch.inf)
    return out, lse.squeeze(-1)
