"""Thousands of steps of ever other documents leave nothing behind: caches are bounded, and threads and files are closed."""

import gc
import os
import random
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from timing import held_memory, return_memory_at_once

import hf_ring_attention as ra
from tests.support.ranks import TIMEOUT

TOKENS, PATTERN = 24, "window:4+1"
#: By the first number of steps the caches of plans and of agreed values, of 256 entries each, are full.
FILLED, STEPS = 280, 442
#: The counted steps after them are cut into this number of parts.
STRETCHES = 3


def figures():
    """(Python's objects, bytes of the process, threads, open files) of this process."""
    gc.collect()
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return len(gc.get_objects()), held_memory("cpu"), threading.active_count(), files


def step(ring, rng):
    """A call on new documents."""
    cuts = sorted(rng.sample(range(1, TOKENS), rng.randint(2, 6)))
    documents = [list(zip([0, *cuts], [*cuts, TOKENS]))]
    layout = ring.layout_for(TOKENS, PATTERN, documents)
    x = torch.randn(1, 2, layout.local_len, 4, requires_grad=True)
    out = ra.ring_attention(x, x, x, pattern=PATTERN, ring=ring, layout=layout, documents=documents)
    out.sum().backward()


def growth(rank, seed, transport, steps=STEPS):
    """What `figures` grow by once the caches are full, in each of `STRETCHES` of equally many steps, over a ring and alone."""
    return_memory_at_once()
    rng, rings = random.Random(seed), (ra.Ring(transport=transport), ra.Ring.alone())
    for ring in rings:
        ring.planned.max_parts = 1000
    readings = []
    for number in range(steps + 1):
        if number >= FILLED and (number - FILLED) % ((steps - FILLED) // STRETCHES) == 0:
            readings.append(figures())
        if number < steps:
            step(rings[number % 2], rng)
    return [[after - first for after, first in zip(*pair)] for pair in pairwise(readings)]


def check(stretches, steps=STEPS):
    """A leak grows in every stretch; a module that is imported late grows in one stretch only."""
    objects, held, threads, files = zip(*stretches)
    # Entries of caches differ in size: of a stretch's first and last 256 entries by some hundred objects.
    assert min(objects) < 6 * (steps - FILLED) / STRETCHES, f"more than some objects a step: {objects}"
    assert sum(held) < 8 << 20
    assert (sum(threads), sum(files)) == (0, 0)


def test_two_processes(ranks, rng):
    for grown in ranks.run(growth, 2, rng.random(), "ring"):
        check(grown)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ring", "collective", "heads"])
def test_two_thousand_steps(ranks, rng, transport):
    for grown in ranks.run(growth, 2, rng.random(), transport, 2001 + FILLED):
        check(grown, 2001 + FILLED)


# ---- ends of processes: torch aborts one whose thread of gloo drops a tensor while Python ends


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "launches", "at_once", "processes"), [("slow", 16, 1, 16), ("rings", 200, 6, 800)])
def test_processes_end_without_a_signal(kind, launches, at_once, processes):
    command = [sys.executable, "-m", "tests.support.process_ends", kind, str(launches), str(at_once)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"cwd": Path(__file__).parents[2], "env": environment, "timeout": max(TIMEOUT, 5 * launches)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, **options)
    assert done.stdout == f"{{0: {processes}}}\n", done.stderr
