"""All ranks in one process: results in order, errors at once and as they are, and the numbers that processes compute."""

import itertools
import re
import threading
import time
from contextlib import nullcontext

import pytest
import torch

import hf_ring_attention as ra
from tests.support.cases import TRANSPORTS, random_case
from tests.support.ranks import PROMPTLY, TIMEOUT, run_simulated
from tests.support.refusals import refused

EXACT = ra.Pattern.exact()


def attention(ring, **options):
    """A call in which every rank needs rows of every other one."""
    q = torch.ones(1, 2, 4, 8, dtype=torch.float64, requires_grad=True)
    return ra.ring_attention(q, q, q, pattern=EXACT, ring=ring, **{"causal": False, **options})


def test_results_are_in_the_order_of_ranks():
    def function(ring):
        time.sleep(0.02 * (5 - ring.rank))  # the last one ends first
        return ring.rank, ring.world_size

    assert ra.run_simulated(function, 5) == [(rank, 5) for rank in range(5)]


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True, "2", None])
def test_wrong_numbers_of_ranks(world_size):
    for make in (ra.simulate, lambda world_size: ra.run_simulated(attention, world_size)):
        refused(f"world_size must be an integer of at least 1, got {world_size!r}", make, world_size)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("point", ["before a call", "after a call", "returned"])
def test_an_error_of_one_rank(transport, point):
    """It is raised as it is, not the errors that follow on other ranks, and they do not wait until their timeout.

    So it goes where a rank takes no part, and its function returns.
    """
    own, said = ZeroDivisionError("of rank 1"), {}

    def function(ring):
        if point == "after a call":
            attention(ring)
        if ring.rank == 1 and point == "returned":
            return
        if ring.rank == 1:
            raise own
        try:
            attention(ring)
        except RuntimeError as error:
            said[ring.rank] = str(error)
            raise

    start = time.monotonic()
    with pytest.raises((ZeroDivisionError, RuntimeError)) as raised:
        ra.run_simulated(function, 3, transport=transport, timeout=TIMEOUT)
    assert time.monotonic() - start < PROMPTLY
    assert sorted(said) == [0, 2]
    if point == "returned":
        assert re.search("receiving from rank 1 did not end: its function returned", str(raised.value))
        assert all("from rank" in text for text in said.values()), said
    else:
        assert raised.value is own
        assert any("rank 1" in text and "ZeroDivisionError: of rank 1" in text for text in said.values()), said


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_does_not_come_in_time(transport):
    awake, seconds = threading.Event(), []

    def function(ring):
        if ring.rank == 1:
            assert awake.wait(PROMPTLY), "the other rank waits on"
            return
        start = time.monotonic()
        try:
            attention(ring)
        finally:
            seconds.append(time.monotonic() - start)
            awake.set()

    with pytest.raises(RuntimeError, match=r"receiving from rank 1 did not end: nothing came in 1(\.0)? s"):
        ra.run_simulated(function, 2, transport=transport, timeout=1)
    assert 1 <= seconds[0] < PROMPTLY


@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_are_recorded_as_the_caller_has_it(world_size):
    def modes(ring):
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), attention(ring).requires_grad

    for mode, expected in (
        (nullcontext, (True, False, True)),
        (torch.no_grad, (False, False, False)),
        (torch.inference_mode, (False, True, False)),
        (nullcontext, (True, False, True)),
    ):
        with mode():
            assert ra.run_simulated(modes, world_size) == [expected] * world_size


def results(ring, cases):
    """The local outs, log-sum-exps and gradients."""
    by_case = []
    for case in cases:
        layout = ring.layout_for(case.seq_len, case.pattern, case.rows)
        leaves = [ring.shard(x, layout, dim=2).requires_grad_() for x in case.tensors[:3]]
        out, lse = ra.ring_attention(*leaves, **case.options, ring=ring, layout=layout, return_lse=True)
        out.backward(torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view_as(out))
        by_case.append([out.detach(), lse, *(x.grad for x in leaves)])
    return by_case


def results_of_processes(rank, cases):
    return {transport: results(ra.Ring(transport=transport), cases) for transport in TRANSPORTS}


def test_the_numbers_of_processes(rng, ranks):
    """Bit for bit."""
    cases = [random_case(rng) for _ in range(3)]
    processes = ranks.run(results_of_processes, 3, cases)
    for transport in TRANSPORTS:
        simulated = ra.run_simulated(lambda ring: results(ring, cases), 3, transport=transport, timeout=TIMEOUT)
        for rank, (by_case, process) in enumerate(zip(simulated, processes, strict=True)):
            for case, tensors, same in zip(cases, by_case, process[transport], strict=True):
                equal = [torch.equal(a, b) for a, b in zip(tensors, same, strict=True)]
                assert all(equal), f"{case}, {transport}, rank {rank}: {equal}"


# ---- `Ring.shard` and `Ring.unshard`: rows go to their ranks and come back whole, and so do gradients

LAYOUTS = ("contiguous", "zigzag")
LENGTHS = (1, 3, 6, 7, 31)
DIMS = (0, 1, -1, -2)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def row_of(length, dim, dtype=torch.float64, seed=0):
    """Whole rows, the same on every rank; `length` tokens along `dim` of 4."""
    shape = [2, 3, 1, 2]
    shape[dim] = length
    return torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x):
    """x as a view of every other number of a wider tensor."""
    return torch.stack([x, -x], -1)[..., 0]


def check_round_trips(ring):
    for kind, length, dim in itertools.product(LAYOUTS, LENGTHS, DIMS):
        layout = ra.SequenceLayout(kind, length, ring.world_size)
        whole = row_of(length, dim)
        for stored in (torch.Tensor.clone, strided):
            local = ring.shard(stored(whole), layout, dim=dim)
            assert local.shape[dim] == layout.local_len
            assert torch.equal(ring.unshard(stored(local), layout, dim=dim), whole), f"{ring}, {layout}, dim {dim}"
    for kind, dtype in itertools.product(LAYOUTS, DTYPES):
        layout = ra.SequenceLayout(kind, 7, ring.world_size)
        whole = row_of(7, 1, dtype)
        again = ring.unshard(ring.shard(whole, layout), layout)
        assert again.dtype == dtype
        assert torch.equal(again, whole), f"{ring}, {layout}, {dtype}"


def check_gradients(ring):
    """Each rank weighs the whole sequence otherwise; a rank's part gets the sum of all ranks' gradients, its padding none."""
    for kind, length, dim in itertools.product(LAYOUTS, LENGTHS, (1, -1)):
        layout = ra.SequenceLayout(kind, length, ring.world_size)
        weights = [row_of(length, dim, seed=1 + rank) for rank in range(ring.world_size)]
        whole = row_of(length, dim).requires_grad_()
        local = ring.shard(whole, layout, dim=dim, fill=3)
        local.retain_grad()
        (ring.unshard(local, layout, dim=dim) * weights[ring.rank]).sum().backward()
        where = f"{ring}, {layout}, dim {dim}"
        assert torch.equal(local.grad, ring.shard(sum(weights), layout, dim=dim)), where
        # And on through shard: this rank's tokens only, since the others' gradients are theirs.
        mine = torch.zeros(length, dtype=torch.bool)
        mine[[p for p in layout.positions(ring.rank) if p < length]] = True
        expected = torch.where(mine.view([-1 if i == dim % 4 else 1 for i in range(4)]), sum(weights), 0)
        assert torch.equal(whole.grad, expected), where


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("check", [check_round_trips, check_gradients])
def test_rows_go_and_come_back(check, world_size):
    run_simulated(check, world_size)
