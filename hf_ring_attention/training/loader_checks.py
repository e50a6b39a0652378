"""What keeps a loader of whole rows, or a schedule beside it, from being used over rings."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.scheduler import AcceleratedScheduler
from datasets import Dataset as Table
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe

from ..compute.private import is_prepared, part_of_stream, schedules_of
from ..ring.ring import Ring
from .lengths import check_lengths
from .samplers import (
    checksum,
    layers_of,
)

#: What a sampler that divides rows by processes calls their number.
_DIVIDING = ("num_replicas", "num_processes", "dp_size", "world_size")


def check_schedules(ring: Ring) -> None:
    """Refuses schedules that the accelerator of `Ring.from_accelerator` would step once for each process.

    Raises:
        ValueError: a schedule that was prepared by it, where rings have several ranks.
    """
    accelerator, ring_size = ring.accelerator, ring.world_size
    for schedule in schedules_of(accelerator):
        by_process = (
            type(schedule) is AcceleratedScheduler and schedule.step_with_optimizer and not schedule.split_batches
        )
        if by_process and ring_size > 1:
            processes = accelerator.num_processes
            raise ValueError(
                f"the schedule {type(schedule.scheduler).__name__} was prepared by Accelerate, which takes {processes} of its "
                f"steps for each step of the optimizer, one a process; {ring_size} processes share their rows here, so it "
                f"would be over {ring_size} times too early: leave it out of accelerator.prepare, and call its step() once "
                f"after each optimizer.step()"
            )


def wrong_loader(loader: Any, ring: Ring) -> ValueError | None:
    """What is wrong with a loader of whole rows that a ring is to divide; None if nothing is."""
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
    if isinstance(loader, DataLoaderShard) or is_prepared(loader):
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


def _wrong_rows(loader: Any, ring: Ring) -> ValueError | None:
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
    batches = length_of(batch_sampler)
    needed = ring.dp_size if drops_last(loader) else 1
    if batches is not None and batches < needed:
        return ValueError(
            f"the loader has {batches} batches of {loader.batch_size} rows for {ring.dp_size} rings, and drop_last="
            f"{drops_last(loader)} needs {needed} at least: use a smaller batch size, or more rows"
        )
    return check_lengths(loader.dataset, loader.collate_fn, warn=ring.rank == ring.dp_rank == 0)


def drops_last(loader: Any) -> bool:
    """As the loader or the batch sampler it was given has it."""
    return bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))


def _wrong_stream(loader: Any, ring: Ring) -> ValueError | None:
    divided = part_of_stream(loader.dataset)
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


def first_row(dataset: Any) -> int | None:
    """A checksum of the first row, of a dataset that gives it at once; rings that have other datasets learn of it.

    A transform that makes the rows of a `datasets.Dataset` may draw random numbers, which say nothing of the dataset.
    """
    at_hand = isinstance(dataset, (list, tuple)) or (isinstance(dataset, Table) and dataset.format["type"] != "custom")
    return checksum(dataset[0]) if at_hand and len(dataset) else None


def length_of(x: Any) -> int | None:
    """How many items x has; None where it cannot tell."""
    try:
        return len(x)
    except TypeError:  # of what has none, or whose source has none
        return None
