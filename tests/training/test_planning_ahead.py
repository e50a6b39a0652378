"""Loaders plan attention over the next batch while a loop computes: calls find their plans, and a run stays what it was."""

import contextlib
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import hf_ring_attention as ra
from hf_ring_attention.ring import planner
from tests.support.ranks import run_ranks, run_simulated
from tests.support.training import documents, loop, process_environment, tiny_llama, trainer

ROWS = documents(60, 3, 20, seed=3)
PACKED = [
    {"input_ids": row, "seq_lengths": lengths}
    for row, lengths in zip(*(ra.pack_documents({"input_ids": [x["input_ids"] for x in ROWS]}, 46)[name]
                              for name in ("input_ids", "seq_lengths")))
]  # fmt: skip
COLLATORS = {
    "packed ahead": (PACKED, ra.PaddingCollator(row_length=46), 1),
    "padded to the left": (PACKED, ra.PaddingCollator(row_length=50, padding_side="left"), 2),
    "packed by batch": (ROWS, ra.PackingCollator(row_length=45), 7),
    "one row as long as all": (ROWS, ra.PackingCollator(), 4),
    "one document a row": (ROWS, ra.PaddingCollator(), 3),
}


@contextlib.contextmanager
def makers():
    """Yields the list of the names of threads in which bindings are made, one for each."""
    names = []

    def spied(bind):
        return lambda *call: names.append(threading.current_thread().name) or bind(*call)

    with mock.patch.dict(planner._BIND, {name: spied(bind) for name, bind in planner._BIND.items()}):
        yield names


def without_planning_ahead():
    return mock.patch.object(planner.Planner, "expect", return_value=None)


def late_makers(ring, name, num_workers=0):
    """For each batch, how many bindings were made by this rank's calls where the planner was given time."""
    rows, collator, batch_size = COLLATORS[name]
    model = tiny_llama(num_hidden_layers=3)
    ra.patch_config(model.config, "window:5", layers=[1])
    ra.patch_model(model, ring=ring)
    loader = ring.prepare_data_loader(
        DataLoader(rows, batch_size=batch_size, collate_fn=collator, num_workers=num_workers)
    )
    made_late, by_batch = [], []

    def of(bind, *call, of=ring.bindings.of):
        known = ring.bindings._bindings.keys() | ring.bindings._ahead.keys()
        if (bind, *call) not in known:
            made_late.append(call)
        return of(bind, *call)

    with mock.patch.object(ring.bindings, "of", of):
        for shard in loader:
            ring.planner.wait()
            made_late.clear()
            ra.next_token_loss(model, shard, 100).backward()
            by_batch.append(len(made_late))
    return by_batch


@pytest.mark.parametrize("name", COLLATORS)
def test_calls_of_all_batches_but_the_first_find_their_plans(name):
    first, *others = late_makers(ra.Ring.alone(), name)
    assert first == 2 and len(others) > 3 and not any(others)


@pytest.mark.drawn
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["packed ahead", "padded to the left", "packed by batch"])
def test_calls_of_simulated_ranks_find_their_plans(world_size, name):
    for first, *others in run_simulated(lambda ring: late_makers(ring, name), world_size):
        assert first == 2 and len(others) > 3 and not any(others)


def test_workers_are_forked_beside_a_planner():
    ring = ra.Ring.alone()
    for _ in range(2):
        _, *others = late_makers(ring, "packed ahead", num_workers=2)
        assert others and not any(others)


def late_makers_of_process(rank, name):
    process_environment(rank, dist.get_world_size())
    return late_makers(ra.Ring(layout="contiguous"), name)


def test_calls_of_processes_find_their_plans():
    for first, *others in run_ranks(late_makers_of_process, 2, "packed by batch"):
        assert first == 2 and len(others) > 3 and not any(others)


# ---- whole runs


def runs_with_and_without(rank, ring_size, transport):
    rows, collator, batch_size = COLLATORS["packed by batch"]
    options = {"ring_size": ring_size, "transport": transport, "rows": rows, "collator": collator}
    options |= {"batch_size": batch_size, "steps": 5, "accumulate": 2, "checkpointing": True}
    with makers() as names:
        ahead = loop(rank, **options)
    with without_planning_ahead(), makers() as others:
        plain = loop(rank, **options)
    return ahead, plain, names.count(planner.THREAD), others.count(planner.THREAD)


def assert_equal_bits(ahead, plain):
    assert (ahead["losses"], ahead["norms"]) == (plain["losses"], plain["norms"])
    assert all(torch.equal(x, plain["parameters"][name]) for name, x in ahead["parameters"].items())


@pytest.mark.parametrize(("ring_size", "transport"), [(1, "auto"), (2, "ring"), (2, "collective")])
def test_a_loop_computes_the_same_bits(ring_size, transport):
    for ahead, plain, planned, unplanned in run_ranks(runs_with_and_without, ring_size, ring_size, transport):
        assert_equal_bits(ahead, plain)
        assert planned > 5 and unplanned == 0


def trainings_with_and_without(rank, folder):
    rows, collator, batch_size = COLLATORS["packed by batch"]
    options = {
        "ring_size": 2,
        "rows": rows,
        "collator": collator,
        "batch_size": batch_size,
        "accumulate": 2,
        "steps": 6,
    }
    options |= {"eval_rows": rows[:20], "eval_strategy": "steps", "eval_steps": 2}
    with makers() as names:
        ahead, made = trainer(rank, f"{folder}/ahead", **options)
    made.ring.planner.wait()
    left = [thread for thread in threading.enumerate() if thread.name == planner.THREAD]
    with without_planning_ahead():
        plain, _ = trainer(rank, f"{folder}/plain", **options)
    return ahead, plain, names.count(planner.THREAD), len(left)


def test_a_trainer_computes_the_same_bits(tmp_path):
    for ahead, plain, planned, left in run_ranks(trainings_with_and_without, 2, str(tmp_path)):
        assert_equal_bits(ahead, plain)
        assert planned > 0 and left == 0


class PatientTrainer(ra.RingTrainer):
    """Gives the planner time after each step, and notes how many bindings of the step were not there before it."""

    known, late = set(), []

    def training_step(self, *args, **options):
        loss = super().training_step(*args, **options)
        bindings = self.ring.bindings
        self.late.append(len(bindings._bindings.keys() - self.known))
        self.ring.planner.wait()
        self.known |= bindings._bindings.keys() | bindings._ahead.keys()
        return loss


def late_makers_of_trainer(rank, folder):
    rows, collator, batch_size = COLLATORS["packed by batch"]
    options = {"ring_size": 2, "rows": rows, "collator": collator, "batch_size": batch_size, "steps": 7}
    trainer(rank, folder, trainer_class=PatientTrainer, **options)
    return PatientTrainer.late


def test_steps_of_a_trainer_find_their_plans(tmp_path):
    for first, *others in run_ranks(late_makers_of_trainer, 2, str(tmp_path)):
        assert first > 0 and len(others) == 6 and not any(others)


def test_threads_do_not_pile_up():
    ring = ra.Ring.alone()
    model = tiny_llama(num_hidden_layers=1)
    ra.patch_model(model, "window:5", ring=ring)
    rows = (PACKED * 10)[:50]
    before, most = threading.active_count(), 0
    for shard in ring.prepare_data_loader(DataLoader(rows, collate_fn=ra.PaddingCollator(row_length=46))):
        with torch.no_grad():
            ra.next_token_loss(model, shard, 100)
        most = max(most, threading.active_count() - before)
    assert most <= 2  # one may be about to end
    ring.planner.wait()
    assert threading.active_count() == before
