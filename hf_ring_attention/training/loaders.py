"""Loaders of sequence shards: the ranks of a ring read the same rows, other rings other rows, and all end together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, DataLoaderStateMixin
from accelerate.state import GradientState
from torch.utils.data import DataLoader, IterableDataset

from ..compute.private import mark_prepared
from ..hf.rings import untrainable_model
from ..plan.patterns import Pattern, as_pattern
from ..ring.ring import Ring
from .dealing import Dealer, Dealing, decide_deal, wrong_deal
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
from .shard_iterators import Shards
from .shards import expect_batch
from .tables import is_streamed


def prepare_data_loader(
    loader: Any,
    ring: Ring,
    pattern: Pattern | str | None,
    deal: str,
    together: int | None = None,
    name: str = "a loader",
) -> RingDataLoader:
    """Returns what `Ring.prepare_data_loader` describes.

    Args:
        together: how many batches an optimizer step accumulates; None for what the ring's accelerator was told.
        name: what errors call the loader if another process does something else meanwhile.
    """
    pattern = None if pattern is None else as_pattern(pattern, "prepare_data_loader")
    error = wrong_loader(loader, ring) or wrong_deal(deal) or untrainable_model(ring)
    agreed, seed, dealing = {}, 0, None
    if isinstance(loader, RingDataLoader):
        if loader.ring is ring and pattern in (None, loader.pattern) and deal in ("auto", loader.dealing.asked):
            return loader
        error = ValueError(
            "the loader was prepared already, by another ring, for another pattern or with another deal: prepare the torch "
            "DataLoader itself"
        )
    if error is None:
        seed = _seed_of_loader(loader, ring)
        dealing = decide_deal(loader, ring, pattern, deal, together)
        agreed = {
            "the loader's dataset": type(loader.dataset).__name__,
            "the number of its rows": length_of(loader.dataset),
            "its first row": first_row(loader.dataset),
            "batch_size": loader.batch_size,
            "drop_last": drops_last(loader),
            **dealing.agreed(),
        }
    seeds = ring.agree_everywhere(f"preparing {name}", agreed, error, tell=seed)
    assert dealing is not None
    dealing.log(ring)
    return RingDataLoader(loader, ring, pattern, seeds[0], dealing, name)


def _seed_of_loader(loader: DataLoader[Any], ring: Ring) -> int:
    """Returns the seed of a loader's order as this process knows it; all processes use that of process 0."""
    for generator in (*generators_in(loader.batch_sampler), loader.generator):
        if isinstance(generator, torch.Generator):
            return generator.initial_seed() % 2**63
    return (torch.initial_seed() if ring.data_seed is None else ring.data_seed) % 2**63


def _source(loader: DataLoader[Any], ring: Ring, seed: int, dealer: Dealer | None) -> RingBatchSampler | RingStream:
    """Returns what gives the rows of this ring to a loader."""
    dataset: Any = loader.dataset
    if not isinstance(dataset, IterableDataset):
        return RingBatchSampler(loader.batch_sampler, ring.dp_rank, ring.dp_size, drops_last(loader), seed, dealer)
    streamed = is_streamed(dataset)
    if streamed and ring.dp_size > 1:
        from datasets.distributed import split_dataset_by_node

        dataset = split_dataset_by_node(dataset, ring.dp_rank, ring.dp_size)
    kind = RingStream if length_of(dataset) is None else SizedRingStream
    return kind(
        dataset,
        batch_size=loader.batch_size or 1,
        dp_rank=ring.dp_rank,
        dp_size=ring.dp_size,
        drop_last=loader.drop_last,
        seed=seed,
        divided=streamed,
        workers=loader.num_workers,
        persistent=loader.persistent_workers,
    )


def _loader_of_rows(
    loader: DataLoader[Any], source: RingBatchSampler | RingStream, tell: Callable[[Any], None]
) -> DataLoaderShard:
    """Returns a loader of the whole sequences of this ring, which calls `tell` for each batch that it reads.

    It is of Accelerate's kind, so that Accelerate can skip its batches; and it is marked as prepared, so that Accelerate
    does not divide its rows again.
    """
    arguments: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            "num_workers", "pin_memory", "pin_memory_device", "timeout", "worker_init_fn", "multiprocessing_context",
            "prefetch_factor", "persistent_workers", "in_order",
        )
        if hasattr(loader, name)
    }  # fmt: skip
    # The loader has a generator of its own, so that a pass takes no random number of the process.
    arguments["generator"] = torch.Generator().manual_seed(source.seed)
    collate: Any = loader.collate_fn
    dataset: Any = source
    if isinstance(source, RingBatchSampler):
        dataset = BatchesOfRows(loader.dataset, collate)
        arguments |= {"batch_sampler": source, "collate_fn": as_it_is}
    else:
        arguments |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        arguments["collate_fn"] = CollatedRows(collate)
    rows = DataLoaderShard(dataset, **arguments)
    rows.base_dataloader = _TellingLoader(dataset, **arguments)
    rows.base_dataloader.tell = tell
    mark_prepared(rows)
    return rows


class _TellingLoader(DataLoader[Any]):
    """A DataLoader that tells each batch when it is read: Accelerate's loader around it holds it back until the next one."""

    tell: Callable[[Any], None]

    def __iter__(self) -> Any:
        return map(self._told, super().__iter__())

    def _told(self, batch: Any) -> Any:
        self.tell(batch)
        return batch


@dataclass
class _Pass:
    """An epoch, and how many of its batches have been given.

    Attributes:
        batches: the number of batches that have been given.
        order: the list that the sampler fills, `RingBatchSampler.order`.
        expected: the checksum that a loaded state has of the rows up to its batch; None without one.
        resumed: whether the epoch is that of a loaded state.
    """

    epoch: int
    batches: int = 0
    order: list[int] | None = None
    expected: int | None = None
    resumed: bool = False


class RingDataLoader(DataLoaderStateMixin):
    """An iterable of this rank's shards, on its device, as `Ring.prepare_data_loader` makes it.

    Each pass is an epoch with an order of its own. The next pass is the next epoch, however early a pass was left, unless
    `set_epoch` says otherwise. To go on where a checkpoint was written, register the loader,
    `accelerator.register_for_checkpointing(loader)`, or call `skip_first_batches`.
    """

    _drop_last = True  # Accelerate would cut a remainder of rows off the last batch, and shards are not rows

    def __init__(
        self, loader: DataLoader[Any], ring: Ring, pattern: Pattern | None, seed: int, dealing: Dealing, name: str
    ) -> None:
        self.dataset, self.batch_size, self.num_workers = loader.dataset, loader.batch_size, loader.num_workers
        self.ring, self.pattern, self.dealing, self.name = ring, pattern, dealing, name
        self.gradient_state = GradientState()
        self._drops = drops_last(loader)
        self._source = _source(loader, ring, seed, dealing.dealer)
        self.rows = _loader_of_rows(loader, self._source, partial(expect_batch, ring=ring, pattern=pattern))
        # Persistent workers serve one pass at a time, and a stream of `datasets` has one epoch for its copies in workers.
        streamed = is_streamed(loader.dataset) and loader.num_workers > 0
        self._one_at_a_time = loader.persistent_workers or streamed
        #: The pass that began last, or else the pass that begins next; and which of these it is.
        self._pass, self._begun = _Pass(0), False
        mark_prepared(self)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a RingDataLoader has no {name!r}: it is an iterable of shards; its loader of whole sequences is .rows; to skip "
            f"batches, call loader.skip_first_batches(n)"
        )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def epoch(self) -> int:
        """The epoch of the pass under way, or of the next pass if there is none."""
        return self._pass.epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass, which decides the order of rows.

        Raises:
            ValueError: no whole number of at least 0, or another epoch than the one that `load_state_dict` goes on in.
        """
        _check_index("set_epoch", "epoch", epoch)
        at = self._pass
        if self._begun:
            self._next(_Pass(epoch))
        elif epoch != at.epoch:
            if at.resumed and at.batches:
                raise ValueError(
                    f"set_epoch: the loader goes on in epoch {at.epoch} after {at.batches} batches, as load_state_dict said, "
                    f"and not in epoch {epoch}: let the loop count its epochs from loader.epoch"
                )
            self._next(_Pass(epoch, at.batches))

    def skip_first_batches(self, count: int) -> RingDataLoader:
        """Leaves out the first `count` batches of the next pass, without reading them where the dataset has a length.

        Raises:
            ValueError: no whole number of at least 0.
        """
        _check_index("skip_first_batches", "count", count)
        self._next(_Pass(self._pass.epoch + self._begun, count))
        return self

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, the number of its batches given, and what their rows depend on; equal on all processes."""
        at = self._pass
        return {
            "epoch": at.epoch,
            "batches": at.batches,
            "seed": self._source.seed,
            "rings": self.ring.dp_size,
            "batch_size": self.batch_size,
            "dealt_together": self.dealing.together,
            "order": self._order_of(at),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next pass go on where `state_dict` was called: with the same rows, and the same random numbers.

        The random numbers are those of the global generators of Python, numpy and torch, and of generators that the
        dataset, its sampler and its collator keep as attributes. Numbers from other sources are not drawn again.

        Raises:
            ValueError: no state of a loader, or a state with another batch size, a number of rings that does not fit, or
                within a step whose rows were dealt to rings in another way.
        """
        entries = state if isinstance(state, Mapping) else {}
        if not all(_is_count(entries.get(name)) for name in ("epoch", "batches")):
            raise ValueError(f"load_state_dict expected what state_dict gives, with epoch and batches, got {state!r}")
        batches, rings = entries["batches"], entries.get("rings", self.ring.dp_size)
        if batches and entries.get("batch_size", self.batch_size) != self.batch_size:
            raise ValueError(
                f"load_state_dict: the state is of a loader with batch_size={entries['batch_size']}, after {batches} of its "
                f"batches, and this loader has batch_size={self.batch_size}: go on with the same batch size, or from the "
                f"beginning of an epoch"
            )
        count, rest = divmod(batches * rings, self.ring.dp_size)
        divided_otherwise = getattr(self._source, "divided", False) and rings != self.ring.dp_size
        if batches and (rest or divided_otherwise):
            raise ValueError(
                f"load_state_dict: each of {rings} rings has taken {batches} batches, and {self.ring.dp_size} rings cannot go "
                f"on after {batches} x {rings} = {batches * rings} of them: go on with {rings} rings, or from the beginning "
                f"of an epoch"
            )
        before, now = entries.get("dealt_together", 1), self.dealing.together
        if (batches % before or count % now) and (rings, before) != (self.ring.dp_size, now):
            raise ValueError(
                f"load_state_dict: each of {rings} rings has taken {batches} batches, of which {before} were dealt together, "
                f"and this loader deals {now} together to {self.ring.dp_size} rings, so that it would read some rows of a step "
                f"twice, and others not at all: go on with the same rings, gradient_accumulation_steps and deal, or from the "
                f"beginning of an epoch"
            )
        self._source.seed = entries.get("seed", self._source.seed)
        self._next(_Pass(entries["epoch"], count, expected=entries.get("order"), resumed=True))

    def shards(self, batches: Iterable[Any]) -> Shards:
        """Returns an iterator over this rank's shards of batches of whole sequences, such as `rows` gives."""
        return Shards(batches, self.ring, self.pattern, self._drops, self._order, self.name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        check_schedules(self.ring)
        if self._begun:
            self._next(_Pass(self._pass.epoch + 1))
        own, self._begun = self._pass, True
        shards = self.shards(self._batches(own))
        self.begin()
        try:
            next_shard = next(shards, None)
            while next_shard is not None:
                shard, next_shard = next_shard, next(shards, None)
                self.end_of_dataloader = next_shard is None
                own.batches += 1
                self._end_of(own, next_shard)
                yield shard
                if next_shard is not None and self._pass is not own and self._one_at_a_time:
                    raise ValueError(
                        f"the pass of epoch {own.epoch} ended when that of epoch {self._pass.epoch} began: a loader with "
                        f"persistent_workers, or with workers that read a stream of datasets, makes one pass at a time: end "
                        f"a pass before the next begins"
                    )
            self._end_of(own, next_shard)
        finally:
            self.end()

    def _next(self, next_pass: _Pass) -> None:
        self._pass, self._begun = next_pass, False

    def _end_of(self, own: _Pass, next_shard: Any) -> None:
        """Goes over to the next epoch after a pass's last batch, so that `state_dict` tells of that epoch."""
        if next_shard is None and self._pass is own:
            self._next(_Pass(own.epoch + 1))

    def _batches(self, own: _Pass) -> Iterator[Any]:
        """Yields the batches of whole sequences of a pass.

        It does not use Accelerate's own loop, which would announce the end of this ring's batches, and not that of all.
        """
        skip = 0
        if isinstance(self._source, RingBatchSampler):
            self._source.begin(own.epoch, own.batches, own.expected)
        else:  # a stream must read the rows that it skips
            self._source.begin(own.epoch, self._source.seed)
            skip = own.batches
        if self.num_workers:
            self.ring.planner.wait()  # workers are forked here, and a fork beside a busy thread may take its locks along
        batches = iter(self.rows.base_dataloader)
        own.order = getattr(self._source, "order", None)
        for batch in itertools.islice(batches, skip, None):
            if skip and 0 not in (own.expected or 0, self._order()) and self._order() != own.expected:
                raise ValueError(another_order("dataset"))
            yield batch

    def _order_of(self, at: _Pass) -> int | None:
        """Returns a checksum of the rows that a pass has read, which must read the same when it goes on; None without any."""
        if at.order:
            return at.order[at.batches - 1] if at.batches else None
        return self._order() if self._begun and at.batches else at.expected

    def _order(self) -> int:
        """Returns a checksum of the first rows of the pass that began last, alike on all processes; 0 if unknown."""
        if isinstance(self._source, RingBatchSampler):
            return next(iter(self._source.order), 0)
        return int(self._source.first[0])


class LoaderPreparer:
    """Stands in for the accelerator where a Trainer makes its loaders: the ring prepares them instead.

    Args:
        deal, together, name: as for `prepare_data_loader`, for loaders that the user has not prepared.
    """

    def __init__(self, accelerator: Any, ring: Ring, deal: str, together: int, name: str) -> None:
        self.accelerator, self.ring = accelerator, ring
        self.deal, self.together, self.name = deal, together, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Prepares loaders by the ring, and other objects by the accelerator."""
        if not all(isinstance(x, DataLoader) for x in objects):
            return self.accelerator.prepare(*objects, **options)
        loaders = tuple(self.prepare_data_loader(loader) for loader in objects)
        return loaders if len(loaders) > 1 else loaders[0]

    def prepare_data_loader(self, loader: DataLoader[Any], **options: Any) -> RingDataLoader:
        """Prepares a loader by the ring, whatever the accelerator's options."""
        deal = "auto" if isinstance(loader, RingDataLoader) else self.deal
        return prepare_data_loader(loader, self.ring, None, deal, self.together, self.name)


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _check_index(method: str, name: str, x: Any) -> None:
    if not _is_count(x):
        raise ValueError(f"{method}: {name} must be a whole number of at least 0, got {x!r}")
