"""What a ring keeps of its calls on devices: row numbers, made once for all layers and steps, bounded in bytes."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor

Binding = TypeVar("Binding")


class Bindings:
    """The bindings of the calls of one rank; where they take too many bytes, the one used longest ago goes first.

    Args:
        max_bytes: what their tensors take together at most, but for the last binding, which is kept however large it is.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        #: What the tensors of all bindings take now.
        self.nbytes = 0
        self._kept: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, bind: Callable[..., Binding], *call: Any) -> Binding:
        """bind(*call), from an equal call before where it is still kept.

        Args:
            call: hashable; a problem, and where it is computed.
        """
        key = (bind, *call)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                binding: Binding = self._kept[key][0]
                return binding
            binding = bind(*call)
            size = sum({id(x): x.numel() * x.element_size() for x in _tensors_in(binding)}.values())
            self._kept[key] = binding, size
            self.nbytes += size
            while self.nbytes > self.max_bytes and len(self._kept) > 1:
                _, (_, freed) = self._kept.popitem(last=False)
                self.nbytes -= freed
            return binding


def _tensors_in(x: Any) -> Iterator[Tensor]:
    """The tensors of nested data classes and tuples."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from _tensors_in(part)
    elif dataclasses.is_dataclass(x):
        for field in dataclasses.fields(x):
            yield from _tensors_in(getattr(x, field.name))
