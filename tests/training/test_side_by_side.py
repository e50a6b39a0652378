"""Rings that read side by side: what one without rows takes part with, and data that would not be divided among them."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset as Table
from datasets.distributed import split_dataset_by_node
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

import hf_ring_attention as ra
from hf_ring_attention.training.shards import blank, outline
from tests.support.ranks import run_ranks
from tests.support.training import process_environment, tiny_llama


def rows_of(count, first=0):
    return [{"input_ids": [first + number + 1] * 6, "weights": [0.5] * 6} for number in range(count)]


# ---- a ring without rows


def with_much_else(rows):
    """A batch with tensors of tokens, of rows and of neither, and with other things."""
    batch = ra.PaddingCollator()(rows)
    count, length = batch["input_ids"].shape
    return {
        **batch,
        "teacher": torch.full((count, length, 3), 2.0, dtype=torch.bfloat16),
        "learned": torch.ones(count, length, dtype=torch.bool),
        "word_labels": torch.full((count, length), 4),
        "rewards": torch.ones(count),
        "scale": torch.tensor(3.0),
        "table": torch.ones(7, 2),
        "name": "text",
        "texts": ["a"] * count,
        "more": {"x": 1},
        "thing": object,
    }


def with_embeddings(rows):
    batch = ra.PaddingCollator()(rows)
    return {"inputs_embeds": torch.ones(*batch.pop("input_ids").shape, 5), **batch}


def packed(rows):
    return ra.PackingCollator(16)(rows)


COLLATORS = [with_much_else, with_embeddings, packed]


def kind_of(x):
    """What a user's code relies on."""
    if isinstance(x, torch.Tensor):
        return x.dtype, tuple(x.shape[2:]) if x.dim() > 1 else (), x.dim()
    return type(x)


def left_over(rank):
    """Three batches for two rings; a packed shard has seq_idx only where it has several documents."""
    process_environment(rank, dist.get_world_size())
    ring = ra.Ring.from_accelerator(Accelerator(), size=1, layout="contiguous")
    seen = []
    for collate in COLLATORS:
        loader = ring.prepare_data_loader(DataLoader(rows_of(5), batch_size=2, collate_fn=collate))
        shards = list(loader)
        seen.append([{name: kind_of(x) for name, x in shard.items()} for shard in shards])
        last = shards[-1]
        if rank == 1:
            assert (last["shift_labels"] == -100).all() and not last["attention_mask"].any()
            assert (last.get("word_labels", torch.tensor(-100)) == -100).all()
    return seen


def test_a_ring_without_rows_has_all_that_the_others_batches_have():
    first, second = run_ranks(left_over, 2)
    for of_first, of_second, collate in zip(first, second, COLLATORS, strict=True):
        assert len(of_first) == len(of_second) == 2
        assert of_first[0] == of_second[0]
        # The last row of five; its ring's shards have a mask, so that padding does.
        missing = of_first[1].keys() - of_second[1].keys()
        assert not missing, (collate.__name__, missing)
        same = of_first[1].keys() - {"thing"}  # what it cannot be told of is None
        assert {name: of_second[1][name] for name in same} == {name: of_first[1][name] for name in same}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("collate", COLLATORS, ids=lambda collate: collate.__name__)
def test_padding_can_be_sharded_whatever_it_is_like(world_size, collate):
    batch = blank(world_size, outline(collate(rows_of(3))))

    def sharded(ring):
        return ra.shard_batch(batch, ring, ra.Pattern.exact())

    for shard in ra.run_simulated(sharded, world_size):
        assert not shard["attention_mask"].any() and (shard["shift_labels"] == -100).all()
        assert shard["shift_labels"].shape[0] == 1
        assert "input_ids" in shard or shard["inputs_embeds"].shape[2] == 5


class FailingOn(Dataset):
    """A dataset of which one row cannot be read."""

    def __init__(self, index):
        self.index = index

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == self.index:
            raise OSError("the disk is gone")
        return rows_of(4)[index]


def failing(rank):
    process_environment(rank, dist.get_world_size())
    ring = ra.Ring.from_accelerator(Accelerator(), size=1, layout="contiguous")
    errors = {}
    for workers in (0, 1):
        loader = ring.prepare_data_loader(
            DataLoader(FailingOn(3), collate_fn=ra.PaddingCollator(), num_workers=workers)
        )
        try:
            list(loader)
        except (OSError, RuntimeError) as error:
            errors[workers] = f"{type(error).__name__}: {error}"
    return errors


def test_an_error_of_one_ring_ends_all():
    first, second = run_ranks(failing, 2)
    for workers in (0, 1):
        assert "OSError" in second[workers] and "the disk is gone" in second[workers]
        assert "process 1 could not take batch 1: OSError" in first[workers]


# ---- data that is not the same on all processes


class ByOwn(BatchSampler):
    """Batches in an order that a generator of its own draws, which nobody finds."""

    def __init__(self, seed):
        self.batch_size, self.drop_last = 2, False
        self.draw = np.random.default_rng(seed).permutation

    def __len__(self):
        return 8

    def __iter__(self):
        order = self.draw(16).tolist()
        return iter([order[start : start + 2] for start in range(0, 16, 2)])


class Parts(Sampler):
    """A sampler that divides rows by processes, under a name that is not torch's."""

    def __init__(self, rank, processes):
        self.rank, self.num_replicas = rank, processes

    def __len__(self):
        return 8

    def __iter__(self):
        return iter(range(self.rank, 16, self.num_replicas))


class Stream(IterableDataset):
    def __init__(self, first, shuffled=False):
        self.first, self.shuffled = first, shuffled

    def __iter__(self):
        rows = rows_of(16, self.first)
        if self.shuffled:
            random.shuffle(rows)
        yield from rows


def different_data(rank):
    """Two rings of one process each, whose rows nothing else compares."""
    process_environment(rank, dist.get_world_size())
    ring = ra.Ring.from_accelerator(Accelerator(), size=1, layout="contiguous")
    torch.manual_seed(rank), random.seed(rank)
    errors = {}

    def expect(name, rows, **arguments):
        made = DataLoader(rows, collate_fn=ra.PaddingCollator(), **{"batch_size": 2, **arguments})
        try:
            errors[name] = [int(row[0]) for shard in ring.prepare_data_loader(made) for row in shard["input_ids"]]
        except ValueError as error:
            errors[name] = str(error)

    expect("order", rows_of(16), batch_sampler=ByOwn(rank), batch_size=1)
    expect("same order", rows_of(16), batch_sampler=ByOwn(7), batch_size=1)
    expect("parts", rows_of(16), sampler=Parts(rank, 2))
    expect("rows", rows_of(16, 16 * rank))
    expect("table", split_dataset_by_node(Table.from_list(rows_of(16)), rank, 2))
    expect("streamed", split_dataset_by_node(Table.from_list(rows_of(16)).to_iterable_dataset(2), rank, 2))
    expect("stream", Stream(16 * rank))
    expect("stream by workers", Stream(16 * rank), num_workers=1)
    # Torch's and Python's generators differ between the processes; those that the loader seeds do not.
    expect("random stream", Stream(0, shuffled=True))
    expect("shuffled", rows_of(16), shuffle=True)
    return errors


DIFFERENT = {
    "order": "processes 0 and 1 read rows in different orders",
    "parts": "Parts divides rows by processes",
    "rows": "disagree on its first row",
    "table": "disagree on its first row",
    "streamed": "was divided already",
    "stream": "processes 0 and 1 read rows in different orders",
    "stream by workers": "processes 0 and 1 read rows in different orders",
}


def test_data_that_is_not_the_same_everywhere_is_refused():
    ranks = run_ranks(different_data, 2)
    for errors in ranks:
        for name, text in DIFFERENT.items():
            assert text in str(errors[name]), name
    for name in ("same order", "random stream", "shuffled"):
        read = [row for errors in ranks for row in errors[name]]
        assert sorted(read) == list(range(1, 17)), (name, read)


class OfRank(Dataset):
    """Rows whose augmentation draws from the global generators, as most do."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        drawn = [int(torch.randint(1, 90, ())), random.randrange(1, 90), int(np.random.randint(1, 90))]  # noqa: NPY002
        return {"input_ids": [index + 1] * 5 + drawn}


def augmented(rank):
    process_environment(rank, dist.get_world_size())
    ring = ra.Ring.from_accelerator(Accelerator(), size=2, layout="contiguous")
    torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)  # noqa: NPY002
    model = ra.patch_model(tiny_llama(), ring=ring)
    seen = []
    for workers in (0, 2):
        loader = ring.prepare_data_loader(
            DataLoader(OfRank(), batch_size=2, collate_fn=ra.PaddingCollator(), num_workers=workers)
        )
        seen.append([shard["input_ids"].tolist() for _ in range(2) for shard in loader])
    del model
    return seen


def test_a_ring_draws_the_same_augmentation_on_all_ranks_and_by_any_number_of_workers():
    first, second = run_ranks(augmented, 2)
    for shards in (first, second):
        assert shards[0] == shards[1], "without workers, and with two"
    assert second[0][:3] != second[0][3:], "each epoch draws its own"


def resuming_on_fewer(rank, folder):
    """Two rings take three batches each; one ring goes on after six."""
    process_environment(rank, dist.get_world_size() if dist.is_initialized() else 1)
    ring = ra.Ring.from_accelerator(Accelerator(), size=1, layout="contiguous")
    torch.manual_seed(3)
    loader = ring.prepare_data_loader(DataLoader(rows_of(20), 1, shuffle=True, collate_fn=ra.PaddingCollator()))
    if dist.is_initialized():
        shards = iter(loader)
        taken = [int(next(shards)["input_ids"][0, 0]) for _ in range(3)]
        torch.save(loader.state_dict(), folder / f"{rank}.pt")
        return taken
    loader.load_state_dict(torch.load(folder / "1.pt", weights_only=True))
    return [int(shard["input_ids"][0, 0]) for shard in loader]


def test_another_number_of_rings_goes_on_with_the_rows_that_are_left(tmp_path):
    taken = run_ranks(resuming_on_fewer, 2, tmp_path)
    assert torch.load(tmp_path / "0.pt", weights_only=True) == torch.load(tmp_path / "1.pt", weights_only=True)
    left = resuming_on_fewer(0, tmp_path)
    assert sorted([*taken[0], *taken[1], *left]) == list(range(1, 21))
    loader = ra.Ring.alone().prepare_data_loader(DataLoader(rows_of(20), 1, collate_fn=ra.PaddingCollator()))
    loader.ring.dp_size = 4
    with pytest.raises(ValueError, match="3 x 2 = 6"):
        loader.load_state_dict(torch.load(tmp_path / "0.pt", weights_only=True))
