"""Documents are packed into nearly full rows: every token once, in an order that depends on nothing but the documents."""

import itertools
import math

import pytest
import torch
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st

import hf_ring_attention as ra
from hf_ring_attention.training.packing import best_fit

ROW = 64
NAMES = ["input_ids", "labels", "position_ids", "attention_mask"]


def tokens_of(lengths):
    """Documents whose tokens encode their document and their place in it."""
    ids = [[1000 * number + place for place in range(length)] for number, length in enumerate(lengths)]
    return {"input_ids": ids, "assistant_masks": [[place % 2 for place in range(length)] for length in lengths]}


def log_normal(rng, count, mean, sigma=1):
    """Lengths of documents as texts have them: many short ones, and few that are very long."""
    return [max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))) for _ in range(count)]


def columns_of(rows):
    """The rows of a data set or a stream, by columns."""
    rows = list(rows)
    assert all(list(row) == NAMES for row in rows)
    return {name: [row[name] for row in rows] for name in NAMES}


def documents_of(rows):
    """The documents in rows, each a list of (token, label); checks all that rows promise."""
    found = []
    for ids, labels, positions, mask in zip(*(rows[name] for name in NAMES), strict=True):
        length = sum(mask)
        assert mask == [1] * length + [0] * (len(mask) - length)
        assert ids[length:] == positions[length:] == [0] * (len(mask) - length)
        assert labels[length:] == [-100] * (len(mask) - length)
        starts = [place for place in range(length) if positions[place] == 0]
        for start, stop in itertools.pairwise([*starts, length]):
            assert positions[start:stop] == list(range(stop - start)) and labels[start] == -100
            found.append(list(zip(ids[start:stop], labels[start:stop], strict=True)))
    return found


@pytest.fixture
def lengths(rng):
    return rng.choices(range(1, ROW + 1), k=150)


@given(st.data())
def test_each_document_is_in_one_row_that_it_fits(data):
    row_length = data.draw(st.integers(1, 50))
    lengths = data.draw(st.lists(st.integers(1, row_length), max_size=60))
    rows = best_fit(lengths, row_length)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    filled = [sum(lengths[number] for number in row) for row in rows]
    assert all(0 < tokens <= row_length for tokens in filled)
    assert sum(2 * tokens <= row_length for tokens in filled) <= 1, "two rows that are half empty are one row"
    assert rows == sorted(rows) and all(row == sorted(row) for row in rows), "rows keep the order of the documents"


@pytest.mark.parametrize(("strategy", "streamed"), [("split", True), ("truncate", False)])
def test_ten_thousand_documents_of_log_normal_lengths_fill_their_rows(strategy, streamed, rng):
    row_length = 256
    lengths = log_normal(rng, 10_000, row_length / 8)
    stops = list(itertools.accumulate(lengths, initial=1))
    ids = [list(range(start, stop)) for start, stop in itertools.pairwise(stops)]  # each token is another
    documents = Dataset.from_dict({"input_ids": ids})
    documents = documents.to_iterable_dataset() if streamed else documents
    rows = list(ra.pack_documents(documents, row_length, excess_length_strategy=strategy))
    tokens = sorted(token for row in rows for token in row["input_ids"] if token)
    kept = row_length if strategy == "truncate" else None
    assert tokens == sorted(token for x in ids for token in x[:kept])
    assert all(len(row[name]) == row_length for row in rows for name in NAMES)
    assert len(tokens) / (row_length * len(rows)) >= 0.97


def test_labels_of_masks_stay_with_their_documents(lengths):
    columns = tokens_of(lengths)
    chats = [[{"role": "user", "content": "one and one?"}]] * len(lengths)
    packed = ra.pack_documents(columns | {"text": ["a text"] * len(lengths), "messages": chats, "length": lengths}, ROW)
    assert list(packed) == NAMES and {len(x) for rows in packed.values() for x in rows} == {ROW}
    expected = [[(token, token if token % 2 else -100) for token in ids] for ids in columns["input_ids"]]
    assert sorted(documents_of(packed)) == expected
    same = {"input_ids": columns["input_ids"], "completion_mask": columns["assistant_masks"]}
    assert ra.pack_documents(same, ROW) == packed
    labels = [[label for _, label in document] for document in expected]
    assert ra.pack_documents({"input_ids": columns["input_ids"], "labels": labels}, ROW) == packed
    every = ra.pack_documents({"input_ids": columns["input_ids"]}, ROW)
    expected = [[(token, token if place else -100) for place, token in enumerate(ids)] for ids in columns["input_ids"]]
    assert sorted(documents_of(every)) == expected
    assert ra.pack_documents({"input_ids": columns["input_ids"], "labels": columns["input_ids"]}, ROW) == every


@pytest.mark.parametrize("buffer", [1, 7])
def test_a_data_set_and_a_stream_are_packed_as_their_buffers_are(buffer, lengths):
    columns = tokens_of(lengths)
    expected = {name: [] for name in NAMES}
    for start in range(0, len(lengths), buffer):
        part = ra.pack_documents({name: x[start : start + buffer] for name, x in columns.items()}, ROW)
        for name, values in part.items():
            expected[name] += values
    dataset = Dataset.from_dict(columns | {"text": ["a text"] * len(lengths)})
    unknown = IterableDataset.from_generator(lambda: iter(dataset))
    assert unknown.column_names is None
    for documents in (dataset, dataset.with_format("torch"), dataset.to_iterable_dataset(num_shards=3), unknown):
        rows = ra.pack_documents(documents, ROW, buffer=buffer)
        assert isinstance(rows, IterableDataset) == isinstance(documents, IterableDataset)
        # A stream of shards may end a buffer where a shard ends, and has all documents nevertheless.
        assert columns_of(rows) == columns_of(rows) == expected


def test_a_stream_is_packed_in_the_order_of_its_epoch(lengths):
    stream = Dataset.from_dict(tokens_of(lengths)).to_iterable_dataset().shuffle(seed=3, buffer_size=100)
    rows = ra.pack_documents(stream, ROW, buffer=150)
    epochs = []
    for epoch in (0, 1, 0):
        rows.set_epoch(epoch)
        epochs.append(columns_of(rows)["input_ids"])
    assert epochs[0] == epochs[2] != epochs[1]
    first, second, _ = (sorted(token for row in rows for token in row if token) for rows in epochs)
    assert first == second


def test_padding_of_documents_does_not_fill_rows():
    ids, mask = [[1, 2, 3, 0, 0], [0, 0, 0, 4, 5], [0, 0, 0, 0, 0]], [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1], [0] * 5]
    packed = ra.pack_documents({"input_ids": ids, "labels": ids, "attention_mask": mask}, 5)
    assert packed == {
        "input_ids": [[1, 2, 3, 4, 5]],
        "labels": [[-100, 2, 3, -100, 5]],
        "position_ids": [[0, 1, 2, 0, 1]],
        "attention_mask": [[1] * 5],
    }
    assert ra.pack_documents({"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}, 5) == packed


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("split", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 1000, 1001]]),
        ("truncate", [[0, 1, 2, 3], [1000, 1001, 0, 0]]),
        ("drop", [[1000, 1001, 0, 0]]),
    ],
)
def test_treatments_of_long_documents(strategy, expected):
    columns = tokens_of([10, 2, 0])
    for documents in (columns, Dataset.from_dict(columns), Dataset.from_dict(columns).to_iterable_dataset()):
        # Under "drop", the first buffer of size 1 yields no row.
        for buffer in (1, 3) if strategy == "drop" else (3,):
            packed = ra.pack_documents(documents, 4, buffer=buffer, excess_length_strategy=strategy)
            rows = packed["input_ids"] if isinstance(packed, dict) else [row["input_ids"] for row in packed]
            assert sorted(rows) == expected


def test_a_long_document_is_refused_by_its_number_in_the_data_set():
    dataset = Dataset.from_dict(tokens_of([2, 3, 1, 10, 2]))
    message = "document 3 has 10 tokens, and a row 4: choose another excess_length_strategy"
    for documents in (dataset, dataset.to_iterable_dataset(), dataset[:]):
        with pytest.raises(ValueError, match=message):
            list(ra.pack_documents(documents, 4, buffer=2, excess_length_strategy="raise"))


@pytest.mark.parametrize(
    ("documents", "arguments", "message"),
    [
        ({"input_ids": [[1, 2]], "labels": [[1, 2, 3]]}, {}, r"document 0 has labels list of shape \(3,\): expected"),
        ({"input_ids": [[[1, 2]]]}, {}, r"document 0 has input_ids list of shape \(1, 2\): expected an integer for each"),
        ({"input_ids": [[1, 2]], "seq_lengths": [[1, 1]]}, {}, "the column seq_lengths is of packed rows, got the columns"),
        ({"input_ids": [[1], [2]], "labels": [[1], None]}, {}, r"document 1 has labels NoneType of shape \(\): expected"),
        ({"input_ids": [[1, 0, 2]], "attention_mask": [[1, 0, 1]]}, {}, "document 0 has padding inside, by its attention_mask"),
        ({"text": ["a"]}, {}, "documents need input_ids, got the columns text"),
        ([{"input_ids": [1, 2]}], {}, r"expected a datasets\.Dataset.*, got list: datasets\.Dataset\.from_list makes"),
        (tokens_of([2]), {"row_length": 0}, "row_length must be an integer of at least 1, got 0"),
        (tokens_of([2]), {"buffer": 0}, "buffer must be an integer of at least 1, got 0"),
        (tokens_of([2]), {"excess_length_strategy": "cut"}, "excess_length_strategy must be one of .*, got 'cut'"),
    ],
)  # fmt: skip
def test_refusals(documents, arguments, message):
    with pytest.raises(ValueError, match=message) as raised:
        ra.pack_documents(documents, **{"row_length": 4, **arguments})
    assert len(str(raised.value).split()) <= 30
