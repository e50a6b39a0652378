"""Passes over a ring's loader: each is an epoch, and a state goes on in it exactly, whatever draws the rows."""

import itertools
import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset

import hf_ring_attention as ra
from tests.support.drawn_rows import KINDS, Augmented, ByCount, Stream, by_batch_sampler, by_dataset, noisy, rows_of
from tests.support.training import process_environment


def made(kind, seed=5):
    torch.manual_seed(seed)
    return ra.Ring.alone().prepare_data_loader(kind())


def content(shard):
    return shard["input_ids"].tolist(), shard["noise"].tolist()


def taken(loader, count=None):
    """The first batches of a pass, which is left then; what a step may draw comes between."""
    batches = []
    for shard in loader:
        torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
        batches.append(content(shard))
        if len(batches) == count:
            break
    return batches


def order(batches):
    return [[row[0] for row in ids] for ids, _ in batches]


# ---- epochs


@pytest.mark.drawn
@pytest.mark.parametrize("name", KINDS)
def test_a_pass_that_was_left_was_an_epoch(name):
    loader = made(KINDS[name])
    whole = [taken(loader) for _ in range(3)]
    assert len({str(order(batches)) for batches in whole}) == 3, "each epoch has an order of its own"
    assert len({str(batches) for batches in whole}) == 3
    loader = made(KINDS[name])
    # Left after two batches, at its end, and not at all.
    for epoch, count in enumerate((2, len(whole[1]), None)):
        assert taken(loader, count) == whole[epoch][:count], epoch


def test_rows_come_in_the_order_of_accelerates_loader():
    """On one process; so a ring of one is trained as without a ring."""
    torch.manual_seed(5)
    theirs = prepare_data_loader(KINDS["shuffled"](), use_seedable_sampler=True)
    loader = made(KINDS["shuffled"])
    for epoch in range(3):
        theirs.set_epoch(epoch)
        assert [shard["input_ids"].tolist() for shard in loader] == [batch["input_ids"].tolist() for batch in theirs]


def test_a_pass_begins_with_its_first_batch():
    loader = made(KINDS["shuffled"])
    whole = [taken(loader) for _ in range(2)]
    loader = made(KINDS["shuffled"])
    iter(loader), iter(loader)
    assert content(next(iter(loader))) == whole[0][0]
    assert content(next(iter(loader))) == whole[1][0]


def test_an_epoch_that_was_set_is_the_next():
    loader = made(KINDS["shuffled"])
    whole = [taken(loader) for _ in range(6)]
    taken(loader, 2)
    loader.set_epoch(4)
    assert loader.epoch == 4
    assert taken(loader, 3) == whole[4][:3]
    assert taken(loader) == whole[5]
    loader.set_epoch(1)
    loader.skip_first_batches(2)
    assert taken(loader) == whole[1][2:]
    loader.skip_first_batches(3)
    loader.set_epoch(3)
    assert taken(loader) == whole[3][3:]
    loader.skip_first_batches(100)
    assert taken(loader) == []
    assert taken(loader) == whole[5]


def test_the_length_is_that_of_an_epoch():
    loader = made(KINDS["shuffled"])
    taken(loader, 2)
    loader.skip_first_batches(1)
    assert len(loader) == 7


# ---- passes side by side


#: Workers of streams take time to start, and have nothing of their own to do here.
SIDE_BY_SIDE = [name for name in KINDS if "by workers" not in name or name == "augmented by workers"]


@pytest.mark.drawn
@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_passes_side_by_side_are_those_of_one_after_the_other(name):
    loader = made(KINDS[name])
    whole = [taken(loader) for _ in range(3)]
    loader = made(KINDS[name])
    first, second = iter(loader), iter(loader)
    found = [content(next(first))], [content(next(second))]
    if "persistent" in name or "a part" in name:
        with pytest.raises(ValueError, match="one pass at a time"):
            next(first)
        assert found[1] + [content(shard) for shard in second] == whole[1]
        return
    for a, b in itertools.zip_longest(first, second):
        found[0].extend([content(a)] if a is not None else [])
        found[1].extend([content(b)] if b is not None else [])
    assert found[0] == whole[0] and found[1] == whole[1]
    assert taken(loader) == whole[2]


def test_a_state_is_that_of_the_pass_begun_last():
    loader = made(KINDS["shuffled"])
    first, second = iter(loader), iter(loader)
    next(first), next(second), next(first), next(first)
    again = made(KINDS["shuffled"])
    again.load_state_dict(loader.state_dict())
    assert taken(again) == [content(shard) for shard in second]


# ---- going on


@pytest.mark.drawn
@pytest.mark.parametrize("name", KINDS)
def test_a_state_goes_on_exactly_whatever_draws_the_rows(name, rng):
    loader = made(KINDS[name])
    whole = [taken(loader) for _ in range(4)]
    for _ in range(1 if "workers" in name or "a part" in name else 4):
        loader, done = made(KINDS[name]), []
        # Passes that were left before do not matter, nor do those that ended.
        for epoch in range(2):
            count = rng.randrange(1, len(whole[epoch]) + 1)
            done.append(taken(loader, count))
            if rng.random() < 0.4:
                break
        state = loader.state_dict()
        # The seed of the process that goes on may be another one.
        again = made(KINDS[name], seed=rng.randrange(2**31))
        again.load_state_dict(state)
        assert again.state_dict() == state
        epoch, count = len(done) - 1, len(done[-1])
        if count == len(whole[epoch]):
            epoch, count = epoch + 1, 0
        assert taken(again) == whole[epoch][count:], (epoch, count)
        assert taken(again, 2) == whole[epoch + 1][:2], (epoch, count)


def test_an_order_that_cannot_be_drawn_again_is_refused():
    loader = made(by_batch_sampler(ByCount))
    taken(loader, 3), taken(loader, 3)
    again = made(by_batch_sampler(ByCount))
    again.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="another order"):
        taken(again)


def test_a_dataset_that_changed_is_refused():
    loader = made(KINDS["shuffled"])
    taken(loader, 3)
    again = made(by_dataset(lambda: rows_of(20), shuffle=True))
    again.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="another order"):
        taken(again)


class Unseeded(IterableDataset):
    """Rows in an order that nobody can draw again."""

    def __iter__(self):
        rng = random.SystemRandom()
        rows = rows_of()
        rng.shuffle(rows)
        return iter([{"input_ids": [rng.randrange(2**20) for _ in range(3)]}, *rows])


def test_a_stream_that_cannot_be_read_again_is_refused():
    loader = made(by_dataset(Unseeded))
    taken(loader, 3)
    again = made(by_dataset(Unseeded))
    again.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="another order"):
        taken(again)


def test_states_that_do_not_fit_are_refused():
    loader = made(KINDS["a stream"])
    taken(loader, 3)
    with pytest.raises(ValueError, match=r"batch_size=2.* batch_size=3"):
        made(lambda: DataLoader(Stream(rows_of(), by_epoch=True), batch_size=3, collate_fn=noisy)).load_state_dict(
            loader.state_dict()
        )
    for state in ({}, {"epoch": 1}, {"epoch": -1, "batches": 0}, {"epoch": 0, "batches": "3"}, None):
        with pytest.raises(ValueError, match="load_state_dict expected"):
            loader.load_state_dict(state)
    for count in (-1, True, 1.5, None):
        with pytest.raises(ValueError, match="skip_first_batches"):
            loader.skip_first_batches(count)
        with pytest.raises(ValueError, match="set_epoch"):
            loader.set_epoch(count)
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert loader.state_dict() == state
    with pytest.raises(ValueError, match="epoch 0 after 3 batches"):
        loader.set_epoch(2)


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 1}])
@pytest.mark.parametrize("data", [rows_of, lambda: Stream(rows_of(), by_epoch=True)], ids=["rows", "stream"])
def test_batches_are_skipped_by_the_loader_itself(data, arguments):
    """Accelerate's function would make a loader of whole sequences of it."""
    loader = ra.Ring.alone().prepare_data_loader(DataLoader(data(), collate_fn=noisy, **arguments))
    with pytest.raises(AttributeError, match=r"loader.skip_first_batches\(n\)"):
        skip_first_batches(loader, 1)


def test_a_rings_loader_goes_through_an_accelerator_as_it_is(tmp_path):
    process_environment(0, 1)
    accelerator = Accelerator()
    ring = ra.Ring.from_accelerator(accelerator, size=1)
    torch.manual_seed(5)
    loader = ring.prepare_data_loader(KINDS["shuffled"]())
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    *_, prepared = accelerator.prepare(model, optimizer, loader)
    assert prepared is loader and accelerator.prepare_data_loader(loader) is loader
    accelerator.register_for_checkpointing(loader)
    whole = [taken(loader) for _ in range(2)]
    loader.set_epoch(0)
    taken(loader, 3)
    accelerator.save_state(str(tmp_path))
    taken(loader)
    accelerator.load_state(str(tmp_path))
    assert taken(loader) == whole[0][3:]
    assert taken(loader) == whole[1]


# ---- what was there before


def test_drawing_rows_leaves_the_generators_of_the_process_alone():
    generator = torch.Generator().manual_seed(9)

    def drawn():
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random(), generator.get_state().tolist()  # noqa: NPY002

    loader = made(
        lambda: DataLoader(Augmented(rows_of()), batch_size=2, shuffle=True, generator=generator, collate_fn=noisy)
    )
    found = []
    for read in (False, True):
        torch.manual_seed(1), np.random.seed(1), random.seed(1)  # noqa: NPY002
        if read:
            list(loader)
        found.append(drawn())
    assert found[0] == found[1]
