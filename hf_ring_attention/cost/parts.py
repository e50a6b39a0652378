"""The setting of an estimate, and the parts of its answer, each with its formula and the source of the formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..plan.branches import check_choice, check_count

#: How parameters and their state are divided among devices.
Parallel = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]
PARALLELS = get_args(Parallel)
#: The bytes of a number.
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_LEAST = {"seq_len": 1, "devices": 1, "ring_size": 1, "batch_size": 1, "mlp_tokens_at_once": 0, "overhead": 0}
_CHOICES = {name: tuple(NUMBER_BYTES) for name in ("dtype", "master_dtype")}
_CHOICES |= {"parallel": PARALLELS, "device": ("cuda", "cpu")}


@dataclass(frozen=True)
class TrainingSetting:
    """The training step that is estimated; `estimate` describes the arguments of the same names."""

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

    def check(self) -> None:
        """Raises a ValueError for numbers that do not fit together, and for unknown words."""
        for name, least in _LEAST.items():
            check_count("estimate", name, getattr(self, name), least)
        for name, choices in _CHOICES.items():
            check_choice("estimate", name, getattr(self, name), choices)
        if self.zero and self.device == "cpu":
            raise ValueError(
                "estimate: DeepSpeed's memory on a CPU is not known: use device='cuda', or parallel='fsdp2'"
            )
        rings, left = divmod(self.devices, self.ring_size)
        if left:
            raise ValueError(
                f"estimate: {self.devices} devices do not divide into rings of {self.ring_size}: {self.devices} = {rings} * "
                f"{self.ring_size} + {left}: take a divisor as ring_size"
            )

    @property
    def local_tokens(self) -> int:
        """The tokens that a rank holds, with padding, in all rows of the batch."""
        pieces = 2 if self.ring_size > 1 else 1  # A zigzag has two pieces a rank, and the most padding of all layouts.
        return -(-self.seq_len // (pieces * self.ring_size)) * pieces * self.batch_size

    @property
    def number_bytes(self) -> int:
        """The bytes of an activation."""
        return NUMBER_BYTES[self.dtype]

    @property
    def master_bytes(self) -> int:
        """The bytes of a parameter that is kept."""
        return NUMBER_BYTES[self.master_dtype]

    @property
    def zero(self) -> bool:
        """Whether DeepSpeed's ZeRO divides the optimizer, which keeps float32 copies of parameters."""
        return self.parallel.startswith("zero")


@dataclass(frozen=True)
class MemoryPart:
    """A line of an estimate: its bytes on each device, or in `host` memory, by a formula with numbers that has a source."""

    name: str
    bytes: int
    formula: str
    source: str
    host: bool = False


def total_bytes(parts: Sequence[MemoryPart], host: bool = False) -> int:
    """Returns the bytes of the parts on a device, or in its host memory."""
    return sum(part.bytes for part in parts if part.host == host)
