"""An Accelerator that counts rings in place of processes: the ranks of a ring are one data-parallel replica.

Loaders divide rows among rings, schedules step once for each ring, and gathered tensors have the rows of each ring once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DummyScheduler, recursively_apply
from torch import Tensor
from torch.utils.data import SequentialSampler

from ..compute.private import check
from ..ring.ring import Ring


class RingAccelerator(Accelerator):
    """The class that an Accelerator gets from `Ring.from_accelerator`.

    `num_processes` and `process_index` are the number of rings and this process's ring, and `gather`, `gather_for_metrics` and
    `reduce` take each ring once. Its `state` has the numbers of processes, as before.
    """

    ring: Ring
    _counts_processes = False

    @property
    def num_processes(self) -> int:
        """The number of rings."""
        return self.state.num_processes if self._counts_processes else self.ring.dp_size

    @property
    def process_index(self) -> int:
        """The number of this process's ring."""
        return self.state.process_index if self._counts_processes else self.ring.dp_rank

    @property
    def dispatch_batches(self) -> bool:
        """False: each process reads its rows, since the first one would divide them among processes."""
        return False

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
        """Profiles as Accelerate does; each process writes its own trace."""
        with self._counting(processes=False), super().profile(*args, **kwargs) as profiler:
            yield profiler
            self._counts_processes = True  # The name of the trace has the number of the process.

    def _prepare_deepspeed(self, *args: Any) -> Any:
        objects = [copy(x) if isinstance(x, DummyScheduler) else x for x in args]
        for schedule in objects:
            if isinstance(schedule, DummyScheduler) and schedule.total_num_steps is not None:
                schedule.total_num_steps *= self.ring.world_size  # Accelerate divides it by the number of processes.
        with self._counting(processes=True):  # DeepSpeed computes its batch from their number.
            prepared = super()._prepare_deepspeed(*objects)
        self.step_schedules_by_rings()
        return prepared

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares a loader whose rows are divided among rings, also while DeepSpeed counts processes."""
        with self._counting(processes=False):
            prepared = super().prepare_data_loader(*args, **kwargs)
        if self.ring.world_size > 1 and self.num_processes == 1 and isinstance(prepared, DataLoaderShard):
            _draw_alike(prepared)
        return prepared

    @contextmanager
    def _counting(self, processes: bool) -> Iterator[None]:
        before, self._counts_processes = self._counts_processes, processes
        try:
            yield
        finally:
            self._counts_processes = before

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepares a schedule that steps once for each ring."""
        prepared = super().prepare_scheduler(scheduler)
        self.step_schedules_by_rings()
        return prepared

    def step_schedules_by_rings(self) -> None:
        """Makes the schedules that were prepared step once for each ring; DeepSpeed steps its own once for each step."""
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
    """A schedule that steps once for each ring, which has read a batch of its own."""

    rings: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        total = getattr(self.scheduler, "total_steps", None)
        self.split_batches = True  # A step of the class around is then a single one.
        follows_optimizer = self.step_with_optimizer and self.gradient_state.sync_gradients
        for number in range(self.rings if follows_optimizer else 1):
            if number and total is not None and self.scheduler.last_epoch >= total:
                return
            super().step(*args, **kwargs)


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
