"""What a launcher started and what Accelerate prepared, against the ring that is made of it."""

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import get_scheduler

import hf_ring_attention as ra
from tests.support.ranks import run_ranks
from tests.support.training import documents, process_environment, tiny_llama


def test_a_ring_without_the_other_processes_that_were_started_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for make in (ra.Ring, lambda: ra.Ring(transport="local")):
        with pytest.raises(ValueError, match=r"Ring: WORLD_SIZE=2 .*init_process_group.*Ring\.alone\(\)"):
            make()
    assert ra.Ring.alone().world_size == 1
    for started in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", started)
        assert ra.Ring().world_size == 1
    monkeypatch.delenv("WORLD_SIZE")
    assert ra.Ring().world_size == 1


class OneProcess:
    """An accelerator as `accelerate launch --cpu --num_processes 2` and a plain torchrun on a CPU leave it."""

    num_processes = 1
    device = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 2])
def test_an_accelerator_without_the_other_processes_names_what_brings_them(monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2 .*ACCELERATE_USE_CPU=true.*--multi_gpu --num_processes N"):
        ra.Ring.from_accelerator(OneProcess(), size=size)


def schedules(rank):
    """Per size of rings and kind of schedule: the error, and the learning rate after 4 of 8 steps."""
    process_environment(rank, 2)
    found = {}
    for size in (1, 2):
        for prepared in (False, True):
            accelerator = Accelerator()
            ring = ra.Ring.from_accelerator(accelerator, size=size)
            model = ra.patch_model(tiny_llama(), ring=ring)
            loader = ring.prepare_data_loader(
                DataLoader(documents(16, 20, 30, seed=0), 1, collate_fn=ra.PaddingCollator())
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            schedule = get_scheduler("linear", optimizer, 0, 8 * (2 if prepared and size == 1 else 1))
            model, optimizer = accelerator.prepare(model, optimizer)
            if prepared:
                schedule = accelerator.prepare(schedule)
            error = None
            try:
                for shard, _ in zip(loader, range(4)):
                    accelerator.backward(0 * ra.next_token_loss(model, shard, ra.count_tokens([shard])))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            except ValueError as refused:
                error = str(refused)
                shard = ra.shard_batch(ra.PaddingCollator()(documents(1, 20, 30, seed=0)), ring)
                with pytest.raises(ValueError, match="leave it out of accelerator"):
                    ra.next_token_loss(model, shard, ra.count_tokens([shard]))
            found[size, prepared] = error, optimizer.param_groups[0]["lr"]
    return found


def test_a_schedule_is_half_way_at_half_of_the_steps_or_refused():
    for found in run_ranks(schedules, 2):
        assert found[1, False] == found[1, True] == found[2, False] == (None, 0.5)
        error, rate = found[2, True]
        assert "LambdaLR was prepared by Accelerate, which takes 2 of its steps for each step of the optimizer" in error
        assert "2 processes share their rows" in error and rate == 1.0
