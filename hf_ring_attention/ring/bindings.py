"""The row numbers that a ring keeps on devices for its calls: once for all layers and steps, in bounded memory."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

Binding = TypeVar("Binding")

#: A binding that was made ahead is dropped if no call needs it for so many rounds (`Bindings.next_round`).
ROUNDS_TO_WAIT = 4


class _Kept(NamedTuple):
    binding: Any
    size: int  # the bytes of its tensors
    parts: int  # the number of its tensors and data classes
    round: int  # in which it was made


class Bindings:
    """The bindings of the calls of one rank. If they take too much memory, the least recently used one goes first.

    Args:
        max_bytes: the most bytes of tensors in bindings that calls have used; the last binding is kept however large it is.
            Bindings that were made ahead may take half as many bytes beside them, so they push out none that is in use.
        max_parts: the most tensors and data classes in bindings that calls have used. Each takes about 2 KiB of main memory,
            and packed batches need new bindings at every step: 131072 tokens in 134 documents have 50 to 400 parts.
    """

    def __init__(self, max_bytes: int = 256 << 20, max_parts: int = 1 << 14) -> None:
        self.max_bytes, self.max_parts = max_bytes, max_parts
        self._round = 0
        #: Bindings that calls have used, the least recently used first; and bindings that wait for their first call.
        self._used: OrderedDict[Any, _Kept] = OrderedDict()
        self._ahead: dict[Any, _Kept] = {}
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors in bindings that calls have used."""
        with self._lock:
            return sum(kept.size for kept in self._used.values())

    @property
    def nbytes_ahead(self) -> int:
        """The bytes of the tensors in bindings that wait for their first call."""
        with self._lock:
            return sum(kept.size for kept in self._ahead.values())

    def of(self, bind: Callable[..., Binding], *call: Any) -> Binding:
        """Returns bind(*call), or the binding that an equal call made before, or that was made ahead of this one."""
        key = (bind, *call)
        with self._lock:
            kept = self._used.get(key)
            if kept is not None:
                self._used.move_to_end(key)
                return cast(Binding, kept.binding)
            kept = self._ahead.pop(key, None)
        if kept is None:
            kept = self._kept(bind(*call))
        else:
            for x in _parts_of(kept.binding):  # Another stream must not reuse its memory before this one is done.
                if isinstance(x, Tensor) and x.is_cuda:
                    x.record_stream(torch.cuda.current_stream(x.device))
        with self._lock:
            self._used[key] = kept
            while len(self._used) > 1 and (
                self.nbytes > self.max_bytes or sum(x.parts for x in self._used.values()) > self.max_parts
            ):
                self._used.popitem(last=False)
        return cast(Binding, kept.binding)

    def make_ahead(self, device: torch.device, bind: Callable[..., Any], *call: Any) -> None:
        """Makes bind(*call) on a device for a later `of`, in a thread beside the calls, unless too many bindings wait."""
        key = (bind, *call)
        with self._lock:
            if key in self._used or key in self._ahead or 2 * self.nbytes_ahead >= self.max_bytes:
                return
        with self._beside_calls(device):
            kept = self._kept(bind(*call))
        with self._lock:
            self._ahead[key] = kept

    def next_round(self) -> None:
        """Begins a round of calls, and drops bindings that were made ahead rounds ago and met no call."""
        with self._lock:
            self._round += 1
            self._ahead = {key: x for key, x in self._ahead.items() if self._round - x.round <= ROUNDS_TO_WAIT}

    def _kept(self, binding: Any) -> _Kept:
        parts = [*_parts_of(binding)]
        size = sum({id(x): x.numel() * x.element_size() for x in parts if isinstance(x, Tensor)}.values())
        return _Kept(binding, size, len(parts), self._round)

    @contextmanager
    def _beside_calls(self, device: torch.device) -> Iterator[None]:
        """A context of work that waits for no call's work on the device, and ends when its own work there is done."""
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def _parts_of(x: Any) -> Iterator[Any]:
    """Yields the tensors and data classes of nested data classes and tuples."""
    if isinstance(x, (tuple, list)):
        for part in x:
            yield from _parts_of(part)
    elif isinstance(x, Tensor):
        yield x
    elif dataclasses.is_dataclass(x):
        yield x
        for field in dataclasses.fields(x):
            yield from _parts_of(getattr(x, field.name))
