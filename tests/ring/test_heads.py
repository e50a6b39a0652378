"""The heads transport on processes, the plan's bytes, and refusals with their arithmetic; random cases are in test_fuzz.py."""

import random
import re
from dataclasses import replace

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.compute.reference import reference_attention
from hf_ring_attention.plan.problem import HeldKeys
from hf_ring_attention.transport.heads import HeadsTransport
from tests.support.cached import cached_attention
from tests.support.cases import check_cases, fitting_heads, random_case
from tests.support.ranks import run_simulated
from tests.support.refusals import refused
from tests.support.tolerance import assert_exact

LAYOUTS = ("contiguous", "zigzag", "documents")


def checked_in_a_process(rank, heads, seed):
    rng = random.Random(seed)
    cases = [random_case(rng, heads=fitting_heads(rng, heads)) for _ in range(2)]
    for layout in LAYOUTS:
        ring = ra.Ring(layout=layout, transport="heads", heads=heads)
        ring.settings = replace(ring.settings, rows_of_a_head_group=1)
        check_cases(ring, cases)


@pytest.mark.parametrize(("world_size", "heads"), [(3, 3), (4, 2)])
def test_processes(world_size, heads, ranks, rng):
    ranks.run(checked_in_a_process, world_size, heads, rng.random())


def test_reference_case():
    """131072 tokens over 8 ranks, 32/8 heads x 128 in bfloat16: MiB of a rank and layer; a ring moves 448 and 1312."""
    call = {"seq_len": 131072, "ring_size": 8, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    said = ra.explain("exact", **call, transport="heads")
    assert [share.heads.forward.received / 2**20 for share in said.ranks] == [280.0] * 8
    assert [share.heads.backward.sent / 2**20 for share in said.ranks] == [280.0] * 8
    assert said.imbalance == 1.0
    assert said.decision.choice == "heads"
    # In groups of 4 each rank has 8 query and 2 key/value heads of 65536 tokens, and needs these keys of the other group.
    groups = ra.explain("exact", **call, transport="heads", heads=4, layout="zigzag")
    assert groups.ranks[0].heads.forward.received / 2**20 == 16384 * 3 * (8 + 2) * 512 / 2**20 + 65536 * 2 * 512 / 2**20


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world_size", "groups_of", "said"),
    [
        (6, 6, 4, None, "equal query heads on 4 ranks, got 6 / 4 = 1.50"),
        (8, 2, 3, None, "equal query heads on 3 ranks, got 8 / 3 = 2.67"),
        (12, 6, 4, None, "6 key/value heads and 4 ranks divide neither way"),
        (6, 3, 8, 4, "equal query heads on 4 ranks, got 6 / 4 = 1.50"),
        (12, 3, 4, 2, "3 key/value heads and 2 ranks divide neither way"),
    ],
)
def test_heads_that_do_not_divide_are_refused_on_every_rank(heads, kv_heads, world_size, groups_of, said):
    def call(ring):
        q, k = torch.randn(1, heads, 4, 8), torch.randn(1, kv_heads, 4, 8)
        refused(said, ra.ring_attention, q, k, k, pattern="exact", ring=ring)
        return ring.traffic().hops

    assert run_simulated(call, world_size, transport="heads", heads=groups_of) == [0] * world_size
    call = {"seq_len": 64, "ring_size": world_size, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 8}
    refused(said, ra.explain, "exact", **call, transport="heads", heads=groups_of)
    if groups_of is None:  # Other transports show no groups.
        said_of_others = ra.explain("exact", **call)
        assert {share.heads for share in said_of_others.ranks} == {None}
        assert "heads" not in said_of_others.balance


def test_errors_of_groups_name_ranks_by_their_number_in_the_ring(monkeypatch):
    """Of two groups of two, ranks 1 and 3 have the same heads; rank 3 ends before keys go between them."""
    of_piece = HeadsTransport.of_piece

    def ending(transport, piece):
        if transport.link.communicator.rank == 3:
            raise KeyError("of this rank")
        return of_piece(transport, piece)

    monkeypatch.setattr(HeadsTransport, "of_piece", ending)

    def attend(ring):
        x = torch.randn(1, 2, 4, 8)
        with pytest.raises((KeyError, RuntimeError)) as error:
            ra.ring_attention(x, x, x, pattern="exact", causal=False, ring=ring)
        return str(error.value)

    said = run_simulated(attend, 4, transport="heads", heads=2)
    assert re.match(r"ring attention, forward pass, .*, on rank 1: receiving from rank 3 did not end", said[1])
    assert re.match(r"attention by heads, outputs, on rank 2: receiving from rank 3 did not end", said[2])


def test_groups_that_do_not_divide_are_refused():
    for heads in (3, 0, "2"):
        refused(f"a divisor of the ring's 4 ranks, got {heads!r}", ra.simulate, 4, transport="heads", heads=heads)
    refused("heads=2 needs transport='heads', got 'ring'", ra.simulate, 4, transport="ring", heads=2)


# ---- calls with some of the heads, as tensor parallelism leaves them to a rank

PATTERNS = (
    "longnet:8/1,16/4", "pyramid:3,3", "kv0,3=window:3;kv1-2=longnet:8/1,16/2",
)  # fmt: skip


def rows(heads, tokens=24):
    return torch.randn(2, heads, tokens, 4, dtype=torch.float64)


@pytest.mark.parametrize("transport", ["ring", "collective", "heads"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_parts_of_the_heads_are_those_of_all(pattern, transport):
    q, k, v = rows(8), rows(4), rows(4)
    expected = reference_attention(q, k, v, pattern=ra.Pattern.parse(pattern))[0].chunk(2, 1)

    def check(ring):
        layout = ring.layout_for(24, pattern)
        for part, want in enumerate(expected):
            shards = [ring.shard(x.chunk(2, 1)[part], layout, dim=2) for x in (q, k, v)]
            out = ra.ring_attention(*shards, pattern=pattern, ring=ring, layout=layout, head_shard=(part, 2))
            assert_exact(ring.unshard(out, layout, dim=2), want, f"part {part}")

    run_simulated(check, 2, transport=transport)
    for part, want in enumerate(expected):
        some = (x.chunk(2, 1)[part] for x in (q[:, :, -3:], k, v))
        out = cached_attention(*some, pattern=pattern, held=HeldKeys.whole(24, 3, 24), head_shard=(part, 2))
        assert_exact(out, want[:, :, -3:], f"part {part} behind a cache")


def test_other_heads_are_refused():
    q, k = rows(4), rows(2)
    said = "for 4 key/value heads, and k has 6"
    refused(said, ra.ring_attention, q, k, k, pattern=PATTERNS[-1], head_shard=(0, 3))
    said = "head_shard must be (i, t) with 0 <= i < t, got"
    for head_shard in ((2, 2), (-1, 2), (0, 0)):
        refused(said, ra.ring_attention, q, k, k, pattern="exact", head_shard=head_shard)

    def differ(ring):
        said = "disagree on the number of the first key/value head: rank 0: 0, rank 1: 2"
        refused(said, ra.ring_attention, q, k, k, pattern="exact", ring=ring, head_shard=(ring.rank, 2))

    run_simulated(differ, 2)
