"""`Ring`: the ranks that share a sequence, its division among them, their transports, and their agreements."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from pkgutil import resolve_name
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..plan.choices import Decision, KernelSetting, check_choices, decide_layout
from ..plan.layouts import LayoutKind, SequenceLayout
from ..plan.patterns import Pattern, as_pattern
from ..plan.problem import Documents, RingSettings, documents_of
from ..plan.traffic import TransportKind
from ..transport.agreement import Agreement, Calls, agreement
from ..transport.communicators import Communicator
from ..transport.transports import Traffic
from .bindings import PlannedCalls
from .callbacks import CALLBACKS
from .mesh import communicator_of, mesh_of
from .operator import is_recorded
from .shards import RINGS, check_shard, shard_of, whole_of

logger = logging.getLogger(__name__)


class Ring:
    """A group of ranks that share sequences.

    Args:
        group: a torch.distributed process group; a DeviceMesh of one dimension, or with one dimension called "cp" or "ring";
            None for the whole world, or for this process if torch.distributed is not initialized.
        layout: "contiguous", "zigzag", "documents" (pieces made for the documents of each batch), or "auto": the first of
            these that gives the ranks about equal work.
        transport: how keys and values reach other ranks. "ring": from neighbour to neighbour, two payloads held.
            "collective": one exchange of the rows needed. "heads": each rank computes some heads of all tokens, so that all
            have equal work. "local": one rank. "auto": as `plan.choices.choose_transport` decides for each call.
        heads: with transport="heads", how many neighbouring ranks exchange heads; None for all. Keys and values then travel
            round rings of the ranks that have the same heads.
        kernel: the setting of all ranks. "auto": for each call the fastest kernel that computes it on its device, as
            `plan.kernel_choice` decides; on a CPU, torch's flash attention for CPUs. "fused", "flash", "cudnn", "efficient":
            a kernel of CUDA, or an error if it cannot compute a call. "math": plain math, on every device.

    Attributes:
        rank, world_size: the number of this rank in the ring, and the number of its ranks.
        dp_rank, dp_size: of a ring by `from_accelerator`, its number among the rings, and their number; else 0 and 1.

    Raises:
        ValueError: an unknown name; a transport that cannot serve this many ranks; a group or mesh without this rank, or a
            mesh without such a dimension; or no process group although a launcher has started several processes (WORLD_SIZE
            in the environment). `Ring.alone()` makes a ring of this process in any case.

    Example:
        >>> ring = ra.Ring.alone()
        >>> layout = ring.layout_for(6, "window:4")
        >>> ring.shard(torch.arange(6)[None], layout)
        tensor([[0, 1, 2, 3, 4, 5]])
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        layout: LayoutKind | Literal["auto"] = "auto",
        transport: TransportKind = "auto",
        heads: int | None = None,
        kernel: KernelSetting = "auto",
    ) -> None:
        self._set_up(communicator_of(group), layout, transport, heads, kernel)

    @classmethod
    def over(
        cls,
        communicator: Communicator | None,
        layout: str = "auto",
        transport: str = "auto",
        heads: int | None = None,
        kernel: str = "auto",
    ) -> Ring:
        """Makes the ring of a rank that reaches the others by `communicator`."""
        ring = cls.__new__(cls)
        ring._set_up(communicator, layout, transport, heads, kernel)
        return ring

    @classmethod
    def alone(cls, kernel: KernelSetting = "auto") -> Ring:
        """Makes a ring of one process, even inside a larger job."""
        return cls.over(None, kernel=kernel)

    @classmethod
    def from_accelerator(
        cls,
        accelerator: Any,
        size: int | None = None,
        *,
        layout: LayoutKind | Literal["auto"] = "auto",
        transport: TransportKind = "auto",
        heads: int | None = None,
        kernel: KernelSetting = "auto",
    ) -> Ring:
        """Makes the ring of this process on a mesh ("dp_replicate", "cp") of all processes of an `accelerate.Accelerator`.

        The ranks of a ring are one data-parallel replica, so from now on the accelerator counts rings. `prepare` gives the
        ranks of a ring the same batches, and steps schedules once for each ring. `num_processes`, `process_index`, `gather`,
        `gather_for_metrics` and `reduce` take each ring once. `accelerator.state` keeps the numbers of processes. DDP and FSDP
        span the whole world. The ranks of a ring, number `dp_rank` of `dp_size`, are neighbours in the world.

        With `ParallelismConfig(cp_size=N)`, rings are the dimension "cp" of the accelerator's own device mesh. The config then
        gets cp_size=1 and N times its dp_shard_size: FSDP shards the model as before, and Accelerate's own context
        parallelism, which would shard each sequence a second time, is off.

        Args:
            size: ranks of a ring, a divisor of the number of processes; None for cp_size.
            layout, transport, heads, kernel: as for `Ring`; ranks that exchange heads are neighbours too.

        Raises:
            ValueError: on every process: sizes that differ, are missing or do not divide the number of processes; an
                Accelerator with sp_size or tp_size, or that has prepared a model with cp_size; a mesh with other dimensions
                than data before "cp"; or an Accelerator with split_batches.

        Example:
            >>> from accelerate import Accelerator
            >>> ring = ra.Ring.from_accelerator(Accelerator(cpu=True), size=1)  # before accelerator.prepare
            >>> ring.world_size, ring.dp_rank, ring.dp_size
            (1, 0, 1)
        """
        mesh = mesh_of(accelerator, size)
        ring = cls(mesh.group, layout=layout, transport=transport, heads=heads, kernel=kernel)
        ring.dp_rank, ring.dp_size, ring._everyone = mesh.dp_rank, mesh.dp_size, mesh.everyone
        ring._accelerator = weakref.ref(accelerator)
        resolve_name(CALLBACKS["count_rings"])(accelerator, ring)
        return ring

    def _set_up(
        self, communicator: Communicator | None, layout: str, transport: str, heads: int | None, kernel: str
    ) -> None:
        self.rank, self.world_size = (0, 1) if communicator is None else (communicator.rank, communicator.world_size)
        check_choices(layout, transport, self.world_size, heads, kernel)
        if transport not in ("auto", "local") and communicator is None:
            raise ValueError(f"transport={transport!r} needs torch.distributed to be initialized")
        self.dp_rank, self.dp_size = 0, 1
        self.layout, self.transport, self.settings = layout, transport, RingSettings(heads=heads)
        self.kernel = kernel
        self._kernels: dict[str, Decision] = {}
        self.communicator = communicator
        #: Reaches all processes that train together: the ring's, or the accelerator's if there is one.
        self._everyone = communicator
        self._accelerator: Callable[[], Any] = lambda: None
        self.counters = Traffic()
        self.calls = Calls(communicator)
        #: Names the ring in graphs.
        self.number = RINGS.add(self)
        self.planned = PlannedCalls()
        self._transports: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ring:
        return self  # a process group cannot be copied, and a copied model belongs to the same ranks

    def __repr__(self) -> str:
        return f"Ring(rank {self.rank} of {self.world_size}, layout={self.layout!r}, transport={self.transport!r})"

    @property
    def accelerator(self) -> Any:
        """The accelerator of `from_accelerator`; None for other rings, and after its end."""
        return self._accelerator()

    @property
    def global_ranks(self) -> list[int]:
        """The numbers in the world of the ranks of a process group; empty without a group."""
        group = getattr(self.communicator, "group", None)
        return [] if group is None else dist.get_process_group_ranks(group)

    def prepare_data_loader(self, loader: Any, *, pattern: Pattern | str | None = None) -> Any:
        """Returns the result of `accelerator.prepare(loader)`, except that the loader's workers cut the rows.

        `model(**batch)` returns the same as for a whole batch. It pays for long rows: each process moves only its part to its
        device. All processes read a stream, which `accelerator.prepare` lets one process read for all; its first rows fill up
        the last batches.

        Args:
            loader: a torch DataLoader, of batches that are mappings with input_ids [B, n].
            pattern: the pattern that decides the layout; None for the pattern of the model that was patched with this ring.

        Raises:
            ValueError: a ring without an accelerator or a patched model, or a loader that was prepared already.
        """
        return resolve_name(CALLBACKS["prepare_data_loader"])(loader, self, pattern)

    def layout_for(
        self, seq_len: int, pattern: Pattern | str, documents: Sequence[Sequence[tuple[int, int]]] | None = None
    ) -> SequenceLayout:
        """Returns the division of sequences of `seq_len` tokens under `pattern` among the ranks.

        Args:
            documents: the documents of each batch row, as for `ring_attention`; None for one document a row. A layout of
                kind "documents" fits this batch only.

        Raises:
            ValueError: documents that are empty, overlap or leave the sequence.

        Example:
            >>> [ring, _] = ra.simulate(2)  # in zigzag, rank 1 would do 1.3 times the mean work
            >>> layout = ring.layout_for(16, "exact", documents=[[(0, 8), (8, 10), (10, 12), (12, 14), (14, 16)]])
            >>> layout.kind, layout.positions(0), layout.positions(1)
            ('documents', [0, 1, 2, 3, 4, 5, 8, 9], [6, 7, 10, 11, 12, 13, 14, 15])
        """
        return self.division(seq_len, as_pattern(pattern, "layout_for"), documents_of(documents, seq_len, "layout_for"))

    def division(self, seq_len: int, pattern: Pattern, documents: Documents | None) -> SequenceLayout:
        """Returns `layout_for` of documents that were checked."""
        settings = self.transport, self.settings.heads
        return decide_layout(self.layout, seq_len, self.world_size, pattern, documents, *settings)[0]

    def check_layout(self, layout: SequenceLayout) -> None:
        """Raises ValueError for anything but a layout for this number of ranks."""
        if not isinstance(layout, SequenceLayout):
            raise ValueError(f"layout must be a SequenceLayout, such as ring.layout_for gives, got {layout!r}")
        if layout.world_size != self.world_size:
            raise ValueError(
                f"the layout is for {layout.world_size} ranks, the ring has {self.world_size}: make it by ring.layout_for"
            )

    def shard(self, tensor: Tensor, layout: SequenceLayout, dim: int = 1, fill: float = 0) -> Tensor:
        """Returns this rank's part of whole sequences.

        Args:
            tensor: `layout.seq_len` tokens along `dim`; for a layout of documents, its batch rows along dim 0.
            fill: value of the padding.

        Returns:
            `layout.local_len` tokens along `dim`, in the order of `layout.positions(rank)`.

        Raises:
            ValueError: another length along `dim`, or a layout for other batch rows or another number of ranks.

        Example:
            >>> layout = ra.SequenceLayout("zigzag", seq_len=5, world_size=2)
            >>> ra.run_simulated(lambda ring: ring.shard(torch.arange(1, 6)[None], layout), 2)
            [tensor([[1, 2, 0, 0]]), tensor([[3, 4, 5, 0]])]
        """
        self.check_layout(layout)
        return shard_of(tensor, layout, self.rank, dim, fill)

    def unshard(self, local: Tensor, layout: SequenceLayout, dim: int = 1) -> Tensor:
        """Returns the whole sequences, without padding, on every rank.

        It is differentiable. Each rank gets the gradient of the sum of all ranks' losses, so a loss that every rank computes
        from the whole sequences counts `world_size` times.

        Args:
            local: `layout.local_len` tokens along `dim`, in the order of `layout.positions(rank)`.

        Raises:
            ValueError: on every rank: another length along `dim`, a layout for another number of ranks, or ranks whose calls
                differ.

        Example:
            >>> layout = ra.SequenceLayout("zigzag", seq_len=5, world_size=2)
            >>> ra.run_simulated(lambda ring: ring.unshard(ring.shard(torch.arange(5)[None], layout), layout), 2)
            [tensor([[0, 1, 2, 3, 4]]), tensor([[0, 1, 2, 3, 4]])]
        """
        with self.agreement("unshard", by_digest=True) as call:
            self.check_layout(layout)
            check_shard(local, layout, dim)
            call.values = {"the shape of a rank's tensor": tuple(local.shape), "dtype": local.dtype, "dim": dim}
            call.same("whether gradients are recorded", is_recorded(local))
        return whole_of(self.side_by_side(local, dim), layout, dim % local.dim())

    def side_by_side(self, local: Tensor, dim: int) -> Tensor:
        """Returns the tensors of all ranks along `dim`, once the ranks have agreed; it is differentiable."""
        if self.world_size == 1:
            return local
        number = self.calls.next_number() if is_recorded(local) else 0
        whole: Tensor = torch.ops.hf_ring_attention.side_by_side(local, self.number, dim % local.dim(), number)
        return whole

    def gather(self, x: Tensor) -> list[Tensor]:
        """Returns x of every rank, of equal shapes; it is not differentiable."""
        if self.communicator is None or self.world_size == 1:
            return [x]
        facts = {"the shape of a tensor to gather": tuple(x.shape), "its dtype": x.dtype}
        self.calls.compare("gather", lambda: facts)
        return self.communicator.gather(x.contiguous())

    def kernels(self) -> dict[str, Decision]:
        """Returns the kernels that computed this rank's calls, with the reasons, by the kind of call.

        Example:
            >>> ring, x = ra.Ring.alone(kernel="math"), torch.randn(1, 2, 16, 8)
            >>> out = ra.ring_attention(x, x, x, pattern="pyramid:4,2", ring=ring)
            >>> ring.kernels()
            {'tiles of any shape, float32, head sizes 8 and 8': Decision(choice='math', reason='it was asked for', heads=None)}
        """
        return dict(self._kernels)

    def note_kernel(self, call: str, decision: Decision) -> None:
        """Remembers the kernel of a kind of calls; rank 0 logs each kernel once, whatever the number of layers and calls."""
        known = {decision.choice for decision in self._kernels.values()}
        self._kernels[call] = decision
        if self.rank == 0 and decision.choice not in known:
            logger.info("ring of %d: kernel %s, because %s", self.world_size, decision.choice, decision.reason)

    def note_transport(self, decision: Decision) -> None:
        """Logs each transport once, on rank 0, whatever the number of layers and calls."""
        if self.rank == 0 and decision.choice not in self._transports:
            self._transports.add(decision.choice)
            logger.info("ring of %d: transport %s, because %s", self.world_size, decision.choice, decision.reason)

    def traffic(self) -> Traffic:
        """Returns a count of the bytes that this rank has moved since the ring was made or `reset_traffic` was called."""
        return replace(self.counters)

    def reset_traffic(self) -> None:
        """Starts the counters of `traffic` at zero; calls under way go on counting."""
        self.counters.reset()

    def agreement(
        self, call: str, *, everywhere: bool = False, by_digest: bool = False
    ) -> AbstractContextManager[Agreement]:
        """Returns a context for this rank's checks of its part of a call: all ranks go on with equal values, or all raise.

        Args:
            everywhere: whether all processes that train together agree, not only the ranks of this ring.
            by_digest: whether equal ranks exchange 8 bytes, and no messages.
        """
        communicator, who = (self._everyone, "process") if everywhere else (self.communicator, "rank")
        return agreement(communicator, who, call, by_digest)


@lru_cache(maxsize=8)
def ring_alone(kernel: str = "auto") -> Ring:
    """Returns the ring of calls that name none, one for each kernel that they ask for."""
    return Ring.over(None, kernel=kernel)
