"""What an estimate is asked for, and the lines that it is made of, each with its formula and the source of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ...plan.layouts import SequenceLayout

#: How parameters and their state are divided among devices.
Parallel = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]
PARALLELS = get_args(Parallel)

#: The bytes of a number.
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class TrainingSetting:
    """The training step that is estimated.

    Attributes:
        seq_len: tokens of a sequence.
        devices: all of them; those of a ring share sequences, and all of them share parameters as `parallel` says.
        ring_size: the ranks of a ring, which divides `devices`.
        batch_size: the sequences that a ring reads at once.
        dtype: that of activations, and of parameters as layers compute with them.
        master_dtype: that of the parameters, gradients and optimizer state that are kept.
        checkpointing: whether a layer keeps its input alone, and backward computes the rest again.
        offload: whether tensors that the forward pass saves wait in host memory.
        offload_optimizer: whether the optimizer's state is in host memory, and its step is done there.
        accumulate: whether gradients are kept from batch to batch, so that they are all there in the forward pass.
        mlp_tokens_at_once: the tokens that pass an MLP at a time, where another library computes it in slices; 0 for all.
        layout, transport, heads: as for `Ring`.
        device: "cuda", or "cpu", where the optimizer works through one tensor after another, and "host memory" is the same.
        overhead: bytes that the process holds on a device before the model is made.
    """

    seq_len: int
    devices: int
    ring_size: int
    batch_size: int
    dtype: str
    master_dtype: str
    parallel: Parallel
    checkpointing: bool
    offload: bool
    offload_optimizer: bool
    accumulate: bool
    mlp_tokens_at_once: int
    layout: Any
    transport: str
    heads: int | None
    device: str
    overhead: int

    @property
    def local_tokens(self) -> int:
        """The tokens that a rank holds, padding and all rows of the batch included."""
        return self.layout_of_length().local_len * self.batch_size

    def layout_of_length(self) -> SequenceLayout:
        """Returns a layout whose padding is that of the longest one: a zigzag has two pieces a rank."""
        return SequenceLayout("zigzag" if self.ring_size > 1 else "contiguous", self.seq_len, self.ring_size)

    @property
    def number_bytes(self) -> int:
        """The bytes of an activation."""
        return NUMBER_BYTES[self.dtype]

    @property
    def master_bytes(self) -> int:
        """The bytes of a parameter that is kept."""
        return NUMBER_BYTES[self.master_dtype]


@dataclass(frozen=True)
class MemoryPart:
    """A line of an estimate.

    Attributes:
        name: what holds the memory.
        bytes: on each device, or of its host memory where `host` is set.
        formula: how the bytes were computed, with numbers.
        source: where the formula comes from.
    """

    name: str
    bytes: int
    formula: str
    source: str
    host: bool = False


def total_bytes(parts: Sequence[MemoryPart], host: bool = False) -> int:
    """Returns the bytes of the parts on a device, or in its host memory."""
    return sum(part.bytes for part in parts if part.host == host)
