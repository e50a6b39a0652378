"""The sizes of the tensors that operations make, on any device, torch's meta device included."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations inside have made, as long as these exist; `peak`: the most at once.

    Args:
        known: tensors that are not counted, nor are views of them.
    """

    def __init__(self, known=()):
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakKeyDictionary((x.untyped_storage(), None) for x in known)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is None or storage in self._known:
                continue
            size = storage.nbytes()
            self._known[storage] = weakref.finalize(storage, self._freed, size)
            self.now += size
            self.peak = max(self.peak, self.now)
        return out

    def _freed(self, size):
        self.now -= size


class LargestResult(TorchDispatchMode):
    """The most `elements` of any tensor that an operation inside gives; of one dtype, if it is named."""

    def __init__(self, dtype=None):
        super().__init__()
        self.dtype, self.elements = dtype, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = (x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and self.dtype in (None, x.dtype))
        self.elements = max([self.elements, *(x.numel() for x in tensors)])
        return out
