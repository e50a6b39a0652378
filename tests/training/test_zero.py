"""DeepSpeed holds the state of parameters, rings the sequences: ZeRO 1, 2 and 3 have the losses of one process, sliced too."""

import collections
import os

import accelerate.utils
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DataLoader

import hf_ring_attention as ra
from tests.support.as_gpus import NO_DEEPSPEED, deepspeed_without_operators, take_cpus_for_gpus
from tests.support.ranks import run_ranks
from tests.support.tolerance import EXACT, float64
from tests.support.training import documents, loop, padded, process_environment, tiny_llama

pytest.importorskip("deepspeed", reason=NO_DEEPSPEED)
DummyScheduler = accelerate.utils.DummyScheduler  # which some releases lack without DeepSpeed
pytestmark = pytest.mark.usefixtures("in_float64")

STAGES = (1, 2, 3)
ROWS = documents(8, 20, 61, seed=0, prompt=3)


def engine_of(model, stage, **zero):
    """DeepSpeed's engine of a stage of ZeRO, with plain steps."""
    deepspeed = deepspeed_without_operators()
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, **zero}}
    # DeepSpeed clips to 1 by default.
    config |= {"gradient_clipping": 1e9, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return deepspeed.initialize(model=model, optimizer=optimizer, dist_init_required=False, config=config)[0]


def losses_of(rank, stage):
    process_environment(rank, dist.get_world_size())
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    ring = ra.Ring.from_accelerator(accelerator, size=2, transport="heads")
    model = ra.patch_model(tiny_llama(), ring=ring)
    torch.manual_seed(1)
    loader = accelerator.prepare(DataLoader(ROWS, shuffle=True, collate_fn=padded))
    engine, losses = engine_of(model.train(), stage), []
    for batch, _ in zip(loader, range(2)):
        items = accelerator.reduce((batch["labels"][:, 1:] != -100).sum(), "sum")
        loss = engine(**batch, num_items_in_batch=items).loss
        engine.backward(loss * accelerator.num_processes)
        engine.step()
        losses.append(float(accelerator.reduce(loss.detach(), "sum")))
    return losses


def test_zero_has_the_losses_of_one_process(by_deepspeed):
    """Two rings of two, with heads inside of each."""
    expected = loop(0, rows=ROWS, batch_size=2, steps=2)["losses"]
    for of_rank in by_deepspeed:
        for stage, losses in zip(STAGES, of_rank["losses"], strict=True):
            assert losses == pytest.approx(expected, rel=EXACT), f"ZeRO {stage}"


#: Steps, as a program of one process counts them.
TOTAL = 12
PARAMETERS = ("total_num_steps", "warmup_num_steps", "warmup_min_lr", "warmup_max_lr")
SCHEDULE = {"type": "WarmupDecayLR", "params": dict.fromkeys(PARAMETERS, "auto")}


def rates(rank, by_its_schedule):
    """The learning rates of the first steps, by DeepSpeed's schedule or by one of torch."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    process_environment(rank, dist.get_world_size())
    take_cpus_for_gpus()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    config |= {"zero_force_ds_cpu_optimizer": False, **({"scheduler": SCHEDULE} if by_its_schedule else {})}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    ring = ra.Ring.from_accelerator(accelerator, size=2)
    model = ra.patch_model(tiny_llama(), ring=ring)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if by_its_schedule:
        schedule = DummyScheduler(optimizer, total_num_steps=TOTAL, warmup_num_steps=2)
    else:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / TOTAL)
    given = schedule, DataLoader(ROWS, collate_fn=padded)
    model, _, schedule, loader = accelerator.prepare(model, optimizer, *given)
    assert getattr(given[0], "total_num_steps", TOTAL) == TOTAL
    found = []
    for batch in loader:
        accelerator.backward(0 * model(**batch).loss)
        schedule.step()
        found.append(schedule.get_last_lr()[0])
    assert len(found) == len(ROWS) // ring.dp_size
    return found


#: Two steps of warming up, then from 1 to 0 in four; and from 1 to 0 in six.
RATES = {True: [0, 1, 1, 3 / 4], False: [5 / 6, 4 / 6, 3 / 6, 2 / 6]}


def test_schedules_have_the_steps_of_rings(by_deepspeed):
    """Two rings of two take half of all steps each, as two processes do."""
    for of_rank in by_deepspeed:
        assert of_rank["rates"] == {kind: pytest.approx(expected) for kind, expected in RATES.items()}


def sliced(rank):
    """[stage][whole rows, slices]: the losses of three steps, summed over ranks with rows of other lengths."""

    def losses(stage, tokens_at_once):
        model = ra.sliced_layers(tiny_llama(None).train(), tokens_at_once)
        model.activation_checkpointing_enable({"use_reentrant": False})
        engine, found, fired = engine_of(model, stage, stage3_param_persistence_threshold=0), [], collections.Counter()
        for name, x in model.named_parameters():
            x.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))
        ids = torch.tensor([ROWS[0]["input_ids"] * 2])[:, : (37, 12, 25, 8)[rank]]
        for _ in range(3):
            loss = engine(ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            found.append(float(total))
        assert {*fired.values()} == {3}, "a parameter got other than one gradient a step"
        return found

    found = [[losses(stage, number) for number in (None, 10)] for stage in STAGES]
    engine = engine_of(tiny_llama(None), 3, stage3_param_persistence_threshold=0)
    with pytest.raises(NotImplementedError, match=r"of gate_proj: .* call sliced_layers before deepspeed\.initialize"):
        ra.sliced_layers(engine, 10)
    return found


def all_of_a_rank(rank):
    found = {"losses": [losses_of(rank, stage) for stage in STAGES], "sliced": sliced(rank)}
    # Accelerate's own DeepSpeed is last, since it stays.
    return found | {"rates": {by_its_schedule: rates(rank, by_its_schedule) for by_its_schedule in RATES}}


@pytest.fixture(scope="module")
def by_deepspeed():
    """What four processes find, by rank: they import DeepSpeed once for all tests."""
    with float64(True):
        return run_ranks(all_of_a_rank, 4)


def test_slices_of_layers_have_the_losses_of_whole_rows(by_deepspeed):
    """ZeRO-3 gathers each MLP once for all slices: ranks with more slices than others do not wait for them."""
    for of_rank in by_deepspeed:
        for stage, (expected, found) in zip(STAGES, of_rank["sliced"], strict=True):
            assert found == pytest.approx(expected, rel=EXACT), f"ZeRO {stage}"
            assert expected[0] > expected[-1]
