"""The arguments of a `RingTrainer`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from ..ring.mesh import without_cp


@dataclass
class RingTrainingArguments(TrainingArguments):
    """`TrainingArguments` of a `RingTrainer`; batch sizes are those of a ring.

    Args:
        ring_size: processes that share each sequence. It divides the number of processes, and the rings are data
            parallel. It is needed if there are several processes: 1 makes each process a ring of its own, and the number
            of processes makes one ring of all. `parallelism_config=ParallelismConfig(cp_size=N)` is understood as
            ring_size=N; Accelerate's own context parallelism, which needs FSDP 2 and drops masks, then takes no part.
        ring_layout: "auto", "contiguous", "zigzag" or "documents".
        ring_transport: "auto", "ring", "collective", "heads" or "local".
        ring_heads: with "heads", how many neighbouring processes exchange heads; None for all of a ring.
        offload_activations: whether tensors that the forward pass saves wait in host memory; with
            activation_checkpointing (gradient_checkpointing before Transformers 5.23), these are the inputs of the layers.

    Example:
        >>> args = ra.RingTrainingArguments("output", ring_layout="zigzag", use_cpu=True, report_to=[])
        >>> args.ring_layout, args.ring_transport
        ('zigzag', 'auto')
    """

    ring_size: int | None = field(
        default=None, metadata={"help": "processes that share each sequence; 1: each has rows of its own"}
    )
    ring_layout: str = field(default="auto", metadata={"help": "auto, contiguous, zigzag or documents"})
    ring_transport: str = field(default="auto", metadata={"help": "auto, ring, collective, heads or local"})
    ring_heads: int | None = field(
        default=None, metadata={"help": "With ring_transport heads: how many neighbours exchange heads; default: all."}
    )
    offload_activations: bool = field(default=False, metadata={"help": "keep saved activations in host memory"})

    @property
    def device(self) -> torch.device:
        """The device of this process: "cpu" and not "cpu:0", to which Trainer of Transformers 5.17 cannot load an optimizer."""
        device: torch.device = super().device
        return torch.device("cpu") if device.type == "cpu" else device


def cp_size_of(args: TrainingArguments) -> int:
    """Returns the cp_size of the arguments' ParallelismConfig, which is another name of ring_size; 1 without a config."""
    config: Any = args.parallelism_config
    return 1 if config is None else int(config.cp_size)


def parallelism_beside_rings(args: TrainingArguments) -> Any:
    """Returns the ParallelismConfig of the accelerator of a Trainer that shards sequences over rings; None for none.

    It has no cp_size, which Accelerate takes with FSDP 2 alone, and by which Trainer would cut each row once more. A config
    that had nothing but a cp_size is left out: on a CPU, Accelerate refuses any.
    """
    config: Any = args.parallelism_config
    if cp_size_of(args) == 1:
        return config
    return None if config.total_size == config.cp_size else without_cp(config)
