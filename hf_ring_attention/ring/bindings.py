"""The row numbers that a ring keeps on devices for its calls: once for all layers and steps, in bounded memory."""

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
        max_bytes: the most bytes that their tensors take together; the last binding is kept however large it is.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        #: The bytes of the tensors of all bindings.
        self.nbytes = 0
        self._bindings: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, bind: Callable[..., Binding], *call: Any) -> Binding:
        """Returns bind(*call), made for an equal call before if it is still here.

        Args:
            call: the hashable arguments: a problem, and where it is computed.
        """
        key = (bind, *call)
        with self._lock:
            if key in self._bindings:
                self._bindings.move_to_end(key)
                binding: Binding = self._bindings[key][0]
                return binding
            binding = bind(*call)
            size = sum({id(x): x.numel() * x.element_size() for x in _tensors_in(binding)}.values())
            self._bindings[key] = binding, size
            self.nbytes += size
            while self.nbytes > self.max_bytes and len(self._bindings) > 1:
                _, (_, freed) = self._bindings.popitem(last=False)
                self.nbytes -= freed
            return binding


def _tensors_in(x: Any) -> Iterator[Tensor]:
    """Yields the tensors of nested data classes and tuples."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from _tensors_in(part)
    elif dataclasses.is_dataclass(x):
        for field in dataclasses.fields(x):
            yield from _tensors_in(getattr(x, field.name))
