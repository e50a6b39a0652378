"""What takes seconds to import, for the process that ranks are forked from: each rank would import it anew."""

import contextlib
import gc
import importlib
import os

# Accelerate imports DeepSpeed, if it is installed, as soon as it takes a model out of its wrappers. It looks for devices
# unless this variable names one, and a process that uses CUDA cannot be forked; the ranks of tests compute on the CPU.
os.environ["DS_ACCELERATOR"] = "cpu"
MODULES = "datasets torch._dynamo torch.distributed.fsdp transformers.trainer peft tests.support.training".split()

gc.disable()
for name in MODULES:
    importlib.import_module(name)
for name in ("deepspeed", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
package = importlib.import_module("hf_ring_attention")
for name in package.__all__:
    getattr(package, name)

# Whoever collects garbage later, as Trainer does after each run, need not look through all modules.
gc.freeze()
gc.enable()
