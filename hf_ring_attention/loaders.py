"""Loaders of sequence shards: the ranks of a ring read the same rows, other rings other rows, and all end together."""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from accelerate import skip_first_batches
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, DataLoaderStateMixin
from accelerate.data_loader import prepare_data_loader as prepare_by_accelerate
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import GradientState
from datasets import IterableDataset as StreamedDataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from .batches import Divider, blank, digests, shard_batch
from .patterns import Pattern
from .samplers import RingBatchSampler, RowsOfRing, SizedRowsOfRing

#: What a process says instead of a batch's checksum: it has none, or it failed to read one.
_NONE, _FAILED = -1, -2


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
    if isinstance(loader, RingDataLoader) and loader.ring is ring:
        return loader
    error, agreed, seed = _wrong_loader(loader, ring) or ring.untrainable(), {}, 0
    if error is None:
        seed = _seed(loader, ring)
        agreed = {
            "the loader's dataset": type(loader.dataset).__name__,
            "the number of its rows": _length(loader.dataset),
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
        }
    seeds = ring.agree_everywhere(agreed, error, tell=seed)
    return RingDataLoader(_loader_of_rows(loader, ring, seeds[0]), ring, pattern, loader.drop_last)


def wrong_accelerator(accelerator: Any, size: int) -> ValueError | None:
    """What keeps rings of `size` ranks from an accelerator."""
    world_size = accelerator.num_processes
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
        by_process = type(schedule) is AcceleratedScheduler and schedule.step_with_optimizer and not schedule.split_batches
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
    remedy = "pass the torch DataLoader itself to ring.prepare_data_loader, and not to accelerator.prepare"
    if isinstance(loader, DataLoaderDispatcher):
        return ValueError(
            f"the loader dispatches batches from one process, so ranks of a ring would not get the same rows: {remedy}"
        )
    if isinstance(loader, (DataLoaderShard, RingDataLoader)) or getattr(loader, "_is_accelerate_prepared", False):
        return ValueError(f"the loader was prepared already, so each process would read other rows: {remedy}")
    if not isinstance(loader, DataLoader):
        return ValueError(f"prepare_data_loader expected a torch DataLoader, got {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_sampler is None:
        return ValueError("the loader has batch_size=None over a map-style dataset: give it a batch size")
    for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            return ValueError(
                "the loader's DistributedSampler divides rows by processes, so ranks of a ring would not get the same: "
                "leave the sampler out, or pass shuffle=True; the ring divides the rows"
            )
    batch_sampler: Any = loader.batch_sampler
    batches = _length(batch_sampler)
    needed = ring.dp_size if loader.drop_last else 1
    if batches is not None and batches < needed:
        return ValueError(
            f"the loader has {batches} batches of {loader.batch_size} rows for {ring.dp_size} rings, and drop_last="
            f"{loader.drop_last} needs {needed} at least: use a smaller batch size, or more rows"
        )
    return None


def _length(x: Any) -> int | None:
    try:
        return len(x)
    except TypeError:  # of what has none, or whose source has none
        return None


def _seed(loader: DataLoader, ring: Members) -> int:
    """Of a loader's order, as far as this process knows it; that of process 0 is taken."""
    generator = getattr(loader.sampler, "generator", None) or loader.generator
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    return torch.initial_seed() if ring._data_seed is None else ring._data_seed


def _loader_of_rows(loader: DataLoader, ring: Members, seed: int) -> DataLoaderShard:
    """A loader of the whole rows of this ring, with Accelerate's epochs and samplers that can be seeded."""
    arguments = {
        name: getattr(loader, name)
        for name in (
            "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
            "prefetch_factor", "persistent_workers", "in_order",
        )
        if hasattr(loader, name)
    }  # fmt: skip
    # Workers of a ring draw the same random numbers, those of other rings other ones.
    arguments["generator"] = torch.Generator().manual_seed((seed + ring.dp_rank) % 2**63)
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        if ring.dp_size > 1:
            if isinstance(dataset, StreamedDataset):
                dataset = split_dataset_by_node(dataset, ring.dp_rank, ring.dp_size)
            else:
                kind = RowsOfRing if _length(dataset) is None else SizedRowsOfRing
                dataset = kind(dataset, loader.batch_size or 1, ring.dp_rank, ring.dp_size, loader.drop_last)
        rows = DataLoader(dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, **arguments)
    else:
        sampler = RingBatchSampler(loader.batch_sampler, ring.dp_rank, ring.dp_size, loader.drop_last, seed)
        rows = DataLoader(dataset, batch_sampler=sampler, **arguments)
    # Divided already, so that for Accelerate there is one process; a seeded sampler gives each epoch an order of its own,
    # the same on all processes.
    prepared: DataLoaderShard = prepare_by_accelerate(
        rows,
        num_processes=1,
        process_index=0,
        put_on_device=False,
        dispatch_batches=False,
        use_seedable_sampler=True,
        data_seed=seed,
    )
    prepared._is_accelerate_prepared = True
    return prepared


class Shards:
    """This rank's shards of the batches of whole rows that an iterator gives; every process takes each one at once.

    Ends when all rings have no more, or with `drop_last` when one has none; until then a ring without a batch takes part
    with nothing but padding.

    Raises:
        ValueError: on every process: the ranks of a ring have different rows.
        ValueError, RuntimeError: another process failed to read or to shard its batch.
    """

    def __init__(self, batches: Iterable[Any], ring: Members, pattern: Pattern | None, drop_last: bool) -> None:
        self.source = batches
        self.batches = iter(batches)
        self.ring, self.pattern, self.drop_last = ring, pattern, drop_last
        self.count = 0

    def __iter__(self) -> Shards:
        return self

    def __next__(self) -> dict[str, Any]:
        shard = batch = None
        said = _FAILED
        try:
            batch = next(self.batches, None)
            if batch is not None:
                shard = shard_batch(batch, self.ring, self.pattern, device=self.ring.device)
            said = _NONE if batch is None else _checksum(batch)
        finally:  # an error on its way is told to the others before it goes on
            by_process = self._compare(said, batch, sys.exc_info()[1] if said == _FAILED else None)
        self.count += 1
        have = [number >= 0 for number in by_process]
        if not any(have) or (self.drop_last and not all(have)):
            raise StopIteration
        if shard is None:
            shard = shard_batch(blank(self.ring.world_size), self.ring, self.pattern, device=self.ring.device)
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
                f"attend to rows of another: the order and content of a dataset must depend on ring.dp_rank, not on the "
                f"process: seed shuffling and augmentation alike on all ranks of a ring"
            )
        return by_process


def _checksum(batch: Any) -> int:
    said = repr(digests(batch)).encode()
    return int.from_bytes(hashlib.sha256(said).digest()[:7], "little")


class RingDataLoader(DataLoaderStateMixin):
    """What `Ring.prepare_data_loader` makes: an iterable of this rank's shards, on its device.

    Each pass is an epoch, with an order of its own. To go on where a checkpoint was written, register it:
    `accelerator.register_for_checkpointing(loader)`; or call `skip_first_batches`.
    """

    _drop_last = True  # leaves no remainder for Accelerate to cut off: shards are not rows

    def __init__(self, rows: DataLoaderShard, ring: Members, pattern: Pattern | None, drop_last: bool) -> None:
        self.rows, self.ring, self.pattern, self.drop_last = rows, ring, pattern, drop_last
        self.gradient_state = GradientState()
        self.epoch = 0
        self.taken = 0
        self._skip = 0
        self._is_accelerate_prepared = True

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "num_workers", "batch_size"):
            return getattr(self.rows, name)
        raise AttributeError(
            f"a RingDataLoader has no {name!r}: it is an iterable of shards; its loader of whole rows is .rows; to skip "
            f"batches, call loader.skip_first_batches(n)"
        )

    def __len__(self) -> int:
        return len(self.rows)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next pass, which decides the order of rows."""
        self.epoch = epoch

    def skip_first_batches(self, count: int) -> RingDataLoader:
        """Leaves out the first `count` batches of the next pass, without collating them where the dataset allows it."""
        self._skip = count
        return self

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were taken."""
        return {"epoch": self.epoch, "batches": self.taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Makes the next pass go on where `state_dict` was called."""
        self.epoch, self._skip = state["epoch"], state["batches"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.ring.check_schedules()
        skip, self._skip = self._skip, 0
        self.rows.set_epoch(self.epoch)
        rows = skip_first_batches(self.rows, skip) if skip else self.rows
        # The batches themselves: Accelerate's own loop would say when those of this ring end, not of all.
        shards = Shards(
            itertools.islice(rows.base_dataloader, getattr(rows, "skip_batches", 0), None),
            self.ring,
            self.pattern,
            self.drop_last,
        )
        self.taken = skip
        self.begin()
        try:
            following = next(shards, None)
            while following is not None:
                shard, following = following, next(shards, None)
                self.end_of_dataloader = following is None
                self.taken += 1
                if following is None:
                    self.epoch, self.taken = self.epoch + 1, 0
                yield shard
        finally:
            self.end()
