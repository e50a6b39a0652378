"""Groups whose backend serves devices only, as "nccl" does: ranks compare their calls over a gloo group beside it."""

import random
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hf_ring_attention as ra
from hf_ring_attention.transport.communicators import companion_of
from tests.hf.test_generation import cache_argument, greedy, tokens
from tests.support.cases import TRANSPORTS, check_cases, random_cases
from tests.support.ranks import PROMPTLY, run_ranks
from tests.support.tiny_models import tiny_model

#: A backend for CUDA alone that can be made without it. Tensors of these tests are on the CPU, and it takes none of them.
DEVICE_ONLY = "cuda:gloo"


def device_only(ranks=None, **options):
    group = dist.new_group(ranks, backend=DEVICE_ONLY, **options)
    if group != dist.GroupMember.NON_GROUP_MEMBER:
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.zeros(1), group=group)
    return group


def agree(ring, name, message=None, **options):
    """The messages of all ranks."""
    with ring.agreement(name, **options) as call:
        call.message = message
    return call.answers


def said(function):
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def calls_and_generation(rank, seed):
    """Calls against the oracle, and the tokens that a sharded prefill and its steps give."""
    device_only([0])  # From here on the ranks have made different numbers of groups.
    group = device_only()
    for transport in TRANSPORTS:
        check_cases(ra.Ring(group, transport=transport), random_cases(random.Random(seed), 3))
    model = ra.patch_model(tiny_model("llama", "eager"), ring=ra.Ring(group, transport="heads"))
    row = tokens(21)
    return greedy(model, row, **cache_argument(ra.prefill(model, row[:, :17])))


def test_calls_prefill_and_steps(rng):
    expected = greedy(tiny_model("llama", "eager"), tokens(21))
    assert all(torch.equal(found, expected) for found in run_ranks(calls_and_generation, 2, rng.random()))


def refusals(rank):
    """What rank 1 alone refuses, in calls that all have agreed on before; and whether the next calls work."""
    ring = ra.Ring(device_only(timeout=timedelta(seconds=2 * PROMPTLY)))
    x = torch.zeros(1, 2, 4, 8, requires_grad=True)

    def attend(pattern="exact"):
        return ra.ring_attention(x, x, x, pattern=pattern, ring=ring)

    calls = {
        "a refusal": lambda: attend("exact" if rank == 0 else "exactly"),
        "another call": lambda: attend() if rank == 0 else ring.unshard(torch.zeros(1, 4), ring.layout_for(8, "exact")),
        "another kind": lambda: attend() if rank == 0 else agree(ring, "reading a file"),
        "backward": lambda: attend() if rank == 0 else attended.sum().backward(),
    }
    attended, found = attend(), {}
    attend().sum().backward()
    for name, call in calls.items():
        start = time.monotonic()
        found[name] = said(call)
        assert time.monotonic() - start < PROMPTLY, name
        attend()
    return found


def test_a_refusal_on_one_rank_ends_the_others_at_once():
    expected = {
        "a refusal": "pattern 'exactly' is not known",
        "another call": "disagree on the call: rank 0: a forward pass of attention, rank 1: unshard; all must make",
        "another kind": "disagree on the call: rank 0: a forward pass of attention, rank 1: reading a file; all must",
        "backward": "disagree on the call: rank 0: a forward pass of attention, rank 1: the backward pass of call 1",
    }
    for found in run_ranks(refusals, 2):
        for name, text in expected.items():
            assert found[name] is not None and text in found[name], found


def one_for_all_rings(rank, folder):
    """Rings over one group share its connections, which end with the group; a mesh has some for each of its groups."""
    for number in range(2):  # The second time after the end of the first.
        dist.destroy_process_group()
        dist.init_process_group(DEVICE_ONLY, f"file://{folder}/{number}", rank=rank, world_size=4)
        first, second = ra.Ring(), ra.Ring(dist.group.WORLD)
        if rank == 0:
            ra.Ring()  # Made by one rank, it waits for none.
        assert agree(first, "a call", rank) == agree(second, "a call", rank) == [0, 1, 2, 3]
        assert companion_of(dist.group.WORLD) is companion_of(dist.group.WORLD) is not None
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ring"))
        ring = ra.Ring(mesh)
        assert agree(ring, "a call", rank) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert companion_of(mesh["ring"].get_group()) is not companion_of(dist.group.WORLD)
        dist.new_group()  # Groups of the world that are made afterwards are made by all.
        assert agree(first, "another call", rank, everywhere=True) == [0, 1, 2, 3]
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{folder}/end", rank=rank, world_size=4)
    assert companion_of(dist.group.WORLD) is None


def test_rings_over_one_group_share_a_companion(tmp_path):
    run_ranks(one_for_all_rings, 4, tmp_path)


def timeouts(rank):
    group = device_only(timeout=timedelta(seconds=2))
    ring = ra.Ring(group)
    start = time.monotonic()
    error = said(lambda: agree(ring, "a call")) if rank == 0 else None
    dist.barrier()
    return error, time.monotonic() - start


def test_a_rank_that_does_not_come_is_awaited_as_long_as_the_group_says():
    (error, seconds), _ = run_ranks(timeouts, 2)
    assert re.match("RuntimeError: comparing the calls of all ranks, on rank 0, in a call: ", str(error)), error
    assert 1.5 < seconds < PROMPTLY
