"""`python -m tests.operations` prints the table of `recipes/bench/operations.py` for CUDA's FlashAttention-2, without a GPU.

The operators of attention return zeros; all others run on the CPU, and their number is the same as on a GPU.
"""

import sys

from hf_ring_attention.compute import cuda_kernels
from hf_ring_attention.compute.cuda_kernels import CudaFlash
from hf_ring_attention.ring import attention
from tests.support.cuda_operators import SilentOperators


def count_for_cuda(monkeypatch):
    """Has every call take the way of CUDA's FlashAttention-2, whose operators compute nothing."""
    monkeypatch.setattr(cuda_kernels, "aten", SilentOperators)
    monkeypatch.setattr(attention, "choose_kernel", lambda *_: CudaFlash())


if __name__ == "__main__":
    import pytest

    sys.path.insert(0, "recipes/bench")
    import operations

    with pytest.MonkeyPatch.context() as patch:
        count_for_cuda(patch)
        operations.main(["--dtype", "bfloat16", *sys.argv[1:]])
