"""`Ring`: the ranks that share a sequence, its division among them, their transports, and their agreements."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..plan.choices import Decision, TransportKind, check_choices, decide_layout, decide_transport
from ..plan.joins import Joining
from ..plan.layouts import LayoutKind, SequenceLayout
from ..plan.patterns import Pattern, as_pattern
from ..plan.problem import Problem, RingSettings, documents_of
from ..plan.traffic import RowBytes
from ..transport.agreement import Agreement, agree, agreement
from ..transport.communicators import Communicator
from ..transport.heads import HeadsTransport
from ..transport.table import TRANSPORTS
from ..transport.transports import Traffic, Transport
from .bindings import Bindings
from .calls import Calls
from .mesh import communicator_of, device_of, mesh_of, ranks_of
from .planner import Planner
from .shards import SideBySide, check_shard, shard_of, whole_of

logger = logging.getLogger(__name__)


class Ring:
    """A group of ranks over which sequences are sharded.

    Args:
        group: a torch.distributed process group; a torch DeviceMesh of one dimension, or of several of which one is called
            "cp" or "ring"; None is the whole world, or this process alone where torch.distributed is not initialized.
        layout: "contiguous", "zigzag", "documents", whose pieces are made for the documents of each batch, or "auto": the
            first of these that gives the ranks about equal work.
        transport: how keys and values reach other ranks: "ring" (neighbour to neighbour, two payloads held), "collective"
            (one exchange of the rows needed), "heads" (each rank computes some heads of all tokens, which it exchanges for its
            tokens of all heads, so that all work alike), "local" (one rank), or "auto", which chooses as `decide` says.
        heads: with transport="heads", how many neighbouring ranks exchange heads, where that are not all: keys and values
            then travel round rings of the ranks that have the same heads.

    Raises:
        ValueError: an unknown name, a transport that cannot serve this many ranks, a group or mesh this rank is not in, a
            mesh without such a dimension, or no group where a launcher has started several processes (the environment's
            WORLD_SIZE): `Ring.alone()` is a ring of this process all the same.

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
    ) -> None:
        self._set_up(communicator_of(group), layout, transport, heads)

    @classmethod
    def alone(cls) -> Ring:
        """Makes a ring of this process only, whatever the world is."""
        ring = cls.__new__(cls)
        ring._set_up(None, "auto", "auto")
        return ring

    @classmethod
    def over(
        cls, communicator: Communicator, layout: str = "auto", transport: str = "auto", heads: int | None = None
    ) -> Ring:
        """Makes the ring of a rank that reaches the others by `communicator`."""
        ring = cls.__new__(cls)
        ring._set_up(communicator, layout, transport, heads)
        return ring

    @classmethod
    def from_accelerator(
        cls,
        accelerator: Any,
        size: int | None = None,
        *,
        layout: LayoutKind | Literal["auto"] = "auto",
        transport: TransportKind = "auto",
        heads: int | None = None,
    ) -> Ring:
        """Makes the ring of this process on a mesh ("dp_replicate", "cp") of all processes of an `accelerate.Accelerator`.

        From then on the accelerator counts rings, since the ranks of a ring are one data-parallel replica: `prepare` gives
        them the same batches and steps schedules once for each ring, and `num_processes`, `process_index`, `gather`,
        `gather_for_metrics` and `reduce` take each ring once. `accelerator.state` has the numbers of processes.

        Ranks of a ring are neighbours in the world, so that they share a node where they can. `dp_rank` is the number
        of the ring among the `dp_size` rings, which read different rows; DDP and FSDP go over the whole world.

        With `ParallelismConfig(cp_size=N)`, rings are the dimension "cp" of the accelerator's own device mesh. From then on
        its config has cp_size=1, and dp_shard_size=N times what it was: FSDP shards the model alike, while Accelerate's own
        context parallelism takes no part, which would shard each sequence once more.

        Args:
            size: ranks of a ring; it divides the number of processes. None for cp_size; it is refused without one.
            layout, transport, heads: as for `Ring`; ranks that exchange heads are neighbours, too.

        Raises:
            ValueError: on every process: sizes that differ or do not divide the number of processes; an Accelerator with
                sp_size or tp_size, one that has prepared a model with cp_size, or whose mesh has other dimensions than
                those of data before "cp"; or one that hands out its batches from one process.
        """
        mesh = mesh_of(accelerator, size)
        ring = cls(mesh.group, layout=layout, transport=transport, heads=heads)
        ring.dp_rank, ring.dp_size = mesh.dp_rank, mesh.dp_size
        ring._everyone, ring.device = mesh.everyone, accelerator.device
        ring._accelerator = weakref.ref(accelerator)
        from ..training.accelerator import count_rings  # Whoever has an accelerator has loaded Accelerate.

        count_rings(accelerator, ring)
        return ring

    def _set_up(self, communicator: Communicator | None, layout: str, transport: str, heads: int | None = None) -> None:
        self.rank = 0 if communicator is None else communicator.rank
        self.world_size = 1 if communicator is None else communicator.world_size
        check_choices(layout, transport, self.world_size, heads)
        if transport in ("ring", "collective", "heads") and communicator is None:
            raise ValueError(f"transport={transport!r} needs torch.distributed to be initialized")
        self.dp_rank, self.dp_size = 0, 1
        self.layout, self.transport = layout, transport
        #: The ways of rows round this ring; they are the same on all ranks.
        self.settings = RingSettings(heads=heads)
        self._communicator = communicator
        #: Reaches all processes that train together: those of the ring, or of the accelerator if there is one.
        self._everyone = communicator
        self.device = device_of(communicator)
        self.global_ranks = ranks_of(communicator)
        self._accelerator: Callable[[], Any] = lambda: None
        #: Row numbers on devices, which all layers and steps share.
        self.bindings = Bindings()
        self.planner = Planner(self.rank, self.bindings)
        self._traffic = Traffic()
        self._calls = Calls(communicator)
        self._logged: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ring:
        return self  # a process group cannot be copied, and a copied model belongs to the same ranks

    def __repr__(self) -> str:
        return f"Ring(rank {self.rank} of {self.world_size}, layout={self.layout!r}, transport={self.transport!r})"

    def decide(self, problem: Problem, sizes: RowBytes) -> Decision:
        """Returns the transport of a call, with the reason: the one that was asked for, or that of `choose_transport`."""
        return decide_transport(self.transport, problem, sizes)

    def transport_for(
        self, problem: Problem, sizes: RowBytes, device: torch.device, joining: Joining | None
    ) -> Transport | HeadsTransport:
        """Returns the transport of a call, by the choice of `decide`, with the call's row numbers on the device."""
        start = time.perf_counter()
        decision, binding = self.planner.plan(self.decide, problem, sizes, device, joining)
        self._traffic.planned_seconds += time.perf_counter() - start
        self.planner.learn(problem, sizes, device, joining, self.transport)
        if self.rank == 0 and decision.choice not in self._logged:  # once, whatever the number of layers and calls
            self._logged.add(decision.choice)
            logger.info("ring of %d: transport %s, because %s", self.world_size, decision.choice, decision.reason)
        made: Transport | HeadsTransport = TRANSPORTS[decision.choice].make(binding, self._communicator, self._traffic)
        return made

    def layout_for(
        self, seq_len: int, pattern: Pattern | str, documents: Sequence[Sequence[tuple[int, int]]] | None = None
    ) -> SequenceLayout:
        """Returns the division of sequences of `seq_len` tokens under `pattern` among the ranks.

        Args:
            documents: those of each batch row, as for `ring_attention`; None for one document a row. A layout of documents,
                asked for or chosen by "auto", is made for them, and serves no other batch.

        Raises:
            ValueError: documents that are empty, overlap or leave the sequence.

        Example:
            >>> [ring, _] = ra.simulate(2)  # in zigzag, rank 1 would do 1.3 times the mean work
            >>> layout = ring.layout_for(16, "exact", documents=[[(0, 8), (8, 10), (10, 12), (12, 14), (14, 16)]])
            >>> layout.kind, layout.positions(0), layout.positions(1)
            ('documents', [0, 1, 2, 3, 4, 5, 8, 9], [6, 7, 10, 11, 12, 13, 14, 15])
        """
        pattern, rows = as_pattern(pattern, "layout_for"), documents_of(documents, seq_len, "layout_for")
        asked = (self.transport, self.settings.heads)
        return decide_layout(self.layout, seq_len, self.world_size, pattern, rows, *asked)[0]

    @property
    def accelerator(self) -> Any:
        """The accelerator of `from_accelerator`; None for other rings, and where it is gone."""
        return self._accelerator()

    def prepare_data_loader(self, loader: Any, *, pattern: Pattern | str | None = None) -> Any:
        """Returns what `accelerator.prepare(loader)` returns, whose rows the loader's workers have cut.

        `model(**batch)` returns the same for such a batch as for a whole one. It pays for long rows: each process moves only
        its part to its device, workers cut, and attention over the next batch is planned while the loop computes.

        Args:
            loader: a torch DataLoader, of batches that are mappings with input_ids [B, n].
            pattern: the pattern that decides the layout; None for that of the model that was patched with this ring.

        Raises:
            ValueError: a ring without an accelerator, or a loader that was prepared already.
        """
        # The one import from a folder above: Accelerate and datasets are loaded by those alone who load data.
        from ..training.loader import prepare_data_loader

        return prepare_data_loader(loader, self, pattern)

    def check_layout(self, layout: SequenceLayout) -> None:
        """Raises ValueError for what is no layout, or one for another number of ranks."""
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
        """
        self.check_layout(layout)
        return shard_of(tensor, layout, self.rank, dim, fill)

    def unshard(self, local: Tensor, layout: SequenceLayout, dim: int = 1) -> Tensor:
        """Returns the whole sequences, without padding, on every rank.

        It is differentiable. The gradient of a rank's part is that of the sum of all ranks' losses, so a loss that every
        rank computes from the whole sequences counts `world_size` times.

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
            self._describe(call, local, dim)
        return whole_of(self.side_by_side(local, dim), layout, dim % local.dim())

    def first_token(self, local: Tensor, layout: SequenceLayout | None = None) -> Tensor:
        """Returns the first token of whole sequences, [B, 1, ...], from shards [B, n, ...]; it is differentiable.

        Args:
            layout: that of the shards; None where rank 0 holds the first token of every row.
        """
        first = local[:, :1]
        with self.agreement("first_token", by_digest=True) as call:
            self._describe(call, first, 1)
        of_ranks = self.side_by_side(first, 1)
        if layout is None or not layout.rows:
            return of_ranks[:, :1]
        holders = [next((r for r, own in enumerate(row) if own[0].start == 0), 0) for row in layout.rows]
        return torch.stack([of_ranks[row, rank] for row, rank in enumerate(holders)]).unsqueeze(1)

    def _describe(self, call: Agreement, local: Tensor, dim: int) -> None:
        """Sets the values that all ranks' tensors must have in common to be gathered."""
        call.same("the shape of a rank's tensor", tuple(local.shape))
        call.same("dtype", local.dtype)
        call.same("dim", dim)
        call.same("whether gradients are recorded", torch.is_grad_enabled() and local.requires_grad)

    def side_by_side(self, local: Tensor, dim: int) -> Tensor:
        """Returns the tensors of all ranks along `dim`, once the ranks have agreed; it is differentiable."""
        if self.world_size == 1:
            return local
        recorded = torch.is_grad_enabled() and local.requires_grad
        before_backward = self.backward_check() if recorded else None
        whole: Tensor = SideBySide.apply(local, self._communicator, self._traffic, dim % local.dim(), before_backward)
        return whole

    def gather(self, x: Tensor) -> list[Tensor]:
        """Returns x of every rank, of equal shapes; it is not differentiable."""
        if self.world_size == 1:
            return [x]
        assert self._communicator is not None
        return self._communicator.gather(x.contiguous())

    def traffic(self) -> Traffic:
        """Returns what this rank's transports moved since the ring was made or `reset_traffic` was called."""
        return replace(self._traffic)

    def reset_traffic(self) -> None:
        """Starts the counters of `traffic` at zero; calls under way go on counting."""
        self._traffic.reset()

    def agree(
        self, call: str, values: Mapping[str, Any], error: Exception | None = None, tell: Any = None
    ) -> list[Any]:
        """Checks that all ranks make the same call with equal values and without an error.

        Args:
            call: what this rank is about to do.
            values: the values that must be equal, by the names that an error gives them.
            tell: this rank's message to the others, which may differ from theirs.

        Returns:
            The message of each rank.

        Raises:
            ValueError: on every rank, if one came with an error or the ranks differ; it says which rank has which value.
        """
        return agree(self._communicator, "rank", call, values, error, tell)

    def agree_everywhere(
        self, call: str, values: Mapping[str, Any], error: BaseException | None = None, tell: Any = None
    ) -> list[Any]:
        """Does what `agree` does among all processes that train together; those of a ring are next to each other."""
        return agree(self._everyone, "process", call, values, error, tell)

    def agreement(
        self, call: str, *, everywhere: bool = False, by_digest: bool = False
    ) -> AbstractContextManager[Agreement]:
        """Returns a context in which this rank checks its part of a call: all ranks go on with equal ones, or all raise.

        `transport.agreement.agreement` has an example.

        Args:
            call: what this rank is about to do.
            everywhere: whether all processes agree that train together.
            by_digest: whether equal ranks exchange 8 bytes, and no messages: for calls that every layer makes.
        """
        if by_digest:
            return agreement(lambda values, error, _: self._calls.agree(call, values, error))
        return agreement(partial(self.agree_everywhere if everywhere else self.agree, call))

    def digest(self, call: str, values: Mapping[str, Any]) -> int:
        """Returns the number that stands for a call and its values when ranks compare them."""
        return self._calls.digest(call, values)

    def compare(self, call: str, values: Mapping[str, Any], digest: int) -> None:
        """Checks that all ranks make this call, whose digest is known.

        Raises:
            ValueError: on every rank, if the ranks differ.
        """
        agree(self._communicator, "rank", call, values, None, digest=digest)

    def backward_check(self) -> Callable[[], None] | None:
        """Returns what the backward pass of a call does first, as `Calls.backward_check` says."""
        return self._calls.backward_check()
