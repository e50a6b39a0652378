"""Which rows of a dataset are those of a ring: every batch is one ring's, and all processes agree whose."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, IterableDataset


class RingBatchSampler(BatchSampler):
    """Of a batch sampler's batches those of one ring: the first of each `dp_size`, the second of each, and so on.

    The last ones may be fewer than rings; its length is that of the longest, and with `drop_last` that of the shortest.
    All processes draw the same batches: whatever is random about them comes from `seed` and the epoch, since the random
    states of processes part as soon as their rows differ.
    """

    def __init__(self, batch_sampler: Any, dp_rank: int, dp_size: int, drop_last: bool, seed: int) -> None:
        self.batch_sampler = batch_sampler
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.seed, self.epoch = seed, 0
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = drop_last

    @property
    def sampler(self) -> Any:
        """That of the batch sampler, which Accelerate replaces by one that it can seed."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        return batches // self.dp_size if self.drop_last else -(-batches // self.dp_size)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next pass."""
        self.epoch = epoch
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        seed = (self.seed + self.epoch) % 2**63
        for sampler in (self.batch_sampler, self.sampler):
            if isinstance(getattr(sampler, "generator", None), torch.Generator):
                sampler.generator.manual_seed(seed)
        draws = _Draws(seed)
        with draws:
            batches = iter(self.batch_sampler)
        while True:
            with draws:
                group = list(itertools.islice(batches, self.dp_size))
            if not group:
                return
            if self.dp_rank < len(group) and (len(group) == self.dp_size or not self.drop_last):
                yield group[self.dp_rank]


class _Draws:
    """Random numbers that depend on a seed alone: inside, the global generators go on from where this was left."""

    def __init__(self, seed: int) -> None:
        outside = self._states()
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        self._inside = self._states()
        self._restore(outside)

    def __enter__(self) -> None:
        self._outside = self._states()
        self._restore(self._inside)

    def __exit__(self, *error: Any) -> None:
        self._inside = self._states()
        self._restore(self._outside)

    @staticmethod
    def _states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002

    @staticmethod
    def _restore(states: tuple[Any, ...]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


class RowsOfRing(IterableDataset):
    """Of an iterable dataset's rows those of one ring, batch by batch."""

    def __init__(self, dataset: IterableDataset, batch_size: int, dp_rank: int, dp_size: int, drop_last: bool) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.drop_last = drop_last

    def set_epoch(self, epoch: int) -> None:
        """For datasets that shuffle by epochs."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        for number, row in enumerate(self.dataset):
            if number // self.batch_size % self.dp_size == self.dp_rank:
                yield row


class SizedRowsOfRing(RowsOfRing):
    """The same of a dataset that knows its length; the length is that of the first ring's rows, which are the most."""

    def __len__(self) -> int:
        rounds, rest = divmod(len(self.dataset), self.batch_size * self.dp_size)  # type: ignore[arg-type]
        return rounds * self.batch_size + (0 if self.drop_last else min(rest, self.batch_size))
