"""Outputs, log-sum-exps and all gradients equal the dense oracle: random patterns, lengths, heads, documents, layouts."""

import random

import pytest
import torch

import hf_ring_attention as ra
from tests.support.cases import check_random_cases
from tests.support.ranks import run_ranks

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def fresh_seed():
    return random.randrange(2**32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_local(dtype):
    check_random_cases(ra.Ring(), seed=fresh_seed(), count=300, tolerance=TOLERANCE[dtype], dtype=dtype)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_local_on_cuda(dtype):
    """float32 by a kernel that sums in another order than the CPU's, hence five times its tolerance."""
    tolerance = TOLERANCE[dtype] * (5 if dtype == torch.float32 else 1)
    check_random_cases(ra.Ring(), seed=fresh_seed(), count=100, tolerance=tolerance, dtype=dtype, device="cuda")


def sharded(rank, seed, count):
    for layout in ("contiguous", "zigzag"):
        ring = ra.Ring(layout=layout, transport="collective")
        for dtype, tolerance in TOLERANCE.items():
            check_random_cases(ring, seed=f"{seed}-{layout}", count=count, tolerance=tolerance, dtype=dtype)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_collective(world_size):
    run_ranks(sharded, world_size, fresh_seed(), 80, timeout=240)
