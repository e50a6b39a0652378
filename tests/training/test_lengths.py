"""Documents longer than a row are told of when a loader is prepared, where the dataset tells its lengths."""

import warnings

import pytest
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset as Table
from datasets import Features, LargeList, Sequence, Value, concatenate_datasets
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

import hf_ring_attention as ra
from tests.support.ranks import run_ranks
from tests.support.training import process_environment, tiny_llama, trainer


class Costly(Dataset):
    """A dataset that would read each document."""

    def __init__(self, rows):
        self.rows, self.read = rows, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.read += 1
        return self.rows[index]


def rows_with(rng, longest, at, count=20):
    """Documents of up to 8 tokens, and one of `longest`."""
    lengths = [rng.randrange(1, 9) for _ in range(count)]
    lengths[at] = longest
    return [{"input_ids": [1 + i % 90 for i in range(length)], "text": "what it was"} for length in lengths]


def prepared(dataset, kind=ra.PackingCollator, **settings):
    collator = kind(**{"row_length": 8, **settings})
    return ra.Ring.alone().prepare_data_loader(DataLoader(dataset, batch_size=2, collate_fn=collator))


def large(rows):
    features = Features({"input_ids": LargeList(Value("int32"))})
    return Table.from_list([{"input_ids": row["input_ids"]} for row in rows], features=features)


#: What makes datasets of rows, none of which is read one by one; and how many rows they then have.
KINDS = {
    "a list": lambda rows: rows,
    "a tuple": tuple,
    "a table": Table.from_list,
    "a table of tensors": lambda rows: Table.from_list(rows).with_format("torch"),
    "a table with large lists": large,
    "a shuffled table": lambda rows: Table.from_list(rows).shuffle(seed=1),
    "a filtered table": lambda rows: Table.from_list(rows).filter(lambda row: len(row["input_ids"]) > 0),
    "tables": lambda rows: concatenate_datasets([Table.from_list(rows[:7]), Table.from_list(rows[7:])]),
    "a subset": lambda rows: Subset(rows, list(range(len(rows)))),
    "a subset of a table": lambda rows: Subset(Table.from_list(rows), range(len(rows))),
    "several": lambda rows: ConcatDataset([rows[:7], Table.from_list(rows[7:])]),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_document_longer_than_a_row_is_refused_when_the_loader_is_prepared(name, rng):
    at = rng.randrange(20)
    dataset = KINDS[name](rows_with(rng, 13, at))
    with pytest.raises(ValueError, match=r"1 of 20 documents .* row of 8, .* 13: .*excess_length_strategy"):
        prepared(dataset)
    prepared(dataset, row_length=13)
    with pytest.warns(UserWarning, match="1 of 20 documents .* left out"):
        loader = prepared(dataset, excess_length_strategy="drop")
    assert sum(int((shard["position_ids"] == 0).sum()) for shard in loader) >= 19
    for strategy, done in (("truncate", "truncated"), ("split", "split")):
        with pytest.warns(UserWarning, match=done):
            prepared(dataset, excess_length_strategy=strategy)
    with pytest.warns(UserWarning, match=r"split into more rows than a batch has documents .*buffer=1"):
        loader = prepared(dataset, ra.PaddingCollator, excess_length_strategy="split")
    assert sum(shard["input_ids"].shape[0] for shard in loader) == 21


def test_rows_that_a_subset_leaves_out_do_not_count(rng):
    rows = rows_with(rng, 13, 4)
    others = [index for index in range(20) if index != 4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dataset in (Subset(rows, others), Table.from_list(rows).select(others), rows[:4] + rows[5:]):
            prepared(dataset, excess_length_strategy="drop")
    assert len(list(prepared(Subset(rows, others)))) > 0


def test_a_long_document_that_makes_no_row_is_refused_as_such():
    with pytest.raises(ValueError, match=r"a document of the dataset has input_ids of torch\.float32"):
        prepared([{"input_ids": [1.5] * 9}])


def test_padding_does_not_make_a_document_long():
    rows = [{"input_ids": [1, 2, 3] + [0] * 9, "attention_mask": [1, 1, 1] + [0] * 9}] * 3
    for dataset in (rows, Table.from_list(rows)):
        assert next(iter(prepared(dataset)))["shift_labels"].shape == (1, 8)


def test_a_dataset_that_would_have_to_be_read_is_refused_at_the_document_itself(rng):
    dataset = Costly(rows_with(rng, 13, 5))
    made = Table.from_list(rows_with(rng, 13, 5)).with_transform(lambda rows: rows)
    for costly in (dataset, made):
        loader = prepared(costly)
        with pytest.raises(ValueError, match="document 1 has 13 tokens, and does not fit a row of 8"):
            list(loader)
    assert prepared(dataset, row_length=13) is not None
    dataset.read = 0
    prepared(dataset)
    assert dataset.read == 0


def test_lists_of_other_types_of_integers_are_measured(rng):
    features = Features({"input_ids": Sequence(Value("int16"), length=9)})
    rows = [{"input_ids": list(range(1, 10))}] * 3
    with pytest.raises(ValueError, match="document 0 has 9 tokens"):
        list(prepared(Table.from_list(rows, features=features)))


def by_trainer(rank, folder):
    process_environment(rank, dist.get_world_size())
    errors = []
    rows = [{"input_ids": [1] * 5}] * 3 + [{"input_ids": [1] * 9}]
    for dataset in (rows, Table.from_list(rows)):
        try:
            trainer(rank, folder, ring_size=2, rows=dataset, collator=ra.PaddingCollator(row_length=8), steps=1)
        except ValueError as error:
            errors.append(str(error))
    accelerator = Accelerator()
    ring = ra.Ring.from_accelerator(accelerator, size=2)
    model = ra.patch_model(tiny_llama(), ring=ring)
    # On one rank alone.
    collator = ra.PaddingCollator(row_length=8 + rank)
    try:
        ring.prepare_data_loader(DataLoader(rows, collate_fn=collator))
    except ValueError as error:
        errors.append(str(error))
    del model
    return errors


def test_a_long_document_is_refused_on_every_rank_and_before_a_trainer_trains(tmp_path):
    for errors in run_ranks(by_trainer, 2, tmp_path):
        assert len(errors) == 3
        for error in errors:
            assert "1 of 4 documents have more tokens than a row of 8, the longest (document 3) 9" in error


def with_masks(rank, folder):
    """The columns that a model's forward does not have, and the collator reads."""
    rows = [{"input_ids": list(range(1, 13)), "completion_mask": [0] * 8 + [1] * 4, "unused": "x"}] * 2
    seen = []
    for dataset in (rows, Table.from_list(rows)):
        _, made = trainer(
            rank, folder, rows=dataset, eval_rows=dataset, collator=ra.PaddingCollator(), batch_size=2, steps=1
        )
        seen.append(made.evaluate()["eval_tokens"])
    return seen


def test_a_trainer_leaves_the_collator_the_columns_that_it_reads(tmp_path):
    assert with_masks(0, tmp_path) == [8, 8]
