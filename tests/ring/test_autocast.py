"""Autocast changes no bit of attention and of the states that ranks pass."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.compute import cuda_kernels
from hf_ring_attention.compute.cuda_kernels import CudaEfficient, CudaFlash, Cudnn
from hf_ring_attention.compute.fused.tiles import Fused
from hf_ring_attention.hybrids import states
from hf_ring_attention.plan.problem import HeldKeys
from hf_ring_attention.plan.state_runs import StateRun
from tests.support.cached import cached_attention
from tests.support.cases import EVERY_TRANSPORT
from tests.support.cuda_operators import CudnnAttention, EfficientAttention, FlashAttention2
from tests.support.fused import SMALL_BLOCKS, needs_interpreter
from tests.support.ranks import run_simulated

CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
#: The device, the dtype, the cap of scores, and the kernel that is asked for and computes.
KERNELS = [
    pytest.param("cpu", torch.float32, 5.0, "auto", "math", id="math"),
    pytest.param("cpu", torch.bfloat16, 5.0, "auto", "math", id="math in bfloat16"),
    pytest.param("cpu", torch.float32, None, "auto", "cpu_flash", id="cpu_flash"),
    pytest.param("cpu", torch.bfloat16, None, "auto", "cpu_flash", id="cpu_flash in bfloat16"),
    pytest.param("cuda", torch.float32, 5.0, "math", "math", id="cuda_math", marks=CUDA),
    pytest.param("cuda", torch.float32, None, "efficient", "efficient", id="cuda_efficient", marks=CUDA),
    pytest.param("cuda", torch.bfloat16, None, "flash", "flash", id="cuda_flash", marks=CUDA),
]
#: Kernels for CUDA whose operators are played by plain math, which autocast would change.
PLAYED = [
    pytest.param(CudaFlash(), FlashAttention2, ("window:5+2", "longnet:8/1,24/2"), id="flash"),
    pytest.param(Cudnn(), CudnnAttention(), ("exact",), id="cudnn"),
    pytest.param(CudaEfficient(), EfficientAttention, ("window:5+2", "longnet:8/1,24/2"), id="efficient"),
    pytest.param(Fused(SMALL_BLOCKS), None, ("window:6+2",), id="fused", marks=needs_interpreter),
]
#: One whole tile, tiles that are merged, and folds.
PATTERNS = ("exact", "window:5+2", "longnet:8/1,24/2")


def autocast(on, device="cpu"):
    return torch.autocast(device, torch.bfloat16) if on else nullcontext()


def attend(on, generator_seed, pattern, ring, device, dtype, softcap):
    """Output and gradients; forward and backward both run inside autocast, or neither."""
    generator = torch.Generator().manual_seed(generator_seed)
    layout = ring.layout_for(24, pattern)
    q, k, v, dout = (
        ring.shard(torch.randn(1, heads, 24, 16, generator=generator), layout, dim=2).to(device, dtype)
        for heads in (4, 2, 2, 4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v, torch.linspace(-1, 1, 4, device=device, dtype=dtype))]
    with autocast(on, device):
        out = ra.ring_attention(
            *leaves[:3], sinks=leaves[3], pattern=pattern, ring=ring, layout=layout, softcap=softcap
        )
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_same(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y), float((x - y).abs().max())


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("device", "dtype", "softcap", "setting", "name"), KERNELS)
def test_attention_by_each_kernel(device, dtype, softcap, setting, name, pattern, rng):
    ring = ra.Ring.alone(kernel=setting)
    call = (rng.randrange(2**32), pattern, ring, device, dtype, softcap)
    assert_same(attend(True, *call), attend(False, *call))
    assert {decision.choice for decision in ring.kernels().values()} == {name}


@pytest.mark.parametrize(("kernel", "operators", "patterns"), PLAYED)
def test_attention_by_kernels_for_cuda(kernel, operators, patterns, computed_by, monkeypatch, rng):
    monkeypatch.setattr(cuda_kernels, "aten", operators)
    computed_by(kernel)
    for pattern in patterns:
        call = (rng.randrange(2**32), pattern, ra.Ring.alone(), "cpu", torch.float32, None)
        assert_same(attend(True, *call), attend(False, *call))


@pytest.mark.parametrize("transport", EVERY_TRANSPORT)
def test_attention_over_a_ring(transport, rng):
    seed = rng.randrange(2**32)

    def work(ring):
        call = (seed, "window:5+2", ring, "cpu", torch.float32, 5.0)
        return attend(True, *call), attend(False, *call)

    for inside, outside in run_simulated(work, 2, transport=transport):
        assert_same(inside, outside)


def test_attention_to_a_cache(rng):
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    q, k = torch.randn(1, 4, 1, 16, generator=generator), torch.randn(1, 2, 9, 16, generator=generator)
    inside, outside = [], []

    def work(ring):
        held = HeldKeys(9, 1, 9, ((0, 0, 4),) if ring.rank == 0 else ((4, 4, 9),))
        for on, found in ((True, inside), (False, outside)):
            with autocast(on):
                found.append(cached_attention(q, k, k, pattern="exact", held=held, ring=ring, softcap=5.0))

    run_simulated(work, 2)
    assert_same(inside, outside)


def chain():
    """Two runs of one document, one behind the other in the batch of a single rank."""
    runs = [StateRun(0, 0, 4, 0, 0, -1, False), StateRun(0, 4, 7, 4, 0, 0, False)]
    return states.Chain(ra.Ring.alone(), runs, [0, 1], 2, 4, states.StatesBehind(), 1)


def delta_rule(draw):
    """The mixer's function is a constant here: the test compares the steps after it."""
    out, final = draw(2, 4, 2, 6 + 8), draw(2, 2, 8, 6 + 8)
    key, value, g = draw(2, 4, 2, 8), draw(2, 4, 2, 6), draw(2, 4, 2)
    return states._delta_rule(lambda *_, **__: (out, final), chain(), key, key, value, g=g, beta=g)


def state_space(draw):
    out, final, x, dt = draw(2, 4, 2, 6), draw(2, 2, 6, 8), draw(2, 4, 2, 6), draw(2, 4, 2)
    A, B, C = -draw(2).abs(), draw(2, 4, 1, 8), draw(2, 4, 1, 8)
    return states._state_space(lambda *_, **__: (out, final), chain(), x, dt, A, B, C)


def selective(draw):
    out, final, x, dt = draw(2, 6, 4 + 8), draw(2, 6, 8), draw(2, 6, 4), draw(2, 6, 4)
    A, B, C = -draw(6, 8).abs(), draw(2, 8, 4), draw(2, 8, 4)
    return states._selective(lambda *_, **__: (out, final), chain(), x, dt, A, B, C)


@pytest.mark.parametrize("passed", [delta_rule, state_space, selective], ids=lambda passed: passed.__name__)
def test_states_that_pass_from_run_to_run(passed, rng):
    seed, found = rng.randrange(2**32), []
    for on in (True, False):
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
        with autocast(on):
            found.append(passed(draw))
    assert_same(*found)
