"""Every kernel proves itself on a device before its first use there: code that no GPU has run may be slow, but not wrong.

The proof computes 256 tokens in packed documents, forward and backward, and compares each row with plain math in float64. The
bounds come from the data: plain math in the dtype itself, on the same device, makes an error, and a kernel may make a few times
this error. A key that is missing or seen too often makes an error of a tenth or more.
"""

from __future__ import annotations

import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..plan.layouts import SequenceLayout
from ..plan.patterns import Pattern
from ..plan.problem import Documents, Problem
from .binding import bind_own
from .cuda_kernels import torch_flash
from .kernel import Kernel, Saved
from .merge import accumulation_dtype

#: How many times the error of plain math in the same dtype a kernel may make. Plain math also rounds scores to 16 bits; in
#: float32, the order of the sums is the whole of the error.
FACTOR, FLOAT32_FACTOR = 3, 32

_ROW_LENGTH, _KV_HEADS = 256, 2
#: The documents of two rows; other tokens are padding. cuDNN takes no short ones.
_DOCUMENTS = (((0, 1), (1, 101), (101, 229)), ((0, 256),))
_EXACT_DOCUMENTS = (((0, 100), (100, 228)), ((0, 256),))
_WINDOW, _SINKS, _EXACT = 24, 2, Pattern.exact()
#: Patterns, documents, and whether they are causal. Long tiles have blocks of keys without a mask, which are other code.
_CALLS = ((Pattern.window(_WINDOW, _SINKS), _DOCUMENTS, True), (_EXACT, _DOCUMENTS, True))
_EXACT_CALLS = ((_EXACT, _EXACT_DOCUMENTS, True), (_EXACT, _EXACT_DOCUMENTS, False))

logger = logging.getLogger(__name__)

_FAULTS: dict[tuple[Any, ...], str | None] = {}
_LOCK = threading.Lock()


def fault_of(
    kernel: Kernel, softcap: float | None, exact: bool, device: torch.device, dtype: torch.dtype, *sizes: int
) -> str | None:
    """Returns why a kernel is not used on a device: its errors, or the error that it raised; None if it is right.

    Each kind of call is tried once, whatever `softcap` is: exact attention if it is `exact`, else a window with sinks too. The
    `sizes` are the query heads of a key/value head, and the widths of queries and keys, and of values.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()  # Other operators run, and some raise errors.
    key = kernel.name, torch_flash(), softcap is None, exact, deterministic, device, dtype, sizes
    with _LOCK:
        if key not in _FAULTS:
            logger.info("kernel %s computes its proof on %s for %s, and may be compiled", kernel.name, device, dtype)
            # A separate thread has no modes, autocast or gradients of the caller, and changes none.
            with ThreadPoolExecutor(1, thread_name_prefix="proof") as thread:
                found = thread.submit(_fault, kernel, softcap, exact, device, dtype, *sizes)
            error = found.exception()
            if isinstance(error, torch.OutOfMemoryError):
                raise error
            # No compiler, no such operator, a launch that fails: compilers raise errors of any class.
            fault = found.result() if error is None else f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            if fault is not None:
                logger.warning("kernel %s is not used on %s for %s: %s", kernel.name, device, dtype, fault)
            _FAULTS[key] = fault
        return _FAULTS[key]


@torch.no_grad()
def _fault(
    kernel: Kernel, softcap: float | None, exact: bool, device: torch.device, dtype: torch.dtype, *sizes: int
) -> str | None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    generator = torch.Generator("cpu").manual_seed(0)
    group, head_dim, value_dim = sizes
    all_heads, inputs = _KV_HEADS * group, []
    for heads, width in ((all_heads, head_dim), (_KV_HEADS, head_dim), (_KV_HEADS, value_dim), (all_heads, value_dim)):
        x = torch.randn(2, _ROW_LENGTH, heads, width, generator=generator, dtype=torch.float64, device="cpu")
        inputs.append(x.to(device, dtype).transpose(1, 2))  # stored by token, as models do
    faults = (_compared(kernel, inputs, softcap, *call) for call in (_EXACT_CALLS if exact else _CALLS))
    return next(filter(None, faults), None)


def _compared(
    kernel: Kernel, inputs: list[Tensor], softcap: float | None, pattern: Pattern, documents: Documents, causal: bool
) -> str | None:
    """Returns the errors of a kernel that are beyond their bounds; None if none is."""
    dtype, device, scale = inputs[0].dtype, inputs[0].device, inputs[0].shape[-1] ** -0.5
    layout, num_heads = SequenceLayout("contiguous", _ROW_LENGTH, 1), inputs[0].shape[1]
    problem = Problem(pattern, layout, documents, num_heads=num_heads, num_kv_heads=_KV_HEADS, causal=causal)
    work = bind_own(problem, 0, device, kernel.joining)
    q, k, v, dout = (x if work.takes_views else x.contiguous() for x in inputs)
    out, lse = work.forward(kernel, q, k, v, scale)
    saved, wide = Saved(q, k, v, out, lse), accumulation_dtype(dtype)
    found = [out, *work.backward(kernel, dout, saved, scale), lse.unsqueeze(-1)]
    # In a ring, steps add to the results of others: here each key comes a second time, so its gradients are half as large.
    twice, lse_of_two = work.forward(kernel, q, k, v, scale, (out.to(wide).contiguous(), lse.clone()))
    sums = torch.zeros_like(q, dtype=wide), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    halves = work.backward(kernel, dout, saved._replace(lse=lse_of_two), scale, sums)
    added = [twice, *(2 * half for half in halves), lse_of_two.unsqueeze(-1) - math.log(2)]

    seen = torch.stack([_seen(row, pattern == _EXACT, causal) for row in documents]).unsqueeze(1).to(device)
    expected, plain, plain_wide = (_plain(kind, inputs, seen, scale, softcap) for kind in (torch.float64, dtype, wide))
    plain[-1] = plain_wide[-1]  # Kernels do not round scores to 16 bits.
    faults, factor = [], FACTOR if dtype.itemsize == 2 else FLOAT32_FACTOR
    for name, x, y, rough, right in zip(("out", "dq", "dk", "dv", "lse"), found, added, plain, expected, strict=True):
        rounding = torch.finfo(dtype).eps / (64 if name == "lse" else 1)
        error, bound = max(_error(x, right), _error(y, right)), factor * (_error(rough, right) + rounding)
        if not error <= bound:
            faults.append(f"{name} is {error:.1e} off, of at most {bound:.1e}")
    return ", ".join(faults) or None


def _seen(documents: tuple[tuple[int, int], ...], exact: bool, causal: bool) -> Tensor:
    """Returns which keys each query of a row sees."""
    seen = torch.zeros(_ROW_LENGTH, _ROW_LENGTH, dtype=torch.bool, device="cpu")
    for start, stop in documents:
        key = torch.arange(stop - start, device="cpu")
        distance = key[:, None] - key
        near = exact | (distance < _WINDOW) | (key < _SINKS)
        seen[start:stop, start:stop] = near & (distance >= 0) if causal else near
    return seen


def _plain(dtype: torch.dtype, inputs: list[Tensor], seen: Tensor, scale: float, softcap: float | None) -> list[Tensor]:
    """Returns out, dq, dk, dv and lse [B, H, n, 1] by matrices of all pairs in one dtype."""
    heads = inputs[0].shape[1]
    q, k, v, dout = (x.to(dtype).repeat_interleave(heads // x.shape[1], 1) for x in inputs)
    scores, slope = q @ k.mT * scale, torch.ones((), dtype=dtype, device=q.device)
    if softcap is not None:
        tanh = torch.tanh(scores / softcap)
        scores, slope = tanh * softcap, 1 - tanh.square()
    lse = torch.logsumexp(scores.masked_fill(~seen, -torch.inf), -1, keepdim=True)
    p = torch.exp(scores - lse).masked_fill(~seen, 0)
    out = p @ v
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale * slope
    dk, dv = ((x.mT @ y).unflatten(1, (_KV_HEADS, -1)).sum(2) for x, y in ((ds, q), (p, dout)))
    return [out, ds @ k, dk, dv, lse]


def _error(x: Tensor, right: Tensor) -> float:
    """Returns the largest error of a row, relative to the root mean square of all rows; infinite for NaN."""
    nowhere = torch.isneginf(right)  # the lse of padding
    if not torch.equal(torch.isneginf(x), nowhere):
        return torch.inf
    right, x = right.masked_fill(nowhere, 0), x.double().masked_fill(nowhere, 0)
    of_rows = (x - right).norm(dim=-1) / right.norm(dim=-1).square().mean().sqrt()
    return float(of_rows.nan_to_num(nan=torch.inf).max())
