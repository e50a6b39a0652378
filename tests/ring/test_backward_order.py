"""Backward passes of a call meet across ranks, or every rank raises an error."""

import torch

import hf_ring_attention as ra
from tests.support.cases import EVERY_TRANSPORT


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


def in_another_order(ring):
    """The error of two backward passes in another order on each rank; two passes in one order follow."""
    first, second = call(ring, 0), call(ring, 1)
    mixed = [first, second] if ring.rank == 0 else [second, first]
    error = said(lambda: [out.sum().backward() for _, out in mixed])
    # In any order that all ranks share, each call gets the right gradient.
    found = []
    for order in ((0, 1), (1, 0)):
        calls = [call(ring, 0), call(ring, 1)]
        for number in order:
            calls[number][1].sum().backward()
        found.append([x.grad for x, _ in calls])
    assert all(torch.equal(a, b) for a, b in zip(*found))
    return error


def unrecorded_on_one_rank(ring):
    """The error of a call whose gradients one rank alone records; a call of all follows."""

    def frozen():
        with torch.set_grad_enabled(ring.rank == 0):
            call(ring, 0)

    error = said(frozen)
    x, out = call(ring, 0)
    out.sum().backward()
    assert x.grad is not None
    return error


def backward_against_forward(ring):
    """The error of a rank that runs a backward pass while the other makes another call."""
    _, out = call(ring, 0)
    return said((lambda: out.sum().backward()) if ring.rank else (lambda: call(ring, 1)))


def unsharding(ring):
    """The errors of calls of `unshard` that differ; one of all ranks follows."""
    layout = ring.layout_for(8, ra.Pattern.exact())
    errors = {}
    states = [torch.randn(1, 4, 3, requires_grad=True) for _ in range(2)]
    wholes = [ring.unshard(x, layout) for x in states]
    errors["order"] = said(lambda: [wholes[number].sum().backward() for number in ((0, 1), (1, 0))[ring.rank]])
    errors["shape"] = said(lambda: ring.unshard(torch.zeros(1, 4, 3 + ring.rank), layout))
    errors["one rank"] = said(lambda: ring.unshard(torch.zeros(1, 4 + ring.rank, 3), layout))
    errors["another call"] = said((lambda: call(ring, 0)) if ring.rank else lambda: ring.unshard(states[0], layout))
    # A gather would take the messages of another call at the same time.
    errors["gather"] = said((lambda: call(ring, 0)) if ring.rank else lambda: ring.gather(torch.zeros(2)))
    errors["gathered"] = said(lambda: ring.gather(torch.zeros(2 + ring.rank)))
    whole = ring.unshard(states[0].detach().requires_grad_(), layout)
    whole.sum().backward()
    return errors


def refusals(rank):
    of_transports = {}
    for transport in EVERY_TRANSPORT:
        ring = ra.Ring(transport=transport)
        of_transports[transport] = in_another_order(ring), unrecorded_on_one_rank(ring)
    return of_transports, backward_against_forward(ra.Ring()), unsharding(ra.Ring())


def test_calls_in_other_orders_are_refused_on_every_rank(ranks):
    expected = {
        "order": "disagree on the call: rank 0: the backward pass of call 1",
        "shape": "disagree on the shape of a rank's tensor: rank 0: (1, 4, 3), rank 1: (1, 4, 4)",
        "one rank": "expected 4 tokens along dim 1, got 5",
        "another call": "disagree on the call: rank 0: unshard, rank 1: a forward pass of attention",
        "gather": "disagree on the call: rank 0: gather, rank 1: a forward pass of attention",
        "gathered": "disagree on the shape of a tensor to gather: rank 0: (2,), rank 1: (3,)",
    }
    call = "the ranks of the ring disagree on the call: rank 0: the backward pass of call 1,"
    for of_transports, of_a_forward_pass, of_unsharding in ranks.run(refusals, 2):
        for transport, (order, gradients) in of_transports.items():
            assert call in order and "rank 1: the backward pass of call 2," in order, transport
            assert "disagree on whether gradients are recorded: rank 0: True, rank 1: False" in gradients, transport
        assert "rank 0: a forward pass of attention, rank 1: the backward pass of call 1" in of_a_forward_pass
        for name, text in expected.items():
            assert text in of_unsharding[name], name


def test_one_rank_compares_nothing():
    assert ra.Ring.alone().calls.next_number() == 0
