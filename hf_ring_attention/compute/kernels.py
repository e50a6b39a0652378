"""The choice of a kernel; torch's kernel for CPUs, and plain math; `kernel.py` describes their arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..plan.choices import Decision
from ..plan.joins import PADDED
from ..plan.kernel_choice import ANY_TILES, CallFacts, DeviceFacts, TileKinds, kernel_candidates
from .bands import Masked, MaskedKernel
from .cuda_kernels import CudaEfficient, CudaFlash, Cudnn, torch_flash
from .fused.choice import fused_kernel, why_not_fused
from .kernel import Gradients, Kernel, KernelCall, Results, Saved, added, merged, narrowed, widened
from .merge import accumulation_dtype
from .proof import fault_of
from .rows import hidden_keys


class CpuFlash(MaskedKernel):
    """torch's flash attention for CPU, which takes grouped heads as they are, and bands as stretches."""

    name = "cpu_flash"
    joining: Hashable = PADDED

    def forward_masked(self, q: Tensor, k: Tensor, v: Tensor, call: Masked) -> Results:
        value_dim, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
        if q.shape[-1] != value_dim or not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            q, k, v = _rows(q, width), _rows(k, width), _rows(v, width)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, call.causal, attn_mask=call.mask, scale=call.scale
        )
        return narrowed(out, value_dim), lse

    def backward_masked(self, dout: Tensor, saved: Saved, call: Masked) -> Gradients:
        q, k, v, out, lse = saved
        head_dim, value_dim = q.shape[-1], v.shape[-1]
        dout, q, k, v, out = (_rows(x, max(head_dim, value_dim)) for x in (dout, q, k, v, out))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse.contiguous(), 0.0, call.causal, attn_mask=call.mask, scale=call.scale
        )
        return narrowed(dq, head_dim), narrowed(dk, head_dim), narrowed(dv, value_dim)


def _rows(x: Tensor, width: int) -> Tensor:
    """Returns x with zero columns up to `width`, and with neighbouring numbers in its rows."""
    return x if x.shape[-1] == width and x.stride(-1) == 1 else widened(x, width).contiguous()


class Math:
    """Plain matrix products, a slice of query rows at a time, for every dtype, device and width.

    Scores s become softcap * tanh(s / softcap), as in Gemma 2 (arXiv 2408.00118), if there is a softcap.
    """

    name = "math"
    joining: Hashable = PADDED
    #: The most elements of scores that are held at once.
    budget = 1 << 24

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap

    def _slices(self, q: Tensor, k: Tensor, call: KernelCall) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Yields query rows, the keys that some of them see, and which pairs are hidden, if any.

        The parts hold at most `budget` scores, or have one row.
        """
        fold_size, num_keys = call.fold_size, k.shape[2]
        width = num_keys - q.shape[2] // fold_size + 1
        rows = max(1, self.budget // max(1, q.shape[0] * q.shape[1] * num_keys))
        for start in range(0, q.shape[2], rows):
            stop = min(start + rows, q.shape[2])
            first, last = start // fold_size, (stop - 1) // fold_size
            keys = {"full": (0, num_keys), "causal": (0, last + 1), "band": (first, last + width)}[call.shape]
            hidden = None if call.lengths is None else hidden_keys(call.lengths, num_keys)[:, None]
            if call.shape != "full":
                query = torch.arange(start, stop, device=q.device)[:, None] // fold_size
                key = torch.arange(*keys, device=q.device)
                beyond = key > query if call.shape == "causal" else (key < query) | (key >= query + width)
                hidden = beyond if hidden is None else hidden[..., slice(*keys)] | beyond
            yield slice(start, stop), slice(*keys), hidden

    def _scores(self, q: Tensor, k: Tensor, scale: float, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns scores [T, Hkv, g, rows, keys] of q [T, Hkv, g, rows, D], k [T, Hkv, keys, D], and their tanh if capped."""
        scores, tanh = q @ k[:, :, None].mT * scale, None
        if self.softcap is not None:
            tanh = torch.tanh(scores / self.softcap)
            scores = tanh * self.softcap
        return (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)), tanh

    def forward_masked(self, q: Tensor, k: Tensor, v: Tensor, call: Masked) -> Results:
        """Returns out and lse of a few queries, as a `MaskedKernel` does, with as many heads in q as in k."""
        dtype = accumulation_dtype(q.dtype)
        scores = self._scores(q.to(dtype).unsqueeze(2), k.to(dtype), call.scale, None)[0].squeeze(2)
        scores = scores if call.mask is None else scores + call.mask
        lse = torch.logsumexp(scores, -1)
        return (torch.exp(scores - lse[..., None]) @ v.to(dtype)).to(q.dtype), lse

    def backward_masked(self, dout: Tensor, saved: Saved, call: Masked) -> Gradients:
        """Returns dq, dk and dv for what `forward_masked` takes."""
        q, k, v, out = (x.to(saved.lse.dtype) for x in saved[:4])
        scores = q @ k.mT * call.scale
        weights = torch.exp((scores if call.mask is None else scores + call.mask) - saved.lse[..., None])
        dout = dout.to(weights.dtype)
        of_scores = weights * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * call.scale
        return of_scores @ k, of_scores.mT @ q, weights.mT @ dout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, totals: Results | None = None) -> Results:
        dtype = accumulation_dtype(q.dtype)
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=dtype)
        k, v, grouped = k.to(dtype), v.to(dtype), (k.shape[1], q.shape[1] // k.shape[1])
        for rows, keys, hidden in self._slices(q, k, call):
            queries = q[:, :, rows].to(dtype).unflatten(1, grouped)
            scores, _ = self._scores(queries, k[:, :, keys], call.scale, hidden)
            lse_rows = torch.logsumexp(scores, -1)
            out[:, :, rows] = (torch.exp(scores - lse_rows[..., None]) @ v[:, :, None, keys]).flatten(1, 2)
            lse[:, :, rows] = lse_rows.flatten(1, 2)
        return merged((out, lse), totals)

    def backward(self, dout: Tensor, saved: Saved, call: KernelCall, sums: Gradients | None = None) -> Gradients:
        q, k, v, out, lse = saved
        dtype = accumulation_dtype(q.dtype)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        key_dtype, grouped = k.dtype, (k.shape[1], q.shape[1] // k.shape[1])
        k, v = k.to(dtype), v.to(dtype)
        for rows, keys, hidden in self._slices(q, k, call):
            q_rows, dout_rows, out_rows = (x[:, :, rows].to(dtype).unflatten(1, grouped) for x in (q, dout, out))
            scores, tanh = self._scores(q_rows, k[:, :, keys], call.scale, hidden)
            p = torch.exp(scores - lse[:, :, rows].unflatten(1, grouped)[..., None])
            dp = dout_rows @ v[:, :, None, keys].mT
            ds = p * (dp - (dout_rows * out_rows).sum(-1, keepdim=True)) * call.scale
            if tanh is not None:
                ds *= 1 - tanh.square()
            dq[:, :, rows] = (ds @ k[:, :, None, keys]).flatten(1, 2)
            dk[:, :, keys] += (ds.mT @ q_rows).sum(2)
            dv[:, :, keys] += (p.mT @ dout_rows).sum(2)
        return added((dq, dk.to(key_dtype), dv.to(key_dtype)), sums)


def choose_kernel(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    softcap: float | None = None,
    setting: str = "auto",
    tiles: TileKinds = ANY_TILES,
    note: Callable[[str, Decision], None] = lambda kind, decision: None,
    group: int = 1,
) -> Kernel:
    """Returns the kernel that was asked for, or with "auto" the fastest one that computes this and has proved itself.

    Args:
        note: is called with the kind of call, and the choice with its reason.
        group: the number of query heads that share a key/value head.

    Raises:
        ValueError: another dtype, or a kernel that was asked for and cannot compute this, or is wrong on this device.
    """
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"attention needs floating point tensors, got {dtype}: use float64, float32, bfloat16 or float16"
        )
    widths = device, dtype, head_dim, value_dim
    call = CallFacts(str(dtype).removeprefix("torch."), head_dim, value_dim, softcap is not None, tiles)
    failed: list[str] = []
    for decision in kernel_candidates(setting, _facts_of(setting, *widths), call):
        kernel = _kernel(decision.choice, *widths, softcap)
        fault = None
        if device.type == "cuda" and not isinstance(kernel, Math):
            fault = fault_of(kernel, softcap, tiles, device, dtype, group, head_dim, value_dim)
        if fault is None:
            note(str(call), replace(decision, reason="; ".join([decision.reason, *failed])))
            return kernel
        if setting != "auto":
            raise ValueError(f"kernel={setting!r} failed its proof on {device}: {fault}; use kernel='auto'")
        failed.append(f"{decision.choice} failed its proof: {fault}")
    raise AssertionError("plain math computes everything")


def _facts_of(setting: str, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> DeviceFacts:
    is_cuda = device.type == "cuda"
    may_fuse = setting == "fused" or (setting == "auto" and is_cuda)  # To find out may load Triton.
    return DeviceFacts(
        type=device.type,
        capability=torch.cuda.get_device_capability(device) if is_cuda else (0, 0),
        has_flash=torch.backends.cuda.is_flash_attention_available(),
        has_cudnn=torch.version.hip is None and (torch.backends.cudnn.version() or 0) > 91500,
        flash=torch_flash(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        not_fused=why_not_fused(device, dtype, head_dim, value_dim) if may_fuse else None,
    )


@lru_cache(maxsize=256)
def _kernel(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None
) -> Kernel:
    kernels: dict[str, Callable[[], Kernel]] = {
        "fused": lambda: fused_kernel(device, dtype, head_dim, value_dim, softcap),
        "flash": CudaFlash,
        "cudnn": Cudnn,
        "efficient": CudaEfficient,
        "cpu_flash": CpuFlash,
        "math": lambda: Math(softcap),
    }
    return kernels[name]()
