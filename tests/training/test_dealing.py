"""Rows dealt to rings by work: even work, the same rows in each step, and exact states; what is not dealt is told."""

import itertools
import logging
import random
import statistics
import tempfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset as Table
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

import hf_ring_attention as ra
from hf_ring_attention.training.dealing import Dealer, decide_deal, divided_evenly
from hf_ring_attention.training.fitting import best_fit
from hf_ring_attention.training.samplers import RingBatchSampler
from tests.support.ranks import run_ranks
from tests.support.training import SIZES, assert_equal_runs, documents, loop, process_environment, tiny_llama, trainer

EXACT = ra.Pattern.exact()
#: The work of a token beside that of query-key pairs.
OF_TOKEN = 6 * SIZES["hidden_size"]


def packed(count, row_length, seed):
    """Rows of documents of uneven lengths, full and not, which say where their documents end."""
    columns = {"input_ids": [row["input_ids"] for row in documents(10 * count, 4, row_length, seed)]}
    rows = Table.from_dict(ra.pack_documents(columns, row_length)).to_list()
    return rows[:count]


def pairs(*lengths):
    return sum(length * (length + 1) // 2 for length in lengths)


# ---- even work


def imbalance(by_ring):
    loads = [sum(works) for works in by_ring]
    return max(loads) * len(loads) / sum(loads)


def of_rings(groups, works):
    """The works of each ring's rows in a step."""
    rings = range(len(groups[0]))
    return [[works[row] for group in groups for batch in group[ring : ring + 1] for row in batch] for ring in rings]


def steps_of(works, rings, together, batch_size):
    rows = iter(range(len(works)))
    return [[list(itertools.islice(rows, batch_size)) for _ in range(rings)] for _ in range(together)]


def test_dealing_is_never_worse_than_by_count(rng):
    draws = (lambda: rng.randrange(1, 100), lambda: int(rng.lognormvariate(8, 1.5)) + 1, lambda: rng.choice((1, 1000)))
    better = 0
    for number in range(1000):
        rings, together, batch_size = rng.randrange(2, 9), rng.randrange(1, 5), rng.randrange(1, 5)
        works = [draws[number % 3]() for _ in range(rings * together * batch_size)]
        groups = steps_of(works, rings, together, batch_size)
        dealt = Dealer(np.array(works), together, alike=number % 2 == 0).dealt(groups)
        assert [[len(batch) for batch in group] for group in dealt] == [[batch_size] * rings] * together
        assert sorted(itertools.chain(*itertools.chain(*dealt))) == list(range(len(works)))
        before, after = (imbalance(of_rings(x, works)) for x in (groups, dealt))
        assert after <= before
        better += after < before
    assert better > 500


@pytest.mark.parametrize("rings", range(2, 9))
@pytest.mark.parametrize(("together", "batch_size"), [(1, 4), (4, 1), (2, 4)])
def test_packed_rows_of_log_normal_documents_are_even(rings, together, batch_size):
    rng = random.Random(rings)
    lengths = [min(4096, int(rng.lognormvariate(6, 1)) + 1) for _ in range(4000)]
    works = [pairs(*(lengths[x] for x in row)) for row in best_fit(lengths, 4096)]
    found = {"count": [], "work": []}
    for _ in range(100):
        own = rng.choices(works, k=rings * together * batch_size)
        groups = steps_of(own, rings, together, batch_size)
        for name, step in (("count", groups), ("work", Dealer(np.array(own), together, alike=True).dealt(groups))):
            found[name].append(imbalance(of_rings(step, own)))
    # The tokens of a row, which are as many for all rows, are left out here: they would make both figures smaller.
    assert statistics.median(found["work"]) <= 1.05 < 1.1 < statistics.median(found["count"])


def test_parts_have_as_many_items_as_they_have_room_for(rng):
    for _ in range(100):
        rooms = [rng.randrange(5) for _ in range(rng.randrange(1, 6))]
        works = [rng.randrange(50) for _ in range(sum(rooms))]
        parts = divided_evenly(works, rooms)
        assert list(map(len, parts)) == rooms and sorted(itertools.chain(*parts)) == list(range(len(works)))
    assert divided_evenly([9, 5, 4, 1], [2, 2]) == [[0, 3], [1, 2]]
    assert divided_evenly([100, 40, 30, 20], [1, 3]) == [[0], [1, 2, 3]]
    # Longest first would leave 9 + 6 + 6 = 21 to one part, where the mean is 53 / 3.
    assert divided_evenly([6, 7, 6, 1, 9, 9, 6, 8, 1], [3, 3, 3]) == [[0, 2, 6], [1, 3, 5], [4, 7, 8]]


def test_a_step_that_would_be_less_even_is_left_as_it_is():
    works = [9, 7, 2, 8, 1, 9, 5, 5, 7]
    assert [sum(works[x] for x in part) for part in divided_evenly(works, [3, 3, 3])] == [17, 19, 17]
    groups = steps_of(works, 3, 1, 3)
    assert Dealer(np.array(works), 1, alike=True).dealt(groups) is groups


def test_batches_of_all_rings_resemble_each_other_at_the_same_time():
    works = [8, 7, 6, 5, 4, 3, 2, 1] * 2
    groups = steps_of(works, 2, 4, 2)
    loads = {
        alike: [
            [sum(works[row] for row in batch) for batch in group]
            for group in Dealer(np.array(works), 4, alike).dealt(groups)
        ]
        for alike in (True, False)
    }
    assert loads[True] == [[16 - 1, 16 - 1], [11, 11], [7, 7], [3, 3]]
    assert loads[False] == [[9, 9]] * 4


# ---- the same rows


def samplers(count, rings, batch_size, drop_last, dealer, seed=3):
    rows = DataLoader(range(count), batch_size, shuffle=True, drop_last=drop_last).batch_sampler
    return [RingBatchSampler(rows, ring, rings, drop_last, seed, dealer) for ring in range(rings)]


def read_by(samplers):
    """For each batch that rings take together, the rows of each."""
    return list(itertools.zip_longest(*([batch.rows for batch in sampler] for sampler in samplers), fillvalue=()))


def test_each_step_has_its_rows_by_count_and_each_row_is_read_once(rng):
    for number in range(60):
        rings, together, batch_size = rng.randrange(2, 5), rng.randrange(1, 4), rng.randrange(1, 4)
        count, drop_last = rng.randrange(rings * batch_size, 60), number % 3 == 0
        works = np.array([rng.randrange(1, 1000) for _ in range(count)])
        dealer = Dealer(works, together, alike=number % 2 == 0)
        by_count, by_work = (samplers(count, rings, batch_size, drop_last, x) for x in (None, dealer))
        for epoch in range(2):
            for sampler in (*by_count, *by_work):
                sampler.set_epoch(epoch)
            expected, found = read_by(by_count), read_by(by_work)
            assert [[*map(len, group)] for group in found] == [[*map(len, group)] for group in expected]
            assert len(found) == len(by_work[0])
            rows = sorted(itertools.chain(*itertools.chain(*found)))
            assert len(rows) == len(set(rows)) and (drop_last or rows == list(range(count)))
            for first in range(0, len(found), together):
                step = [
                    sorted(itertools.chain(*itertools.chain(*x[first : first + together]))) for x in (found, expected)
                ]
                assert step[0] == step[1]
            # A state at the end of a step serves any number of rings, however they deal.
            assert by_work[0].order[together - 1 :: together] == by_count[0].order[together - 1 :: together]
            assert all(sampler.order == by_work[0].order for sampler in by_work)


# ---- going on


ROWS = packed(22, 32, seed=4)


def prepared(ring, accumulate=3, deal="auto", rows=ROWS, **arguments):
    """The loader of one of two rings, as an accelerator would have it that accumulates."""
    arguments = {"shuffle": True, "collate_fn": ra.PaddingCollator(row_length=32), "batch_size": 2, **arguments}
    torch.manual_seed(5)
    process_environment(0, 1)
    accelerator = Accelerator(gradient_accumulation_steps=accumulate)
    of_process = ra.Ring.from_accelerator(accelerator, size=1)
    of_process.dp_rank, of_process.dp_size = ring, 2
    model = ra.patch_model(tiny_llama(EXACT), ring=of_process)
    loader = of_process.prepare_data_loader(DataLoader(rows, **arguments), deal=deal)
    loader.model = model  # a ring does not keep its models alive
    return loader


def taken(loader, count=None):
    return [shard["input_ids"].tolist() for shard in itertools.islice(loader, count)]


@pytest.mark.parametrize("ring", [0, 1])
def test_a_state_goes_on_within_a_step(ring):
    whole = [taken(loader := prepared(ring)), taken(loader)]
    assert len(whole[0]) == 6 - ring and whole[0] != taken(prepared(ring, deal="count")) and whole[0] != whole[1]
    for count in range(1, 6 - ring):
        first = prepared(ring)
        taken(first, count)
        second = prepared(ring, num_workers=1 if count == 2 else 0)
        second.load_state_dict(first.state_dict())
        assert taken(second) == whole[0][count:]
        assert taken(second, 2) == whole[1][:2]


def test_a_state_within_a_step_serves_only_a_loader_that_deals_alike():
    first, by_count = prepared(0), prepared(0, deal="count")
    taken(first, 4), taken(by_count, 4)
    for state, other in ((first, prepared(0, 2)), (first, prepared(0, deal="count")), (by_count, prepared(0))):
        with pytest.raises(ValueError, match=r"has taken 4 batches, of which . were dealt together, .* go on with"):
            other.load_state_dict(state.state_dict())
    longer = prepared(0, rows=[*ROWS[1:], ROWS[0]])
    longer.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="another order"):
        taken(longer)
    # At the end of a step all have read the same rows.
    first, by_count = prepared(0), prepared(0, deal="count")
    taken(first, 3)
    by_count.load_state_dict(first.state_dict())
    assert taken(by_count) == taken(prepared(0, deal="count"))[3:]


# ---- training


def trained(rank, kind, ring_size, batch_size):
    """The figures of a run, and whether rows have changed places."""
    moved, dealt = [], Dealer.dealt

    def telling(dealer, groups):
        moved.append(dealer.together)
        after = dealt(dealer, groups)
        if after == groups:
            moved.pop()
        return after

    Dealer.dealt = telling
    try:
        settings = {
            "ring_size": ring_size, "batch_size": batch_size, "steps": 4, "accumulate": 2, "rows": TRAINED[kind],
            "collator": ra.PaddingCollator(row_length=64),
        }  # fmt: skip
        if kind == "loop":
            run = loop(rank, **settings)
        else:
            with tempfile.TemporaryDirectory() as folder:
                run, made = trainer(rank, folder, ring_deal="work", **settings)
                of_training, of_evaluation = made.get_train_dataloader(), made.get_eval_dataloader(TRAINED["loop"])
                assert of_training.dealing.asked == "work" and of_evaluation.dealing.decision.choice == "count"
    finally:
        Dealer.dealt = dealt
    return run, set(moved)


#: Two steps of eight rows, and for the Trainer, whose steps end with an epoch, one of fewer.
TRAINED = {"loop": packed(16, 64, seed=1), "Trainer": packed(22, 64, seed=1)}
#: The numbers of processes that share a row, and of rows of a ring's batch: eight rows a step over four processes.
RINGS = ((2, 2), (1, 1))


def all_trained(rank):
    kinds = itertools.product(TRAINED, RINGS)
    return {(kind, sizes): trained(rank, kind, *sizes) for kind, sizes in kinds}


@pytest.mark.usefixtures("in_float64")
def test_training_is_that_of_one_process():
    by_rank = run_ranks(all_trained, 4)
    for kind in TRAINED:
        expected, moved = trained(0, kind, 1, 4)
        assert not moved
        for sizes, runs in itertools.product(RINGS, by_rank):
            figures, moved = runs[kind, sizes]
            assert_equal_runs(figures, expected, f"{kind} over rings of {sizes[0]}")
            assert moved == {2}, "rows have changed places within steps of two batches"


# ---- work


def works_of(dataset, collator, pattern=None):
    ring = ra.Ring.alone()
    ring.dp_size = 2
    model = ra.patch_model(tiny_llama(EXACT), ring=ring)
    loader = DataLoader(dataset, 2, shuffle=True, collate_fn=collator)
    dealer = decide_deal(loader, ring, pattern, "auto", None).dealer
    assert model is not None
    return None if dealer is None else dealer.works.tolist()


class Unknown(Dataset):
    """Rows that are made when they are read."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


def test_work_is_that_of_pairs_and_of_tokens():
    rows = [{"input_ids": [1] * 12, "seq_lengths": [3, 9]}, {"input_ids": [1] * 7}, {"input_ids": [1] * 12}]
    expected = [pairs(3, 9) + 12 * OF_TOKEN, pairs(7) + 7 * OF_TOKEN, pairs(12) + 12 * OF_TOKEN]
    padding = ra.PaddingCollator()
    assert works_of(rows, padding) == works_of(rows, None) == expected
    # Rows that are filled have as many tokens as the others.
    assert works_of(rows, ra.PaddingCollator(row_length=12)) == [pairs(3, 9), pairs(7), pairs(12)]
    assert works_of(rows, padding, ra.Pattern([ra.Window(1)])) == [
        12 * (1 + OF_TOKEN),
        7 * (1 + OF_TOKEN),
        12 * (1 + OF_TOKEN),
    ]
    for strategy, longest in (("truncate", pairs(8)), ("split", pairs(8, 4)), ("drop", 0)):
        collator = ra.PaddingCollator(row_length=8, excess_length_strategy=strategy)
        assert works_of(rows, collator)[1:] == [pairs(7), longest]
    table = Table.from_list(rows)
    assert works_of(table, padding) == expected
    assert works_of(table.select([2, 0]), padding) == [expected[2], expected[0]]
    assert works_of(Subset(table, [1, 1]), padding) == [expected[1]] * 2
    assert works_of(ConcatDataset([table, rows[:1]]), padding) == [*expected, expected[0]]
    assert works_of(table.with_format("torch", columns=["input_ids"]), padding)[0] == pairs(12) + 12 * OF_TOKEN


@pytest.mark.parametrize(
    "dataset",
    [
        Unknown(),
        [{"text": "no tokens yet"}] * 4,
        [{"input_ids": [1] * 4, "seq_idx": [0, 0, 1, 1]}] * 4,
        Table.from_list([{"input_ids": [1] * 4, "position_ids": [0, 1, 0, 1]}] * 4),
        Table.from_list(ROWS).with_transform(lambda rows: rows),
        Table.from_dict({"text": ["no tokens yet"] * 4}),
    ],
    ids=["a class", "texts", "seq_idx", "position_ids", "a transform", "a table of texts"],
)
def test_lengths_that_are_not_known(dataset):
    assert works_of(dataset, ra.PaddingCollator()) is None


# ---- what is told, and refused


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


class Own(BatchSampler):
    pass


TOLD = {
    "work": ({}, "by work, because the dataset tells the lengths"),
    "unknown": ({"rows": Unknown()}, "by count, because the dataset does not tell the lengths"),
    "a stream": ({"rows": Stream(), "shuffle": None}, "by count, because the lengths of a stream's documents"),
    "in order": ({"shuffle": False}, "by count, because rows are read in the order of the dataset"),
    "in order, asked for": ({"shuffle": False, "deal": "work"}, "by work, because"),
    "by count": ({"deal": "count"}, "by count, because deal='count' asks for it"),
    "unknown, asked for": ({"rows": Unknown(), "deal": "work"}, "by count, because the dataset does not tell the lengths"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_the_choice_is_told_once(name, caplog):
    settings, expected = TOLD[name]
    caplog.set_level(logging.INFO, "hf_ring_attention.training.dealing")
    loader = prepared(0, **settings)
    taken(loader), taken(loader)
    (record,) = [record for record in caplog.records if record.name == "hf_ring_attention.training.dealing"]
    assert f"rows go to 2 rings {expected}" in record.getMessage()
    assert record.levelno == (logging.WARNING if name == "unknown, asked for" else logging.INFO)
    if "by count" in expected and "stream" not in name:
        by_count = {**settings, "deal": "count", "rows": ROWS}
        assert taken(prepared(0, **settings), 6) == taken(prepared(0, **by_count), 6)


def test_batches_of_an_own_batch_sampler_stay_as_they_are(caplog):
    caplog.set_level(logging.INFO, "hf_ring_attention.training.dealing")
    own = {"batch_sampler": Own(range(len(ROWS)), 2, False), "batch_size": 1, "shuffle": None, "deal": "work"}
    loader = prepared(0, **own)
    assert "the loader has a batch sampler of its own (Own), whose batches stay as they are" in caplog.text
    assert [batch.rows for batch in loader.rows.batch_sampler] == [[first, first + 1] for first in range(0, 22, 4)]


def test_a_prepared_loader_keeps_its_deal():
    loader = prepared(0, deal="count")
    assert loader.ring.prepare_data_loader(loader) is loader.ring.prepare_data_loader(loader, deal="count") is loader
    with pytest.raises(ValueError, match="with another deal"):
        loader.ring.prepare_data_loader(loader, deal="work")


def refused(rank):
    process_environment(rank, dist.get_world_size())
    accelerator = Accelerator()
    errors = []
    ring = ra.Ring.from_accelerator(accelerator, size=1)
    model = ra.patch_model(tiny_llama(EXACT), ring=ring)
    for deals, rows in (
        (("work", "count"), ROWS),
        (("work", "length"), ROWS),
        (("work", "work"), ROWS[: 11 * (1 + rank)]),
    ):
        # The same number of rows, and the same first row.
        rows = DataLoader([*rows, *ROWS[:11]][:22], 2, collate_fn=ra.PaddingCollator())
        try:
            ring.prepare_data_loader(rows, deal=deals[rank])
            errors.append("no error")
        except ValueError as error:
            errors.append(str(error))
    assert model is not None
    return errors


def test_ranks_that_disagree_are_refused_on_every_rank():
    for errors in run_ranks(refused, 2):
        for error, expected in zip(
            errors,
            (
                "disagree on deal: process 0: work, process 1: count",
                "deal must be one of ('auto', 'work', 'count'), got 'length'",
                "disagree on the work of its rows",
            ),
            strict=True,
        ):
            assert expected in error
