"""Tiles of unequal lengths get the same results in one kernel call, padded or in place, as in separate calls."""

import dataclasses

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.compute import batched
from hf_ring_attention.compute.cuda_kernels import CudaFlash
from hf_ring_attention.compute.kernels import CpuFlash, Math
from hf_ring_attention.plan.joins import Joining
from tests.support.cases import check_cases, check_simulated, random_cases
from tests.support.cuda_operators import FlashAttention2

#: All tiles that may share a call do, whatever it costs; and up to some rows, or if it costs little.
EVERYTHING = {"rows": 10**9, "pairs": 10**9, "most_rows": 10**9}
LITTLE = [EVERYTHING, {**EVERYTHING, "most_rows": 30}, {**EVERYTHING, "rows": 8}, {**EVERYTHING, "pairs": 10}]


class JoinedCalls:
    """Hands calls on to a kernel and counts the calls with tiles of several lengths."""

    def __init__(self, kernel, joining):
        self.kernel, self.joining, self.name = kernel, joining, kernel.name
        self.with_lengths = self.padded = 0

    def forward(self, *tensors_and_tiles):
        self.with_lengths += tensors_and_tiles[3].lengths is not None
        return self.kernel.forward(*tensors_and_tiles)

    def backward(self, *tensors_and_tiles):
        self.padded += bool(torch.isinf(tensors_and_tiles[1].lse).any())
        return self.kernel.backward(*tensors_and_tiles)


def joined_cases(rng, kernel, count):
    """Random cases, whose scores are capped if plain math computes them alone.

    The first one has tiles of each shape in unequal lengths: documents that are shorter than its window, and longer ones.
    """
    cases = random_cases(rng, count)
    cases[0] = dataclasses.replace(
        cases[0],
        pattern=ra.Pattern.parse("window:12+2"),
        batch=1,
        seq_len=60,
        causal=True,
        documents=[[(0, 9), (9, 22), (22, 40), (40, 57)]],
    )
    capped = kernel.softcap if isinstance(kernel, Math) else None
    return [dataclasses.replace(case, softcap=capped) for case in cases]


@pytest.mark.drawn
@pytest.mark.parametrize(
    "kernel", [CpuFlash(), Math(), Math(softcap=3.0)], ids=["cpu_flash", "math", "math with capped scores"]
)
@pytest.mark.parametrize("bounds", LITTLE, ids=["all", "few rows", "little padding", "few pairs"])
def test_padded_tiles(kernel, bounds, computed_by, rng):
    counted = JoinedCalls(kernel, Joining(**bounds))
    computed_by(counted)
    cases = joined_cases(rng, kernel, 8)
    check_cases(ra.Ring(), cases)
    for transport in ("ring", "collective"):
        check_simulated(cases[:3], 3, layout="zigzag", transport=transport)
    if bounds is EVERYTHING:
        assert counted.with_lengths
        assert counted.padded


def test_tiles_of_flash_attention(computed_by, checked_operators, rng):
    """FlashAttention for CUDA: its calls are checked, and computed in float64."""
    operators = checked_operators(torch.float64, played_by=FlashAttention2)
    computed_by(CudaFlash())
    cases = joined_cases(rng, CudaFlash(), 8)
    check_cases(ra.Ring(), cases)
    for transport in ("ring", "collective"):
        check_simulated(cases[:3], 3, layout="zigzag", transport=transport)
    shapes = {(given["is_causal"], "window_size_left" in given) for _, given in operators.calls}
    assert shapes == {(False, False), (True, False), (False, True)}


def test_joined_calls_are_never_cut(computed_by, monkeypatch, rng):
    """Their lengths would go with the rows; other calls are cut after a few."""
    monkeypatch.setattr(batched, "PART_ROWS", 1)
    counted = JoinedCalls(CpuFlash(), Joining(**EVERYTHING))
    computed_by(counted)
    check_cases(ra.Ring(), joined_cases(rng, CpuFlash(), 8))
    assert counted.with_lengths and counted.padded
