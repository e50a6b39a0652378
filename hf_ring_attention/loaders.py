"""Loaders of sequence shards: the ranks of a ring read the same rows, other rings other rows, and all end together."""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, DataLoaderStateMixin
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import GradientState
from datasets import Dataset as Table
from datasets import IterableDataset as StreamedDataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe

from .batches import Divider, blank, digests, outline, shard_batch
from .lengths import check_lengths
from .patterns import Pattern
from .samplers import (
    BatchesOfRows,
    CollatedRows,
    RingBatchSampler,
    RowsOfRing,
    SizedRowsOfRing,
    another_order,
    as_it_is,
    checksum,
    generators_in,
    layers_of,
)

#: What a process says instead of a batch's checksum: it has none, or it failed to read one.
_NONE, _FAILED = -1, -2
#: Bits of what it says that are a checksum of the order of rows; those above are one of the batch.
_ORDER_BITS = 24
#: What a sampler that divides rows by processes calls their number.
_DIVIDING = ("num_replicas", "num_processes", "dp_size", "world_size")


class Members(Divider, Protocol):
    """What a `Ring` does for a loader."""

    dp_rank: int
    dp_size: int
    device: torch.device
    _data_seed: int | None

    def agree_everywhere(
        self, values: Mapping[str, Any], error: BaseException | None = None, tell: Any = None
    ) -> list[Any]: ...

    def gather_everywhere(self, number: int) -> list[int]: ...

    def untrainable(self) -> ValueError | None: ...

    def check_schedules(self) -> None: ...


def prepare_data_loader(loader: Any, ring: Members, pattern: Pattern | None) -> RingDataLoader:
    """See `Ring.prepare_data_loader`."""
    if isinstance(loader, RingDataLoader) and loader.ring is ring and pattern in (None, loader.pattern):
        return loader
    error, agreed, seed = _wrong_loader(loader, ring) or ring.untrainable(), {}, 0
    if error is None:
        seed = _seed(loader, ring)
        agreed = {
            "the loader's dataset": type(loader.dataset).__name__,
            "the number of its rows": _length(loader.dataset),
            "its first row": _first_row(loader.dataset),
            "batch_size": loader.batch_size,
            "drop_last": _drops_last(loader),
        }
    seeds = ring.agree_everywhere(agreed, error, tell=seed)
    return RingDataLoader(loader, ring, pattern, seeds[0])


def wrong_accelerator(accelerator: Any, size: int | None) -> ValueError | None:
    """What keeps rings of `size` ranks from an accelerator."""
    world_size = accelerator.num_processes
    if size is None:
        return ValueError(
            f"the size of rings was not given (ring_size of a Trainer), and there are {world_size} processes: "
            f"ring_size={world_size} makes one ring of all, which share each sequence; ring_size=1 makes each process a ring "
            f"of its own, with sequences of its own (data parallel); another divisor of {world_size} makes several rings"
        )
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or world_size % size:
        return ValueError(
            f"Ring.from_accelerator: {world_size} processes cannot form rings of {size!r}: use a size that divides "
            f"{world_size}, or start another number of processes"
        )
    config = getattr(accelerator, "parallelism_config", None)
    for name in ("cp_size", "sp_size"):
        if (getattr(config, name, 1) or 1) > 1:
            return ValueError(
                f"Ring.from_accelerator: the accelerator's ParallelismConfig has {name}={getattr(config, name)}, so it "
                f"would shard sequences too: leave it at 1, the ring shards them"
            )
    loading = accelerator.dataloader_config
    if loading.dispatch_batches or loading.split_batches:
        name = "dispatch_batches" if loading.dispatch_batches else "split_batches"
        return ValueError(
            f"Ring.from_accelerator: the accelerator has {name}=True, so it would divide batches in a way of its own, and "
            f"ranks of a ring would not get the same rows: leave it out, the ring's loaders divide them"
        )
    return None


def wrong_schedules(accelerator: Any, ring_size: int) -> ValueError | None:
    """What is wrong with the schedules that an accelerator has prepared, where `ring_size` processes share their rows."""
    for schedule in getattr(accelerator, "_schedulers", ()):
        by_process = (
            type(schedule) is AcceleratedScheduler and schedule.step_with_optimizer and not schedule.split_batches
        )
        if by_process and ring_size > 1:
            processes = accelerator.num_processes
            return ValueError(
                f"the schedule {type(schedule.scheduler).__name__} was prepared by Accelerate, which takes {processes} of its "
                f"steps for each step of the optimizer, one a process; {ring_size} processes share their rows here, so it "
                f"would be over {ring_size} times too early: leave it out of accelerator.prepare, and call its step() once "
                f"after each optimizer.step()"
            )
    return None


def _wrong_loader(loader: Any, ring: Members) -> ValueError | None:
    error = _wrong_kind(loader)
    if error is not None:
        return error
    return _wrong_stream(loader, ring) if isinstance(loader.dataset, IterableDataset) else _wrong_rows(loader, ring)


def _wrong_kind(loader: Any) -> ValueError | None:
    remedy = "pass the torch DataLoader itself to ring.prepare_data_loader, and not to accelerator.prepare"
    if isinstance(loader, DataLoaderDispatcher):
        return ValueError(
            f"the loader dispatches batches from one process, so ranks of a ring would not get the same rows: {remedy}"
        )
    if isinstance(loader, RingDataLoader):
        return ValueError(
            "the loader was prepared already, by another ring or for another pattern: prepare the torch DataLoader itself"
        )
    if isinstance(loader, DataLoaderShard) or getattr(loader, "_is_accelerate_prepared", False):
        return ValueError(
            f"the loader was prepared already, by Accelerate, so each process would read other rows: {remedy}"
        )
    if not isinstance(loader, DataLoader):
        return ValueError(f"prepare_data_loader expected a torch DataLoader, got {type(loader).__name__}")
    if type(loader).__iter__ is not DataLoader.__iter__ and not type(loader).__module__.startswith("torchdata."):
        return ValueError(
            f"the loader is a {type(loader).__name__} with an __iter__ of its own, of which the ring's loader would know "
            f"nothing: pass a torch DataLoader, and do in its dataset, sampler or collate_fn what __iter__ does"
        )
    if loader.num_workers and not loader.in_order:
        return ValueError(
            "the loader has in_order=False, and gives batches in whichever order its workers end, so ranks of a ring would "
            "not get the same, and no run could go on from a checkpoint: leave it out"
        )
    return None


def _wrong_rows(loader: Any, ring: Members) -> ValueError | None:
    if loader.batch_sampler is None:
        return ValueError("the loader has batch_size=None over a map-style dataset: give it a batch size")
    for sampler in layers_of(loader.batch_sampler):
        divides = isinstance(sampler, DistributedSampler) or any(
            isinstance(n := getattr(sampler, name, 1), int) and n > 1 for name in _DIVIDING
        )
        if divides:
            return ValueError(
                f"the loader's {type(sampler).__name__} divides rows by processes, so ranks of a ring would not get the "
                f"same: leave the sampler out, or pass shuffle=True; the ring divides the rows"
            )
    batch_sampler: Any = loader.batch_sampler
    batches = _length(batch_sampler)
    needed = ring.dp_size if _drops_last(loader) else 1
    if batches is not None and batches < needed:
        return ValueError(
            f"the loader has {batches} batches of {loader.batch_size} rows for {ring.dp_size} rings, and drop_last="
            f"{_drops_last(loader)} needs {needed} at least: use a smaller batch size, or more rows"
        )
    return check_lengths(loader.dataset, loader.collate_fn, warn=ring.rank == ring.dp_rank == 0)


def _drops_last(loader: Any) -> bool:
    """As the loader or the batch sampler it was given has it."""
    return bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))


def _wrong_stream(loader: Any, ring: Members) -> ValueError | None:
    divided = getattr(loader.dataset, "_distributed", None)
    if divided is not None and divided.world_size > 1 and ring.world_size * ring.dp_size > 1:
        return ValueError(
            f"the loader's dataset was divided already (split_dataset_by_node, part {divided.rank} of {divided.world_size}), "
            f"and the ring's loader would divide that part again, and never read the rest: pass the whole dataset"
        )
    if isinstance(loader.dataset, IterDataPipe) and loader.num_workers:
        return ValueError(
            f"the loader's dataset is a datapipe, which torch divides among {loader.num_workers} workers in a way of its own: "
            f"use num_workers=0, or a torch IterableDataset"
        )
    return None


def _first_row(dataset: Any) -> int | None:
    """A checksum of the first row, of a dataset that gives it at once; rings that have other datasets learn of it.

    A transform that makes the rows of a `datasets.Dataset` may draw random numbers, which say nothing of the dataset.
    """
    at_hand = isinstance(dataset, (list, tuple)) or (isinstance(dataset, Table) and dataset.format["type"] != "custom")
    return checksum(dataset[0]) if at_hand and len(dataset) else None


def _length(x: Any) -> int | None:
    try:
        return len(x)
    except TypeError:  # of what has none, or whose source has none
        return None


def _seed(loader: DataLoader, ring: Members) -> int:
    """Of a loader's order, as far as this process knows it; that of process 0 is taken."""
    for generator in (*generators_in(loader.batch_sampler), loader.generator):
        if isinstance(generator, torch.Generator):
            return generator.initial_seed() % 2**63
    return (torch.initial_seed() if ring._data_seed is None else ring._data_seed) % 2**63


def _source(loader: DataLoader, ring: Members, seed: int) -> RingBatchSampler | RowsOfRing:
    """What gives the rows of this ring."""
    dataset: Any = loader.dataset
    if not isinstance(dataset, IterableDataset):
        return RingBatchSampler(loader.batch_sampler, ring.dp_rank, ring.dp_size, _drops_last(loader), seed)
    streamed = isinstance(dataset, StreamedDataset)
    if streamed and ring.dp_size > 1:
        dataset = split_dataset_by_node(dataset, ring.dp_rank, ring.dp_size)
    kind = RowsOfRing if _length(dataset) is None else SizedRowsOfRing
    return kind(
        dataset, loader.batch_size or 1, ring.dp_rank, ring.dp_size, loader.drop_last, seed,
        divided=streamed, workers=loader.num_workers, persistent=loader.persistent_workers,
    )  # fmt: skip


def _loader_of_rows(loader: DataLoader, source: RingBatchSampler | RowsOfRing) -> DataLoaderShard:
    """A loader of the whole rows of this ring, which skips batches as Accelerate's do: it is divided already."""
    arguments: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            "num_workers", "pin_memory", "pin_memory_device", "timeout", "worker_init_fn", "multiprocessing_context",
            "prefetch_factor", "persistent_workers", "in_order",
        )
        if hasattr(loader, name)
    }  # fmt: skip
    # Of its own, so that a pass takes no random number of the process.
    arguments["generator"] = torch.Generator().manual_seed(source.seed)
    collate: Any = loader.collate_fn
    if isinstance(source, RingBatchSampler):
        arguments |= {"batch_sampler": source, "collate_fn": as_it_is}
        rows = DataLoaderShard(BatchesOfRows(loader.dataset, collate), **arguments)
    else:
        arguments |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        rows = DataLoaderShard(source, collate_fn=CollatedRows(collate), **arguments)
    rows._is_accelerate_prepared = True
    return rows


class Shards:
    """This rank's shards of the batches of whole rows that an iterator gives; every process takes each one at once.

    Ends when all rings have no more, or with `drop_last` when one has none; until then a ring without a batch takes part
    with nothing but padding.

    Raises:
        ValueError: on every process: the ranks of a ring have different rows, or rings read them in different orders.
        ValueError, RuntimeError: another process failed to read or to shard its batch.
    """

    def __init__(
        self, batches: Iterable[Any], ring: Members, pattern: Pattern | None, drop_last: bool, order: Callable[[], int]
    ) -> None:
        self.source = batches
        self.batches: Iterator[Any] | None = None
        self.ring, self.pattern, self.drop_last, self.order = ring, pattern, drop_last, order
        self.count = 0

    def __iter__(self) -> Shards:
        return self

    def __next__(self) -> dict[str, Any]:
        shard = batch = None
        said = _FAILED
        try:
            if self.batches is None:
                self.batches = iter(self.source)
            batch = next(self.batches, None)
            if batch is not None:
                shard = shard_batch(batch, self.ring, self.pattern, device=self.ring.device)
            said = _NONE if batch is None else _checksum(batch) << _ORDER_BITS | self.order() % (1 << _ORDER_BITS)
        finally:  # an error on its way is told to the others before it goes on
            by_process = self._compare(said, batch, sys.exc_info()[1] if said == _FAILED else None)
        self.count += 1
        have = [number >= 0 for number in by_process]
        if not any(have) or (self.drop_last and not all(have)):
            raise StopIteration
        if not all(have):
            # What is not padding elsewhere may be asked for here too.
            outlines = self.ring.agree_everywhere({}, tell=None if batch is None else outline(batch))
            outlined = next(told for told in outlines if told is not None)
            if shard is None:
                batch = blank(self.ring.world_size, outlined)
                shard = dict.fromkeys(batch) | shard_batch(batch, self.ring, self.pattern, device=self.ring.device)
        assert shard is not None
        return shard

    def _compare(self, said: int, batch: Any, error: BaseException | None) -> list[int]:
        by_process = self.ring.gather_everywhere(said)
        if _FAILED in by_process:
            texts = self.ring.agree_everywhere({}, tell=None if error is None else f"{type(error).__name__}: {error}")
            if error is None:
                process = by_process.index(_FAILED)
                kind = ValueError if str(texts[process]).startswith("ValueError") else RuntimeError
                raise kind(f"process {process} could not take batch {self.count}: {texts[process]}")
            return by_process
        orders = {number % (1 << _ORDER_BITS): process for process, number in enumerate(by_process) if number >= 0}
        orders.pop(0, None)  # unknown
        if len(orders) > 1:
            raise ValueError(
                f"processes {' and '.join(map(str, sorted(orders.values())))} read rows in different orders at batch "
                f"{self.count}, so some would be read twice, and others not at all: a sampler or iterable dataset must give "
                f"all processes the same rows, of which the ring's loader takes its own: draw from Python's, numpy's or "
                f"torch's global generators, which the loader seeds, or seed a generator of your own alike"
            )
        size = self.ring.world_size
        rings = [by_process[start : start + size] for start in range(0, len(by_process), size)]
        different = [number for number, theirs in enumerate(rings) if len(set(theirs)) > 1]
        if different:
            contents = self.ring.agree_everywhere({}, tell={"batch": "none"} if batch is None else digests(batch))
            first = different[0] * size
            of_ring = contents[first : first + size]
            listed = "; ".join(
                f"process {first + rank}: "
                + ", ".join(f"{name} {x}" for name, x in said.items() if any(o.get(name) != x for o in of_ring))
                for rank, said in enumerate(of_ring)
            )
            raise ValueError(
                f"the ranks of ring {different[0]} read different rows at batch {self.count} ({listed}), and each would "
                f"attend to rows of another: the content of a dataset must not depend on the process: leave out what divides "
                f"it by processes, and seed a random generator of its own alike on all ranks of a ring (the global ones of "
                f"Python, numpy and torch are seeded by the loader)"
            )
        return by_process


def _checksum(batch: Any) -> int:
    said = repr(digests(batch)).encode()
    return (
        int.from_bytes(hashlib.sha256(said).digest()[:8], "little") >> _ORDER_BITS + 2
    )  # 62 bits, with those of the order


@dataclass
class _Pass:
    """An epoch, and how many of its batches were taken.

    `order`: what its sampler fills, see `RingBatchSampler.order`; `expected`: the checksum after the batches that were taken
    before, where a state told it; `resumed`: a state told the epoch.
    """

    epoch: int
    taken: int = 0
    order: list[int] | None = None
    expected: int | None = None
    resumed: bool = False


class RingDataLoader(DataLoaderStateMixin):
    """What `Ring.prepare_data_loader` makes: an iterable of this rank's shards, on its device.

    Each pass is an epoch, with an order of its own, however early it is left: the next pass is the next epoch, unless
    `set_epoch` says otherwise. To go on where a checkpoint was written, register it:
    `accelerator.register_for_checkpointing(loader)`; or call `skip_first_batches`.
    """

    _drop_last = True  # leaves no remainder for Accelerate to cut off: shards are not rows

    def __init__(self, loader: DataLoader, ring: Members, pattern: Pattern | None, seed: int) -> None:
        self.dataset, self.batch_size, self.num_workers = loader.dataset, loader.batch_size, loader.num_workers
        self.ring, self.pattern = ring, pattern
        self.gradient_state = GradientState()
        self._drops = _drops_last(loader)
        self._source = _source(loader, ring, seed)
        self.rows = _loader_of_rows(loader, self._source)
        # Workers that live on, or a stream that tells all its copies of an epoch, know of one.
        streamed = isinstance(loader.dataset, StreamedDataset) and loader.num_workers > 0
        self._one_at_a_time = loader.persistent_workers or streamed
        #: The pass begun last, or the one that begins next.
        self._pass, self._begun = _Pass(0), False
        self._is_accelerate_prepared = True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a RingDataLoader has no {name!r}: it is an iterable of shards; its loader of whole rows is .rows; to skip "
            f"batches, call loader.skip_first_batches(n)"
        )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def epoch(self) -> int:
        """Of the pass under way, or where there is none of the next."""
        return self._pass.epoch

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next pass, which decides the order of rows.

        Raises:
            ValueError: no epoch, or another one than `load_state_dict` goes on in.
        """
        _check_count("set_epoch", "epoch", epoch)
        at = self._pass
        if self._begun:
            self._next(_Pass(epoch))
        elif epoch != at.epoch:
            if at.resumed and at.taken:
                raise ValueError(
                    f"set_epoch: the loader goes on in epoch {at.epoch} after {at.taken} batches, as load_state_dict said, "
                    f"and not in epoch {epoch}: begin to count epochs at loader.epoch"
                )
            self._next(_Pass(epoch, at.taken))

    def skip_first_batches(self, count: int) -> RingDataLoader:
        """Leaves out the first `count` batches of the next pass, without reading them where the dataset has a length.

        Raises:
            ValueError: no number of batches.
        """
        _check_count("skip_first_batches", "count", count)
        self._next(_Pass(self._pass.epoch + self._begun, count))
        return self

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many of its batches were taken, and what their rows depend on; the same on all processes."""
        at = self._pass
        return {
            "epoch": at.epoch,
            "batches": at.taken,
            "seed": self._source.seed,
            "rings": self.ring.dp_size,
            "batch_size": self.batch_size,
            "order": self._order_of(at),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next pass go on where `state_dict` was called: with the same rows, and the same random numbers.

        These are the numbers of the global generators of Python, numpy and torch, and of those that the dataset, its sampler
        and its collator keep as attributes; what they draw otherwise is not drawn again.

        Raises:
            ValueError: no such state, or one of batches of another size, or of a number of rings that does not fit.
        """
        known = state if isinstance(state, Mapping) else {}
        if not all(_is_count(known.get(name)) for name in ("epoch", "batches")):
            raise ValueError(f"load_state_dict expected what state_dict gives, with epoch and batches, got {state!r}")
        batches, rings = known["batches"], known.get("rings", self.ring.dp_size)
        if batches and known.get("batch_size", self.batch_size) != self.batch_size:
            raise ValueError(
                f"load_state_dict: the state is of a loader with batch_size={known['batch_size']}, and has {batches} of its "
                f"batches; this one has batch_size={self.batch_size}: go on with the same, or from the beginning of an epoch"
            )
        taken, rest = divmod(batches * rings, self.ring.dp_size)
        whose = getattr(self._source, "divided", False) and rings != self.ring.dp_size
        if batches and (rest or whose):
            raise ValueError(
                f"load_state_dict: {batches} batches were taken by each of {rings} rings, and {self.ring.dp_size} rings "
                f"cannot go on after {batches} x {rings} = {batches * rings} of them: go on with {rings} rings, or from the "
                f"beginning of an epoch"
            )
        self._source.seed = known.get("seed", self._source.seed)
        self._next(_Pass(known["epoch"], taken, expected=known.get("order"), resumed=True))

    def shards(self, batches: Iterable[Any]) -> Shards:
        """This rank's shards of batches of whole rows, such as `rows` gives."""
        return Shards(batches, self.ring, self.pattern, self._drops, self._order)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.ring.check_schedules()
        if self._begun:
            self._next(_Pass(self._pass.epoch + 1))
        own, self._begun = self._pass, True
        shards = self.shards(self._batches(own))
        self.begin()
        try:
            following = next(shards, None)
            while following is not None:
                shard, following = following, next(shards, None)
                self.end_of_dataloader = following is None
                own.taken += 1
                self._end_of(own, following)
                yield shard
                if following is not None and self._pass is not own and self._one_at_a_time:
                    raise ValueError(
                        f"the pass of epoch {own.epoch} ended when that of epoch {self._pass.epoch} began: a loader with "
                        f"persistent_workers, or with workers that read a stream of datasets, makes one pass at a time"
                    )
            self._end_of(own, following)
        finally:
            self.end()

    def _next(self, following: _Pass) -> None:
        self._pass, self._begun = following, False

    def _end_of(self, own: _Pass, following: Any) -> None:
        """After the last batch the next pass is at hand, whose state is that of the loader."""
        if following is None and self._pass is own:
            self._next(_Pass(own.epoch + 1))

    def _batches(self, own: _Pass) -> Iterator[Any]:
        """Of whole rows. Not by Accelerate's own loop, which would say when those of this ring end, not of all."""
        skip = 0
        if isinstance(self._source, RingBatchSampler):
            self._source.begin(own.epoch, own.taken, own.expected)
        else:  # must read what it skips
            self._source.begin(own.epoch, self._source.seed)
            skip = own.taken
        batches = iter(self.rows.base_dataloader)
        own.order = getattr(self._source, "order", None)
        for batch in itertools.islice(batches, skip, None):
            if skip and 0 not in (own.expected or 0, self._order()) and self._order() != own.expected:
                raise ValueError(another_order("dataset"))
            yield batch

    def _order_of(self, at: _Pass) -> int | None:
        """The checksum by which rows are known again that were read before; None where none were."""
        if at.order:
            return at.order[at.taken - 1] if at.taken else None
        return self._order() if self._begun and at.taken else at.expected

    def _order(self) -> int:
        """A checksum of the first rows of the pass begun last, alike on all processes; 0 where it is not known."""
        if isinstance(self._source, RingBatchSampler):
            return next(iter(self._source.order), 0)
        return int(self._source.first[0])


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _check_count(method: str, name: str, x: Any) -> None:
    if not _is_count(x):
        raise ValueError(f"{method}: {name} must be a whole number of at least 0, got {x!r}")
