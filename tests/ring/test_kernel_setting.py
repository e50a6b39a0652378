"""The kernel that a ring asks for: the same setting on all ranks, never replaced, and named with the reason."""

import logging
import threading

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.compute import kernels
from hf_ring_attention.compute.kernels import CpuFlash, Math
from hf_ring_attention.plan.problem import HeldKeys
from hf_ring_attention.ring import planned
from hf_ring_attention.transport.transports import Link
from tests.support.cached import cached_attention
from tests.support.patches import replaced
from tests.support.ranks import run_simulated
from tests.support.refusals import refused
from tests.support.tolerance import assert_exact

TOKENS = 24


def drawn():
    return torch.randn(1, 2, TOKENS, 8, dtype=torch.float64, requires_grad=True)


def assert_same(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        assert_exact(got, want)


def on_rank_1():
    """Whether this is the thread of simulated rank 1."""
    return threading.current_thread().name.endswith("_1")


def attend(ring, x, pattern="window:5+2", **settings):
    """The output and the gradient of its sum, of whole sequences, on every rank."""
    layout = ring.layout_for(x.shape[2], pattern)
    own = ring.shard(x.detach(), layout, dim=2).requires_grad_()
    out = ra.ring_attention(own, own, own, pattern=pattern, ring=ring, layout=layout, **settings)
    out.sum().backward()
    return [ring.unshard(y.detach(), layout, dim=2) for y in (out, own.grad)]


def test_kernels_with_their_reasons():
    x = drawn()
    ring = ra.Ring.alone()
    assert ring.kernels() == {}
    attend(ring, x)
    attend(ring, x, "exact")
    attend(ring, x, softcap=3.0)
    held = HeldKeys.whole(TOKENS, 1, TOKENS)
    cached_attention(x[:, :, -1:], x, x, pattern="exact", held=held, ring=ring)
    assert {kind: decision.choice for kind, decision in ring.kernels().items()} == {
        "few shapes of tiles on one rank, float64, head sizes 8 and 8": "cpu_flash",
        "one document a row, exact documents on one rank, float64, head sizes 8 and 8": "cpu_flash",
        "few shapes of tiles on one rank, float64, head sizes 8 and 8, capped scores": "math",
        "few queries to a cache, float64, head sizes 8 and 8": "cpu_flash",
    }
    assert {decision.reason for decision in ring.kernels().values()} == {
        "it is torch's flash attention for CPUs", "it computes everything; not cpu_flash: it does not cap scores",
    }  # fmt: skip


@pytest.mark.parametrize("transport", ["ring", "collective", "heads"])
def test_plain_math_on_a_ring(transport):
    x = drawn()
    wanted = attend(ra.Ring.alone(), x)
    for ring, *found in run_simulated(lambda ring: (ring, *attend(ring, x)), 2, transport=transport, kernel="math"):
        assert {decision.choice for decision in ring.kernels().values()} == {"math"}
        assert_same(found, wanted)


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient", "fused"])
def test_kernels_of_other_devices_are_refused_on_every_rank_before_any_work(kernel, monkeypatch):
    monkeypatch.setattr(kernels, "why_not_fused", lambda *_: "there is no GPU")
    monkeypatch.setattr(Link, "exchange", lambda *_: pytest.fail("rows were sent"))
    reason = "there is no GPU" if kernel == "fused" else "it computes on CUDA devices, and the tensors are on cpu"

    def call(ring):
        refused(f"kernel='{kernel}' cannot compute this call: {reason}", attend, ring, drawn())

    run_simulated(call, 2, kernel=kernel)


def test_a_refusal_of_one_rank_reaches_all(monkeypatch):
    """For example, one rank has an older device than the others."""
    replaced(
        monkeypatch,
        kernels,
        why_not_fused=lambda *_: "no compiler" if on_rank_1() else None,
        fused_kernel=lambda *_: Math(),
    )

    def call(ring):
        refused("kernel='fused' cannot compute this call: no compiler", attend, ring, drawn())

    run_simulated(call, 2, kernel="fused")


def test_the_fused_kernel_where_it_can_run(monkeypatch):
    made = []
    replaced(
        monkeypatch,
        kernels,
        why_not_fused=lambda *_: None,
        fused_kernel=lambda *call: made.append(call) or Math(call[-1]),
    )
    kernels._kernel.cache_clear()
    ring, x = ra.Ring.alone(kernel="fused"), drawn()
    assert_same(attend(ring, x, softcap=2.0), attend(ra.Ring.alone(), x, softcap=2.0))
    kernels._kernel.cache_clear()
    assert made == [(torch.device("cpu"), torch.float64, 8, 8, 2.0)]
    assert [decision.choice for decision in ring.kernels().values()] == ["fused"]


def test_ranks_that_ask_for_different_kernels():
    def call(ring):
        ring.kernel = ("auto", "math")[ring.rank]
        refused("the ranks of the ring disagree on kernel: rank 0: auto, rank 1: math", attend, ring, drawn())

    run_simulated(call, 2)


def test_ranks_may_choose_different_kernels(monkeypatch):
    choose, x = planned.choose_kernel, drawn()
    wanted = attend(ra.Ring.alone(), x)
    monkeypatch.setattr(
        planned, "choose_kernel", lambda *call: choose(*call) and (Math() if on_rank_1() else CpuFlash())
    )
    for found in run_simulated(lambda ring: attend(ring, x), 2):
        assert_same(found, wanted)


def test_each_kernel_is_logged_once_by_rank_0(caplog):
    def call(ring):
        for _ in range(2):
            attend(ring, drawn())
            attend(ring, drawn(), "exact")
            attend(ring, drawn(), softcap=2.0)

    with caplog.at_level(logging.INFO, logger="hf_ring_attention.ring.ring"):
        run_simulated(call, 2)
    assert [record.getMessage() for record in caplog.records if "kernel" in record.getMessage()] == [
        "ring of 2: kernel cpu_flash, because it is torch's flash attention for CPUs",
        "ring of 2: kernel math, because it computes everything; not cpu_flash: it does not cap scores",
    ]
