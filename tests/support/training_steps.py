"""Training steps of a small model whose peak memory is measured: processes of one thread, AdamW, float32, on the CPU."""

import ctypes
import gc
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ring_attention as ra
from hf_ring_attention.compute.private import checkpoint_activations
from tests.support.as_gpus import deepspeed_without_operators
from tests.support.ranks import run_ranks


@dataclass(frozen=True)
class Step:
    """A training step; the names are the arguments of `ra.estimate`."""

    tokens: int
    devices: int = 1
    ring_size: int = 1
    parallel: str = "ddp"
    checkpointing: bool = True
    offload: bool = False
    pattern: str = "window:256"
    heads: int = 8


def small_config(heads=8):
    """A Llama of 4 layers whose heads have 64 features, in groups of two."""
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=64 * heads,
        intermediate_size=192 * heads,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        max_position_embeddings=1 << 14,
    )


def measured_and_estimated(step):
    """The peak of the busiest process beyond what it held before its model was made, and the estimate of that, in bytes."""
    measured = max(run_ranks(_peak, step.devices, step))
    setting = {name: value for name, value in vars(step).items() if name not in ("tokens", "heads")}
    answer = ra.estimate(
        small_config(step.heads), step.tokens, **setting, dtype="float32", master_dtype="float32", device="cpu"
    )
    return measured, max(answer.phases_with_host.values())  # On a CPU, host memory is the same memory.


def _resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if name in line))


def _peak(rank, step):
    torch.set_num_threads(1)
    if sys.platform == "linux":  # glibc returns freed tensors at once, so that the peak is what the process holds.
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    few = Step(**{**vars(step), "tokens": 64 * step.ring_size})
    _peak_of_step(few)  # It loads what kernels and connections need.
    return _peak_of_step(step)


def _peak_of_step(step):
    gc.collect()
    start = _resident("VmRSS")
    torch.manual_seed(0)
    model = LlamaForCausalLM(small_config(step.heads)).train()
    if step.checkpointing:
        checkpoint_activations(model)
    model = ra.patch_model(model, step.pattern, ring=ra.Ring() if step.ring_size > 1 else ra.Ring.alone())
    trained, backward, update = _in_parallel(model, step)
    ids = torch.randint(8192, (1, step.tokens), generator=torch.Generator().manual_seed(1))
    for _ in range(3):  # The first step makes the optimizer's state, the second DDP's buckets.
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        with save_on_cpu() if step.offload else nullcontext():
            loss = trained(input_ids=ids, labels=ids, use_cache=False).loss
        backward(loss)
        del loss
        update()
    return _resident("VmHWM") - start


def _in_parallel(model, step):
    """The model as it is called, its backward pass, and the step of its optimizer, which frees the gradients."""
    if step.devices > 1 and step.parallel.startswith("zero"):
        config = {"stage": int(step.parallel[-1])}
        engine, *_ = deepspeed_without_operators().initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": config,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        )
        engine.train()
        return engine, engine.backward, engine.step
    if step.devices > 1 and step.parallel == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in [*model.model.layers, model]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    elif step.devices > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def update():
        optimizer.step()
        optimizer.zero_grad()

    return model, lambda loss: loss.backward(), update
