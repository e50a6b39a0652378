"""The planned calls of a ring by value, with their row numbers on devices, in bounded memory."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

#: A binding that was made ahead is dropped if no call needs it for so many rounds (`Bindings.next_round`).
ROUNDS_TO_WAIT = 4

#: The values of a planned call take as much memory as this many parts of a binding.
PARTS_OF_A_CALL = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """The binding of a plan, which calls share."""

    binding: Any
    size: int  # the bytes of its tensors
    parts: int  # the number of its tensors and data classes
    round: int  # when it was made


class PlannedCalls:
    """The planned calls of one rank by value. If their bindings take too much memory, the oldest one goes first.

    A call that is in use and goes is planned again, once for many new ones.

    Args:
        max_bytes: the most bytes of tensors in bindings; the last call is kept however large its binding is.
        max_parts: the most tensors and data classes in bindings. Each takes about 2 KiB of main memory, and packed batches need
            new bindings at every step: 131072 tokens in 134 documents have 50 to 400 parts.
    """

    def __init__(self, max_bytes: int = 256 << 20, max_parts: int = 1 << 14) -> None:
        self.max_bytes, self.max_parts = max_bytes, max_parts
        self.nbytes, self._parts = 0, 0
        self._calls: dict[Hashable, Any] = {}  # the oldest first
        #: Returns the planned call that is equal, else None.
        self.find: Callable[[Hashable], Any] = self._calls.get
        self._users: Counter[Kept] = Counter()  # the number of calls that share a binding
        self._lock = threading.Lock()

    def keep(self, call: Hashable, planned: Any) -> None:
        """Keeps a planned call, whose `kept` is the binding of its plan, for calls that are equal to `call`."""
        with self._lock:
            if call in self._calls:  # Another thread has planned it.
                return
            self._calls[call] = planned
            self._count(planned.kept, 1)
            while len(self._calls) > 1 and (self.nbytes > self.max_bytes or self._parts > self.max_parts):
                self._count(self._calls.pop(next(iter(self._calls))).kept, -1)

    def _count(self, kept: Kept, change: int) -> None:
        """Adds a call that uses a binding, or takes it away; a binding counts once."""
        before = self._users[kept]
        self._users[kept] += change
        if not before or not self._users[kept]:
            self.nbytes += change * kept.size
            self._parts += change * (kept.parts + PARTS_OF_A_CALL)
        if not self._users[kept]:
            del self._users[kept]


class Bindings:
    """The bindings that planned calls share, and those that were made ahead and wait for their first call.

    Args:
        max_bytes: those made ahead may take this many bytes.
    """

    def __init__(self, max_bytes: int = 128 << 20) -> None:
        self.max_bytes, self._round = max_bytes, 0
        self._shared: weakref.WeakValueDictionary[Any, Kept] = weakref.WeakValueDictionary()
        self._ahead: dict[Any, Kept] = {}
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.RLock()

    @property
    def nbytes_ahead(self) -> int:
        """The bytes of the tensors in bindings that wait for their first call."""
        with self._lock:
            return sum(kept.size for kept in self._ahead.values())

    def of(self, bind: Callable[..., Any], *call: Any) -> Kept:
        """Returns bind(*call), or the binding that an equal call has, or that was made ahead."""
        key = (bind, *call)
        with self._lock:
            kept, ahead = self._shared.get(key), self._ahead.pop(key, None)
        if ahead is not None:
            for x in _parts_of(ahead.binding):  # Another stream must not reuse its memory before this stream is done.
                if isinstance(x, Tensor) and x.is_cuda:
                    x.record_stream(torch.cuda.current_stream(x.device))
        if kept is None:
            kept = self._shared[key] = self._made(bind(*call))
        return kept

    def make_ahead(self, device: torch.device, bind: Callable[..., Any], *call: Any) -> None:
        """Makes bind(*call) on a device for a later `of`, in a thread beside the calls, unless too many bindings wait."""
        key = (bind, *call)
        with self._lock:
            if key in self._shared or self.nbytes_ahead >= self.max_bytes:
                return
        with self._beside_calls(device):
            kept = self._made(bind(*call))
        with self._lock:
            self._ahead[key] = self._shared[key] = kept

    def next_round(self) -> None:
        """Begins a round of calls, and drops bindings that were made ahead rounds ago and met no call."""
        with self._lock:
            self._round += 1
            self._ahead = {key: x for key, x in self._ahead.items() if self._round - x.round <= ROUNDS_TO_WAIT}

    def _made(self, binding: Any) -> Kept:
        parts = _parts_of(binding)
        size = sum({id(x): x.numel() * x.element_size() for x in parts if isinstance(x, Tensor)}.values())
        return Kept(binding, size, len(parts), self._round)

    @contextmanager
    def _beside_calls(self, device: torch.device) -> Iterator[None]:
        """A context of work that waits for no call's work on the device, and ends when the work inside is done there."""
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def _parts_of(x: Any) -> list[Any]:
    """Returns the tensors and data classes of nested data classes and tuples."""
    found: list[Any] = []
    left = [x]
    while left:
        x = left.pop()
        if isinstance(x, (tuple, list)):
            left += x
        elif isinstance(x, Tensor):
            found.append(x)
        elif dataclasses.is_dataclass(x):
            found.append(x)
            left += [getattr(x, field.name) for field in dataclasses.fields(x)]
    return found
