"""Calls with some of the attention's heads, as tensor parallelism leaves them to a rank: they are part of the definition."""

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.compute.reference import reference_attention
from hf_ring_attention.plan.problem import HeldKeys
from tests.support.cached import cached_attention
from tests.support.ranks import run_simulated
from tests.support.refusals import refused
from tests.support.tolerance import assert_exact

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
