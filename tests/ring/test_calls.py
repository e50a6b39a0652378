"""Calls on rings beside what else PyTorch does: calls that interleave, no gradients or a few, compilers."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

import hf_ring_attention as ra
from tests.support.cases import EXACT_ATTENTION, TRANSPORTS, Case
from tests.support.tolerance import distance, largest

PATTERN = ra.Pattern.pyramid(window=3, levels=3, ratio=2, sinks=2)


class Call:
    """A call on whole sequences made from a seed: this rank's part of the inputs and of the oracle's results."""

    def __init__(self, ring, seed, seq_len):
        case = Case(pattern=PATTERN, batch=2, seq_len=seq_len, seed=seed)
        self.ring, self.layout = ring, ring.layout_for(seq_len, PATTERN)
        *whole, dout, _ = case.tensors
        self.leaves = dict(zip("qkv", (self.shard(x).requires_grad_() for x in whole)))
        self.dout = self.shard(dout)
        out, _, *grads = case.definition
        self.want = {"out": out, **dict(zip("qkv", grads))}

    def shard(self, x):
        return self.ring.shard(x, self.layout, dim=2)

    def forward(self):
        self.out = ra.ring_attention(*self.leaves.values(), pattern=PATTERN, ring=self.ring, layout=self.layout)
        return self

    def backward(self):
        self.out.backward(self.dout)
        return self

    def error(self, *names):
        """The largest of "out" and of the gradients of "q", "k" and "v"; of all of them, if none is named."""
        got = {"out": self.out.detach(), **{name: x.grad for name, x in self.leaves.items()}}
        return largest(
            float((got[name] - self.shard(self.want[name])).abs().max() / self.want[name].abs().max())
            for name in names or got
        )


def assert_exact(errors):
    for error in errors:
        assert error <= EXACT_ATTENTION


# ---- calls at once

#: The rings of two calls at once, by name, and the lengths of their sequences.
CALLS = {
    "one ring": (("ring", "ring"), (17, 23)),
    "one ring, equal shapes": (("ring", "ring"), (17, 17)),
    "one exchange each": (("collective", "collective"), (17, 17)),
    "two transports": (("ring", "collective"), (17, 17)),
    "two groups": (("ring", "other group"), (17, 23)),
}
ORDERS = ("first in, first out", "first in, last out")


def two_calls_at_once(rank, seed):
    """The errors of two calls, both forward and then both backward, in either order."""
    by_name = {name: ra.Ring(transport=name) for name in TRANSPORTS}
    by_name["other group"] = ra.Ring(dist.new_group(), transport="ring")
    errors = {}
    for (name, (rings, lengths)), order in itertools.product(CALLS.items(), ORDERS):
        calls = [Call(by_name[ring], seed + i, n) for i, (ring, n) in enumerate(zip(rings, lengths, strict=True))]
        for call in calls:
            call.forward()
        for call in calls if order == ORDERS[0] else reversed(calls):
            call.backward()
        errors[name, order] = largest(call.error() for call in calls)
    return errors


def test_two_calls_at_once(ranks, rng):
    for errors in ranks.run(two_calls_at_once, 3, rng.randrange(2**32)):
        assert max(errors.values()) <= EXACT_ATTENTION, errors


# ---- without gradients, or with some


def without_gradients(rank, seed):
    """The largest error of calls that record no gradients, and of calls of the same shapes after them that do."""
    errors = []
    for transport, mode in itertools.product(TRANSPORTS, (torch.no_grad, torch.inference_mode)):
        call = Call(ra.Ring(transport=transport), seed, 24)
        with mode():
            call.forward()
            assert not call.out.requires_grad
            errors.append(call.error("out"))
        errors.append(call.forward().backward().error())
    return largest(errors)


def some_gradients(rank, seed):
    """The largest error if none, one or two of q, k and v take gradients."""
    errors, some = [without_gradients(rank, seed)], ["q", "k", "v", "qk", "qv", "kv"]
    for transport, names in itertools.product(TRANSPORTS, some):
        call = Call(ra.Ring(transport=transport), seed, 20)
        for name, x in call.leaves.items():
            x.requires_grad_(name in names)
        call.forward().backward()
        assert all((x.grad is None) == (name not in names) for name, x in call.leaves.items())
        errors.append(call.error("out", *names))
    return largest(errors)


def test_no_gradients_and_some(ranks, rng):
    """The plans of calls without gradients serve calls with gradients."""
    assert_exact(ranks.run(some_gradients, 3, rng.randrange(2**32)))


# ---- compilers


# Dynamo asks every tensor that comes in for its gradient, and warns of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled():
    """The break is at the attention: there are graphs on both sides of it, and one graph for all is refused."""
    ring, x = ra.Ring(), torch.randn(1, 2, 24, 8, dtype=torch.float64)
    layout = ra.SequenceLayout("zigzag", 24, 1)

    def layer(x):
        return ra.ring_attention(x.sin(), x, x, pattern=PATTERN, ring=ring, layout=layout).cos()

    torch._dynamo.reset()
    backend, found = CompileCounterWithBackend("aot_eager"), []
    for function in (layer, torch.compile(layer, backend=backend)):
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaf)])
    assert_exact(map(distance, *found))
    assert backend.frame_count == 2
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="ring_attention"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
