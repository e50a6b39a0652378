"""torch's attention operators for CUDA as kernels; `kernel.py` describes their arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import reduce
from operator import or_
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor

from ..plan.joins import FLASH_IN_PLACE
from .bands import Masked, MaskedKernel
from .kernel import Gradients, KernelCall, Results, Saved, added, merged, narrowed, widened

aten = torch.ops.aten


class CudaFlash:
    """torch's FlashAttention-2 for CUDA, or an implementation in its place (`torch_flash`), for float16 and bfloat16.

    It takes bands by its windows, and documents of whole rows in place.
    """

    name = "flash"
    joining: Hashable = FLASH_IN_PLACE

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, totals: Results | None = None) -> Results:
        value_dim, width, tokens = v.shape[-1], max(q.shape[-1], v.shape[-1]), (q.shape[0], q.shape[2])
        sequences, window = _sequences_and_window(q, k, call)
        q, k, v = (_by_token(x, width, call) for x in (q, k, v))
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, *sequences, 0.0, call.shape == "causal", False, scale=call.scale, **window
        )
        lse = lse if call.sequences is None else lse.unflatten(1, tokens).transpose(0, 1)
        return merged((_of_heads(out, value_dim, tokens), lse), totals)

    def backward(self, dout: Tensor, saved: Saved, call: KernelCall, sums: Gradients | None = None) -> Gradients:
        q, k, v, out, lse = saved
        widths, (sequences, window) = [x.shape[-1] for x in (q, k, v)], _sequences_and_window(q, k, call)
        tokens, key_tokens = ((x.shape[0], x.shape[2]) for x in (q, k))
        dout, q, k, v, out = (_by_token(x, max(widths), call) for x in (dout, q, k, v, out))
        lse = lse if call.sequences is None else lse.transpose(0, 1).flatten(1)
        unused = q.new_empty((), dtype=torch.int64)  # the random state of dropout, which is off
        grads = aten._flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), *sequences, 0.0, call.shape == "causal", unused, unused,
            scale=call.scale, **window,
        )  # fmt: skip
        dq, dk, dv = (_of_heads(*grad) for grad in zip(grads, widths, (tokens, key_tokens, key_tokens)))
        return added((dq, dk, dv), sums)


#: Returns "FA3" or "FA4" if `torch.nn.attention.activate_flash_attention_impl` has put it in the place of FlashAttention-2.
torch_flash: Callable[[], str | None] = torch.nn.attention.current_flash_attention_impl


def _by_token(x: Tensor, width: int, call: KernelCall) -> Tensor:
    """Returns x [T, H, L, D] as [T, L, H, D], or as [T * L, H, D] for sequences; without a copy if it is stored so."""
    x = _aligned(x, width).transpose(1, 2)
    return x if call.sequences is None else x.flatten(0, 1)


def _of_heads(x: Tensor, width: int, tokens: tuple[int, int]) -> Tensor:
    """Returns the first columns of results by token as [T, H, L, D]; `tokens` are T and L."""
    return narrowed(x.view(*tokens, *x.shape[-2:]), width).transpose(1, 2)


def _sequences_and_window(q: Tensor, k: Tensor, call: KernelCall) -> tuple[Any, dict[str, int]]:
    """Returns the ends of sequences in q and in k, None for tiles, and the longest lengths; and the window of a band.

    The operator's diagonal has query i and key i + Lk - Lq.
    """
    window = {"window_size_left": k.shape[2] - q.shape[2], "window_size_right": 0} if call.shape == "band" else {}
    (ends, longest), most = call.sequences or (None, 0), (q.shape[2], k.shape[2])
    return (ends, ends, *(most if ends is None else (longest, longest))), window


def _aligned(x: Tensor, width: int) -> Tensor:
    """Returns x with zero columns up to a multiple of 8; a copy if its rows are strided or not at multiples of 16 bytes.

    CUDA's attention kernels read 16 bytes at once: some of them check the alignment, and others fail in the middle of a run.
    """
    x = widened(x, _round_up(width, 8))
    *strides, last = x.stride()
    starts = reduce(or_, strides, x.storage_offset())  # a multiple of a power of 2 if all are
    return x if last == 1 and starts % (16 // x.element_size()) == 0 else x.clone(memory_format=torch.contiguous_format)


class CudaEfficient(MaskedKernel):
    """torch's memory-efficient attention for CUDA, also for float32, and for any head size; it takes bands as stretches.

    The operator lacks grouped heads, so it runs once for each member of the groups, on the same keys. Its backward ignores
    the strides of out, so out must be stored as its forward stores it.
    """

    name = "efficient"
    joining: Hashable = None
    #: The backward kernel reads the log-sum-exp in blocks of this many rows.
    lse_block = 32
    #: Rows of a mask begin at multiples of this many numbers.
    mask_block = 16

    def _bias(self, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Returns a mask for all tiles, the heads of k and the rows of q, without copies of it."""
        if mask is None:
            return None
        length = mask.shape[-1]
        aligned = F.pad(mask, (0, _round_up(length, self.mask_block) - length))[..., :length]
        return aligned.expand(k.shape[0], k.shape[1], q.shape[2], length)

    def forward_masked(self, q: Tensor, k: Tensor, v: Tensor, call: Masked) -> Results:
        head_dim, value_dim, group = q.shape[-1], v.shape[-1], q.shape[1] // k.shape[1]
        q, k, v = _aligned(q, head_dim), _aligned(k, head_dim), _aligned(v, value_dim)
        bias, operator = self._bias(call.mask, q, k), aten._scaled_dot_product_efficient_attention
        parts = [
            operator(member, k, v, bias, True, 0.0, call.causal, scale=call.scale)[:2] for member in _members(q, group)
        ]
        out, lse = (torch.stack(part, 2).flatten(1, 2) for part in zip(*parts))
        return narrowed(out, value_dim), lse[..., : q.shape[2]]

    def backward_masked(self, dout: Tensor, saved: Saved, call: Masked) -> Gradients:
        q, k, v, out, lse = saved
        head_dim, value_dim, group = q.shape[-1], v.shape[-1], q.shape[1] // k.shape[1]
        q, k, v, dout = (_aligned(x, x.shape[-1]) for x in (q, k, v, dout))
        length, bias = lse.shape[-1], self._bias(call.mask, q, k)
        lse = F.pad(lse, (0, _round_up(length, self.lse_block) - length), value=torch.inf)
        unused = q.new_empty((), dtype=torch.int64)  # the random state of dropout, which is off
        parts = [
            aten._scaled_dot_product_efficient_attention_backward(
                dout_, q_, k, v, bias, _aligned(out_.transpose(1, 2).contiguous(), value_dim).transpose(1, 2),
                lse_.contiguous(), unused, unused, 0.0,
                [True, True, True, False], call.causal, scale=call.scale,
            )[:3]
            for dout_, q_, out_, lse_ in zip(*(_members(x, group) for x in (dout, q, out, lse)))
        ]  # fmt: skip
        dqs, dks, dvs = zip(*parts)
        dq, dk, dv = torch.stack(dqs, 2).flatten(1, 2), sum(dks[1:], dks[0]), sum(dvs[1:], dvs[0])
        return narrowed(dq, head_dim), narrowed(dk, head_dim), narrowed(dv, value_dim)


class Cudnn:
    """torch's cuDNN attention for CUDA, for float16 and bfloat16: rectangles and lower triangles, grouped heads as they are.

    torch keeps the program of a backward pass by the sizes and strides of q, k and v. In torch 2.11, the strides of out and
    dout are not part of this key: a program would read them wrongly if they changed, so they follow from q's.
    """

    name = "cudnn"
    joining: Hashable = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, totals: Results | None = None) -> Results:
        assert call.shape != "band" and call.lengths is None and call.sequences is None
        q, k, v = (_aligned(x, x.shape[-1]) for x in (q, k, v))
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, call.shape == "causal", False, scale=call.scale
        )
        return merged((out, lse.squeeze(-1)), totals)

    def backward(self, dout: Tensor, saved: Saved, call: KernelCall, sums: Gradients | None = None) -> Gradients:
        q, k, v = (_aligned(x, x.shape[-1]) for x in saved[:3])
        out, dout = (_stored_as(q, _aligned(x, x.shape[-1])) for x in (saved.out, dout))
        unused = q.new_empty((), dtype=torch.int64)  # the random state of dropout, which is off
        gradients = aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, saved.lse.contiguous().unsqueeze(-1), unused, unused, None, None, None,
            q.shape[2], k.shape[2], 0.0, call.shape == "causal", scale=call.scale,
        )  # fmt: skip
        return added(gradients, sums)


def _stored_as(like: Tensor, x: Tensor) -> Tensor:
    """Returns x [T, H, L, D] stored by head, or by token if `like` is not stored by head."""
    return x.contiguous() if like.is_contiguous() else x.transpose(1, 2).contiguous().transpose(1, 2)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _members(x: Tensor, group: int) -> list[Tensor]:
    """Returns `group` tensors [T, Hkv, ...] of x [T, Hkv * group, ...]: the i-th has the i-th head of each group."""
    return [x[:, member::group] for member in range(group)]
