"""Backward passes meet those of the same call on other ranks, or every rank says that they do not."""

import pytest
import torch

import hf_ring_attention as ra
from tests.support.ranks import run_ranks


def call(ring, seed):
    """A call of a rank, and a leaf that takes its gradient."""
    generator = torch.Generator().manual_seed(100 * seed + ring.rank)
    x = torch.randn(3, 1, 2, 6, 8, generator=generator, dtype=torch.float64).requires_grad_()
    return x, ra.ring_attention(*x, pattern=ra.Pattern.exact(), ring=ring)


def said(function):
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def in_another_order(rank, transport):
    """The error of two backward passes in another order on each rank; two passes in one order follow."""
    ring = ra.Ring(transport=transport)
    first, second = call(ring, 0), call(ring, 1)
    mixed = [first, second] if rank == 0 else [second, first]
    error = said(lambda: [out.sum().backward() for _, out in mixed])
    # In any order that all ranks share, each gets its own gradient.
    found = []
    for order in ((0, 1), (1, 0)):
        calls = [call(ring, 0), call(ring, 1)]
        for number in order:
            calls[number][1].sum().backward()
        found.append([x.grad for x, _ in calls])
    assert all(torch.equal(a, b) for a, b in zip(*found))
    return error


def unrecorded_on_one_rank(rank, transport):
    """The error of a call whose gradients one rank alone records; a call of all follows."""
    ring = ra.Ring(transport=transport)

    def frozen():
        with torch.set_grad_enabled(rank == 0):
            call(ring, 0)

    error = said(frozen)
    x, out = call(ring, 0)
    out.sum().backward()
    assert x.grad is not None
    return error


def refusals(rank, transport):
    return in_another_order(rank, transport), unrecorded_on_one_rank(rank, transport)


@pytest.mark.parametrize("transport", ["ring", "collective", "heads"])
def test_other_orders_and_other_gradients_are_refused_on_every_rank(transport):
    for order, gradients in run_ranks(refusals, 2, transport):
        assert "the ranks of the ring disagree on the call: rank 0: the backward pass of call 1," in order
        assert "rank 1: the backward pass of call 2," in order
        assert "disagree on whether gradients are recorded: rank 0: True, rank 1: False" in gradients


def backward_against_forward(rank):
    ring = ra.Ring()
    _, out = call(ring, 0)
    return said((lambda: out.sum().backward()) if rank else (lambda: call(ring, 1)))


def test_a_backward_pass_that_meets_a_forward_pass_is_refused_on_every_rank():
    for error in run_ranks(backward_against_forward, 2):
        assert "disagree on the call: rank 0: a forward pass of attention, rank 1: the backward pass of call 1" in error


def unsharding(rank):
    ring = ra.Ring()
    layout = ring.layout_for(8, ra.Pattern.exact())
    errors = {}
    states = [torch.randn(1, 4, 3, requires_grad=True) for _ in range(2)]
    wholes = [ring.unshard(x, layout) for x in states]
    errors["order"] = said(lambda: [wholes[number].sum().backward() for number in ((0, 1), (1, 0))[rank]])
    errors["shape"] = said(lambda: ring.unshard(torch.zeros(1, 4, 3 + rank), layout))
    errors["one rank"] = said(lambda: ring.unshard(torch.zeros(1, 4 + rank, 3), layout))
    errors["another call"] = said((lambda: call(ring, 0)) if rank else lambda: ring.unshard(states[0], layout))
    whole = ring.unshard(states[0].detach().requires_grad_(), layout)
    whole.sum().backward()
    return errors


def test_calls_of_unshard_that_differ_are_refused_on_every_rank():
    expected = {
        "order": "disagree on the call: rank 0: the backward pass of call 1",
        "shape": "disagree on the shape of a rank's tensor: rank 0: (1, 4, 3), rank 1: (1, 4, 4)",
        "one rank": "expected 4 tokens along dim 1, got 5",
        "another call": "disagree on the call: rank 0: unshard, rank 1: a forward pass of attention",
    }
    for errors in run_ranks(unsharding, 2):
        for name, text in expected.items():
            assert text in errors[name], name


def test_one_rank_compares_nothing():
    assert ra.Ring.alone().calls.backward_check() is None
