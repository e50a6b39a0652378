"""Attention of a batch of tiles, forward and backward, with the log-sum-exp of each row.

Every kernel takes q [T, H, Lq, D], k [T, Hkv, Lk, D], v [T, Hkv, Lk, Dv] (query head h reads key/value head
h // (H / Hkv)) and the shape of the tiles: query i sees all keys ("full"), keys 0 to i ("causal", Lq = Lk), or keys i to
i + Lk - Lq ("band"). Where a tile has folds (`plan/tiles.py`), q has `folds` rows in place of each of these Lq, one after the
other, which see the same keys.
`backward` takes the out and lse of the *whole* softmax: with those, a tile's gradients are its exact share
(FlashAttention, arXiv 2205.14135, appendix B).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..plan.tiles import Shape
from .bands import Gradients, MaskedKernel, Results, added, folded, merged, unfolded
from .merge import accumulation_dtype

aten = torch.ops.aten


class Kernel(Protocol):
    """An implementation of attention for a batch of tiles."""

    name: str

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shape: Shape,
        scale: float,
        folds: int = 1,
        totals: Results | None = None,
    ) -> Results:
        """Returns out [T, H, Lq, Dv] in q's dtype and lse [T, H, Lq] in the accumulation dtype.

        Args:
            totals: out and lse, both in the accumulation dtype, that the results are merged into; they are then returned.
        """

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        shape: Shape,
        scale: float,
        folds: int = 1,
        sums: Gradients | None = None,
    ) -> Gradients:
        """Returns dq, dk and dv, in the shapes of q, k and v.

        Args:
            sums: tensors of these shapes, in the accumulation dtype, that the gradients are added to; they are then returned.
        """


@dataclass(frozen=True)
class KernelChoice:
    """A kernel, with the reason for its choice."""

    kernel: Kernel
    reason: str


def _pad(x: Tensor, width: int) -> Tensor:
    """Adds zero columns up to `width`: they change no score, and outputs there are dropped."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class CpuFlash(MaskedKernel):
    """torch's flash attention for CPU, which takes grouped heads as they are, and bands as stretches."""

    name = "cpu_flash"

    def forward_masked(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        value_dim, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
        q, k, v = (_rows(_pad(x, width)) for x in (q, k, v))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return out[..., :value_dim], lse

    def backward_masked(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head_dim, value_dim = q.shape[-1], v.shape[-1]
        dout, q, k, v, out = (_rows(_pad(x, max(head_dim, value_dim))) for x in (dout, q, k, v, out))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse.contiguous(), 0.0, causal, attn_mask=mask, scale=scale
        )
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]


class CudaFlash:
    """torch's FlashAttention-2 for CUDA, for float16 and bfloat16; it knows windows, and so takes bands as they are."""

    name = "cuda_flash"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shape: Shape,
        scale: float,
        folds: int = 1,
        totals: Results | None = None,
    ) -> Results:
        value_dim, width = v.shape[-1], _round_up(max(q.shape[-1], v.shape[-1]), 8)
        q, k, v = (_by_token(_pad(x, width)) for x in (unfolded(q, folds), k, v))
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, shape == "causal", False, scale=scale,
            **_window_of_band(q, k, shape),
        )  # fmt: skip
        return merged((folded(out.transpose(1, 2)[..., :value_dim], folds), folded(lse, folds)), totals)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        shape: Shape,
        scale: float,
        folds: int = 1,
        sums: Gradients | None = None,
    ) -> Gradients:
        head_dim, value_dim = q.shape[-1], v.shape[-1]
        width = _round_up(max(head_dim, value_dim), 8)
        dout, q, out, lse = (unfolded(x, folds) for x in (dout, q, out, lse))
        dout, q, k, v, out = (_by_token(_pad(x, width)) for x in (dout, q, k, v, out))
        unused = _no_random_state(q)
        grads = aten._flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, shape == "causal", unused,
            unused, scale=scale, **_window_of_band(q, k, shape),
        )  # fmt: skip
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return added((folded(dq[..., :head_dim], folds), dk[..., :head_dim], dv[..., :value_dim]), sums)


def _aligned(x: Tensor) -> Tensor:
    """Returns x, or a copy of it if its rows are strided or begin elsewhere than at multiples of 16 bytes.

    That is how much CUDA's attention kernels read at once: some of them check it, and others fail in the middle of a run.
    """
    block = 16 // x.element_size()
    if x.stride(-1) == 1 and not any(start % block for start in (x.storage_offset(), *x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _by_token(x: Tensor) -> Tensor:
    """Returns [T, L, H, D], which these operators take."""
    return _aligned(x).transpose(1, 2)


def _stored_by_token(x: Tensor) -> Tensor:
    """Returns x [T, H, L, D], stored as [T, L, H, D] without gaps."""
    return _aligned(x.transpose(1, 2).contiguous()).transpose(1, 2)


def _no_random_state(q: Tensor) -> Tensor:
    """Returns what operators take for the random state of dropout, which is off: they do not read it."""
    return q.new_empty((), dtype=torch.int64)


def _window_of_band(q: Tensor, k: Tensor, shape: Shape) -> dict[str, int]:
    """Returns the window of a band: query i of [T, Lq, H, D] and key i + Lk - Lq are on the operator's diagonal."""
    return {"window_size_left": k.shape[1] - q.shape[1], "window_size_right": 0} if shape == "band" else {}


class CudaEfficient(MaskedKernel):
    """torch's memory-efficient attention for CUDA, also for float32, and for any head size; it takes bands as stretches.

    The operator has no grouped heads, so it runs once for each member of the groups, on the same keys. Its backward takes
    from the sizes of out where the rows of out are, whatever the strides say: they have to be as its forward stores them.
    """

    name = "cuda_efficient"
    #: The backward kernel reads the log-sum-exp in blocks of this many rows.
    lse_block = 32
    #: Rows of a mask begin at multiples of this many numbers.
    mask_block = 16

    def _bias(self, mask: Tensor | None, k: Tensor) -> Tensor | None:
        """Returns a mask for all tiles and the heads of k, without copies of it."""
        if mask is None:
            return None
        length = mask.shape[1]
        aligned = F.pad(mask, (0, _round_up(length, self.mask_block) - length))[:, :length]
        return aligned.expand(k.shape[0], k.shape[1], *aligned.shape)

    def forward_masked(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        head_dim, value_dim, group = q.shape[-1], v.shape[-1], q.shape[1] // k.shape[1]
        q, k = (_aligned(_pad(x, _round_up(head_dim, 8))) for x in (q, k))
        v, bias = _aligned(_pad(v, _round_up(value_dim, 8))), self._bias(mask, k)
        parts = [
            aten._scaled_dot_product_efficient_attention(member, k, v, bias, True, 0.0, causal, scale=scale)[:2]
            for member in _members(q, group)
        ]
        out, lse = (torch.stack(part, 2).flatten(1, 2) for part in zip(*parts))
        return out[..., :value_dim], lse[..., : q.shape[2]]

    def backward_masked(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head_dim, value_dim, group = q.shape[-1], v.shape[-1], q.shape[1] // k.shape[1]
        q, k = (_aligned(_pad(x, _round_up(head_dim, 8))) for x in (q, k))
        dout, v, out = (_pad(x, _round_up(value_dim, 8)) for x in (dout, v, out))
        dout, v = _aligned(dout), _aligned(v)
        length, bias = lse.shape[-1], self._bias(mask, k)
        lse = F.pad(lse, (0, _round_up(length, self.lse_block) - length), value=torch.inf)
        unused = _no_random_state(q)
        parts = [
            aten._scaled_dot_product_efficient_attention_backward(
                dout_, q_, k, v, bias, _stored_by_token(out_), lse_.contiguous(), unused, unused, 0.0,
                [True, True, True, False], causal, scale=scale,
            )[:3]
            for dout_, q_, out_, lse_ in zip(*(_members(x, group) for x in (dout, q, out, lse)))
        ]  # fmt: skip
        dqs, dks, dvs = zip(*parts)
        dq, dk, dv = torch.stack(dqs, 2).flatten(1, 2), sum(dks[1:], dks[0]), sum(dvs[1:], dvs[0])
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]


class Math:
    """Plain matrix products, a slice of query rows at a time, for every dtype, device and width.

    Args:
        softcap: scores s become softcap * tanh(s / softcap), as in Gemma 2 (arXiv 2408.00118).
    """

    name = "math"
    #: The most elements of scores that are held at once.
    budget = 1 << 24

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap

    def _slices(self, q: Tensor, k: Tensor, shape: Shape, folds: int) -> Iterator[tuple[slice, slice]]:
        """Yields (query rows, the keys that some of them see): parts that hold at most `budget` scores, or have one row."""
        width = k.shape[2] - q.shape[2] // folds + 1
        rows = max(1, self.budget // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
        for start in range(0, q.shape[2], rows):
            stop = min(start + rows, q.shape[2])
            first, last = start // folds, (stop - 1) // folds
            keys = {"full": (0, k.shape[2]), "causal": (0, last + 1), "band": (first, last + width)}[shape]
            yield slice(start, stop), slice(*keys)

    def _scores(
        self, q: Tensor, k: Tensor, rows: slice, keys: slice, shape: Shape, width: int, scale: float, folds: int
    ) -> tuple[Tensor, Tensor | None]:
        """Returns scores [T, Hkv, g, rows, keys] of q [T, Hkv, g, rows, D], and their tanh if capped."""
        scores, tanh = q @ k[:, :, None, keys].mT * scale, None
        if self.softcap is not None:
            tanh = torch.tanh(scores / self.softcap)
            scores = tanh * self.softcap
        if shape != "full":
            query = torch.arange(rows.start, rows.stop, device=q.device)[:, None] // folds
            key = torch.arange(keys.start, keys.stop, device=q.device)
            hidden = key > query if shape == "causal" else (key < query) | (key >= query + width)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores, tanh

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shape: Shape,
        scale: float,
        folds: int = 1,
        totals: Results | None = None,
    ) -> Results:
        dtype, width = accumulation_dtype(q.dtype), k.shape[2] - q.shape[2] // folds + 1
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=dtype)
        k, v, grouped = k.to(dtype), v.to(dtype), (k.shape[1], q.shape[1] // k.shape[1])
        for rows, keys in self._slices(q, k, shape, folds):
            queries = q[:, :, rows].to(dtype).unflatten(1, grouped)
            scores, _ = self._scores(queries, k, rows, keys, shape, width, scale, folds)
            lse_rows = torch.logsumexp(scores, -1)
            out[:, :, rows] = (torch.exp(scores - lse_rows[..., None]) @ v[:, :, None, keys]).flatten(1, 2)
            lse[:, :, rows] = lse_rows.flatten(1, 2)
        return merged((out, lse), totals)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        shape: Shape,
        scale: float,
        folds: int = 1,
        sums: Gradients | None = None,
    ) -> Gradients:
        dtype, width = accumulation_dtype(q.dtype), k.shape[2] - q.shape[2] // folds + 1
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        key_dtype, grouped = k.dtype, (k.shape[1], q.shape[1] // k.shape[1])
        k, v = k.to(dtype), v.to(dtype)
        for rows, keys in self._slices(q, k, shape, folds):
            q_rows, dout_rows, out_rows = (x[:, :, rows].to(dtype).unflatten(1, grouped) for x in (q, dout, out))
            scores, tanh = self._scores(q_rows, k, rows, keys, shape, width, scale, folds)
            p = torch.exp(scores - lse[:, :, rows].unflatten(1, grouped)[..., None])
            dp = dout_rows @ v[:, :, None, keys].mT
            ds = p * (dp - (dout_rows * out_rows).sum(-1, keepdim=True)) * scale
            if tanh is not None:
                ds *= 1 - tanh.square()
            dq[:, :, rows] = (ds @ k[:, :, None, keys]).flatten(1, 2)
            dk[:, :, keys] += (ds.mT @ q_rows).sum(2)
            dv[:, :, keys] += (p.mT @ dout_rows).sum(2)
        return added((dq, dk.to(key_dtype), dv.to(key_dtype)), sums)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _members(x: Tensor, group: int) -> list[Tensor]:
    """Returns `group` tensors [T, Hkv, ...] of x [T, Hkv * group, ...]: the i-th has the i-th head of each group."""
    return [x[:, member::group] for member in range(group)]


@lru_cache(maxsize=256)
def choose_kernel(
    device_type: str, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None = None
) -> KernelChoice:
    """Returns the fastest kernel that computes this, with the reason.

    Raises:
        ValueError: a dtype other than float64, float32, bfloat16 and float16.
    """
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"attention needs floating point tensors, got {dtype}: use float64, float32, bfloat16 or float16"
        )
    if softcap is not None:
        return KernelChoice(Math(softcap), f"scores are capped at {softcap}, which no fused kernel does: plain math")
    if device_type == "cpu":
        return KernelChoice(CpuFlash(), "torch's CPU flash attention takes these dtypes and grouped heads")
    if device_type == "cuda" and dtype != torch.float64:
        widest = max(head_dim, value_dim)
        if (
            dtype in (torch.float16, torch.bfloat16)
            and widest <= 256
            and torch.backends.cuda.is_flash_attention_available()
        ):
            return KernelChoice(CudaFlash(), f"{dtype} with heads of {widest} <= 256: FlashAttention-2")
        return KernelChoice(CudaEfficient(), f"{dtype} with heads of {widest} is beyond FlashAttention-2: efficient")
    return KernelChoice(Math(), f"no fused kernel with a log-sum-exp for {dtype} on {device_type}: plain math")
