"""Memory that does not depend on the sequence: parameters, gradients, the optimizer's state, and buffers of their exchange.

ZeRO's stages are those of arXiv 1910.02054, section 5: stage 1 divides the optimizer's state among the devices, stage 2 the
gradients too, stage 3 (and FSDP) the parameters too. What implementations hold beside that is theirs: DDP's buckets,
DeepSpeed's buckets and float32 copies, and the layers that FSDP and ZeRO-3 gather.
"""

from __future__ import annotations

from .model_shape import ModelShape
from .parts import MemoryPart, TrainingSetting

#: The numbers of DeepSpeed's reduce bucket where its configuration says nothing (`reduce_bucket_size`).
REDUCE_BUCKET = 500_000_000
#: Adam's two moments (arXiv 1412.6980).
MOMENTS = 2

_ZERO = "ZeRO, arXiv 1910.02054, section 5"
_TORCH_DDP = "torch's DistributedDataParallel copies gradients to buckets (gradient_as_bucket_view=False)"
_FSDP = "torch's fully_shard over each layer and the root, resharded after forward"


def sharded_parameters(setting: TrainingSetting) -> bool:
    """Returns whether a device holds its part of the parameters alone."""
    return setting.devices > 1 and setting.parallel in ("fsdp2", "zero3")


def gradient_bytes_at(setting: TrainingSetting, done: int) -> int:
    """Returns the bytes of a device's gradients when backward is done with this many parameters.

    DeepSpeed's ZeRO 2 collects them whole in a bucket, and keeps its part of those of a full bucket. A GPU's bucket is taken at
    once and counted apart; in main memory, pages of it count as they are written.
    """
    if setting.parallel == "zero2" and setting.devices > 1:
        bucket = min(done, REDUCE_BUCKET) if setting.device == "cpu" else 0
        return (bucket + (done - bucket) // setting.devices) * setting.number_bytes
    divided = setting.devices if setting.parallel in ("fsdp2", "zero3") else 1
    return done // divided * (setting.number_bytes if setting.parallel.startswith("zero") else setting.master_bytes)


def state_parts(shape: ModelShape, setting: TrainingSetting) -> list[MemoryPart]:
    """Returns parameters, optimizer state, and the buffers of their exchange; gradients come with the phases of a step."""
    devices, parallel, numbers = setting.devices, setting.parallel, f"{shape.parameters:,} parameters"
    master, computing = setting.master_bytes, setting.number_bytes
    zero = parallel.startswith("zero")
    divided = f" / {devices} devices" if devices > 1 else ""
    counted = f"counted by {shape.counted_by}"
    parts = []
    kept, divisor = (computing if zero else master), (devices if sharded_parameters(setting) else 1)
    parts.append(
        MemoryPart(
            "parameters",
            shape.parameters * kept // divisor,
            f"{numbers} x {kept} bytes" + (divided if divisor > 1 else ""),
            counted + (f"; {_ZERO}" if divisor > 1 else ""),
        )
    )
    if zero:
        parts.append(
            MemoryPart(
                "optimizer state",
                shape.parameters * (4 + 4 * MOMENTS) // devices,
                f"{numbers} x (4 bytes of a float32 copy + {MOMENTS} moments x 4 bytes){divided}",
                f"Adam, arXiv 1412.6980; {_ZERO}",
                host=setting.offload_optimizer,
            )
        )
    else:
        divisor = devices if parallel == "fsdp2" else 1
        parts.append(
            MemoryPart(
                "optimizer state",
                shape.parameters * MOMENTS * master // divisor,
                f"{numbers} x {MOMENTS} moments x {master} bytes" + (divided if divisor > 1 else ""),
                "Adam, arXiv 1412.6980" + (f"; {_ZERO}" if divisor > 1 else ""),
                host=setting.offload_optimizer,
            )
        )
    if parallel == "ddp" and master != computing:
        parts.append(
            MemoryPart(
                "weights cast for the forward pass",
                shape.parameters * computing,
                f"{numbers} x {computing} bytes",
                "torch.autocast keeps the casts of leaf tensors until it ends",
            )
        )
    exchange = _exchange_part(shape, setting)
    return [*parts, *([exchange] if exchange is not None and devices > 1 else [])]


def _exchange_part(shape: ModelShape, setting: TrainingSetting) -> MemoryPart | None:
    """Returns the buffers of a device for parameters or gradients that travel; None where there are none."""
    parallel, master, computing = setting.parallel, setting.master_bytes, setting.number_bytes
    if parallel == "ddp":
        formula = f"{shape.parameters:,} gradients x {master} bytes"
        return MemoryPart("gradient buckets", shape.parameters * master, formula, _TORCH_DDP)
    if parallel in ("fsdp2", "zero3"):
        layer = max(layer.parameters for layer in shape.layers)
        outside = shape.parameters - sum(one.parameters - one.shared for one in shape.layers)
        return MemoryPart(
            "gathered parameters",
            (3 * layer + outside) * computing,
            f"({layer:,} of the largest layer x (weights, weights of the next one, gradients) + {outside:,} outside of layers) "
            f"x {computing} bytes",
            _FSDP if parallel == "fsdp2" else "DeepSpeed's ZeRO-3 gathers a layer and prefetches the next",
        )
    if parallel == "zero2" and setting.device == "cpu":
        return None  # It is counted with the gradients that are in it.
    bucket = REDUCE_BUCKET if setting.device == "cuda" else min(REDUCE_BUCKET, shape.parameters)
    return MemoryPart(
        "gradient buckets",
        bucket * computing,
        f"{bucket:,} numbers x {computing} bytes",
        "DeepSpeed's reduce_bucket_size, 5e8 where its configuration says nothing",
    )


def optimizer_working_bytes(shape: ModelShape, setting: TrainingSetting) -> tuple[int, str]:
    """Returns what the optimizer's step holds beside its state, and the formula."""
    if setting.offload_optimizer:
        return 0, "the step is done in host memory"
    master = 4 if setting.parallel.startswith("zero") else setting.master_bytes
    divided = setting.devices if setting.parallel != "ddp" else 1
    if setting.device == "cpu":
        largest = shape.largest // (divided if setting.parallel == "fsdp2" else 1)
        if setting.parallel.startswith("zero"):  # the partition is one flat tensor, with its gradient in float32
            flat = shape.parameters // divided
            return 3 * flat * master, f"3 x {flat:,} numbers of the partition x {master} bytes"
        return 2 * largest * master, f"2 x {largest:,} numbers of the largest tensor x {master} bytes"
    share = shape.parameters // divided
    return share * master, f"{share:,} numbers x {master} bytes: torch's foreach computes all denominators at once"
