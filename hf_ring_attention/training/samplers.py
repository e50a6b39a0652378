"""Which rows of a dataset are those of a ring: every batch is one ring's, and all processes agree whose.

What is random about a batch (its rows, what a dataset and a collator draw from Python's, numpy's and torch's global
generators, or from those that they keep as attributes) follows from a seed, the epoch and the number of the batch: it is the
same on all ranks of a ring, whoever reads the batch, and when a run goes on from a checkpoint.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info

_Random = torch.Generator | random.Random | np.random.RandomState | np.random.Generator

#: Attributes by which samplers, datasets and collators are made around others.
_INNER = ("batch_sampler", "sampler", "dataset", "data_collator")


def seed_of(*parts: int) -> int:
    """A seed that differs wherever a part does."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


class Draws:
    """Random numbers that depend on a seed alone: inside, generators go on from where this was left.

    They are the global ones of Python, numpy and torch, and those given.
    """

    def __init__(self, seed: int, generators: Iterable[_Random] = ()) -> None:
        # Of the last two, what their modules offer for the global ones.
        self._generators: list[Any] = [*generators, torch.default_generator, random, np.random]
        outside = self._states()
        for generator in self._generators:
            _seed_generator(generator, seed)
        self._inside = self._states()
        self._restore(outside)

    def __enter__(self) -> None:
        self._outside = self._states()
        self._restore(self._inside)

    def __exit__(self, *error: Any) -> None:
        self._inside = self._states()
        self._restore(self._outside)

    def _states(self) -> list[Any]:
        return [_state(generator) for generator in self._generators]

    def _restore(self, states: list[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            _set_state(generator, state)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if _is_python(generator) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif _is_python(generator):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed_generator(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed if _is_python(generator) else seed % 2**32)


def _is_python(generator: Any) -> bool:
    return generator is random or isinstance(generator, random.Random)


def layers_of(x: Any) -> list[Any]:
    """A sampler, dataset or collator, and those of its kind that it is made around."""
    found: list[Any] = []
    while x is not None and not any(x is other for other in found):
        found.append(x)
        attributes = getattr(x, "__dict__", {})
        x = next((attributes[name] for name in _INNER if attributes.get(name) is not None), None)
    return found


def generators_in(*given: Any) -> list[_Random]:
    """Those that samplers, datasets or collators keep as attributes."""
    layers = [layer for x in given for layer in layers_of(x)]
    kept = [x for layer in layers for x in getattr(layer, "__dict__", {}).values()]
    # That of the system is one that nobody can seed.
    return list({id(x): x for x in kept if isinstance(x, _Random) and not isinstance(x, random.SystemRandom)}.values())


# ---- datasets with a length


class Batch(NamedTuple):
    """Which rows make a batch, and what its random numbers follow from."""

    rows: Any
    seed: int
    epoch: int


class RingBatchSampler(Sampler[Batch]):
    """Of a batch sampler's batches those of one ring: the first of each `dp_size`, the second of each, and so on.

    The last ones may be fewer than rings; its length is that of the longest, and with `drop_last` that of the shortest.
    All processes draw the same batches: whatever is random about them comes from `seed` and the epoch, since the random
    states of processes part as soon as their rows differ.
    """

    def __init__(self, batch_sampler: Any, dp_rank: int, dp_size: int, drop_last: bool, seed: int) -> None:
        self.batch_sampler, self._shuffled = _shuffled_by_epoch(batch_sampler)
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.seed, self.epoch = seed, 0
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = drop_last
        #: Of the pass begun last, after each round of the rings a checksum of the rows so far, those of all rings.
        self.order: list[int] = []
        self._skip = 0
        self._expected: int | None = None

    @property
    def sampler(self) -> RingBatchSampler:
        """Itself, whose epoch Accelerate sets where it skips batches: it looks for a sampler in the sampler."""
        return self

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        return batches // self.dp_size if self.drop_last else -(-batches // self.dp_size)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next pass."""
        self.epoch = epoch

    def begin(self, epoch: int, skip: int, expected: int | None) -> None:
        """What the next pass is.

        Args:
            skip: how many batches of each ring are left out at its beginning.
            expected: the checksum of their rows, where they were read before.
        """
        self.epoch, self._skip, self._expected = epoch, skip, expected

    def __iter__(self) -> Iterator[Batch]:
        self.order = []
        batches = self._batches(self.epoch, self.order)
        return batches if self._skip == 0 else self._after(batches, self.order, self._skip, self._expected)

    def _batches(self, epoch: int, order: list[int]) -> Iterator[Batch]:
        draws = Draws(seed_of(self.seed, epoch), generators_in(self.batch_sampler))
        if self._shuffled is not None:
            self._shuffled.initial_seed = self.seed
        for sampler in layers_of(self.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        with draws:
            batches = iter(self.batch_sampler)
        checksum = 0
        for first in itertools.count(step=self.dp_size):
            with draws:
                group = list(itertools.islice(batches, self.dp_size))
            if not group:
                return
            for batch in group:
                checksum = zlib.crc32(repr(_names(batch)).encode(), checksum)
            order.append(checksum)
            if self.dp_rank < len(group) and (len(group) == self.dp_size or not self.drop_last):
                yield Batch(group[self.dp_rank], seed_of(self.seed, epoch, first + self.dp_rank), epoch)

    def _after(self, batches: Iterator[Batch], order: list[int], skip: int, expected: int | None) -> Iterator[Batch]:
        self._skip, self._expected = 0, None  # not before: torch makes iterators that it does not use
        skipped = len(list(itertools.islice(batches, skip)))
        if expected is not None and order[skip - 1 : skip] != [expected]:
            what = "others" if len(order) >= skip else f"only {skipped}"
            raise ValueError(f"{another_order('sampler')}: its first {skip} batches are {what}")
        yield from batches


def another_order(what: str) -> str:
    """That rows cannot be read again as they were, and what to do."""
    return (
        f"the {what} gives rows in another order than in the run that goes on here, so some would be read twice, and others "
        f"not at all; go on with the same dataset and sampler, whose order must follow from set_epoch(epoch), from Python's, "
        f"numpy's or torch's global generators, or from a generator that the {what} keeps as an attribute"
    )


def _shuffled_by_epoch(batch_sampler: Any) -> tuple[Any, SeedableRandomSampler | None]:
    """Where a loader was made with shuffle=True, the same with Accelerate's order of rows, and what draws it."""
    sampler = getattr(batch_sampler, "sampler", None)
    if type(batch_sampler) is not BatchSampler or type(sampler) is not RandomSampler:
        return batch_sampler, None
    shuffled = SeedableRandomSampler(
        sampler.data_source, sampler.replacement, sampler.num_samples, torch.Generator(), data_seed=0
    )
    return BatchSampler(shuffled, batch_sampler.batch_size, batch_sampler.drop_last), shuffled


def _names(batch: Any) -> list[Any]:
    """What tells rows apart; nothing where a batch is not a list of numbers or names."""
    if not isinstance(batch, (list, tuple, range, Tensor, np.ndarray)):
        return []
    try:
        return [x if isinstance(x, str) else operator.index(x) for x in batch]
    except TypeError:
        return []


class BatchesOfRows(Dataset):
    """A dataset of rows that gives whole batches, collated, to a loader whose batch sampler gives `Batch`es."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate
        self._epoch: int | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, batch: Batch) -> Any:
        """In the process that reads: the loader's, or one of its workers, whose copy of a dataset learns its epoch here."""
        if self._epoch != batch.epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(batch.epoch)
        self._epoch = batch.epoch
        several = getattr(self.dataset, "__getitems__", None)
        with Draws(batch.seed, generators_in(self.dataset, self.collate)):
            return self.collate(several(batch.rows) if several else [self.dataset[index] for index in batch.rows])


def as_it_is(batch: Any) -> Any:
    """Collates what is collated already."""
    return batch


# ---- iterable datasets


class Row(NamedTuple):
    """A row of an iterable dataset, and what the random numbers of its batch follow from."""

    content: Any
    seed: int


class RingStream(IterableDataset):
    """Of an iterable dataset's rows those of one ring, batch by batch.

    Args:
        divided: the dataset gives this ring's rows alone, and tells its epoch to its copies in workers.
        workers: processes that read it, each a part or all of it.
        persistent: they live as long as the loader, and learn of an epoch by memory that they share.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        dp_rank: int,
        dp_size: int,
        drop_last: bool,
        seed: int,
        *,
        divided: bool,
        workers: int,
        persistent: bool,
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.drop_last, self.seed, self.epoch = drop_last, seed, 0
        self.divided = divided
        self._shared = torch.zeros(2, dtype=torch.int64).share_memory_() if persistent else None
        #: By worker, a checksum of the first row that it saw, whichever ring's it is.
        self.first = torch.zeros(max(workers, 1), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next pass."""
        self.begin(epoch, self.seed)

    def begin(self, epoch: int, seed: int) -> None:
        """What the next pass is."""
        self.epoch, self.seed = epoch, seed
        if self.divided and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if self._shared is not None:
            self._shared.copy_(torch.tensor([epoch, seed]))

    def __iter__(self) -> Iterator[Row]:
        epoch, seed = (self.epoch, self.seed) if self._shared is None else self._shared.tolist()
        return self._rows(epoch, seed)

    def _rows(self, epoch: int, seed: int) -> Iterator[Row]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if not self.divided and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        # Rings that divide a dataset's rows must see the same; rings that have rows of their own draw other numbers.
        of_ring = self.dp_rank if self.divided else 0
        draws = Draws(seed_of(seed, epoch, worker, of_ring), generators_in(self.dataset))
        with draws:
            source = iter(self.dataset)
        for number in itertools.count():
            with draws:
                rows = list(itertools.islice(source, self.batch_size))
            if not rows:
                return
            if number == 0 and not self.divided:
                self.first[worker] = checksum(rows[0])
            if self.divided or number % self.dp_size == self.dp_rank:
                yield from (Row(row, seed_of(seed, epoch, worker, of_ring, number)) for row in rows)


def checksum(row: Any) -> int:
    """Of a row's tokens; 0 where it has none."""
    ids = row.get("input_ids") if hasattr(row, "get") else row if isinstance(row, (Tensor, np.ndarray)) else None
    return 0 if ids is None else zlib.crc32(repr(np.asarray(ids).tolist()).encode())


class SizedRingStream(RingStream):
    """The same of a dataset that knows its length; the length is that of the first ring's rows, which are the most."""

    def __len__(self) -> int:
        rounds, rest = divmod(len(self.dataset), self.batch_size * self.dp_size)
        return rounds * self.batch_size + (0 if self.drop_last else min(rest, self.batch_size))


class CollatedRows:
    """Collates the rows of `RingStream`, or takes one where a loader makes no batches."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: Row | list[Row]) -> Any:
        """The batch."""
        seed = rows.seed if isinstance(rows, Row) else rows[0].seed
        content = rows.content if isinstance(rows, Row) else [row.content for row in rows]
        with Draws(seed, generators_in(self.collate)):
            return self.collate(content)
