"""Thousands of steps of ever other documents leave nothing behind: caches are bounded, and threads and files are closed."""

import gc
import os
import random
import threading

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.tools.benchmarks.harness import give_memory_back_at_once, held_memory

TOKENS, PATTERN = 64, "pyramid:4,2"
#: By the first number of steps the caches of plans and of agreed values, of 256 entries each, are full.
FILLED, STEPS = 280, 440


def figures():
    """(Python's objects, bytes of the process, threads, open files) of this process."""
    gc.collect()
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return len(gc.get_objects()), held_memory(torch.device("cpu")), threading.active_count(), files


def step(ring, rng):
    """One call on other documents than those of the steps before, which are expected as a loader expects them."""
    cuts = sorted(rng.sample(range(1, TOKENS), rng.randint(3, 12)))
    documents = [list(zip([0, *cuts], [*cuts, TOKENS]))]
    layout = ring.layout_for(TOKENS, PATTERN, documents)
    ring.planner.expect(layout, tuple(map(tuple, documents)))
    x = torch.randn(1, 2, layout.local_len, 4, requires_grad=True)
    out = ra.ring_attention(x, x, x, pattern=PATTERN, ring=ring, layout=layout, documents=documents)
    out.sum().backward()


def growth(rank, seed, transport, steps=STEPS):
    """What `figures` grow by once the caches are full."""
    give_memory_back_at_once()
    rng, ring = random.Random(seed), ra.Ring(transport=transport)
    ring.bindings.max_parts = 1000
    before = None
    for number in range(steps):
        if number == FILLED:
            ring.planner.wait()
            before = figures()
        step(ring, rng)
    ring.planner.wait()
    return [after - first for after, first in zip(figures(), before)]


def check(objects, held, threads, files, steps=STEPS):
    assert objects < 4 * (steps - FILLED), "more than some objects a step"
    assert held < 8 << 20
    assert (threads, files) == (0, 0)


def test_one_rank(rng):
    check(*growth(0, rng.random(), "auto"))


def test_two_processes(ranks, rng):
    for grown in ranks.run(growth, 2, rng.random(), "ring"):
        check(*grown)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ring", "collective", "heads"])
def test_two_thousand_steps(ranks, rng, transport):
    for grown in ranks.run(growth, 2, rng.random(), transport, 2000 + FILLED):
        check(*grown, 2000 + FILLED)
