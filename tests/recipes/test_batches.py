"""Rings read batches of their own, epoch after epoch, and a loop goes on in the middle of an epoch where it was."""

import itertools

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from batches import Batches
from datasets import Dataset
from torch.utils.data import DataLoader, DistributedSampler
from transformers import default_data_collator

import hf_ring_attention as ra
from tests.support.ranks import run_ranks
from tests.support.training import process_environment

ROWS, BATCH, EPOCHS = 23, 2, 3
KINDS = ("rows", "stream", "shards")


def batches_of(kind):
    """The batches of a new loop, and what its checkpoint holds."""
    accelerator = Accelerator()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    ra.Ring.from_accelerator(accelerator, size=min(2, world_size))
    rows = Dataset.from_dict({"input_ids": [[n] * 4 for n in range(ROWS)]})
    if kind == "rows":
        order = {"sampler": DistributedSampler(rows, 1, 0, seed=5)}
    else:
        rows = rows.to_iterable_dataset(num_shards=3 if kind == "shards" else 1).shuffle(seed=5, buffer_size=7)
        order = {}
    loader = DataLoader(rows, BATCH, drop_last=True, collate_fn=default_data_collator, **order)
    return Batches(accelerator, accelerator.prepare(loader))


def read_all(rank):
    process_environment(rank, dist.get_world_size())
    return {kind: read(kind) for kind in KINDS}


def read(kind):
    """The rows of the batches of three epochs, read once and with breaks."""
    whole, epochs = batches_of(kind), []
    for batch in whole:
        if whole.epoch == EPOCHS:
            break
        epochs.append((whole.epoch, batch["input_ids"][:, 0].tolist()))
    for stop in (2, len(epochs) - 1):
        first = batches_of(kind)
        taken = [batch["input_ids"][:, 0].tolist() for batch in itertools.islice(iter(first), stop)]
        second = batches_of(kind)
        second.load_state_dict(first.state_dict())
        rest = itertools.islice(iter(second), len(epochs) - stop)
        taken += [batch["input_ids"][:, 0].tolist() for batch in rest]
        assert taken == [batch for _, batch in epochs], stop
    return epochs


@pytest.mark.parametrize("processes", [1, 4])
def test_a_loop_goes_on_where_it_was(processes):
    by_rank = run_ranks(read_all, processes)
    for kind in KINDS:
        rings = [answer[kind] for answer in by_rank[:: min(2, processes)]]
        if processes == 4:
            assert [answer[kind] for answer in by_rank[1::2]] == rings, "the ranks of a ring read the same rows"
        orders = []
        for epoch in range(EPOCHS):
            rows = [row for ring in rings for number, batch in ring if number == epoch for row in batch]
            assert len(rows) == len({*rows}) > ROWS - 2 * BATCH * len(rings)
            orders.append(rows)
        assert orders[0] != orders[1] != orders[2]


def test_data_that_fill_no_batch_are_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    accelerator = Accelerator()
    rows = Dataset.from_dict({"input_ids": [[1, 2]]})
    loader = DataLoader(rows, 2, drop_last=True, collate_fn=default_data_collator)
    ra.Ring.from_accelerator(accelerator, 1)
    batches = Batches(accelerator, accelerator.prepare(loader))
    with pytest.raises(SystemExit, match="the data do not fill one batch: take more of them, or smaller batches"):
        next(iter(batches))


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_a_pause_does_not_change_random_numbers(kind, monkeypatch):
    """Dropout draws the same numbers whether an epoch is begun or continued, as finetune.py makes its loader."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    accelerator = Accelerator()
    rows = Dataset.from_dict({"input_ids": [[n] for n in range(4)]})
    rows = rows.to_iterable_dataset() if kind == "stream" else rows
    loader = DataLoader(rows, 1, collate_fn=default_data_collator, generator=torch.Generator())
    ra.Ring.from_accelerator(accelerator, 1)
    batches = Batches(accelerator, accelerator.prepare(loader))
    before = torch.random.get_rng_state()
    list(itertools.islice(iter(batches), 6))
    assert torch.equal(torch.random.get_rng_state(), before)
