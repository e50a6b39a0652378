"""Documents are packed into nearly full rows: every token once, in an order that depends on nothing but the documents."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import hf_ring_attention as ra
from hf_ring_attention.training.fitting import best_fit
from tests.support.ranks import run_ranks
from tests.support.training import process_environment, trainer

ROW = 64
#: Columns of tokens, beside which a data set may have others.
NAMES = ("input_ids", "assistant_masks")


def tokens_of(lengths):
    """Documents whose tokens say which document they are of, and where in it they are."""
    ids = [[1000 * number + place for place in range(length)] for number, length in enumerate(lengths)]
    return {"input_ids": ids, "assistant_masks": [[place % 2 for place in range(length)] for length in lengths]}


def log_normal(rng, count, mean, sigma=1):
    """Lengths of documents as texts have them: many short ones, and few that are very long."""
    return [max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))) for _ in range(count)]


def columns_of(rows):
    """The rows of a data set or a stream, by columns."""
    rows = list(rows)
    return {name: [row[name] for row in rows] for name in (*NAMES, "seq_lengths")}


@pytest.fixture
def lengths(rng):
    return rng.choices(range(1, ROW + 1), k=300)


# ---- the row of each document


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


def test_a_document_takes_the_fullest_row_that_has_room():
    assert best_fit([6, 5, 4, 5], 10) == [[0, 2], [1, 3]]
    assert best_fit([], 10) == []


@pytest.mark.parametrize("strategy", ["split", "truncate", "drop"])
@pytest.mark.parametrize("streamed", [False, True])
def test_ten_thousand_documents_of_log_normal_lengths_fill_their_rows(strategy, streamed, rng):
    row_length = 256
    lengths = log_normal(rng, 10_000, row_length / 8)
    stops = list(itertools.accumulate(lengths, initial=0))
    ids = [list(range(start, stop)) for start, stop in itertools.pairwise(stops)]  # each token is another
    documents = Dataset.from_dict({"input_ids": ids})
    documents = documents.to_iterable_dataset() if streamed else documents
    rows = list(ra.pack_documents(documents, row_length, excess_length_strategy=strategy))
    tokens = sorted(token for row in rows for token in row["input_ids"])
    kept = {"split": math.inf, "truncate": row_length, "drop": row_length}[strategy]
    whole = [x for x in ids if strategy != "drop" or len(x) <= kept]
    assert tokens == sorted(token for x in whole for token in (x if kept == math.inf else x[:kept]))
    assert len(tokens) / (row_length * len(rows)) >= 0.97


# ---- columns, data sets and streams


def test_columns_of_tokens_stay_with_their_documents(lengths):
    columns = tokens_of(lengths)
    chats = [[{"role": "user", "content": "one and one?"}]] * len(lengths)
    packed = ra.pack_documents(columns | {"text": ["a text"] * len(lengths), "messages": chats, "length": lengths}, ROW)
    assert packed.keys() == {*NAMES, "seq_lengths"}
    found = {}
    for ids, mask, lengths_of_row in zip(*packed.values(), strict=True):
        assert len(ids) == len(mask) == sum(lengths_of_row) <= ROW
        for length in lengths_of_row:
            found[ids[0] // 1000] = (ids[:length], mask[:length])
            ids, mask = ids[length:], mask[length:]
    assert found == {n: (columns["input_ids"][n], columns["assistant_masks"][n]) for n in range(len(lengths))}


#: For tests of small buffers, which are to be told by a warning.
SMALL_BUFFERS = pytest.mark.filterwarnings("ignore:the .* documents of a buffer have:UserWarning")


@SMALL_BUFFERS
@pytest.mark.parametrize("buffer", [1, 7, 1000])
def test_a_data_set_and_a_stream_are_packed_as_their_buffers_are(buffer, lengths):
    columns = tokens_of(lengths)
    expected = {name: [] for name in (*NAMES, "seq_lengths")}
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
    assert sorted(itertools.chain(*epochs[0])) == sorted(itertools.chain(*epochs[1]))


def test_a_buffer_of_few_rows_is_told_with_a_larger_one():
    documents = Dataset.from_dict(tokens_of([3] * 9))
    for data in (documents, documents.to_iterable_dataset()):
        with pytest.warns(
            UserWarning, match="4 documents .* 12 tokens in 2 rows of 10, .* 60% full: .* buffer=100"
        ) as told:
            assert len(list(ra.pack_documents(data, 10, buffer=4))) == 5
        assert len(told) == 1
    assert len(ra.pack_documents(documents, 10, buffer=100)) == 3  # there are no more documents, so nothing is told
    assert len(ra.pack_documents(documents[:], 10, buffer=4)["input_ids"]) == 3


def test_padding_of_documents_does_not_fill_rows():
    ids, mask = [[1, 2, 3, 0, 0], [0, 0, 0, 4, 5], [0, 0, 0, 0, 0]], [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1], [0] * 5]
    packed = ra.pack_documents({"input_ids": ids, "labels": ids, "attention_mask": mask}, 5)
    assert packed == {"input_ids": [[1, 2, 3, 4, 5]], "labels": [[1, 2, 3, 4, 5]], "seq_lengths": [[3, 2]]}


@SMALL_BUFFERS
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("split", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 1000, 1001]]),
        ("truncate", [[0, 1, 2, 3], [1000, 1001]]),
        ("drop", [[1000, 1001]]),
    ],
)
def test_long_documents_become_what_is_asked_for(strategy, expected):
    columns = tokens_of([10, 2, 0])
    for documents in (columns, Dataset.from_dict(columns), Dataset.from_dict(columns).to_iterable_dataset()):
        # In buffers of one, the first of which has no row under "drop".
        for buffer in (1, 3) if strategy == "drop" else (3,):
            packed = ra.pack_documents(documents, 4, buffer=buffer, excess_length_strategy=strategy)
            rows = packed["input_ids"] if isinstance(packed, dict) else [row["input_ids"] for row in packed]
            assert sorted(rows) == expected


@SMALL_BUFFERS
def test_a_long_document_is_refused_by_its_number_in_the_data_set():
    dataset = Dataset.from_dict(tokens_of([2, 3, 1, 10, 2]))
    message = (
        "document 3 has 10 tokens, and does not fit a row of 4: make rows longer, or choose an excess_length_strategy"
    )
    for documents in (dataset, dataset.to_iterable_dataset(), dataset[:]):
        with pytest.raises(ValueError, match=message):
            list(ra.pack_documents(documents, 4, buffer=2, excess_length_strategy="raise"))


@pytest.mark.parametrize(
    ("documents", "arguments", "message"),
    [
        ({"input_ids": [[1, 2]], "labels": [[1, 2, 3]]}, {}, r"document 0 has labels of shape \(3,\), and needs one value"),
        ({"input_ids": [[1, 2]], "seq_lengths": [[1, 1]]}, {}, "seq_lengths says that these documents were packed before"),
        ({"input_ids": [[1], [2]], "labels": [[1], None]}, {}, "document 1 has no labels, which the documents before it have"),
        ({"input_ids": [[1], [2]], "labels": [None, [2]]}, {}, "document 1 has labels, which the documents before .* do not"),
        ({"input_ids": [[1, 0, 2]], "attention_mask": [[1, 0, 1]]}, {}, "document 0 has an attention_mask with padding inside"),
        ({"text": ["a"]}, {}, "documents need input_ids, got the columns text"),
        ([{"input_ids": [1, 2]}], {}, r"expected a data set .*, got list: datasets\.Dataset\.from_list makes"),
        (tokens_of([2]), {"row_length": 0}, "row_length must be a number of tokens of at least 1, .*got 0"),
        (tokens_of([2]), {"row_length": None}, "row_length must be a number of tokens of at least 1, got None"),
        (tokens_of([2]), {"buffer": 0}, "buffer must be a number of documents of at least 1, got 0"),
        (tokens_of([2]), {"excess_length_strategy": "cut"}, "excess_length_strategy must be one of .*, got 'cut'"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused(documents, arguments, message):
    with pytest.raises(ValueError, match=message):
        ra.pack_documents(documents, **{"row_length": 4, **arguments})


# ---- what becomes of rows


def test_a_row_is_read_by_the_collator(lengths):
    rows = ra.pack_documents(Dataset.from_dict(tokens_of(lengths)), ROW)
    batch = ra.PaddingCollator(row_length=ROW)(list(rows))
    assert int(batch["attention_mask"].sum()) == sum(lengths)
    inside = batch["seq_idx"] >= 0
    assert torch.equal(batch["position_ids"][inside], batch["input_ids"][inside] % 1000)
    assert torch.equal(batch["labels"][inside] >= 0, batch["position_ids"][inside] % 2 == 1)


def loader_of(rows, ring, **arguments):
    order = {} if isinstance(rows, IterableDataset) else {"shuffle": True}
    collate = ra.PaddingCollator(row_length=ROW)
    return ring.prepare_data_loader(DataLoader(rows, batch_size=3, collate_fn=collate, **order, **arguments))


def packed(lengths, streamed):
    documents = Dataset.from_dict(tokens_of(lengths))
    if streamed:
        documents = documents.to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=40)
    return ra.pack_documents(documents, ROW, buffer=150)


def read_by_rings(rank, lengths):
    """For each kind of data: of each shard of this rank, its rows, its tokens, and the fill of the rows of all processes."""
    process_environment(rank, dist.get_world_size())
    ring = ra.Ring.from_accelerator(Accelerator(), size=2, layout="contiguous")
    return [
        [
            (len(shard["input_ids"]), shard["input_ids"][shard["attention_mask"] == 1].tolist(), ra.row_fill(shard))
            for shard in loader_of(packed(lengths, streamed), ring, drop_last=True)
        ]
        for streamed in (False, True)
    ]


def test_rings_read_a_fixed_number_of_rows_a_step_and_each_token_once(lengths):
    by_rank = run_ranks(read_by_rings, 4, lengths)
    for streamed in (False, True):
        shards = [kinds[streamed] for kinds in by_rank]
        assert len({len(own) for own in shards}) == 1
        assert {rows for own in shards for rows, _, _ in own} == {3}
        tokens = sorted(token for own in shards for _, own_tokens, _ in own for token in own_tokens)
        every_token = {1000 * number + place for number, length in enumerate(lengths) for place in range(length)}
        assert len(tokens) == len(set(tokens)) and every_token >= {*tokens}
        # What is dropped are the last rows of each ring, fewer than 2 batches; and a stream has rings of other lengths.
        rows = len(list(packed(lengths, streamed)))
        assert len(shards[0]) * 6 > (rows - 12 if not streamed else rows / 2)
        for step in zip(*shards, strict=True):
            filled = sum(len(own_tokens) for _, own_tokens, _ in step) / (2 * 3 * ROW)
            assert {fill for _, _, fill in step} == {filled}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_loader_of_packed_rows_goes_on_where_it_was(streamed, lengths):
    def made():
        torch.manual_seed(7)
        return loader_of(packed(lengths, streamed), ra.Ring.alone())

    whole = [shard["input_ids"].tolist() for shard in made()]
    first = made()
    taken = [shard["input_ids"].tolist() for shard in itertools.islice(first, 5)]
    second = made()
    second.load_state_dict(first.state_dict())
    assert taken + [shard["input_ids"].tolist() for shard in second] == whole


def test_a_trainer_logs_the_fill_of_its_rows(rng, tmp_path):
    lengths = [rng.randrange(1, ROW + 1) for _ in range(40)]
    columns = {"input_ids": [[1 + place % 90 for place in range(length)] for length in lengths]}
    rows = ra.pack_documents(Dataset.from_dict(columns), ROW).select(range(8))
    arguments = {"batch_size": 1, "accumulate": 2, "steps": 4, "logging_steps": 2}
    _, made = trainer(0, tmp_path, rows=rows, collator=ra.PaddingCollator(row_length=ROW), **arguments)
    fills = [entry["fill"] for entry in made.state.log_history if "fill" in entry]
    assert len(fills) == 2 == sum("loss" in entry for entry in made.state.log_history)
    assert sum(fills) / 2 == pytest.approx(sum(map(sum, rows["seq_lengths"])) / (8 * ROW), abs=1e-3)


def test_the_fill_of_no_shards_is_refused():
    with pytest.raises(ValueError, match="row_fill: got no shards"):
        ra.row_fill([])
    with pytest.raises(ValueError, match="row_fill"):
        ra.row_fill({"input_ids": torch.ones(1, 4)})
