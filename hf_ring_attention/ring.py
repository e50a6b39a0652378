"""`Ring`: the ranks that share a sequence, how they divide it, how rows travel, and what they must agree on."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .bindings import bind_collective, bind_own, bind_ring
from .communicators import Communicator, Message, ProcessGroupCommunicator, agree
from .layouts import LayoutKind, SequenceLayout
from .loaders import RingDataLoader, prepare_data_loader, wrong_accelerator, wrong_schedules
from .patterns import Pattern
from .plans import Problem
from .routes import Sizes
from .selection import Decision, check_choices, choose_layout, choose_transport
from .transports import CollectiveTransport, LocalTransport, RingTransport, Traffic, Transport

logger = logging.getLogger(__name__)

#: Ranks that are threads of one process plan in turn: the first makes what they share.
_PLANNING = threading.Lock()


class Ring:
    """A group of ranks over which sequences are sharded.

    Args:
        group: a torch.distributed process group; None is the whole world, or this process alone where
            torch.distributed is not initialized.
        layout: "contiguous", "zigzag", or "auto": zigzag where contiguous pieces would leave ranks with unequal work.
        transport: how keys and values reach other ranks: "ring" (neighbour to neighbour, two payloads held), "collective"
            (one exchange of the rows needed), "local" (one rank), or "auto": chosen call by call, see `decide`.

    Raises:
        ValueError: an unknown name, a transport that cannot serve this many ranks, a group this rank is not in, or no group
            where a launcher has started several processes (the environment's WORLD_SIZE): `Ring.alone()` is a ring of
            this process all the same.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        layout: LayoutKind | Literal["auto"] = "auto",
        transport: Literal["auto", "ring", "collective", "local"] = "auto",
    ) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None:
            _check_alone("Ring", "call torch.distributed.init_process_group, or make the Accelerator, before the ring")
        if group is not None and dist.get_rank(group) < 0:
            raise ValueError(f"Ring: rank {dist.get_rank()} of the world is not in the group it was given")
        self._set_up(None if group is None else ProcessGroupCommunicator(group), layout, transport)

    @classmethod
    def alone(cls) -> Ring:
        """A ring of this process only, whatever the world is."""
        ring = cls.__new__(cls)
        ring._set_up(None, "auto", "auto")
        return ring

    @classmethod
    def over(cls, communicator: Communicator, layout: str = "auto", transport: str = "auto") -> Ring:
        """The ring of a rank that reaches the others by `communicator`."""
        ring = cls.__new__(cls)
        ring._set_up(communicator, layout, transport)
        return ring

    @classmethod
    def from_accelerator(
        cls,
        accelerator: Any,
        size: int | None,
        *,
        layout: LayoutKind | Literal["auto"] = "auto",
        transport: Literal["auto", "ring", "collective", "local"] = "auto",
    ) -> Ring:
        """The ring of this process on a mesh ("dp", "ring") of all processes of an `accelerate.Accelerator`.

        Ranks of a ring are neighbours in the world, so that they share a node where they can. `dp_rank` is the number
        of the ring among the `dp_size` rings, which read different rows; DDP and FSDP go over the whole world.

        Args:
            size: ranks of a ring; it divides the number of processes. None is refused: nothing tells the size.

        Raises:
            ValueError: on every process: sizes that differ or do not divide the number of processes, or an Accelerator
                that shards sequences itself, or hands out its batches from one process.
        """
        world_size = accelerator.num_processes
        if world_size == 1:
            _check_alone(
                "Ring.from_accelerator",
                "on a CPU set ACCELERATE_USE_CPU=true in the environment of the launcher, and start it with accelerate launch "
                "--multi_gpu --num_processes N, or torchrun --nproc-per-node N",
            )
        everyone = None
        if dist.is_available() and dist.is_initialized():
            everyone = ProcessGroupCommunicator(dist.distributed_c10d._get_default_group())
        agree(everyone, "process", {"the size of rings": size}, wrong_accelerator(accelerator, size))
        assert size is not None  # it was refused
        if everyone is None:
            ring = cls(None, layout=layout, transport=transport)
        else:
            mesh = init_device_mesh(accelerator.device.type, (world_size // size, size), mesh_dim_names=("dp", "ring"))
            ring = cls(mesh.get_group("ring"), layout=layout, transport=transport)
            ring.dp_rank, ring.dp_size = mesh.get_local_rank("dp"), world_size // size
        ring._everyone, ring.device = everyone, accelerator.device
        ring._accelerator = weakref.ref(accelerator)
        ring._data_seed = accelerator.dataloader_config.data_seed
        return ring

    def _set_up(self, communicator: Communicator | None, layout: str, transport: str) -> None:
        self.rank = 0 if communicator is None else communicator.rank
        self.world_size = 1 if communicator is None else communicator.world_size
        check_choices(layout, transport, self.world_size)
        if transport in ("ring", "collective") and communicator is None:
            raise ValueError(f"transport={transport!r} needs torch.distributed to be initialized")
        self.dp_rank, self.dp_size = 0, 1
        self.layout = layout
        self.transport = transport
        self._communicator = communicator
        #: All processes that train together; those of the ring, where nothing tells of more.
        self._everyone = communicator
        self.device = _device_of(communicator)
        self._data_seed: int | None = None
        self._accelerator: Callable[[], Any] = lambda: None
        self._served: weakref.WeakKeyDictionary[Any, tuple[Callable[[Any], Any], ...]] = weakref.WeakKeyDictionary()
        self._traffic = Traffic()
        self._digests: dict[Any, int] = {}
        #: Calls whose gradients were recorded; equal on all ranks, which compare their calls.
        self._calls = 0
        #: Which of them ran its backward pass last; None where a call was recorded since.
        self._last_backward: int | None = None
        self._logged: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ring:
        return self  # a process group cannot be copied, and a copied model belongs to the same ranks

    def __repr__(self) -> str:
        return f"Ring(rank {self.rank} of {self.world_size}, layout={self.layout!r}, transport={self.transport!r})"

    def decide(self, problem: Problem, sizes: Sizes) -> Decision:
        """The transport of a call, and why: what was asked for, or `choose_transport`'s choice."""
        if self.transport != "auto":
            return Decision(self.transport, "it was asked for")
        return choose_transport(problem, sizes)

    def _transport_for(self, problem: Problem, sizes: Sizes, device: torch.device) -> Transport:
        with _PLANNING:
            decision = self.decide(problem, sizes)
            binding: Any = {"local": bind_own, "collective": bind_collective, "ring": bind_ring}[decision.choice](
                problem, self.rank, device
            )
        if self.rank == 0 and decision.choice not in self._logged:  # once, whatever the number of layers and calls
            self._logged.add(decision.choice)
            logger.info("ring of %d: transport %s, because %s", self.world_size, decision.choice, decision.reason)
        if decision.choice == "local":
            return LocalTransport(binding)
        assert self._communicator is not None
        made = CollectiveTransport if decision.choice == "collective" else RingTransport
        return made(binding, self._communicator, self._traffic)

    def layout_for(self, seq_len: int, pattern: Pattern) -> SequenceLayout:
        """How a row of `seq_len` tokens under `pattern` is divided among the ranks."""
        kind = self.layout if self.layout != "auto" else choose_layout(seq_len, self.world_size, pattern).choice
        return SequenceLayout(kind, seq_len, self.world_size)  # type: ignore[arg-type]

    def serve(
        self,
        model: Any,
        rule: Callable[[Any], tuple[Pattern, int]],
        untrainable: Callable[[Any], ValueError | None],
    ) -> None:
        """Remembers a model whose rows this ring divides.

        Args:
            rule: gives the pattern that decides the model's layouts, and the position id of a row's first token.
            untrainable: gives the reason why the model cannot be trained, if there is one.
        """
        self._served[model] = rule, untrainable

    def forget(self, model: Any) -> None:
        """Remembers a model no longer."""
        self._served.pop(model, None)

    def untrainable(self) -> ValueError | None:
        """Why a model that was patched with this ring cannot be trained."""
        errors = (untrainable(model) for model, (_, untrainable) in list(self._served.items()))
        return next((error for error in errors if error is not None), None)

    def check_schedules(self) -> None:
        """Refuses schedules that the accelerator of `from_accelerator` would step once for each process.

        Raises:
            ValueError: a schedule that was prepared by it, where rings have several ranks.
        """
        wrong = wrong_schedules(self._accelerator(), self.world_size)
        if wrong is not None:
            raise wrong

    def rows_rule(self, seq_len: int, pattern: Pattern | None = None) -> tuple[SequenceLayout, int]:
        """The layout of rows of `seq_len` tokens and the position id of their first token.

        Args:
            pattern: None for that of the model that was patched with this ring.

        Raises:
            ValueError: no pattern where the layout depends on one, or models that differ.
        """
        rules = {rule(model) for model, (rule, _) in list(self._served.items())}
        if pattern is not None:
            rules = {(pattern, first) for _, first in rules} or {(pattern, 0)}
        if not rules and (self.layout != "auto" or self.world_size == 1):
            rules = {(Pattern.exact(), 0)}
        if not rules:
            raise ValueError(
                "the layout of rows depends on the model's pattern, and no model was patched with this ring: call "
                "ra.patch_model(model, ring=ring) first, or pass the pattern, or make the ring with layout='contiguous' "
                "or 'zigzag'"
            )
        found = {(self.layout_for(seq_len, pattern), first) for pattern, first in rules}
        if len(found) > 1:
            raise ValueError(
                f"models of one ring divide rows of {seq_len} tokens in different ways: {sorted(map(str, found))}"
            )
        return found.pop()

    def prepare_data_loader(self, loader: Any, *, pattern: Pattern | None = None) -> RingDataLoader:
        """A loader of this rank's shards, from one of whole rows; instead of `accelerator.prepare(loader)`.

        All ranks of a ring read the same rows, which each batch proves by a checksum, and other rings other rows. What a
        shard has is said at `ra.shard_batch`. Batches that are left over at the end go to some rings, and the others
        take part with nothing but padding, so that no row is read twice; `drop_last=True` drops them.

        Each pass is an epoch, and the random numbers of a batch follow from the loader's seed (that of its generator, else
        the Accelerator's data_seed, else torch.initial_seed()), the epoch and the number of the batch: those of its order,
        and those that its dataset and collator draw, in whichever process. So a state of the loader goes on exactly.

        Args:
            loader: a torch DataLoader over a dataset or an iterable one, the same on every process; its batch size is
                that of a ring. With a collator of this package, documents that are longer than its rows are found here if
                the dataset is a list or a `datasets.Dataset` without a transform (or torch's Subset or ConcatDataset of
                these), which tell their lengths at once; others are found when they are read.
            pattern: see `shard_batch`.

        Raises:
            ValueError: on every process: a loader that was prepared already, divides its rows itself or differs between
                processes, or documents that are too long; or a model of this ring with attention dropout.
        """
        return prepare_data_loader(loader, self, pattern)

    def _check_layout(self, layout: SequenceLayout) -> None:
        if not isinstance(layout, SequenceLayout):
            raise ValueError(f"layout must be a SequenceLayout, such as ring.layout_for gives, got {layout!r}")
        if layout.world_size != self.world_size:
            raise ValueError(f"the layout is for {layout.world_size} ranks, the ring has {self.world_size}")

    def shard(self, tensor: Tensor, layout: SequenceLayout, dim: int = 1, fill: float = 0) -> Tensor:
        """This rank's part of a whole row.

        Args:
            tensor: `layout.seq_len` tokens along `dim`.
            fill: value of the padding.

        Returns:
            `layout.local_len` tokens along `dim`, in the order of `layout.positions(rank)`.

        Raises:
            ValueError: another length along `dim`, or a layout for another number of ranks.
        """
        self._check_layout(layout)
        if tensor.shape[dim] != layout.seq_len:
            raise ValueError(
                f"shard: expected {layout.seq_len} tokens along dim {dim}, got {tensor.shape[dim]} in {tuple(tensor.shape)}"
            )
        padding = layout.padded_len - layout.seq_len
        if padding:
            shape = list(tensor.shape)
            shape[dim] = padding
            tensor = torch.cat([tensor, tensor.new_full(shape, fill)], dim)
        return torch.cat([tensor.narrow(dim, p.start, len(p)) for p in layout.pieces(self.rank)], dim)

    def unshard(self, local: Tensor, layout: SequenceLayout, dim: int = 1) -> Tensor:
        """The whole row, without its padding, on every rank.

        Differentiable: the gradient of a rank's part is that of the sum of all ranks' losses, so a loss that every
        rank computes from the whole row counts `world_size` times.

        Args:
            local: `layout.local_len` tokens along `dim`, in the order of `layout.positions(rank)`.

        Raises:
            ValueError: on every rank: another length along `dim`, a layout for another number of ranks, or ranks whose calls
                differ.
        """
        error: ValueError | None = None
        try:
            self._check_layout(layout)
            if local.shape[dim] != layout.local_len:
                error = ValueError(
                    f"unshard: expected {layout.local_len} tokens along dim {dim}, got {local.shape[dim]} in "
                    f"{tuple(local.shape)}"
                )
        except ValueError as refused:
            error = refused
        whole = self._gathered("unshard", local, dim, error)
        dim %= local.dim()
        parts = {}
        for rank in range(self.world_size):
            offset = rank * layout.local_len
            for piece in layout.pieces(rank):
                parts[piece.start] = whole.narrow(dim, offset, len(piece))
                offset += len(piece)
        return torch.cat([parts[start] for start in sorted(parts)], dim).narrow(dim, 0, layout.seq_len)

    def first_token(self, local: Tensor) -> Tensor:
        """[B, 1, ...] the first token of whole rows, which rank 0 holds, of shards [B, n, ...]; differentiable."""
        return self._gathered("first_token", local[:, :1], 1)[:, :1]

    def _gathered(self, call: str, local: Tensor, dim: int, error: ValueError | None = None) -> Tensor:
        """The tensors of all ranks side by side, once all ranks have come with the same call."""
        if self.world_size == 1:
            if error is not None:
                raise error
            return local
        recorded = torch.is_grad_enabled() and local.requires_grad
        values = {
            "the call": call,
            "the shape of a rank's tensor": tuple(local.shape),
            "dtype": local.dtype,
            "dim": dim,
            "whether gradients are recorded": recorded,
        }
        self.agree_cheaply(values, error, local.device)
        before_backward = self.backward_check(local.device) if recorded else None
        whole: Tensor = _Gather.apply(local, self._communicator, dim % local.dim(), before_backward)
        return whole

    def gather(self, x: Tensor) -> list[Tensor]:
        """x of every rank, of equal shapes; not differentiable."""
        if self.world_size == 1:
            return [x]
        assert self._communicator is not None
        return self._communicator.gather(x.contiguous())

    def traffic(self) -> Traffic:
        """What this rank's transports moved since the ring was made or `reset_traffic` was called."""
        return replace(self._traffic)

    def reset_traffic(self) -> None:
        """Starts the counters of `traffic` at zero; calls under way go on counting."""
        self._traffic.reset()

    def agree(self, values: Mapping[str, Any], error: Exception | None = None, tell: Any = None) -> list[Any]:
        """Checks that all ranks came with equal values and without an error; one small exchange.

        Args:
            values: what must be equal, by the name an error gives it.
            tell: something for the other ranks, which may differ.

        Returns:
            What each rank tells.

        Raises:
            ValueError: on every rank, if a rank came with an error or the ranks differ; says which rank has which value.
        """
        return agree(self._communicator, "rank", values, error, tell)

    def agree_everywhere(
        self, values: Mapping[str, Any], error: BaseException | None = None, tell: Any = None
    ) -> list[Any]:
        """`agree`, among all processes that train together: those of other rings too."""
        return agree(self._everyone, "process", values, error, tell)

    def gather_everywhere(self, number: int) -> list[int]:
        """A number of every process that trains with this one; each ring's are next to each other."""
        if self._everyone is None:
            return [number]
        own = torch.tensor([number], device=self.device)
        return [int(theirs) for theirs in torch.cat(self._everyone.gather(own)).tolist()]

    def agree_cheaply(self, values: Mapping[str, Any], error: Exception | None, device: torch.device) -> None:
        """`agree`, at the price of 8 bytes a rank on the CPU, and of nothing on other devices once values were agreed on.

        On the CPU every call compares digests first: a rank that makes a call it has made before then learns that
        another one came with something else, where it would have waited for rows that never come. On other devices the
        comparison would have to wait for the device, so it is made once for equal values.
        """
        key = tuple(values.items())
        if device.type == "cpu":
            digest = self._digests.get(key)
            if digest is None:
                digest = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little", signed=True)
                self._remember(key, digest)
            self._compare(0 if error is not None else digest, values, error)
        elif error is not None or key not in self._digests:
            self.agree(values, error)
            self._remember(key, 0)

    def _remember(self, key: Any, digest: int) -> None:
        if len(self._digests) >= 4096:  # packed rows differ from batch to batch
            self._digests.clear()
        self._digests[key] = digest

    def _compare(self, number: int, values: Mapping[str, Any], error: Exception | None = None) -> None:
        """Goes on if all ranks came with this number and without an error; otherwise `agree` says what differs."""
        others = self._from_others(torch.tensor([number]))
        if error is not None or any(theirs != number for theirs in others):
            self.agree(values, error)

    def backward_check(self, device: torch.device) -> Callable[[], None] | None:
        """For a call that all ranks agreed on: what its backward pass does first, so that it meets the same call's.

        Two backward passes in another order on another rank would exchange each other's gradients. On the CPU ranks
        compare the number of the call, 8 bytes each. On other devices a comparison has to wait for the device, so ranks
        compare each step from one backward pass to the next only once, by how many calls the two lie back: nothing in a
        training loop after its first step. A rank that leaves that order later compares alone, and ends by the process
        group's timeout.
        """
        if self.world_size == 1:
            return None
        self._calls += 1
        self._last_backward = None
        return partial(self._check_backward, self._calls, device)

    def _check_backward(self, number: int, device: torch.device) -> None:
        if device.type == "cpu":
            self._compare(number, {"the call": f"the backward pass of call {number}, of those that recorded gradients"})
            return
        last = self._last_backward
        before = "a forward pass" if last is None else f"that of the call {self._calls - last} before it"
        self._last_backward = number
        call = f"the backward pass of the call {self._calls - number} before the last, after {before}"
        self.agree_cheaply({"the call": call}, None, device)

    def _from_others(self, own: Tensor) -> list[int]:
        """A number of every rank, from each directly: a rank that does not come is known by name."""
        assert self._communicator is not None
        theirs = [torch.empty_like(own) if rank != self.rank else own for rank in range(self.world_size)]
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        try:
            self._communicator.exchange(
                [Message(rank, own) for rank in others], [Message(rank, theirs[rank]) for rank in others]
            ).wait()
        except RuntimeError as error:
            raise RuntimeError(f"comparing the calls of all ranks, on rank {self.rank}: {error}") from error
        return [int(number) for number in theirs]


def _check_alone(who: str, remedy: str) -> None:
    """Refuses a ring of one where a launcher has started several processes: each would read everything by itself."""
    started = os.environ.get("WORLD_SIZE", "1")
    if started.isdigit() and int(started) > 1:
        raise ValueError(
            f"{who}: WORLD_SIZE={started} in the environment says that {started} processes were started, and here each is by "
            f"itself, so it would be rank 0 of a ring of 1 and read everything: {remedy}; a ring of this process alone is "
            f"Ring.alone()"
        )


def _device_of(communicator: Communicator | None) -> torch.device:
    """Where tensors must be that the communicator's group gathers."""
    group = getattr(communicator, "group", None)
    nccl = group is not None and "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


class _Gather(torch.autograd.Function):
    """Tensors of all ranks, side by side along `dim`; gradients are summed over ranks and taken home."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, communicator: Communicator, dim: int, before_backward: Callable[[], None] | None
    ) -> Tensor:
        ctx.call = (communicator, dim, local.shape[dim], before_backward)
        return torch.cat(communicator.gather(local.contiguous()), dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        communicator, dim, length, before_backward = ctx.call
        if before_backward is not None:
            before_backward()
        grad = grad.contiguous().clone()
        communicator.sum_(grad)
        return grad.narrow(dim, communicator.rank * length, length).contiguous(), None, None, None
