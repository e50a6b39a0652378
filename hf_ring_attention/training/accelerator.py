"""An Accelerator that counts rings in place of processes: the ranks of a ring are one data-parallel replica.

Loaders divide rows among rings, schedules step once for each ring, and gathered tensors have the rows of each ring once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, IterableDatasetShard, SeedableRandomSampler
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from accelerate.utils.deepspeed import DummyScheduler  # `accelerate.utils` has it only beside DeepSpeed.
from torch import Tensor
from torch.utils.data import IterableDataset, SequentialSampler

from ..compute.private import check, is_prepared
from ..ring.ring import Ring


class RingAccelerator(Accelerator):
    """The class that an Accelerator gets from `Ring.from_accelerator`.

    `num_processes` and `process_index` are the number of rings and this process's ring, and `gather`, `gather_for_metrics` and
    `reduce` take each ring once. Its `state` has the numbers of processes, as before.
    """

    ring: Ring
    counts_processes = False

    @property
    def num_processes(self) -> int:
        """The number of rings."""
        return self.state.num_processes if self.counts_processes else self.ring.dp_size

    @property
    def process_index(self) -> int:
        """The number of this process's ring."""
        return self.state.process_index if self.counts_processes else self.ring.dp_rank

    def _prepare_device_mesh(self) -> None:
        """Returns no mesh: the two numbers above say which rows a process reads."""

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of all; it is true for one process."""
        return bool(self.state.is_last_process)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Any:
        """Divides inputs among rings: a context, which gives the ranks of a ring the same part."""
        return PartialState.split_between_processes(self, inputs, apply_padding)

    @contextmanager
    def profile(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Profiles as Accelerate does; each process writes a trace."""
        with self._counting(processes=False), super().profile(*args, **kwargs) as profiler:
            yield profiler
            self.counts_processes = True  # The name of the trace has the number of the process.

    def _prepare_deepspeed(self, *args: Any) -> Any:
        objects = [copy(x) if isinstance(x, DummyScheduler) else x for x in args]
        for schedule in objects:
            if isinstance(schedule, DummyScheduler) and schedule.total_num_steps is not None:
                schedule.total_num_steps *= self.ring.world_size  # Accelerate divides it by the number of processes.
        with self._counting(processes=True):  # DeepSpeed computes its batch from their number.
            prepared = super()._prepare_deepspeed(*objects)
        self.step_schedules_by_rings()
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepares a loader whose rows are divided among rings, also while DeepSpeed counts processes."""
        if is_prepared(data_loader):
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        with self._counting(processes=False):
            by_rows = _divided_by_rows(data_loader) if self.num_processes > 1 else data_loader
            prepared = super().prepare_data_loader(by_rows, *args, **kwargs)
        if isinstance(prepared, DataLoaderDispatcher):
            prepared.base_dataloader.generator = data_loader.generator  # Accelerate leaves it out.
        elif self.ring.world_size > 1 and self.ring.dp_size == 1:
            _draw_alike(prepared)
        return self._dispatching_to_rings(prepared)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Returns a loader without its first batches."""
        return self._dispatching_to_rings(super().skip_first_batches(dataloader, num_batches))

    def _dispatching_to_rings(self, prepared: Any) -> Any:
        """Has a loader whose batches the first process reads, such as a stream's, divide them among rings."""
        if self.ring.world_size == 1 or not isinstance(prepared, DataLoaderDispatcher):
            return prepared
        if self.use_stateful_dataloader:
            raise ValueError(
                "prepare: use_stateful_dataloader=True counts the batches of processes, and rings read fewer of a stream: "
                "set dispatch_batches=False, or leave it out"
            )
        index, device = prepared.state.process_index, prepared.state.device
        prepared.state = SimpleNamespace(num_processes=self.ring.dp_size, process_index=index, device=device)
        prepared.slice_fn = partial(_rows_of_ring, prepared.slice_fn, self.ring)
        return prepared

    @contextmanager
    def _counting(self, processes: bool) -> Iterator[None]:
        before, self.counts_processes = self.counts_processes, processes
        try:
            yield
        finally:
            self.counts_processes = before

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepares a schedule that steps once for each ring."""
        prepared = super().prepare_scheduler(scheduler)
        self.step_schedules_by_rings()
        return prepared

    def step_schedules_by_rings(self) -> None:
        """Makes prepared schedules step once for each ring; DeepSpeed's schedules step once for each step."""
        for schedule in self._schedulers:
            if type(schedule) in (AcceleratedScheduler, _RingScheduler):
                schedule.__class__ = _RingScheduler
                schedule.rings = self.ring.dp_size

    def gather(self, tensor: Any) -> Any:
        """Gathers tensors of all rings, one behind the other; the results of a ring's ranks are the same."""
        gathered, shape = super().gather(tensor), (self.ring.dp_size, self.ring.world_size, -1)
        if self.state.num_processes == 1:
            return gathered
        return recursively_apply(lambda x: x.unflatten(0, shape)[:, 0].flatten(0, 1), gathered)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers as `gather` does, without the rows that fill up the last batch of a loader."""
        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if use_gather_object and self.ring.rank > 0:
            input_data = []
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduces tensors over rings: a sum has the tensors of each ring once.

        Where the ranks of a ring have different integers, such as the flag of `set_trigger`, the largest counts.
        """
        if reduction != "sum" or self.ring.world_size == 1:
            return super().reduce(tensor, reduction, scale)
        add, gather, rings = super().reduce, super().gather, (self.ring.dp_size, self.ring.world_size)

        def sum_of_rings(x: Tensor) -> Any:
            if x.is_floating_point() or x.is_complex():
                return add(x, reduction, scale) / self.ring.world_size
            return gather(x[None]).unflatten(0, rings).amax(1).sum(0, dtype=x.dtype)

        return recursively_apply(sum_of_rings, tensor, error_on_other_type=True)


class _RingScheduler(AcceleratedScheduler):
    """A schedule that steps once for each ring, as each ring has read a different batch."""

    rings: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        total = getattr(self.scheduler, "total_steps", None)
        self.split_batches = True  # A step of the class around is then a single one.
        follows_optimizer = self.step_with_optimizer and self.gradient_state.sync_gradients
        for number in range(self.rings if follows_optimizer else 1):
            if number and total is not None and self.scheduler.last_epoch >= total:
                return
            super().step(*args, **kwargs)


def _rows_of_ring(slice_fn: Any, ring: Ring, batch: Any, rows: slice, **numbers: int) -> Any:
    """Returns a ring's rows of a batch that all processes have, in place of the rows of this process.

    The first process read the batch, and may have drawn random numbers for it. The others of its ring take its random state.
    """
    if ring.dp_rank == 0:
        with ring.agreement("a batch of a stream") as call:
            call.message = torch.get_rng_state() if ring.rank == 0 else None
        torch.set_rng_state(call.answers[0])
    if rows.start:  # The first rows, which fill up the last batch, are the same for all.
        count = rows.stop - rows.start
        rows = slice(ring.dp_rank * count, (ring.dp_rank + 1) * count)
    return slice_fn(batch, rows, process_index=ring.dp_rank, num_processes=ring.dp_size)


def _divided_by_rows(loader: Any) -> Any:
    """Returns a loader of the same stream, which Accelerate cannot divide by files: rings would end at different batches."""
    if isinstance(loader.dataset, IterableDataset) and hasattr(loader.dataset, "n_shards"):
        loader = copy(loader)
        object.__setattr__(loader, "dataset", IterableDatasetShard(loader.dataset))
    return loader


def _draw_alike(loader: DataLoaderShard) -> None:
    """Has all ranks draw the same random order, by the random state of the first process when an epoch begins.

    Accelerate does this when it divides rows among processes, which it does not do for a single ring.
    """
    sampler = loader.get_sampler()
    if loader.synchronized_generator is not None or isinstance(sampler, (SequentialSampler, SeedableRandomSampler)):
        return
    loader.synchronized_generator = getattr(sampler, "generator", None)
    kind = "torch" if loader.synchronized_generator is None else "generator"
    loader.rng_types = [*(loader.rng_types or ()), kind]


def count_rings(accelerator: Any, ring: Ring) -> None:
    """Makes an Accelerator count rings from now on."""
    check("accelerate")
    accelerator.__class__ = RingAccelerator
    accelerator.ring = ring
    accelerator.step_schedules_by_rings()
