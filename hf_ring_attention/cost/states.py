"""Memory that does not depend on the sequence: parameters, gradients, the optimizer's state, and buffers of their exchange.

ZeRO (arXiv 1910.02054, section 5) divides them among the devices: stage 1 the optimizer's state, stage 2 also the gradients,
stage 3 (and FSDP) also the parameters. Implementations hold more: DDP's and DeepSpeed's buckets, DeepSpeed's float32 copies,
and the layers that FSDP and ZeRO-3 gather.
"""

from __future__ import annotations

from .parts import MemoryPart, TrainingSetting
from .shape import ModelShape

#: The numbers of DeepSpeed's reduce bucket unless its configuration sets `reduce_bucket_size`.
REDUCE_BUCKET = 500_000_000
#: Adam's two moments (arXiv 1412.6980).
MOMENTS = 2

_ADAM = "Adam, arXiv 1412.6980"
_COUNTED = "counted in the model on torch's meta device"
_ZERO = "; ZeRO, arXiv 1910.02054, section 5"


def gradient_bytes_at(setting: TrainingSetting, done: int) -> int:
    """Returns the bytes of a device's gradients when backward has reached this many parameters."""
    divided = setting.devices if setting.parallel in ("fsdp2", "zero2", "zero3") else 1
    return done // divided * (setting.number_bytes if setting.zero else setting.master_bytes)


def state_parts(shape: ModelShape, setting: TrainingSetting) -> list[MemoryPart]:
    """Returns parameters, optimizer state, and the buffers of their exchange; gradients come with the phases of a step."""
    devices, parallel, number = setting.devices, setting.parallel, shape.parameters
    master, computing = setting.master_bytes, setting.number_bytes

    def divided(name: str, formula: str, size: int, by: int, source: str, host: bool = False) -> MemoryPart:
        share = (f" / {by} devices", _ZERO) if by > 1 else ("", "")
        text = f"{number:,} parameters x {formula}{share[0]}"
        return MemoryPart(name, number * size // by, text, source + share[1], host)

    kept, by = computing if setting.zero else master, devices if parallel in ("fsdp2", "zero3") else 1
    parts = [divided("parameters", f"{kept} bytes", kept, by, _COUNTED)]
    size, by, formula = MOMENTS * master, 1 if parallel == "ddp" else devices, f"{MOMENTS} moments x {master} bytes"
    if setting.zero:
        size, formula = 4 + 4 * MOMENTS, f"(4 bytes of a float32 copy + {MOMENTS} moments x 4 bytes)"
    parts.append(divided("optimizer state", formula, size, by, _ADAM, setting.offload_optimizer))
    if parallel == "ddp" and master != computing:
        source = "torch.autocast keeps the casts of leaf tensors until it ends"
        parts.append(divided("weights cast for the forward pass", f"{computing} bytes", computing, 1, source))
    return parts if devices == 1 else [*parts, _exchange_part(shape, setting)]


def _exchange_part(shape: ModelShape, setting: TrainingSetting) -> MemoryPart:
    """Returns the buffers of a device for parameters or gradients that travel."""
    parallel, master, computing = setting.parallel, setting.master_bytes, setting.number_bytes
    if parallel == "ddp":
        formula = f"{shape.parameters:,} gradients x {master} bytes"
        source = "torch's DistributedDataParallel copies gradients to buckets (gradient_as_bucket_view=False)"
        return MemoryPart("gradient buckets", shape.parameters * master, formula, source)
    if parallel in ("fsdp2", "zero3"):
        layer = max(layer.parameters for layer in shape.layers)
        outside = shape.parameters - sum(one.parameters - one.shared for one in shape.layers)
        formula = f"({layer:,} of the largest layer x (weights, weights of the next one, gradients) + "
        formula += f"{outside:,} outside of layers) x {computing} bytes"
        source = "torch's fully_shard over each layer and the root, resharded after forward"
        source = source if parallel == "fsdp2" else "DeepSpeed's ZeRO-3 gathers a layer and prefetches the next"
        return MemoryPart("gathered parameters", (3 * layer + outside) * computing, formula, source)
    formula = f"{REDUCE_BUCKET:,} numbers x {computing} bytes"
    source = "DeepSpeed's reduce_bucket_size, 5e8 unless its configuration sets it"
    return MemoryPart("gradient buckets", REDUCE_BUCKET * computing, formula, source)


def optimizer_working_bytes(shape: ModelShape, setting: TrainingSetting) -> tuple[int, str]:
    """Returns the bytes that the optimizer's step needs beside its state, and the formula."""
    if setting.offload_optimizer:
        return 0, "the step runs in host memory"
    master = 4 if setting.zero else setting.master_bytes
    share = shape.parameters // (setting.devices if setting.parallel != "ddp" else 1)
    if setting.device == "cuda":
        return share * master, f"{share:,} numbers x {master} bytes: torch's foreach computes all denominators at once"
    largest = shape.largest // (setting.devices if setting.parallel == "fsdp2" else 1)
    return 2 * largest * master, f"2 x {largest:,} numbers of the largest tensor x {master} bytes"
