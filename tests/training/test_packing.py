"""Documents are packed into nearly full rows, and a row teaches a model what its documents alone would."""

import random

import pytest
import torch
from datasets import Dataset

import hf_ring_attention as ra
from hf_ring_attention.training.packing import best_fit

LENGTHS = random.Random(0).choices(range(1, 101), k=300)


def tokens_of(lengths):
    """Documents whose tokens say which document they are of, and where in it they are."""
    ids = [[1000 * number + place for place in range(length)] for number, length in enumerate(lengths)]
    return {"input_ids": ids, "assistant_masks": [[place % 2 for place in range(length)] for length in lengths]}


def test_each_document_is_in_one_row_that_it_fits():
    rows = best_fit(LENGTHS, 100)
    assert sorted(number for row in rows for number in row) == list(range(len(LENGTHS)))
    assert all(sum(LENGTHS[number] for number in row) <= 100 for row in rows)


def test_rows_are_nearly_full_and_in_the_order_of_their_documents():
    rows = best_fit(LENGTHS, 100)
    assert sum(LENGTHS) / (100 * len(rows)) > 0.97
    assert rows == sorted(rows) and all(row == sorted(row) for row in rows)


def test_a_document_takes_the_fullest_row_that_has_room():
    assert best_fit([6, 5, 4, 5], 10) == [[0, 2], [1, 3]]
    assert best_fit([], 10) == []


def test_columns_of_tokens_stay_with_their_documents():
    columns = tokens_of(LENGTHS)
    packed = ra.pack_documents(columns | {"text": ["a text"] * len(LENGTHS)}, 100)
    assert packed.keys() == {"input_ids", "assistant_masks", "seq_lengths"}
    found = {}
    for ids, mask, lengths in zip(*(packed[name] for name in ("input_ids", "assistant_masks", "seq_lengths"))):
        assert len(ids) == len(mask) == sum(lengths) <= 100
        for length in lengths:
            found[ids[0] // 1000] = (ids[:length], mask[:length])
            ids, mask = ids[length:], mask[length:]
    assert found == {n: (columns["input_ids"][n], columns["assistant_masks"][n]) for n in range(len(LENGTHS))}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("split", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 1000, 1001]]),
        ("truncate", [[0, 1, 2, 3], [1000, 1001]]),
        ("drop", [[1000, 1001]]),
    ],
)
def test_long_documents_become_what_is_asked_for(strategy, expected):
    packed = ra.pack_documents(tokens_of([10, 2, 0]), 4, excess_length_strategy=strategy)
    assert sorted(packed["input_ids"]) == expected


def test_what_cannot_be_packed_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="document 0 has 10 tokens, and does not fit a row of 4: make rows longer"):
        ra.pack_documents(tokens_of([10]), 4, excess_length_strategy="raise")
    with pytest.raises(ValueError, match="document 0 has 2 tokens and 3 values of labels"):
        ra.pack_documents({"input_ids": [[1, 2]], "labels": [[1, 2, 3]]}, 4)
    with pytest.raises(ValueError, match="column seq_lengths says that these documents were packed before"):
        ra.pack_documents({"input_ids": [[1, 2]], "seq_lengths": [[1, 1]]}, 4)
    with pytest.raises(ValueError, match="documents need input_ids, got the columns text"):
        ra.pack_documents({"text": ["a"]}, 4)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_data_set_is_packed_by_map_and_read_by_the_collator(streamed):
    dataset = Dataset.from_dict(tokens_of(LENGTHS))
    dataset = dataset.to_iterable_dataset() if streamed else dataset
    rows = dataset.map(
        lambda columns: ra.pack_documents(columns, 100),
        batched=True,
        batch_size=150,
        remove_columns=["input_ids", "assistant_masks"],
    )
    batch = ra.PaddingCollator(row_length=100)(list(rows))
    assert int(batch["attention_mask"].sum()) == sum(LENGTHS)
    inside = batch["seq_idx"] >= 0
    assert torch.equal(batch["position_ids"][inside], batch["input_ids"][inside] % 1000)
    assert torch.equal(batch["labels"][inside] >= 0, batch["position_ids"][inside] % 2 == 1)
