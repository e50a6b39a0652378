"""Divides the batches of a dataset among rings: each batch goes to one ring, and all processes know to which.

A batch's rows, and the numbers that its dataset and collator draw from Python's, numpy's and torch's global generators or from
generators among their attributes, follow from a seed, the epoch and the number of the batch. So they are the same on all ranks
of a ring, in whichever process the batch is read, and when a run continues from a checkpoint.
"""

from __future__ import annotations

import functools
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

from .dealing import Dealer

_Random = torch.Generator | random.Random | np.random.RandomState | np.random.Generator

#: Attributes in which samplers, datasets and collators keep the object that they are wrapped around.
_INNER = ("batch_sampler", "sampler", "dataset", "data_collator")


def seed_of(*parts: int) -> int:
    """Returns a seed that differs where any part differs."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


class Draws:
    """A context whose random numbers depend on a seed alone; each time it is entered, they go on where it was left.

    It holds for the global generators of Python, numpy and torch, and for `generators`. They are restored when it is left.
    """

    def __init__(self, seed: int, generators: Iterable[_Random] = ()) -> None:
        # The modules random and numpy.random have the methods of their global generators.
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
    """Returns a sampler, dataset or collator, and the objects that it is wrapped around, the outermost first."""
    layers: list[Any] = []
    while x is not None and not any(x is other for other in layers):
        layers.append(x)
        attributes = getattr(x, "__dict__", {})
        x = next((attributes[name] for name in _INNER if attributes.get(name) is not None), None)
    return layers


def generators_in(*objects: Any) -> list[_Random]:
    """Returns the random generators that samplers, datasets or collators keep as attributes."""
    layers = [layer for x in objects for layer in layers_of(x)]
    attributes = [x for layer in layers for x in getattr(layer, "__dict__", {}).values()]
    # The operating system's generator cannot be seeded.
    seedable = (x for x in attributes if isinstance(x, _Random) and not isinstance(x, random.SystemRandom))
    return list({id(x): x for x in seedable}.values())


# ---- datasets with a length


class Batch(NamedTuple):
    """The rows of a batch, and the seed and epoch that its random numbers follow from."""

    rows: Any
    seed: int
    epoch: int


class RingBatchSampler(Sampler[Batch]):
    """Selects one ring's batches from those of a batch sampler: ring i has number i of each group of `dp_size` batches.

    The last group may have fewer batches than there are rings. The length is the number of groups, and with `drop_last`
    the number of whole groups. All processes draw the same batches, by `seed` and the epoch alone, since the states of
    their global generators differ as soon as their rows do. A `dealer` exchanges rows among the batches of a step.
    """

    def __init__(
        self,
        batch_sampler: Any,
        dp_rank: int,
        dp_size: int,
        drop_last: bool,
        seed: int,
        dealer: Dealer | None = None,
    ) -> None:
        self.batch_sampler, self._shuffled = _shuffled_by_epoch(batch_sampler)
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.seed, self.epoch = seed, 0
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last, self.dealer = drop_last, dealer
        #: Checksums of the last pass: number i is that of all rings' rows in its first i + 1 groups of batches. At the end
        #: of a step it is that of the sampler's order, which is the same for any number of rings, however they are dealt.
        self.order: list[int] = []
        self._skip = 0
        self._expected: int | None = None

    @property
    def sampler(self) -> RingBatchSampler:
        """The object itself: where Accelerate skips batches, it sets the epoch of the batch sampler's `sampler`."""
        return self

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        return batches // self.dp_size if self.drop_last else -(-batches // self.dp_size)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass."""
        self.epoch = epoch

    def begin(self, epoch: int, skip: int, expected: int | None) -> None:
        """Sets where the next pass begins.

        Args:
            skip: how many batches of each ring are left out at its beginning.
            expected: the checksum of the rows left out, if an earlier run has read them; None without a check.
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
        groups = self._groups(batches, draws)
        together = 1 if self.dealer is None else self.dealer.together
        checksum, number = 0, self.dp_rank
        while step := list(itertools.islice(groups, together)):
            dealt = step if self.dealer is None else self.dealer.dealt(step)
            within, checksum = checksum, functools.reduce(_with_group, step, checksum)
            for group in dealt:
                within = _with_group(within, group)
                order.append(checksum if group is dealt[-1] else within)
                if self.dp_rank < len(group):
                    yield Batch(group[self.dp_rank], seed_of(self.seed, epoch, number), epoch)
                number += self.dp_size

    def _groups(self, batches: Iterator[Any], draws: Draws) -> Iterator[list[Any]]:
        """Yields the next batches of all rings, as often as they are drawn."""
        while True:
            with draws:
                group = list(itertools.islice(batches, self.dp_size))
            if not group or (self.drop_last and len(group) < self.dp_size):
                return
            yield group

    def _after(self, batches: Iterator[Batch], order: list[int], skip: int, expected: int | None) -> Iterator[Batch]:
        self._skip, self._expected = 0, None  # here and not in __iter__: torch also makes iterators that it never uses
        skipped = len(list(itertools.islice(batches, skip)))
        if expected is not None and order[skip - 1 : skip] != [expected]:
            reason = "have other rows" if len(order) >= skip else f"are only {skipped}"
            raise ValueError(f"{another_order('sampler')} (its first {skip} batches {reason})")
        yield from batches


def another_order(source: str) -> str:
    """Returns the message of an error: a run cannot continue, since a sampler or dataset gives rows in another order."""
    return (
        f"the {source} gives rows in another order than in the run that goes on here, so some rows would be read twice, and "
        f"others not at all; go on with the same dataset and sampler, whose order must follow from set_epoch(epoch), from "
        f"Python's, numpy's or torch's global generators, or from a generator that the {source} keeps as an attribute"
    )


def _shuffled_by_epoch(batch_sampler: Any) -> tuple[Any, SeedableRandomSampler | None]:
    """Returns a batch sampler, and what draws its order: Accelerate's sampler in place of torch's by shuffle=True.

    Other batch samplers are returned as they are, with None.
    """
    sampler = getattr(batch_sampler, "sampler", None)
    if type(batch_sampler) is not BatchSampler or type(sampler) is not RandomSampler:
        return batch_sampler, None
    shuffled = SeedableRandomSampler(
        sampler.data_source, sampler.replacement, sampler.num_samples, torch.Generator(), data_seed=0
    )
    return BatchSampler(shuffled, batch_sampler.batch_size, batch_sampler.drop_last), shuffled


def _with_group(checksum: int, group: list[Any]) -> int:
    """Returns a checksum of batches that continues one of those before them."""
    return functools.reduce(lambda total, batch: zlib.crc32(repr(_names(batch)).encode(), total), group, checksum)


def _names(batch: Any) -> list[Any]:
    """Returns the numbers or names of a batch's rows; nothing if the batch is not a list of such."""
    if not isinstance(batch, (list, tuple, range, Tensor, np.ndarray)):
        return []
    try:
        return [x if isinstance(x, str) else operator.index(x) for x in batch]
    except TypeError:
        return []


class BatchesOfRows(Dataset[Any]):
    """A dataset that gives whole collated batches to a loader whose batch sampler gives `Batch`es."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate
        self._epoch: int | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, batch: Batch) -> Any:
        """Reads and collates a batch, in the loader's process or in a worker, whose copy of the dataset learns the epoch."""
        if self._epoch != batch.epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(batch.epoch)
        self._epoch = batch.epoch
        get_rows = getattr(self.dataset, "__getitems__", None)
        with Draws(batch.seed, generators_in(self.dataset, self.collate)):
            return self.collate(get_rows(batch.rows) if get_rows else [self.dataset[index] for index in batch.rows])


def as_it_is(batch: Any) -> Any:
    """Returns a batch that is collated already, where a loader needs a collate_fn."""
    return batch


# ---- iterable datasets


class Row(NamedTuple):
    """A row of an iterable dataset, and the seed that the random numbers of its batch follow from."""

    content: Any
    seed: int


class RingStream(IterableDataset[Any]):
    """Selects one ring's rows from those of an iterable dataset, batch by batch.

    Args:
        divided: whether the dataset gives the rows of this ring alone, and tells its epoch to its copies in workers.
        workers: how many processes read it; each reads a part of it, or all of it.
        persistent: whether the workers live as long as the loader, so that they learn of an epoch by shared memory.
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
        #: A checksum of the first row that each worker has read, of whichever ring the row is.
        self.first = torch.zeros(max(workers, 1), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass."""
        self.begin(epoch, self.seed)

    def begin(self, epoch: int, seed: int) -> None:
        """Sets the epoch and the seed of the next pass."""
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
        # Rings that take their rows from one stream must draw the same stream; rings with parts of their own draw apart.
        part = self.dp_rank if self.divided else 0
        draws = Draws(seed_of(seed, epoch, worker, part), generators_in(self.dataset))
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
                yield from (Row(row, seed_of(seed, epoch, worker, part, number)) for row in rows)


def checksum(row: Any) -> int:
    """Returns a checksum of a row's tokens; 0 for a row without any."""
    ids = row.get("input_ids") if hasattr(row, "get") else row if isinstance(row, (Tensor, np.ndarray)) else None
    return 0 if ids is None else zlib.crc32(repr(np.asarray(ids).tolist()).encode())


class SizedRingStream(RingStream):
    """A `RingStream` of a dataset that knows its length; its own length is that of the first ring, which has most rows."""

    def __len__(self) -> int:
        rounds, rest = divmod(len(self.dataset), self.batch_size * self.dp_size)
        return rounds * self.batch_size + (0 if self.drop_last else min(rest, self.batch_size))


class CollatedRows:
    """Collates the rows of `RingStream`, or a single row where a loader makes no batches."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: Row | list[Row]) -> Any:
        """Returns the batch."""
        seed = rows.seed if isinstance(rows, Row) else rows[0].seed
        content = rows.content if isinstance(rows, Row) else [row.content for row in rows]
        with Draws(seed, generators_in(self.collate)):
            return self.collate(content)
