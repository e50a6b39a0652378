"""The largest tensor that operations make, on any device, torch's meta device included."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
