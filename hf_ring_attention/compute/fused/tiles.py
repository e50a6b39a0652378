"""The fused kernels as a `Kernel`, and the tiles of a step as their `Work`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...plan.plans import TileBatch
from ..kernel import Gradients, Results, Saved
from .columns import Sizes
from .key_items import Sums
from .lists import Launch, work_lists
from .settings import Settings

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class FusedTiles:
    """The tiles of a step as launches of the fused kernels; `lists.py` describes their integers, int32 here."""

    tiles: Tensor
    forward_launches: tuple[Launch[Tensor], ...]
    dq_launches: tuple[Launch[Tensor], ...]
    key_launches: tuple[Launch[Tensor], ...]
    #: None if key items add to tensors of all key rows.
    sums: Sums[Tensor] | None

    takes_views = True

    @classmethod
    def of(
        cls,
        batches: Sequence[TileBatch],
        sizes: Sizes,
        settings: Settings,
        device: torch.device,
        places: Callable[[Tensor], Tensor] | None = None,
        complete: bool = True,
    ) -> FusedTiles:
        """Binds tiles to rows; the arguments are those of `work_lists`."""

        def of_payload(numbers: Any) -> Any:
            assert places is not None
            return places(torch.from_numpy(numbers).to(device)).cpu().numpy()

        lists = work_lists(batches, sizes, settings, None if places is None else of_payload, complete)

        moved: dict[int, Tensor] = {}

        def on_device(x: Any) -> Tensor:
            assert not len(x) or abs(x).max() < 2**31, "row numbers need 31 bits"
            if id(x) not in moved:  # Forward and dq may share their items.
                moved[id(x)] = torch.from_numpy(x.astype(np.int32)).to(device)
            return moved[id(x)]

        forward, dq, dkdv = (
            tuple(Launch(x.setting, x.heads, on_device(x.items), on_device(x.references)) for x in some)
            for some in (lists.forward, lists.dq, lists.dkdv)
        )
        sums: Sums[Tensor] | None = None
        if lists.sums is not None:
            sums = Sums(on_device(lists.sums.items), on_device(lists.sums.references), lists.sums.slots)
        return cls(on_device(lists.tiles), forward, dq, dkdv, sums)

    def forward(
        self, kernel: Fused, q: Tensor, k: Tensor, v: Tensor, scale: float, totals: Results | None = None
    ) -> Results:
        """Returns out and lse, as `Work.forward`."""
        q, k, v = (_with_rows(x) for x in (q, k, v))
        if totals is None:
            dtype = q.dtype if len(self.forward_launches) == 1 else torch.float32
            results = _new(q, v.shape[-1], dtype), q.new_empty(q.shape[:3], dtype=torch.float32)
        else:
            results = totals
        out, lse = results
        for number, launch in enumerate(self.forward_launches):
            _launch(
                kernel.forward_kernel, launch, kernel, q, v,
                (q, k, v, out, lse, launch.items, launch.references, self.tiles, *kernel.factors(scale)),
                (*_strides(q), *_key_strides(k), *_key_strides(v), *_strides(out), *lse.stride()[:2]),
                RESUME=totals is not None or number > 0, SMALL=launch.setting.small,
            )  # fmt: skip
        return (out.to(q.dtype), lse) if totals is None else totals

    def backward(
        self, kernel: Fused, dout: Tensor, saved: Saved, scale: float, sums: Gradients | None = None
    ) -> Gradients:
        """Returns dq, dk and dv, as `Work.backward`."""
        q, k, v, out, dout = (_with_rows(x) for x in (*saved[:4], dout))
        lse = saved.lse.contiguous()
        added = self.sums is None or sums is not None
        if sums is not None:
            dq, dk, dv = sums
        else:
            dq = _new(q, q.shape[-1], q.dtype if len(self.dq_launches) == 1 else torch.float32)
            if added:
                dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
            else:
                dk, dv = (_new(x, x.shape[-1], x.dtype) for x in (k, v))
        delta, factors = torch.empty_like(lse), (*kernel.factors(scale), float(scale))
        rows = (*_strides(q), *_key_strides(k), *_key_strides(v))
        for number, launch in enumerate(self.dq_launches):
            _launch(
                kernel.dq_kernel, launch, kernel, q, v,
                (q, k, v, out, dout, lse, delta, dq, launch.items, launch.references, self.tiles, *factors),
                (*rows, *_strides(out), *_strides(dout), *lse.stride()[:2], *_strides(dq)),
                RESUME=sums is not None or number > 0, SMALL=launch.setting.small,
            )  # fmt: skip
        slots = 0 if self.sums is None or added else self.sums.slots
        parts = dk if added else q.new_empty(slots, k.shape[-1] + v.shape[-1], dtype=torch.float32)
        of_keys = *_key_strides(dk), *_key_strides(dv)
        for launch in self.key_launches:
            _launch(
                kernel.dkdv_kernel, launch, kernel, q, v,
                (q, k, v, dout, lse, delta, dk, dv, parts, launch.items, self.tiles, *factors),
                (*rows, *_strides(dout), *lse.stride()[:2], *of_keys),
                ADD=added,
            )  # fmt: skip
        if slots:
            assert self.sums is not None
            arguments = (parts, dk, dv, self.sums.items, self.sums.references, *of_keys)
            _start(kernel.sum_kernel, self.sums.items, arguments, **_widths(k, v), num_warps=1)
        return dq, dk, dv


def _key_strides(x: Tensor) -> tuple[int, int, int]:
    """Returns the distances of batch rows, heads and rows of keys; tiles have the numbers of all rows of a payload."""
    return _strides(x) if x.dim() == 4 else (0, 0, x.stride(0))


def _with_rows(x: Tensor) -> Tensor:
    """Returns x with neighbouring numbers in its rows."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Returns the distances of batch rows, heads and rows; 0 if there is one: with other numbers, Triton aligns no loads."""
    batch, head, row = (0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride()))
    return batch, head, row


def _new(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Returns a new tensor [B, H, n, width] for x [B, H, n, D], stored by token, as models take it."""
    batch, heads, tokens, _ = x.shape
    strides = tokens * heads * width, width, heads * width, 1
    return torch.empty_strided((batch, heads, tokens, width), strides, dtype=dtype, device=x.device)


#: Triton's interpreter runs one kernel at a time, and the ranks of a simulated ring are threads.
_INTERPRETER = threading.Lock()


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Returns a context in which Triton launches on the device of x."""
    return torch.cuda.device(x.device) if x.is_cuda else _INTERPRETER


def _widths(k: Tensor, v: Tensor) -> dict[str, int]:
    """Returns the widths of rows, and the widths of blocks that hold them."""
    width, value_width = k.shape[-1], v.shape[-1]
    return {"D": width, "BLOCK_D": padded_width(width), "DV": value_width, "BLOCK_DV": padded_width(value_width)}


def _launch(
    function: Any, launch: Launch[Tensor], kernel: Fused, q: Tensor, v: Tensor, tensors: tuple[Any, ...],
    strides: tuple[int, ...], **constants: bool,
) -> None:  # fmt: skip
    """Starts a program for each item of a launch."""
    setting = launch.setting
    _start(
        function, launch.items, (*tensors, *strides), HEADS=launch.heads, BLOCK_M=setting.rows, BLOCK_N=setting.keys,
        **_widths(q, v), CAPPED=kernel.softcap is not None, LOOPS=setting.loops, num_warps=setting.warps,
        num_stages=setting.stages, **constants,
    )  # fmt: skip


def _start(function: Any, items: Tensor, arguments: tuple[Any, ...], **options: Any) -> None:
    """Starts a program for each item."""
    with on_device(items):
        function[(len(items),)](*arguments, **options)


def padded_width(width: int) -> int:
    """Returns the next power of 2, at least 16, which Triton's products need."""
    return max(16, 1 << (width - 1).bit_length())


class Fused:
    """Attention of all tiles of a step in one launch, or in one for each distance between dilated queries."""

    name = "fused"

    def __init__(self, settings: Settings, softcap: float | None = None) -> None:
        from . import backward_kernels, kernels  # Triton is not there on every machine.

        self.joining: Hashable = settings
        self.softcap = softcap
        self.forward_kernel: Any = kernels.forward_kernel
        self.dq_kernel: Any = backward_kernels.dq_kernel
        self.dkdv_kernel: Any = backward_kernels.dkdv_kernel
        self.sum_kernel: Any = backward_kernels.sum_kernel

    def factors(self, scale: float) -> tuple[float, float]:
        """Returns the factors of scores inside and outside of the cap, in units of log(2)."""
        return (scale * _LOG2_E, 1.0) if self.softcap is None else (scale / self.softcap, self.softcap * _LOG2_E)
