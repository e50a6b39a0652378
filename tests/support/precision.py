"""Computes in float64, where equal computations hardly differ, and measures how far two results are apart."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_ring_attention.compute.private import TorchDispatchMode

#: How far two computations in float64 may be apart, relative to the largest entry; tests/support/tolerance.py says why.
EXACT = 1e-10

_THREAD = threading.local()

_DEFAULTS_LOCK = threading.Lock()
#: The default dtype before any thread was in float64, and one entry for each thread that is.
_DEFAULTS: list[torch.dtype] = []


class _Float64ForFloat32(TorchFunctionMode):
    """A mode in which calls that ask for float32 get float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            # Backward may compute layers again, and this mode is off inside of calls.
            with _Float64ForFloat32InOperations():
                return func(*args, **kwargs)
        if func is Tensor.float:
            return Tensor.double(*args, **kwargs)
        return func(*_in_float64(func is Tensor.view, args, kwargs), **kwargs)


class _Float64ForFloat32InOperations(TorchDispatchMode):
    """The same for the operations that calls are made of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*_in_float64(func is torch.ops.aten.view.dtype, args, kwargs), **kwargs)


def _in_float64(reads_bits: bool, args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns the arguments with float64 for float32, and changes `kwargs`; not of views that read bits as another dtype."""
    if reads_bits:
        return args
    if kwargs.get("dtype") is torch.float32:
        kwargs["dtype"] = torch.float64
    return [torch.float64 if x is torch.float32 else x for x in args]


@contextmanager
def float64(on: bool = True) -> Iterator[None]:
    """Makes this thread compute and make models in float64 while the context lasts; `on=False` changes nothing.

    Threads that are started meanwhile must enter this context themselves.
    """
    if not on or is_float64():
        yield
        return
    # The default is that of all threads: the first one that enters sets it, and the last one that leaves restores it.
    with _DEFAULTS_LOCK:
        if not _DEFAULTS:
            _DEFAULTS.append(torch.get_default_dtype())
        _DEFAULTS.append(torch.float64)
        torch.set_default_dtype(torch.float64)
    _THREAD.float64 = True
    try:
        with _Float64ForFloat32():
            yield
    finally:
        _THREAD.float64 = False
        with _DEFAULTS_LOCK:
            _DEFAULTS.pop()
            if len(_DEFAULTS) == 1:
                torch.set_default_dtype(_DEFAULTS.pop())


def is_float64() -> bool:
    """Returns whether this thread is inside `float64`."""
    return getattr(_THREAD, "float64", False)


def distance(result: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, relative to the largest entry of `expected`."""
    result, expected = result.detach(), expected.detach()
    return float((result - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def largest(errors: Iterable[float]) -> float:
    """Returns the largest error, or NaN if any is NaN: no bound allows NaN, and Python's max may pass it over."""
    return float(torch.tensor(list(errors)).max())
