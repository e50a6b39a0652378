"""Every kernel proves itself on a device before its first use there: code that no GPU has run may be slow, but not wrong.

A proof computes up to 256 tokens, forward and backward, and compares each row with plain math in float64. The bounds come
from the data: plain math in the dtype itself, on the same device, makes an error, and a kernel may make a few times this error.
A key that is missing or seen too often makes an error of a tenth or more.

A call needs the proofs of its kinds of tiles only (`cases_of`), since programs are compiled for them: by cuDNN for each shape.
Proofs that a kernel passed are kept on disk (`kept_proofs.py`).
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..plan.kernel_choice import TileKinds
from ..plan.layouts import SequenceLayout
from ..plan.patterns import Pattern
from ..plan.problem import Documents, Problem
from .binding import bind_own
from .cuda_kernels import torch_flash
from .fused.settings import Settings
from .kept_proofs import kept_proof
from .kernel import Kernel, Saved, Work
from .merge import accumulation_dtype

#: How many times the error of plain math in the same dtype a kernel may make. Plain math also rounds scores to 16 bits; in
#: float32, the order of the sums is the whole of the error.
FACTOR, FLOAT32_FACTOR = 3, 32

_KV_HEADS, _WINDOW, _SINKS, _EXACT = 2, 24, 2, Pattern.exact()
#: The documents of two rows; the second row is a single document, and other tokens are padding. cuDNN takes no short documents.
_SHORT = (((0, 1), (1, 101), (101, 229)), ((0, 256),))
_PACKED_ROWS = (((0, 100), (100, 200)), ((0, 256),))
_WHOLE_ROWS = (((0, 228),), ((0, 228),))


class Case(NamedTuple):
    """Attention that a proof computes."""

    pattern: Pattern
    documents: Documents
    causal: bool


#: By the kinds of tiles. Long tiles have blocks of keys without a mask, which are other code. Whole rows of one document need
#: other programs than packed rows, which flash takes in place.
_CASES = {
    "window": Case(Pattern.window(_WINDOW, _SINKS), _SHORT, True),
    "causal": Case(_EXACT, _PACKED_ROWS, True),
    "full": Case(_EXACT, _PACKED_ROWS, False),
    "whole window": Case(Pattern.window(_WINDOW, _SINKS), _WHOLE_ROWS, True),
    "whole causal": Case(_EXACT, _WHOLE_ROWS, True),
    "whole full": Case(_EXACT, _WHOLE_ROWS, False),
}
#: The first call waits for its kernel's programs: a wait of this many seconds deserves a line that users see.
LONG_WAIT = 1.0

logger = logging.getLogger(__name__)

_FAULTS: dict[tuple[Any, ...], str | None] = {}
_LOCK = threading.Lock()


def cases_of(tiles: TileKinds) -> list[str]:
    """Returns the names of the proofs that a kernel needs for these tiles."""
    whole = "whole " if tiles.whole_rows and tiles.full_rows else ""
    return [f"{whole}{kind}" for kind in (tiles.shapes if tiles.rows else ("window", "causal"))]


def fault_of(
    kernel: Kernel, softcap: float | None, tiles: TileKinds, device: torch.device, dtype: torch.dtype, *sizes: int
) -> str | None:
    """Returns why a kernel is not used on a device: its errors, or the error that it raised; None if it is right.

    Each case runs once per process, or never if its proof is on disk; `softcap` does not matter. The `sizes` are the query
    heads of a key/value head, and the widths of queries and keys, and of values.

    Raises:
        torch.OutOfMemoryError: which is no fault of the kernel.
    """
    implementation = torch_flash() if kernel.name == "flash" else None
    call = {
        "kernel": kernel.name,
        "implementation": implementation,
        "capped": softcap is not None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),  # Other operators run, and some raise errors.
        "products": torch.backends.cuda.matmul.fp32_precision,  # of float32 in plain math, whose errors are the bounds
        "dtype": str(dtype),
        "sizes": sizes,
    }
    with _LOCK:
        started, proved, place = time.perf_counter(), list[str](), ""
        for case in cases_of(tiles):
            key = (device, *call.values(), case)
            if key not in _FAULTS:
                kept = kept_proof(device, {**call, "case": case})
                is_kept = kept.found()
                _FAULTS[key] = None if is_kept else _tried(kernel, softcap, case, device, dtype, *sizes)
                if not is_kept and _FAULTS[key] is None:
                    proved.append(case)
                    place = kept.keep()
            if _FAULTS[key] is not None:
                return _FAULTS[key]
        if proved:
            seconds, name = time.perf_counter() - started, " of ".join(filter(None, (kernel.name, implementation)))
            visible = seconds > LONG_WAIT and os.environ.get("LOCAL_RANK", "0") == "0"  # one line for each machine
            logger.log(
                logging.WARNING if visible else logging.INFO,
                "kernel %s was compiled and proved right in %.1f s (%s; %s; heads of %s numbers; %s): the proof is %s",
                *(name, seconds, ", ".join(proved), dtype, " and ".join(map(str, sizes[1:])), device, place),
            )
        return None


def outcome(proof: Callable[..., str | None], *args: Any) -> str | None:
    """Returns the fault that a proof finds, or the error that it raised; runs in a separate thread.

    The thread has no modes, autocast or gradients of the caller, and changes none.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="proof") as thread:
        found = thread.submit(proof, *args)
    error = found.exception()
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    # No compiler, no such operator, a launch that fails: compilers raise errors of any class.
    return found.result() if error is None else f"{type(error).__name__}: {error}".partition("\n")[0][:300]


def _tried(
    kernel: Kernel, softcap: float | None, case: str, device: torch.device, dtype: torch.dtype, *sizes: int
) -> str | None:
    """Returns the fault of a kernel in one case, which is logged."""
    logger.info("kernel %s computes its proof (%s) on %s for %s, and may be compiled", kernel.name, case, device, dtype)
    fault = outcome(_fault, kernel, softcap, _CASES[case], device, dtype, *sizes)
    if fault is not None:
        logger.warning("kernel %s is not used on %s for %s: %s", kernel.name, device, dtype, fault)
    return fault


@torch.no_grad()
def _fault(
    kernel: Kernel, softcap: float | None, case: Case, device: torch.device, dtype: torch.dtype, *sizes: int
) -> str | None:
    """Returns the errors of a kernel that are beyond their bounds; None if none is."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    pattern, documents, causal = case
    generator, length = torch.Generator("cpu").manual_seed(0), documents[-1][-1][1]
    group, head_dim, value_dim = sizes
    all_heads, inputs = _KV_HEADS * group, []
    for heads, width in ((all_heads, head_dim), (_KV_HEADS, head_dim), (_KV_HEADS, value_dim), (all_heads, value_dim)):
        x = torch.randn(2, length, heads, width, generator=generator, dtype=torch.float64, device="cpu")
        inputs.append(x.to(device, dtype).transpose(1, 2))  # stored by token, as models do
    scale, layout, num_heads = head_dim**-0.5, SequenceLayout("contiguous", length, 1), all_heads
    problem = Problem(pattern, layout, documents, num_heads=num_heads, num_kv_heads=_KV_HEADS, causal=causal)
    joinings = kernel.joining.kinds() if isinstance(kernel.joining, Settings) else [kernel.joining]
    works = (bind_own(problem, 0, device, joining) for joining in joinings)
    seen = torch.stack([_seen(row, length, pattern == _EXACT, causal) for row in documents]).unsqueeze(1).to(device)
    return next(filter(None, (_compared(kernel, work, inputs, seen, scale, softcap) for work in works)), None)


def _compared(
    kernel: Kernel, work: Work, inputs: list[Tensor], seen: Tensor, scale: float, softcap: float | None
) -> str | None:
    """Returns the errors of a kernel's results, once alone and once added to others, that are beyond their bounds."""
    dtype = inputs[0].dtype
    q, k, v, dout = (x if work.takes_views else x.contiguous() for x in inputs)
    out, lse = work.forward(kernel, q, k, v, scale)
    saved, wide = Saved(q, k, v, out, lse), accumulation_dtype(dtype)
    found = [out, *work.backward(kernel, dout, saved, scale), lse.unsqueeze(-1)]
    # In a ring, steps add to the results of others: here each key comes a second time, so its gradients are half as large.
    twice, lse_of_two = work.forward(kernel, q, k, v, scale, (out.to(wide).contiguous(), lse.clone()))
    sums = torch.zeros_like(q, dtype=wide), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    halves = work.backward(kernel, dout, saved._replace(lse=lse_of_two), scale, sums)
    added = [twice, *(2 * half for half in halves), lse_of_two.unsqueeze(-1) - math.log(2)]

    expected, plain, plain_wide = (_plain(kind, inputs, seen, scale, softcap) for kind in (torch.float64, dtype, wide))
    plain[-1] = plain_wide[-1]  # Kernels do not round scores to 16 bits.
    faults, factor = [], FACTOR if dtype.itemsize == 2 else FLOAT32_FACTOR
    for name, x, y, rough, right in zip(("out", "dq", "dk", "dv", "lse"), found, added, plain, expected, strict=True):
        rounding = torch.finfo(dtype).eps / (64 if name == "lse" else 1)
        error, bound = (
            max(largest_error(x, right), largest_error(y, right)),
            factor * (largest_error(rough, right) + rounding),
        )
        if not error <= bound:
            faults.append(f"{name} is {error:.1e} off, of at most {bound:.1e}")
    return ", ".join(faults) or None


def _seen(documents: tuple[tuple[int, int], ...], length: int, exact: bool, causal: bool) -> Tensor:
    """Returns which keys each query of a row sees."""
    seen = torch.zeros(length, length, dtype=torch.bool, device="cpu")
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


def largest_error(x: Tensor, right: Tensor) -> float:
    """Returns the largest error of a row, relative to the root mean square of all rows; infinite for NaN."""
    nowhere = torch.isneginf(right)  # the lse of padding
    if not torch.equal(torch.isneginf(x), nowhere):
        return torch.inf
    right, x = right.masked_fill(nowhere, 0), x.double().masked_fill(nowhere, 0)
    of_rows = (x - right).norm(dim=-1) / right.norm(dim=-1).square().mean().sqrt()
    return float(of_rows.nan_to_num(nan=torch.inf).max())
