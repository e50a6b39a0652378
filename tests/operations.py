"""`python -m tests.operations` prints the table of `recipes/bench/operations.py` for the kernels of GPUs, without one.

Attention itself computes nothing; all other operations run on the CPU, and their number is the same as on a GPU. The host
starts each of them, and a launch of Triton's kernels counts as one.
"""

import sys

import torch

from hf_ring_attention.compute import cuda_kernels
from hf_ring_attention.compute.cuda_kernels import CudaFlash, Cudnn
from hf_ring_attention.compute.fused import tiles
from hf_ring_attention.compute.fused.choice import settings_for
from hf_ring_attention.compute.fused.tiles import Fused
from hf_ring_attention.plan.kernel_choice import LONG_TILE
from hf_ring_attention.ring import planned
from tests.support.cuda_operators import SilentOperators


def count_for_cuda(monkeypatch):
    """Has calls take the kernels that they would take on an H100; these compute nothing."""

    def chosen(device, dtype, width, value_width, softcap, setting, kinds, *others):
        if kinds.rows >= LONG_TILE:
            return Cudnn()
        return CudaFlash() if kinds.rows and kinds.whole_rows else Fused(settings_for(torch.bfloat16, 128, "sm_90"))

    monkeypatch.setattr(cuda_kernels, "aten", SilentOperators)
    monkeypatch.setattr(tiles, "_start", lambda function, items, *_, **__: torch.ops.silent.launch(items))
    monkeypatch.setattr(planned, "choose_kernel", chosen)


if __name__ == "__main__":
    import pytest

    sys.path.insert(0, "recipes/bench")
    import operations

    with pytest.MonkeyPatch.context() as patch:
        count_for_cuda(patch)
        operations.main(["--dtype", "bfloat16", *sys.argv[1:]])
