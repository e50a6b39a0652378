"""What takes seconds to import, for the process that ranks are forked from: each rank would import it anew."""

import gc

import datasets  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp  # noqa: F401
from transformers import Trainer  # noqa: F401

import hf_ring_attention as ra
import tests.support.training  # noqa: F401

for name in ra.__all__:
    getattr(ra, name)

# Whoever collects garbage later, as Trainer does after each run, need not look through all modules.
gc.freeze()
