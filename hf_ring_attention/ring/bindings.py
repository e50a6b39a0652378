"""The planned calls of a ring by value, with their row numbers on devices, in bounded memory."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

#: The values of a planned call take as much memory as this many parts of a binding.
PARTS_OF_A_CALL = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """The binding of a plan, which calls share."""

    binding: Any
    size: int  # the bytes of its tensors
    parts: int  # the number of its tensors and data classes


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
        self._shared: weakref.WeakValueDictionary[Any, Kept] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def binding(self, bind: Callable[..., Any], *call: Any) -> Kept:
        """Returns bind(*call), or the binding that an equal call has: calls that differ in their scale share it."""
        kept = self._shared.get((bind, *call))
        if kept is None:
            kept = self._shared[bind, *call] = _made(bind(*call))
        return kept

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


def _made(binding: Any) -> Kept:
    """Returns a binding with its size, which is found in nested data classes and tuples."""
    parts, left = [], [binding]
    while left:
        x = left.pop()
        if isinstance(x, (tuple, list)):
            left += x
        elif isinstance(x, Tensor) or dataclasses.is_dataclass(x):
            parts.append(x)
            left += [] if isinstance(x, Tensor) else [getattr(x, field.name) for field in dataclasses.fields(x)]
    size = sum({id(x): x.numel() * x.element_size() for x in parts if isinstance(x, Tensor)}.values())
    return Kept(binding, size, len(parts))
