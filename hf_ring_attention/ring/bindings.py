"""The row numbers that a ring keeps on devices for its calls: once for all layers and steps, in bounded memory."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Binding = TypeVar("Binding")

#: The rounds (`Bindings.next_round`) after which a binding that was made ahead is taken for one that no call needs.
ROUNDS_TO_WAIT = 4


class Turns:
    """Lets threads that come with equal keys go one after another, and those with other keys side by side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The lock of each key that a thread has come with; it goes with the last of them.
        self._turns: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()

    @contextmanager
    def of(self, key: Any) -> Iterator[None]:
        """Waits until no other thread is in this context with an equal key."""
        with self._lock:
            turn = self._turns.setdefault(key, threading.Lock())
        with turn:
            yield


class _Ahead(NamedTuple):
    """A binding that waits for its first call, its bytes, and the round in which it was made."""

    binding: Any
    size: int
    made: int


class Bindings:
    """The bindings of the calls of one rank; where they take too much memory, the one used longest ago goes first.

    Threads that need equal bindings at once make one: the others wait for it. A binding under way keeps nobody else.

    Args:
        max_bytes: the most bytes that their tensors take together; the last binding is kept however large it is. Those
            that are made ahead may take half as many beside them, so that they push out none that is in use.
        max_parts: the most tensors, and data classes around them, that they have together. Each takes about 2 KiB of main
            memory, and rows of other documents in every step need bindings that no step needs again; those of 131072 tokens
            in 134 documents have 50 to 400.
    """

    def __init__(self, max_bytes: int = 256 << 20, max_parts: int = 1 << 14) -> None:
        self.max_bytes, self.max_parts = max_bytes, max_parts
        #: The bytes of the tensors of all bindings that calls have used, and of those that were made ahead and not yet used.
        self.nbytes, self.nbytes_ahead = 0, 0
        self._num_parts = 0
        self._bindings: OrderedDict[Any, tuple[Any, int, int]] = OrderedDict()
        self._ahead: dict[Any, _Ahead] = {}
        self._round = 0
        self._streams: dict[torch.device, Any] = {}
        self._turns = Turns()
        self._lock = threading.Lock()

    def of(self, bind: Callable[..., Binding], *call: Any) -> Binding:
        """Returns bind(*call), made for an equal call before, or ahead of this one, if it is still here.

        Args:
            call: the hashable arguments: a problem, and where it is computed.
        """
        key = (bind, *call)
        binding: Binding | None = self._used(key)
        if binding is not None:
            return binding
        with self._turns.of(key):
            for look in (self._used, self._take):
                binding = look(key)
                if binding is not None:
                    return binding
            return self._keep(key, bind(*call))

    def make_ahead(self, device: torch.device, bind: Callable[..., Any], *call: Any) -> None:
        """Makes bind(*call) for `of` to find later, in a thread beside the calls; not where too many wait already.

        Args:
            device: the one of the binding's tensors.
            call: as for `of`.
        """
        key = (bind, *call)
        with self._turns.of(key):
            with self._lock:
                if key in self._bindings or key in self._ahead or 2 * self.nbytes_ahead >= self.max_bytes:
                    return
            with self._beside_calls(device):
                binding = bind(*call)
            size = _size_of(binding)
            with self._lock:
                self._ahead[key] = _Ahead(binding, size, self._round)
                self.nbytes_ahead += size

    def next_round(self) -> None:
        """Begins a round of calls, and drops what was made ahead rounds ago and has met no call."""
        with self._lock:
            self._round += 1
            for key in [key for key, x in self._ahead.items() if self._round - x.made > ROUNDS_TO_WAIT]:
                self.nbytes_ahead -= self._ahead.pop(key).size

    def _used(self, key: Any) -> Any:
        """Returns the binding of a call made before; None if there is none."""
        with self._lock:
            if key not in self._bindings:
                return None
            self._bindings.move_to_end(key)
            return self._bindings[key][0]

    def _take(self, key: Any) -> Any:
        """Returns the binding that was made ahead, and keeps it like those of calls; None if there is none."""
        with self._lock:
            ahead = self._ahead.pop(key, None)
            if ahead is None:
                return None
            self.nbytes_ahead -= ahead.size
        for x in _tensors_in(ahead.binding):
            if x.is_cuda:  # Its memory came with another stream, which must not reuse it before this one is done.
                x.record_stream(torch.cuda.current_stream(x.device))
        return self._keep(key, ahead.binding)

    def _keep(self, key: Any, binding: Binding) -> Binding:
        size, parts = _size_of(binding), sum(1 for _ in _parts_of(binding))
        with self._lock:
            self._bindings[key] = binding, size, parts
            self.nbytes, self._num_parts = self.nbytes + size, self._num_parts + parts
            while (self.nbytes > self.max_bytes or self._num_parts > self.max_parts) and len(self._bindings) > 1:
                _, (_, size, parts) = self._bindings.popitem(last=False)
                self.nbytes, self._num_parts = self.nbytes - size, self._num_parts - parts
        return binding

    @contextmanager
    def _beside_calls(self, device: torch.device) -> Iterator[None]:
        """A context of work that neither waits for what the device computes for calls, nor is seen before it is done."""
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def _size_of(binding: Any) -> int:
    return sum({id(x): x.numel() * x.element_size() for x in _tensors_in(binding)}.values())


def _tensors_in(x: Any) -> Iterator[Tensor]:
    return (part for part in _parts_of(x) if isinstance(part, Tensor))


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
