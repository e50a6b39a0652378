"""Plain math as a kernel; `kernel.py` describes its arguments and results."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..plan.joins import PADDED, Joining
from .kernel import Gradients, KernelCall, Results, Saved, added, merged
from .merge import accumulation_dtype
from .rows import hidden_keys


class Math:
    """Plain matrix products, a slice of query rows at a time, for every dtype, device and width.

    Scores s become softcap * tanh(s / softcap), as in Gemma 2 (arXiv 2408.00118), if there is a softcap.
    """

    name = "math"
    joining: Joining | None = PADDED
    #: The most elements of scores that are held at once.
    budget = 1 << 24

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap

    def _slices(self, q: Tensor, k: Tensor, call: KernelCall) -> Iterator[tuple[slice, slice]]:
        """Yields (query rows, the keys that some of them see): parts that hold at most `budget` scores, or have one row."""
        fold_size, num_keys = call.fold_size, k.shape[2]
        width = num_keys - q.shape[2] // fold_size + 1
        rows = max(1, self.budget // max(1, q.shape[0] * q.shape[1] * num_keys))
        for start in range(0, q.shape[2], rows):
            stop = min(start + rows, q.shape[2])
            first, last = start // fold_size, (stop - 1) // fold_size
            keys = {"full": (0, num_keys), "causal": (0, last + 1), "band": (first, last + width)}[call.shape]
            yield slice(start, stop), slice(*keys)

    def _scores(
        self, q: Tensor, k: Tensor, rows: slice, keys: slice, width: int, call: KernelCall
    ) -> tuple[Tensor, Tensor | None]:
        """Returns scores [T, Hkv, g, rows, keys] of q [T, Hkv, g, rows, D], and their tanh if capped."""
        scores, tanh = q @ k[:, :, None, keys].mT * call.scale, None
        if self.softcap is not None:
            tanh = torch.tanh(scores / self.softcap)
            scores = tanh * self.softcap
        if call.shape != "full":
            query = torch.arange(rows.start, rows.stop, device=q.device)[:, None] // call.fold_size
            key = torch.arange(keys.start, keys.stop, device=q.device)
            hidden = key > query if call.shape == "causal" else (key < query) | (key >= query + width)
            scores = scores.masked_fill(hidden, -torch.inf)
        if call.lengths is not None:
            scores = scores.masked_fill(hidden_keys(call.lengths, k.shape[2])[:, None], -torch.inf)
        return scores, tanh

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, totals: Results | None = None) -> Results:
        dtype, width = accumulation_dtype(q.dtype), k.shape[2] - q.shape[2] // call.fold_size + 1
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=dtype)
        k, v, grouped = k.to(dtype), v.to(dtype), (k.shape[1], q.shape[1] // k.shape[1])
        for rows, keys in self._slices(q, k, call):
            queries = q[:, :, rows].to(dtype).unflatten(1, grouped)
            scores, _ = self._scores(queries, k, rows, keys, width, call)
            lse_rows = torch.logsumexp(scores, -1)
            out[:, :, rows] = (torch.exp(scores - lse_rows[..., None]) @ v[:, :, None, keys]).flatten(1, 2)
            lse[:, :, rows] = lse_rows.flatten(1, 2)
        return merged((out, lse), totals)

    def backward(self, dout: Tensor, saved: Saved, call: KernelCall, sums: Gradients | None = None) -> Gradients:
        q, k, v, out, lse = saved
        dtype, width = accumulation_dtype(q.dtype), k.shape[2] - q.shape[2] // call.fold_size + 1
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        key_dtype, grouped = k.dtype, (k.shape[1], q.shape[1] // k.shape[1])
        k, v = k.to(dtype), v.to(dtype)
        for rows, keys in self._slices(q, k, call):
            q_rows, dout_rows, out_rows = (x[:, :, rows].to(dtype).unflatten(1, grouped) for x in (q, dout, out))
            scores, tanh = self._scores(q_rows, k, rows, keys, width, call)
            p = torch.exp(scores - lse[:, :, rows].unflatten(1, grouped)[..., None])
            dp = dout_rows @ v[:, :, None, keys].mT
            ds = p * (dp - (dout_rows * out_rows).sum(-1, keepdim=True)) * call.scale
            if tanh is not None:
                ds *= 1 - tanh.square()
            dq[:, :, rows] = (ds @ k[:, :, None, keys]).flatten(1, 2)
            dk[:, :, keys] += (ds.mT @ q_rows).sum(2)
            dv[:, :, keys] += (p.mT @ dout_rows).sum(2)
        return added((dq, dk.to(key_dtype), dv.to(key_dtype)), sums)
