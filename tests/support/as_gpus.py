"""Runs a script of Accelerate on the CPU as it would run on GPUs: its FSDP and DeepSpeed plugins act only there.

accelerate launch --config_file FILE tests/support/as_gpus.py SCRIPT ARGUMENTS
"""

import os
import runpy
import sys

import torch
import torch.distributed as dist
from accelerate import state
from accelerate.utils import DistributedType

NO_DEEPSPEED = (
    "DeepSpeed is not installed: make test installs it, or DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"
)


def deepspeed_without_operators():
    """DeepSpeed for CPUs, in Python only: otherwise it would compile collectives over shared memory."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # operators to compile; without this dict it lists them all
    # On CPUs with float16, ZeRO 3 refuses models in float64, which it takes on all others.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: False
    return deepspeed


def take_cpus_for_gpus():
    os.environ.pop("ACCELERATE_USE_CPU", None)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        deepspeed_without_operators()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    state.PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    state.PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


if __name__ == "__main__":
    take_cpus_for_gpus()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
