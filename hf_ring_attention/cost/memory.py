"""The setting and the formulas of an estimate: memory that grows with the sequence, and memory that does not.

Activations are measured (activations.py); what only a kernel or a transport knows is here. ZeRO (arXiv 1910.02054, section 5)
divides the optimizer's state, from stage 2 gradients, in stage 3 (and FSDP) parameters. Implementations also hold buckets,
float32 copies, and the layers that they gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..plan.branches import check_choice, check_count

if TYPE_CHECKING:  # The command line reads its choices here, and loads Transformers later.
    from ..plan.patterns import Pattern
    from .layers import ModelAttention
    from .shape import ModelShape

#: How parameters and their state are divided among devices.
Parallel = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]
PARALLELS = get_args(Parallel)
#: The bytes of a number.
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

#: The numbers of DeepSpeed's reduce bucket unless its configuration sets `reduce_bucket_size`.
REDUCE_BUCKET = 500_000_000
#: FlashAttention-2 pads the rows of a sequence to a multiple of this number.
ROWS_OF_A_TILE = 128
#: Adam's two moments (arXiv 1412.6980).
MOMENTS = 2

_LEAST = {"seq_len": 1, "devices": 1, "ring_size": 1, "batch_size": 1}
_LEAST |= {"layer_tokens_at_once": 0}
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
    keep_attention: bool
    offload: bool
    offload_optimizer: bool
    accumulate: bool
    layer_tokens_at_once: int
    layout: Any
    transport: str
    heads: int | None
    device: str

    def check(self) -> None:
        """Raises a ValueError for numbers that do not fit together, and for unknown words."""
        for name, least in _LEAST.items():
            check_count("estimate", name, getattr(self, name), least)
        for name, choices in _CHOICES.items():
            check_choice("estimate", name, getattr(self, name), choices)
        if self.zero and self.device == "cpu":
            raise ValueError("estimate: DeepSpeed's memory on a CPU is unknown: use device='cuda' or parallel='fsdp2'")
        if self.devices % self.ring_size:
            devices = "1 device does" if self.devices == 1 else f"{self.devices} devices do"
            raise ValueError(
                f"estimate: {devices} not divide into rings of {self.ring_size}: take a divisor of devices as ring_size"
            )

    @property
    def local_tokens(self) -> int:
        """The tokens that a rank holds, with padding, in all rows of the batch."""
        pieces = 2 if self.ring_size > 1 else 1  # A zigzag has two pieces a rank, and the most padding of all layouts.
        return -(-self.seq_len // (pieces * self.ring_size)) * pieces * self.batch_size

    def slices(self, tokens_at_once: int) -> bool:
        """Whether modules that compute this number of tokens at once, 0 for whole rows, compute slices."""
        return 0 < tokens_at_once < self.local_tokens

    @property
    def is_fused(self) -> bool:
        """Whether one launch of the fused kernel computes a pattern."""
        return self.device == "cuda" and self.ring_size == 1

    def is_one_tile(self, pattern: Pattern | None) -> bool:
        """Whether attention is one tile of all tokens; None is no attention."""
        return self.ring_size == 1 and pattern is not None and str(pattern) == "exact"

    def attention_widths(self, attention: ModelAttention) -> tuple[int, int, int]:
        """Returns the numbers of a token in queries, in outputs, and in keys and values."""
        # With fewer key/value heads than ranks, several ranks have the same head (plan/heads.py).
        group = (self.heads or self.ring_size) if self.transport == "heads" else 1
        keys = max(attention.num_kv_heads, group) * (attention.head_dim + attention.value_dim)
        return attention.num_heads * attention.head_dim, attention.num_heads * attention.value_dim, keys

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


def sums_part(attention: ModelAttention, setting: TrainingSetting, pattern: Pattern) -> MemoryPart:
    """Returns the tensors that backward of one layer's attention holds beside the gradients that it returns.

    With several tiles, gradients of queries, keys and values are summed in float32 beside those of a tile, and the output's
    gradient is copied to the order of the kernel. One launch of the fused kernel sums only those of keys and values.
    """
    queries, outputs, keys = setting.attention_widths(attention)
    whole, fused = setting.is_one_tile(pattern), setting.is_fused
    numbers = 4 * keys * (not whole) + 4 * queries * (not (whole or fused))
    numbers += outputs * setting.number_bytes * (whole or not fused)
    formula = f"{setting.local_tokens:,} tokens x {numbers:,} bytes"
    return MemoryPart(
        "sums of attention", setting.local_tokens * numbers, formula, "float32 sums of tiles; ring/engine.py"
    )


def pieces_part(attention: ModelAttention, setting: TrainingSetting, layers: int) -> MemoryPart:
    """Returns what these layers save by the heads transport, beside what they save by others.

    Checkpointing keeps the queries, keys, values and outputs of each piece. Without it, they take the place of the tensors that
    were exchanged, but for key/value heads that several ranks have.
    """
    *queries_and_outputs, keys = setting.attention_widths(attention)
    numbers = keys - attention.num_kv_heads * (attention.head_dim + attention.value_dim)
    if setting.checkpointing:
        numbers = (sum(queries_and_outputs) + keys) * (setting.transport == "heads" and setting.keep_attention)
    formula = f"{setting.local_tokens:,} tokens x {numbers * setting.number_bytes:,} bytes in {layers} layers"
    size = setting.local_tokens * numbers * setting.number_bytes * layers
    return MemoryPart(
        "pieces of heads", size, formula, "saved by the heads transport (ring/operator.py)", setting.offload
    )


def workspace_part(attention: ModelAttention, setting: TrainingSetting, exact: bool) -> MemoryPart:
    """Returns the tensors that a kernel's backward holds beside gradients: on a GPU, with a number of each row.

    Exact attention counts FlashAttention-2's: dq in float32 and, for grouped heads, dk and dv of each query head.
    """
    heads, rows = attention.num_heads, setting.local_tokens + ROWS_OF_A_TILE * setting.batch_size
    width = -(-max(attention.head_dim, attention.value_dim) // 32) * 32
    numbers = 4 + exact * width * (4 + 2 * setting.number_bytes * (attention.num_kv_heads < heads))
    kernel = "cuDNN or FlashAttention-2" if exact else "the fused kernel"
    formula = f"{kernel}: {rows:,} rows x {heads} heads x {numbers} bytes"
    size = rows * heads * numbers * (setting.device == "cuda")
    return MemoryPart("workspace of attention", size, formula, "torch's mha_bwd; compute/fused")


def gradients_part(setting: TrainingSetting, parameters: int) -> MemoryPart:
    """Returns a device's gradients when backward has reached this many parameters."""
    number = setting.number_bytes if setting.zero else setting.master_bytes
    divided = setting.devices > 1 and setting.parallel in ("fsdp2", "zero2", "zero3")
    share = f" / {setting.devices} devices" if divided else ""
    formula = f"{number} bytes x the parameters that have theirs{share}"
    size = parameters // (setting.devices if divided else 1) * number
    return MemoryPart("gradients", size, formula, "layers get theirs one after another in backward")


def state_parts(shape: ModelShape, setting: TrainingSetting) -> list[MemoryPart]:
    """Returns parameters, optimizer state, and the buffers of their exchange; gradients come with the phases of a step."""
    devices, parallel, number = setting.devices, setting.parallel, shape.parameters
    master, computing = setting.master_bytes, setting.number_bytes

    def divided(name: str, formula: str, size: int, by: int, source: str, host: bool = False) -> MemoryPart:
        share, zero = (f" / {by} devices", "; ZeRO, arXiv 1910.02054, section 5") if by > 1 else ("", "")
        return MemoryPart(name, number * size // by, f"{number:,} parameters x {formula}{share}", source + zero, host)

    kept, by = computing if setting.zero else master, devices if parallel in ("fsdp2", "zero3") else 1
    parts = [divided("parameters", f"{kept} bytes", kept, by, "counted in the model on torch's meta device")]
    size, by, formula = MOMENTS * master, 1 if parallel == "ddp" else devices, f"{MOMENTS} moments x {master} bytes"
    if setting.zero:
        size, formula = 4 + 4 * MOMENTS, f"(4 bytes of a float32 copy + {MOMENTS} moments x 4 bytes)"
    parts.append(divided("optimizer state", formula, size, by, "Adam, arXiv 1412.6980", setting.offload_optimizer))
    if parallel == "ddp" and master != computing:
        source = "torch.autocast keeps the casts of leaf tensors until it ends"
        parts.append(divided("weights cast for the forward pass", f"{computing} bytes", computing, 1, source))
    return parts if devices == 1 else [*parts, _exchange_part(shape, setting)]


def _exchange_part(shape: ModelShape, setting: TrainingSetting) -> MemoryPart:
    """Returns the buffers of a device for parameters or gradients that travel."""
    parallel, master, computing = setting.parallel, setting.master_bytes, setting.number_bytes
    if parallel in ("fsdp2", "zero3"):
        layer = max(layer.parameters for layer in shape.layers)
        outside = shape.parameters - sum(one.parameters - one.shared for one in shape.layers)
        layers = f"{layer:,} of the largest layer x (weights, weights of the next one, gradients)"
        formula = f"({layers} + {outside:,} outside of layers) x {computing} bytes"
        source = "torch's fully_shard over each layer and the root; DeepSpeed's ZeRO-3 prefetches the next layer too"
        return MemoryPart("gathered parameters", (3 * layer + outside) * computing, formula, source)
    count, size, source = shape.parameters, master, "DistributedDataParallel with gradient_as_bucket_view=False"
    if parallel != "ddp":
        count, size, source = REDUCE_BUCKET, computing, "DeepSpeed's default reduce_bucket_size"
    return MemoryPart("gradient buckets", count * size, f"{count:,} gradients x {size} bytes", source)


def optimizer_part(shape: ModelShape, setting: TrainingSetting) -> MemoryPart:
    """Returns what the optimizer's step needs beside its state."""
    master = 4 if setting.zero else setting.master_bytes
    share = shape.parameters // (setting.devices if setting.parallel != "ddp" else 1)
    largest = shape.largest // (setting.devices if setting.parallel == "fsdp2" else 1)
    size, formula = 2 * largest * master, f"2 x {largest:,} numbers of the largest tensor x {master} bytes"
    if setting.offload_optimizer:
        size, formula = 0, "the step runs in host memory"
    elif setting.device == "cuda":
        formula = f"{share:,} numbers x {master} bytes: torch's foreach computes all denominators at once"
        size = share * master
    return MemoryPart("optimizer step", size, formula, "torch.optim.AdamW")
