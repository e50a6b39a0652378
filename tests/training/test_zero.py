"""DeepSpeed holds the parameters' state, rings hold the sequences: ZeRO 1, 2 and 3 have the losses of one process."""

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

import hf_ring_attention as ra
from tests.support.as_gpus import NO_DEEPSPEED, deepspeed_without_operators
from tests.support.ranks import run_ranks
from tests.support.tolerance import EXACT
from tests.support.training import documents, loop, padded, process_environment, tiny_llama

pytestmark = pytest.mark.usefixtures("in_float64")

STAGES = (1, 2, 3)
ROWS = documents(8, 20, 61, seed=0, prompt=3)


def all_stages(rank):
    return [zero(rank, stage) for stage in STAGES]


def zero(rank, stage):
    deepspeed = deepspeed_without_operators()
    world_size = dist.get_world_size()
    process_environment(rank, world_size)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    ring = ra.Ring.from_accelerator(accelerator, size=2, transport="heads")
    model = ra.patch_model(tiny_llama(), ring=ring)
    torch.manual_seed(1)
    loader = accelerator.prepare(DataLoader(ROWS, shuffle=True, collate_fn=padded))
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 1e9,  # DeepSpeed clips to 1 where nothing is said
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    engine.train()
    losses = []
    for batch, _ in zip(loader, range(2)):
        items = accelerator.reduce((batch["labels"][:, 1:] != -100).sum(), "sum")
        loss = engine(**batch, num_items_in_batch=items).loss
        engine.backward(loss * accelerator.num_processes)
        engine.step()
        losses.append(float(accelerator.reduce(loss.detach(), "sum")))
    return losses


def test_zero_has_the_losses_of_one_process():
    """Two rings of two, with heads inside of each."""
    pytest.importorskip("deepspeed", reason=NO_DEEPSPEED)
    expected = loop(0, rows=ROWS, batch_size=2, steps=2)["losses"]
    for by_stage in run_ranks(all_stages, 4):
        for stage, losses in zip(STAGES, by_stage, strict=True):
            assert losses == pytest.approx(expected, rel=EXACT), f"ZeRO {stage}"
