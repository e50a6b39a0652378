"""A sequence-sharded loader plans attention over the next batch while a loop computes, and changes no bit of a run."""

import contextlib
import threading
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import default_data_collator

import hf_ring_attention as ra
from hf_ring_attention.ring import planner
from tests.support.training import documents, loop, packed, padded, process_environment, tiny_llama

ROWS = documents(60, 3, 20, seed=3)
#: What loaders read: the rows, their collate function, and how many make a batch.
KINDS = {"packed": (packed(ROWS, 46), default_data_collator, 1), "padded": (ROWS, padded, 3)}


@contextlib.contextmanager
def makers():
    """Yields the list of the names of threads in which bindings are made, one for each."""
    names = []

    def spied(bind):
        return lambda *call: names.append(threading.current_thread().name) or bind(*call)

    spies = {name: spec._replace(bind=spied(spec.bind)) for name, spec in planner.TRANSPORTS.items()}
    with mock.patch.dict(planner.TRANSPORTS, spies):
        yield names


def late_makers(rank, name, num_workers=0):
    """For each batch, how many bindings were made by this rank's calls where the planner was given time."""
    process_environment(rank, 2)
    rows, collator, batch_size = KINDS[name]
    accelerator = Accelerator()
    ring = ra.Ring.from_accelerator(accelerator, 2, layout="documents" if name == "packed" else "zigzag")
    model = tiny_llama(num_hidden_layers=3)
    ra.patch_config(model.config, "window:5", layers=[1])
    ra.patch_model(model, ring=ring)
    loader = DataLoader(rows, batch_size=batch_size, collate_fn=collator, num_workers=num_workers)
    loader = ring.prepare_data_loader(loader)
    by_batch = []
    with makers() as names:
        for batch in loader:
            ring.planner.wait()
            names.clear()
            model(**batch).loss.backward()
            by_batch.append(len([name for name in names if name != planner.THREAD]))
    left = [thread for thread in threading.enumerate() if thread.name == planner.THREAD]
    return by_batch, len(left)


@pytest.mark.parametrize(("name", "workers"), [("packed", 2), ("padded", 0)])
def test_calls_of_all_batches_but_the_first_find_their_plans(name, workers, programs):
    for (first, *others), left in programs.run(late_makers, 2, name, workers):
        assert first == 2 and len(others) > 3 and not any(others)
        assert left == 0


def runs_with_and_without(rank):
    rows, collator, batch_size = KINDS["packed"]
    options = {"ring_size": 2, "transport": "ring", "rows": rows, "collator": collator, "sharded_loader": True}
    options |= {"batch_size": batch_size, "steps": 4, "accumulate": 2, "checkpointing": True}
    with makers() as names:
        ahead = loop(rank, **options)
    with mock.patch.object(planner.Planner, "expect", return_value=None), makers() as others:
        plain = loop(rank, **options)
    return ahead, plain, names.count(planner.THREAD), others.count(planner.THREAD)


def test_a_loop_computes_the_same_bits(programs):
    for ahead, plain, planned, unplanned in programs.run(runs_with_and_without, 2):
        assert (ahead["losses"], ahead["norms"]) == (plain["losses"], plain["norms"])
        assert all(torch.equal(x, plain["parameters"][name]) for name, x in ahead["parameters"].items())
        assert planned > 5 and unplanned == 0


def refused(rank):
    process_environment(rank, 2)
    accelerator = Accelerator()
    ring, loader = ra.Ring.from_accelerator(accelerator, 2), DataLoader(ROWS, collate_fn=padded)
    with pytest.raises(ValueError, match="no model has this ring"):
        ring.prepare_data_loader(loader)
    with pytest.raises(ValueError, match="the ring has no accelerator"):
        ra.Ring().prepare_data_loader(loader)
    ra.patch_model(tiny_llama(), ring=ring)
    with pytest.raises(ValueError, match="expected an unprepared torch DataLoader"):
        ring.prepare_data_loader(accelerator.prepare(loader))


def test_loaders_that_cannot_be_cut_are_refused(programs):
    programs.run(refused, 2)
