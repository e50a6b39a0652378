"""What takes seconds to import, for the process that ranks are forked from: each rank would import it anew."""

import contextlib
import gc
import os

import datasets  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp  # noqa: F401
from transformers import Trainer  # noqa: F401

import hf_ring_attention as ra
import tests.support.training  # noqa: F401

for name in ra.__all__:
    getattr(ra, name)
with contextlib.suppress(ImportError):
    import trl

    trl.SFTTrainer, trl.DPOTrainer  # noqa: B018

# Accelerate imports it, where it is installed, as soon as it takes a model out of its wrappers. It looks for devices unless
# it is told of one, and a process that has begun to use CUDA cannot be forked; the ranks of tests compute on the CPU.
os.environ["DS_ACCELERATOR"] = "cpu"
with contextlib.suppress(ImportError):
    import deepspeed  # noqa: F401

# Whoever collects garbage later, as Trainer does after each run, need not look through all modules.
gc.freeze()
