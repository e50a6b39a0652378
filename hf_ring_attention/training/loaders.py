"""Loaders of sequence shards: the ranks of a ring read the same rows, other rings other rows, and all end together."""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, DataLoaderStateMixin
from accelerate.state import GradientState
from datasets import IterableDataset as StreamedDataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset

from ..compute.private import mark_prepared
from ..hf.rings import untrainable_model
from ..plan.patterns import Pattern, as_pattern
from ..ring.ring import Ring
from .loader_checks import check_schedules, drops_last, first_row, length_of, wrong_loader
from .samplers import (
    BatchesOfRows,
    CollatedRows,
    RingBatchSampler,
    RingStream,
    SizedRingStream,
    another_order,
    as_it_is,
    generators_in,
)
from .shards import blank, digests, outline, shard_batch

#: What a process says instead of a batch's checksum: it has none, or it failed to read one.
_NONE, _FAILED = -1, -2

#: Bits of what it says that are a checksum of the order of rows; those above are one of the batch.
_ORDER_BITS = 24


def prepare_data_loader(loader: Any, ring: Ring, pattern: Pattern | str | None) -> RingDataLoader:
    """See `Ring.prepare_data_loader`."""
    pattern = None if pattern is None else as_pattern(pattern, "prepare_data_loader")
    if isinstance(loader, RingDataLoader) and loader.ring is ring and pattern in (None, loader.pattern):
        return loader
    error, agreed, seed = wrong_loader(loader, ring) or untrainable_model(ring), {}, 0
    if isinstance(loader, RingDataLoader):
        error = ValueError(
            "the loader was prepared already, by another ring or for another pattern: prepare the torch DataLoader itself"
        )
    if error is None:
        seed = _seed_of_loader(loader, ring)
        agreed = {
            "the loader's dataset": type(loader.dataset).__name__,
            "the number of its rows": length_of(loader.dataset),
            "its first row": first_row(loader.dataset),
            "batch_size": loader.batch_size,
            "drop_last": drops_last(loader),
        }
    seeds = ring.agree_everywhere(agreed, error, tell=seed)
    return RingDataLoader(loader, ring, pattern, seeds[0])


def _seed_of_loader(loader: DataLoader, ring: Ring) -> int:
    """Of a loader's order, as far as this process knows it; that of process 0 is taken."""
    for generator in (*generators_in(loader.batch_sampler), loader.generator):
        if isinstance(generator, torch.Generator):
            return generator.initial_seed() % 2**63
    return (torch.initial_seed() if ring.data_seed is None else ring.data_seed) % 2**63


def _source(loader: DataLoader, ring: Ring, seed: int) -> RingBatchSampler | RingStream:
    """What gives the rows of this ring."""
    dataset: Any = loader.dataset
    if not isinstance(dataset, IterableDataset):
        return RingBatchSampler(loader.batch_sampler, ring.dp_rank, ring.dp_size, drops_last(loader), seed)
    streamed = isinstance(dataset, StreamedDataset)
    if streamed and ring.dp_size > 1:
        dataset = split_dataset_by_node(dataset, ring.dp_rank, ring.dp_size)
    kind = RingStream if length_of(dataset) is None else SizedRingStream
    return kind(
        dataset, loader.batch_size or 1, ring.dp_rank, ring.dp_size, loader.drop_last, seed,
        divided=streamed, workers=loader.num_workers, persistent=loader.persistent_workers,
    )  # fmt: skip


def _loader_of_rows(loader: DataLoader, source: RingBatchSampler | RingStream) -> DataLoaderShard:
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
    mark_prepared(rows)
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
        self, batches: Iterable[Any], ring: Ring, pattern: Pattern | None, drop_last: bool, order: Callable[[], int]
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

    def __init__(self, loader: DataLoader, ring: Ring, pattern: Pattern | None, seed: int) -> None:
        self.dataset, self.batch_size, self.num_workers = loader.dataset, loader.batch_size, loader.num_workers
        self.ring, self.pattern = ring, pattern
        self.gradient_state = GradientState()
        self._drops = drops_last(loader)
        self._source = _source(loader, ring, seed)
        self.rows = _loader_of_rows(loader, self._source)
        # Workers that live on, or a stream that tells all its copies of an epoch, know of one.
        streamed = isinstance(loader.dataset, StreamedDataset) and loader.num_workers > 0
        self._one_at_a_time = loader.persistent_workers or streamed
        #: The pass begun last, or the one that begins next.
        self._pass, self._begun = _Pass(0), False
        mark_prepared(self)

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
        _check_index("set_epoch", "epoch", epoch)
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
        _check_index("skip_first_batches", "count", count)
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
        check_schedules(self.ring)
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


def _check_index(method: str, name: str, x: Any) -> None:
    if not _is_count(x):
        raise ValueError(f"{method}: {name} must be a whole number of at least 0, got {x!r}")
