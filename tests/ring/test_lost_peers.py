"""A rank that stalls or dies ends the others in time, with an error that names it."""

import os
import re
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hf_ring_attention as ra
from hf_ring_attention.compute.kernels import CpuFlash
from tests.support.cases import EVERY_TRANSPORT
from tests.support.ranks import PROMPTLY, TIMEOUT, run_ranks

SECONDS_OF_A_STALL = 5


def attempt(ring):
    """(the error, or None; seconds) of a call on one ring."""
    q, k = torch.ones(1, 6, 2, 8), torch.ones(1, 3, 2, 8)
    start = time.monotonic()
    try:
        ra.ring_attention(q, k, k, pattern=ra.Pattern.exact(), ring=ring, causal=False)
    except BaseException as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return None, time.monotonic() - start


def with_lost_peers(rank, folder):
    """What each of three ranks learns of rank 2, which sleeps in a step, and then, in other groups, dies."""
    found = {}
    group = dist.new_group(timeout=timedelta(seconds=SECONDS_OF_A_STALL))
    ring = ra.Ring(group, layout="contiguous", transport="ring")
    # First without that timeout: what a first call does beside waiting may take long on a busy machine.
    found["before"] = [attempt(ra.Ring(layout="contiguous", transport="ring")), attempt(ring)]

    def slow(*args, forward=CpuFlash.forward):
        """Until the others have given up."""
        deadline = time.monotonic() + TIMEOUT
        while not all(Path(folder, f"gave up {rank}").exists() for rank in (0, 1)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return forward(*args)

    with mock.patch.object(CpuFlash, "forward", slow if rank == 2 else CpuFlash.forward):
        found["stall"] = attempt(ring)
    Path(folder, f"gave up {rank}").touch()

    # A rank that has begun to send before rank 2 is gone may wait first for the other one, which has given up meanwhile.
    limit = timedelta(seconds=PROMPTLY / 2)
    rings = {name: ra.Ring(dist.new_group(timeout=limit), transport=name) for name in EVERY_TRANSPORT}
    found["before"] += [attempt(ring) for ring in rings.values()]
    dist.barrier()
    if rank == 2:
        os._exit(0)
    found["death"] = {name: attempt(ring) for name, ring in rings.items()}
    return found


@pytest.fixture(scope="module")
def lost_peers(tmp_path_factory):
    """What ranks 0 and 1 learnt; rank 2 ends by itself."""
    return run_ranks(with_lost_peers, 3, tmp_path_factory.mktemp("lost"), lost=[2])


def test_a_peer_that_stalls(lost_peers):
    """Rank 2 sleeps in its first tile, with its own rows sent: rank 0 waits in the second step, for rank 1's by way of it."""
    assert all(said is None for found in lost_peers for said, _ in found["before"]), lost_peers
    directions = ("receiving from rank 2", "(sending to|receiving from) rank [02]")
    for rank, (found, direction) in enumerate(zip(lost_peers, directions, strict=True)):
        said, seconds = found["stall"]
        step = rf"RuntimeError: ring attention, forward pass, step \d+ of 2, keys and values, on rank {rank}: "
        assert said is not None and re.match(step + direction, said), said
        assert seconds < SECONDS_OF_A_STALL + PROMPTLY


@pytest.mark.parametrize("transport", EVERY_TRANSPORT)
def test_a_peer_that_dies(lost_peers, transport):
    """The errors name the rank that is gone; only one may name another, which has given up for that."""
    told = [found["death"][transport] for found in lost_peers]
    assert all(said is not None and re.match(r"RuntimeError: .*\brank \d\b", said, re.DOTALL) for said, _ in told), told
    assert any(re.search(r"\brank 2\b", said) for said, _ in told), told
    assert all(seconds < PROMPTLY for _, seconds in told), told
