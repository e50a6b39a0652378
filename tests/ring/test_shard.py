"""`Ring.shard` and `Ring.unshard`: rows go to their ranks by the layout and come back whole, and so do gradients."""

import itertools

import pytest
import torch

import hf_ring_attention as ra

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


def checks(rank):
    ring = ra.Ring()
    check_round_trips(ring)
    check_gradients(ring)


def test_three_ranks(ranks):
    ranks.run(checks, 3)


@pytest.mark.parametrize("check", [check_round_trips, check_gradients])
def test_one_rank(check):
    check(ra.Ring())
