"""Checks of loaders of whole sequences, and of learning rate schedules beside them, before rings use them."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.scheduler import AcceleratedScheduler
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe

from ..compute.private import is_prepared, part_of_stream, schedules_of
from ..ring.ring import Ring
from .lengths import check_lengths
from .samplers import checksum, layers_of
from .tables import is_streamed, is_table

#: Attributes in which samplers that divide rows by processes keep the number of processes.
_DIVIDING = ("num_replicas", "num_processes", "dp_size", "world_size")


def check_schedules(ring: Ring) -> None:
    """Refuses schedules that the accelerator of `Ring.from_accelerator` would step once for each process.

    Raises:
        ValueError: the accelerator has prepared a schedule, and rings have several ranks.
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
                f"would end {ring_size} times too early: leave it out of accelerator.prepare, and call its step() once after "
                f"each optimizer.step()"
            )


def wrong_loader(loader: Any, ring: Ring) -> ValueError | None:
    """Returns the error of a loader of whole sequences that a ring is to divide; None if the loader is right."""
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
            f"the loader is a {type(loader).__name__} with an __iter__ of its own, which the ring's loader would not call: "
            f"pass a torch DataLoader, and do in its dataset, sampler or collate_fn what __iter__ does"
        )
    if loader.num_workers and not loader.in_order:
        return ValueError(
            "the loader has in_order=False, and gives batches in the order in which its workers finish them, so ranks of a "
            "ring would not get the same batches, and no run could go on from a checkpoint: leave in_order out"
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
                f"same rows: leave the sampler out, or pass shuffle=True; the ring divides the rows"
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
    """Returns drop_last of a loader, or of the batch sampler that it was made with."""
    return bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))


def _wrong_stream(loader: Any, ring: Ring) -> ValueError | None:
    part = part_of_stream(loader.dataset) if is_streamed(loader.dataset) else None
    if part is not None and part.world_size > 1 and ring.world_size * ring.dp_size > 1:
        return ValueError(
            f"the loader's dataset was divided already (split_dataset_by_node, part {part.rank} of {part.world_size}), "
            f"and the ring's loader would divide that part again, and never read the rest: pass the whole dataset"
        )
    if isinstance(loader.dataset, IterDataPipe) and loader.num_workers:
        return ValueError(
            f"the loader's dataset is a datapipe, which torch itself divides among {loader.num_workers} workers, beside the "
            f"ring's loader: use num_workers=0, or a torch IterableDataset"
        )
    return None


def first_row(dataset: Any) -> int | None:
    """Returns a checksum of the first row, by which rings notice that they have different datasets.

    It is None for a dataset whose rows may be costly to read, and for a `datasets.Dataset` with a transform, which may
    draw random numbers, so that the row differs where the dataset does not.
    """
    at_hand = isinstance(dataset, (list, tuple)) or (is_table(dataset) and dataset.format["type"] != "custom")
    return checksum(dataset[0]) if at_hand and len(dataset) else None


def length_of(x: Any) -> int | None:
    """Returns how many items x has; None if x does not know it."""
    try:
        return len(x)
    except TypeError:  # x has no length, or its source has none
        return None
