"""DeepSpeed holds the parameters' state, rings hold the sequences: ZeRO 1, 2 and 3 have the losses of one process."""

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

import hf_ring_attention as ra
from tests.support.as_gpus import NO_DEEPSPEED, deepspeed_without_operators
from tests.support.ranks import run_ranks
from tests.support.tolerance import EXACT
from tests.support.training import documents, loop, process_environment, tiny_llama

pytestmark = pytest.mark.usefixtures("in_float64")

STAGES = (1, 2, 3)
DATA = {"rows": documents(9, 20, 61, seed=0, prompt=3), "collator": ra.PaddingCollator()}


def all_stages(rank, ring_size, batch_size, transport):
    return [zero(rank, stage, ring_size, batch_size, transport) for stage in STAGES]


def zero(rank, stage, ring_size, batch_size, transport, steps=5):
    deepspeed = deepspeed_without_operators()
    world_size = dist.get_world_size()
    process_environment(rank, world_size)
    accelerator = Accelerator()
    ring = ra.Ring.from_accelerator(accelerator, size=ring_size, transport=transport)
    model = ra.patch_model(tiny_llama(), ring=ring)
    torch.manual_seed(1)
    rows = DataLoader(DATA["rows"], batch_size=batch_size, shuffle=True, collate_fn=DATA["collator"])
    loader = ring.prepare_data_loader(rows)
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
    for shard, _ in zip(loader, range(steps)):
        loss = ra.next_token_loss(engine, shard, ra.count_tokens([shard]), tokens_at_once=7)
        engine.backward(loss)
        engine.step()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


@pytest.mark.parametrize(("world_size", "batch_size", "transport"), [(2, 2, "heads"), (4, 1, "auto")])
def test_zero_has_the_losses_of_one_process(world_size, batch_size, transport):
    pytest.importorskip("deepspeed", reason=NO_DEEPSPEED)
    expected = loop(0, **DATA, batch_size=2, steps=5)["losses"]
    for by_stage in run_ranks(all_stages, world_size, 2, batch_size, transport):
        for stage, losses in zip(STAGES, by_stage, strict=True):
            assert losses == pytest.approx(expected, rel=EXACT), f"ZeRO {stage}"
