"""Loaders whose rows are drawn in many ways: by samplers, data sets and collators with their own generators, by streams."""

import random

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

import hf_ring_attention as ra

COUNT = 14


def rows_of(count=COUNT):
    return [{"input_ids": [number + 1] * (3 + number % 4)} for number in range(count)]


class Augmented(Dataset):
    """Rows in which each global generator has a part, and the epoch."""

    def __init__(self, rows):
        self.rows, self.epoch = rows, 0

    def __len__(self):
        return len(self.rows)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        drawn = [int(torch.randint(1000, ())), random.randrange(1000), np.random.randint(1000), self.epoch]  # noqa: NPY002
        return {"input_ids": self.rows[index]["input_ids"] + drawn}


class WithOwn(Dataset):
    """Rows in which generators that it keeps have a part."""

    def __init__(self):
        self.rows = rows_of()
        self.torch, self.numpy, self.python = torch.Generator(), np.random.default_rng(), random.Random()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        drawn = [int(torch.randint(9, (), generator=self.torch)), self.python.randrange(9), int(self.numpy.integers(9))]
        return {"input_ids": self.rows[index]["input_ids"] + drawn}


class StreamWithOwn(IterableDataset):
    def __init__(self):
        self.own = random.Random()

    def __iter__(self):
        rows = rows_of()
        self.own.shuffle(rows)
        yield from rows


class Batches(IterableDataset):
    """Lists of rows, of which a loader makes no batches."""

    def __iter__(self):
        rows = rows_of()
        random.shuffle(rows)
        return iter([rows[start : start + 2] for start in range(0, COUNT, 2)])


class BesideSystem(RandomSampler):
    """Keeps a generator that nobody can seed, and draws from another."""

    def __init__(self, rows):
        super().__init__(rows)
        self.system = random.SystemRandom()


class Noisy:
    """A collator that draws from a generator that it keeps."""

    def __init__(self):
        self.own = np.random.default_rng()

    def __call__(self, rows):
        batch = ra.PaddingCollator()(rows)
        batch["noise"] = torch.as_tensor(self.own.random(tuple(batch["input_ids"].shape)))
        return batch


class Stream(IterableDataset):
    """Rows in an order that depends on the epoch, or on the global generators."""

    def __init__(self, rows, by_epoch):
        self.rows, self.by_epoch, self.epoch = rows, by_epoch, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rows = list(self.rows)
        (random.Random(self.epoch) if self.by_epoch else random).shuffle(rows)
        info = get_worker_info()
        yield from rows if info is None else rows[info.id :: info.num_workers]


class ByGenerator(BatchSampler):
    """Batches in an order that a generator of its own draws."""

    def __init__(self, generator):
        self.own, self.batch_size, self.drop_last = generator, 2, False

    def __len__(self):
        return COUNT // 2

    def __iter__(self):
        order = list(range(COUNT))
        if isinstance(self.own, torch.Generator):
            order = torch.randperm(COUNT, generator=self.own).tolist()
        else:
            self.own.shuffle(order)
        return iter([order[start : start + 2] for start in range(0, COUNT, 2)])


class ByCount(ByGenerator):
    """An order that nothing but the number of passes decides."""

    def __init__(self):
        super().__init__(None)
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        order = list(range(COUNT))
        random.Random(self.passes).shuffle(order)
        return iter([order[start : start + 2] for start in range(0, COUNT, 2)])


def noisy(rows):
    """A collator that draws."""
    batch = ra.PaddingCollator()(rows)
    batch["noise"] = torch.rand(batch["input_ids"].shape)
    return batch


def streamed():
    from datasets import Dataset as Table

    return Table.from_list(rows_of()).to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=5)


def by_sampler(make):
    return lambda: DataLoader(rows_of(), sampler=make(), batch_size=2, collate_fn=noisy)


def by_batch_sampler(make):
    return lambda: DataLoader(rows_of(), batch_sampler=make(), collate_fn=noisy)


def by_dataset(make, **arguments):
    return lambda: DataLoader(make(), batch_size=2, collate_fn=noisy, **arguments)


WORKERS = {"num_workers": 2}
PERSISTENT = {**WORKERS, "persistent_workers": True}
KINDS = {
    "shuffled": by_dataset(rows_of, shuffle=True),
    "shuffled by a generator": lambda: DataLoader(
        rows_of(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3), collate_fn=noisy
    ),
    "with replacement": by_sampler(lambda: RandomSampler(rows_of(), replacement=True, num_samples=70)),
    "twice": by_sampler(lambda: RandomSampler(rows_of(), num_samples=2 * COUNT, generator=torch.Generator())),
    "weighted": by_sampler(lambda: WeightedRandomSampler([1 + i for i in range(COUNT)], COUNT)),
    "weighted by a generator": by_sampler(
        lambda: WeightedRandomSampler([1 + i for i in range(COUNT)], COUNT, generator=torch.Generator().manual_seed(3))
    ),
    "a subset": by_sampler(lambda: SubsetRandomSampler(range(1, COUNT), generator=torch.Generator().manual_seed(3))),
    "Accelerate's": by_sampler(lambda: SeedableRandomSampler(rows_of(), data_seed=3)),
    "by length": by_sampler(lambda: LengthGroupedSampler(2, lengths=[len(row["input_ids"]) for row in rows_of()])),
    "batches by a generator": by_batch_sampler(lambda: ByGenerator(torch.Generator().manual_seed(3))),
    "batches by numpy": by_batch_sampler(lambda: ByGenerator(np.random.default_rng(3))),
    "batches by numpy's old generator": by_batch_sampler(lambda: ByGenerator(np.random.RandomState(3))),
    "batches by Python": by_batch_sampler(lambda: ByGenerator(random.Random(3))),
    "augmented": by_dataset(lambda: Augmented(rows_of()), shuffle=True),
    "augmented by workers": by_dataset(lambda: Augmented(rows_of()), shuffle=True, **WORKERS),
    "augmented by persistent workers": by_dataset(lambda: Augmented(rows_of()), shuffle=True, **PERSISTENT),
    "by generators of its own": by_dataset(WithOwn, shuffle=True),
    "a part by generators of its own": by_dataset(
        lambda: Subset(WithOwn(), range(1, COUNT)), shuffle=True, **PERSISTENT
    ),
    "a collator's generator": lambda: DataLoader(rows_of(), batch_size=2, shuffle=True, collate_fn=Noisy()),
    "a collator's generator, streamed": lambda: DataLoader(Stream(rows_of(), True), batch_size=2, collate_fn=Noisy()),
    "a stream of batches": lambda: DataLoader(Batches(), batch_size=None, collate_fn=noisy),
    "beside the system's generator": lambda: DataLoader(
        rows_of(), batch_size=2, sampler=BesideSystem(rows_of()), collate_fn=noisy
    ),
    "a stream with its generator": by_dataset(StreamWithOwn),
    "a stream": by_dataset(lambda: Stream(rows_of(), by_epoch=True)),
    "a stream by workers": by_dataset(lambda: Stream(rows_of(), by_epoch=True), **WORKERS),
    "a stream by persistent workers": by_dataset(lambda: Stream(rows_of(), by_epoch=True), **PERSISTENT),
    "a random stream": by_dataset(lambda: Stream(rows_of(), by_epoch=False)),
    "a random stream by workers": by_dataset(lambda: Stream(rows_of(), by_epoch=False), **WORKERS),
    "a random stream by persistent workers": by_dataset(lambda: Stream(rows_of(), by_epoch=False), **PERSISTENT),
    "streamed": by_dataset(streamed),
    "streamed by workers": by_dataset(streamed, **WORKERS),
    "streamed by persistent workers": by_dataset(streamed, **PERSISTENT),
}
