"""Live bytes of tensors while operations run, and what stands for attention and for the loss on torch's meta device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from ..compute.chosen import attend_to_chosen
from ..compute.kernel import Saved
from ..compute.merge import accumulation_dtype
from ..compute.private import GROUPED_MM, DispatchMode, tree_leaves
from ..hf.layer.indexed import choice_of
from ..ring.operator import CALLS

#: The attention implementation of models that are measured.
MEASURING = "hf_ring_attention_measured"

#: The attribute of modules with three facts: whether attention is one tile, whether the fused kernel computes patterns, and
#: the fields of `_ChosenWithoutNumbers` where queries choose their keys.
KERNEL = "_measured_kernel"

#: A slice of queries that have chosen keys holds about as many tensors of its size at once.
SLICES = 3

#: The part of a step, the number of its layer, and whether the last slice of the tokens is computed.
Phase = tuple[str, int, bool]


@contextmanager
def as_in_training() -> Iterator[None]:
    """Records gradients as a training step does, also inside no_grad, inference_mode, anomaly detection and offloading."""
    anomalies, hooks = torch.autograd.set_detect_anomaly(False), saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), anomalies, hooks:
        yield


class LiveBytes(DispatchMode):
    """Counts the bytes of the tensors that operations inside have made, as long as these exist; `peak`: the most at once.

    Args:
        known: tensors that are not counted, nor are views of them.
    """

    def __init__(self, known: Any = ()) -> None:
        super().__init__()
        self.now = self.peak = self.operations = 0
        # After how many operations each storage was made.
        self.born: Any = weakref.WeakKeyDictionary((x.untyped_storage(), 0) for x in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            storage = x.untyped_storage() if isinstance(x, Tensor) else None
            if storage is not None and storage not in self.born:
                size, self.born[storage] = storage.nbytes(), self.operations
                weakref.finalize(storage, self._free, size)
                self.now += size
        self.operations += 1
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, size: int) -> None:
        self.now -= size


class Trace(LiveBytes):
    """Live bytes after each operation, by the phase of the step; and the bytes in host memory."""

    def __init__(self, known: Any) -> None:
        super().__init__(known)
        self.host = 0
        self.part, self.in_last_slice = ("forward", -1), False
        self.sizes: dict[nn.Module, int] = {}  # of the first slice of each module
        self.entries: list[tuple[int, Phase, int]] = []  # operations so far, phase and bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is GROUPED_MM:
            func = _empty_grouped_mm
        out = super().__torch_dispatch__(func, types, args, kwargs)
        of_attention = func is torch.ops.hf_ring_attention.attend_backward.default
        self.note("attention" if of_attention else self.part[0], self.part[1], self.now)
        return out

    def note(self, name: str, layer: int, size: int) -> None:
        self.entries.append((self.operations, (name, layer, self.in_last_slice), size))

    def begin_backward(self, number: int, grad: Tensor) -> None:
        """Begins the backward pass of a layer; a hook of its output."""
        self.part = "layer", number

    def run_slice(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs a module on one of two slices; the last one is shorter."""
        size = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)).numel()
        self.in_last_slice = size < self.sizes.setdefault(module, size)
        return type(module).forward(module, *args, **kwargs)

    def behind(self, number: int, layer: nn.Module, args: Any, output: Any) -> None:
        """Notes what is saved behind a layer; a hook of its forward, which runs once more if it is computed again."""
        if self.part[0] != "forward":
            return
        self.note("saved", number, self.now)
        self.note("host", number, self.host)
        for x in tree_leaves(output)[:1]:
            if isinstance(x, Tensor):
                x.register_hook(partial(self.begin_backward, number))

    def drop_gradient(self, parameter: Tensor) -> None:
        """Takes the gradient of a parameter out of the trace, since it is counted by formula: devices divide it."""
        assert parameter.grad is not None
        storage, parameter.grad = parameter.grad.untyped_storage(), None
        born, size = self.born[storage], storage.nbytes()
        for at in reversed(range(len(self.entries))):
            operations, phase, live = self.entries[at]
            if operations <= born:
                break
            self.entries[at] = operations, phase, live - size

    def take_back(self, size: int) -> None:
        self.host -= size

    def phases(self) -> dict[Phase, list[int]]:
        """Returns the bytes in each phase, in the order of the operations."""
        found: dict[Phase, list[int]] = {}
        for _, phase, size in self.entries:
            found.setdefault(phase, []).append(size)
        return found


class InHost:
    """A saved tensor in host memory."""

    def __init__(self, trace: Trace, x: Tensor) -> None:
        self.size, self.dtype = x.shape, x.dtype
        trace.host += x.nbytes
        weakref.finalize(self, trace.take_back, x.nbytes)

    def back(self) -> Tensor:
        return torch.empty(self.size, dtype=self.dtype, device="meta")


class SavedGradient(torch.autograd.Function):
    """Saves the gradient of hidden states in forward, as the loss in slices does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(hidden))
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * grad


def _empty_grouped_mm(a: Tensor, b: Tensor, groups: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch's product of each group of rows, in any dtype: torch takes only bfloat16 on the meta device."""
    return a.new_empty(*groups.shape[: 3 - b.dim()], a.shape[0], b.shape[-1])


class CacheOfRing(Cache):
    """Stands for a `RingCache` of this many ranks, which returns the keys and values of whole rows."""

    def __init__(self, ranks: int) -> None:
        super().__init__(layers=[])
        self.ranks = ranks

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return torch.cat([key_states] * self.ranks, 2), torch.cat([value_states] * self.ranks, 2)


class _ChosenWithoutNumbers(NamedTuple):
    """Makes what attention to chosen keys (compute/chosen.py) holds, without numbers."""

    slice_bytes: int
    gathers: bool  # whether it gathers the keys of each query, and adds no gradients of all keys up for a slice

    def forward(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))

    def backward(self, indices: Tensor, dout: Tensor, saved: Saved, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dk, dv = (torch.empty_like(x, dtype=saved.lse.dtype) for x in (saved.k, saved.v))
        dq, of_slice = torch.empty_like(saved.q), [dk.new_empty(SLICES * self.slice_bytes, dtype=torch.uint8)]
        of_slice += [] if self.gathers else [torch.empty_like(saved.k), torch.empty_like(saved.v)]
        return dq, dk, dv


class _Named:
    """Stands for a planned call, which nobody executes."""


_CALL = _Named()


def _measured_attention(module: nn.Module, *tensors: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The operator of attention on tensors without numbers: it saves and keeps what it does elsewhere."""
    if (chosen := choice_of(tensors[3], kwargs)) is not None:
        q, k, v = tensors[:3]
        way = _ChosenWithoutNumbers(*getattr(module, KERNEL)[2])
        return attend_to_chosen(q, k, v, chosen, 1.0, kwargs.get("s_aux"), way=way).transpose(1, 2).contiguous(), None
    (batch, heads, tokens, _), width = tensors[0].shape, tensors[2].shape[-1]
    is_one_tile, is_fused, _ = getattr(module, KERNEL)
    by_torch = is_one_tile and kwargs.get("softcap") is None and tensors[0].shape[-1] == width
    number = torch.tensor([CALLS.add(_CALL)], device="cpu")
    if is_one_tile or is_fused:  # They take views, and write gradients in the order of their tensors.
        q, k, v = (x if x.is_contiguous() else x.transpose(1, 2) for x in tensors[:3])
    else:
        q, k, v = (x.contiguous() for x in tensors[:3])
    out, _ = torch.ops.hf_ring_attention.attend(q, k, v, None, number, 0, "", [1.0])
    if (is_fused and not by_torch) or (by_torch and q is not tensors[0]):  # torch writes in the order of the queries.
        return out.view(batch, tokens, heads, width), None
    return out.view(batch, heads, tokens, width).transpose(1, 2).contiguous(), None


AttentionInterface.register(MEASURING, _measured_attention)
AttentionMaskInterface.register(MEASURING, lambda *args, **kwargs: None)
