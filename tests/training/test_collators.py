"""Collators: what becomes of each column that a tokenizer, a dataset or TRL gives, and of documents longer than a row."""

import itertools
import re

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

import hf_ring_attention as ra

BOTH = pytest.mark.parametrize("collator", [ra.PaddingCollator(), ra.PackingCollator()], ids=["padding", "packing"])


def document(rng, length, **columns):
    return {"input_ids": [rng.randrange(1, 97) for _ in range(length)], **columns}


def documents_of(batch):
    """Per document of a batch, in order, its tokens' columns."""
    found = []
    for row in range(len(batch["input_ids"])):
        numbers = batch["seq_idx"][row] if "seq_idx" in batch else batch["attention_mask"][row] - 1
        for number in range(int(numbers.max()) + 1):
            found.append({name: x[row][numbers == number].tolist() for name, x in batch.items() if name != "seq_idx"})
    return found


# ---- columns


@BOTH
def test_a_documents_own_mask_says_what_is_padding(collator, rng):
    rows = [{"input_ids": [5, 6, 7, 0, 0, 0], "attention_mask": [1, 1, 1, 0, 0, 0], "labels": [5, 6, 7, 0, 0, 0]}]
    expected = [[5, 6, 7]]
    for _ in range(9):
        left, length, right = rng.randrange(4), rng.randrange(1, 9), rng.randrange(4)
        row = document(rng, left + length + right, attention_mask=[0] * left + [1] * length + [0] * right)
        row["labels"] = [token if rng.random() < 0.7 else -100 for token in row["input_ids"]]
        rows.append(row)
        expected.append(row["input_ids"][left : left + length])
    batch = collator(rows)
    found = documents_of(batch)
    assert [document["input_ids"] for document in found] == expected
    assert int(batch["attention_mask"].sum()) == sum(map(len, expected))
    # What is padding is not learned, whatever its labels were.
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    for row, document_ in zip(rows[1:], found[1:], strict=True):
        start = row["attention_mask"].index(1)
        assert document_["labels"] == row["labels"][start : start + len(document_["input_ids"])]


@BOTH
@pytest.mark.parametrize("names", [["completion_mask"], ["assistant_masks"], ["completion_mask", "assistant_masks"]])
def test_prompts_that_a_mask_marks_are_not_learned(collator, names, rng):
    rows = [
        document(rng, length, **{name: [rng.randrange(2) for _ in range(length)] for name in names})
        for length in (rng.randrange(2, 12) for _ in range(6))
    ]
    found = documents_of(collator(rows))
    for row, document_ in zip(rows, found, strict=True):
        # As TRL's SFTTrainer builds labels of these columns.
        masks = [row[name] for name in names]
        labels = [token if all(bits) else -100 for token, *bits in zip(row["input_ids"], *masks, strict=True)]
        assert document_["labels"] == labels
        assert not set(names) & document_.keys()


def test_labels_and_a_mask_that_agree_are_taken(rng):
    row = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "completion_mask": [0, 0, 1, 1]}
    assert ra.PaddingCollator()([row])["labels"].tolist() == [[-100, -100, 7, 8]]


@BOTH
@pytest.mark.parametrize("name", ["assistant_masks", "completion_mask", "labels", "attention_mask"])
def test_a_document_without_the_marks_of_others_is_refused(collator, name):
    """Every token of it would be learned, the padding too."""
    rows = [{"input_ids": [*range(5, 11)], name: [0, 0, 1, 1, 1, 1]} for _ in range(3)]
    if name == "labels":
        rows = [{"input_ids": [*range(5, 11)], name: [-100, -100, 7, 8, 9, 10]} for _ in range(3)]
    assert int((collator(rows)["labels"] != -100).sum()) == 12
    del rows[1][name]
    with pytest.raises(
        ValueError, match=f"document 1 of a batch has no {name}, which document 0 has, so that its every"
    ):
        collator(rows)
    rows[1][name] = None  # as a data set has what is missing
    with pytest.raises(ValueError, match=f"document 1 of a batch has None for {name}, so that every token would count"):
        collator(rows)
    with pytest.raises(ValueError, match=f"document 0 of a batch has None for {name}"):
        collator([{"input_ids": [5, 6], name: None}])
    for missing in (rows, [{"input_ids": [5, 6], name: None}]):
        with pytest.raises(ValueError, match=f"document [01] has (no|None for) {name}"):
            ra.pack_documents({key: [row[key] for row in missing] for key in ("input_ids", name)}, row_length=8)


@BOTH
def test_other_columns_of_tokens_are_carried_along(collator, rng):
    rows = []
    for _ in range(5):
        n = rng.randrange(2, 9)
        rows.append(
            document(
                rng,
                n,
                weights=[rng.random() for _ in range(n)],
                token_type_ids=np.array([rng.randrange(2) for _ in range(n)]),
                special_tokens_mask=[rng.randrange(2) for _ in range(n)],
                offset_mapping=[(i, i + 1) for i in range(n)],
                kept=torch.tensor([rng.random() < 0.5 for _ in range(n)]),
                word_labels=[rng.randrange(5) for _ in range(n)],
                text="what it was",
                words=["what"] * n,
                number=3,
                nothing=None,
            )
        )
    batch = collator(rows)
    assert batch["offset_mapping"].shape == (*batch["input_ids"].shape, 2)
    assert batch["kept"].dtype == torch.bool and batch["weights"].dtype == torch.float32
    for row, document_ in zip(rows, documents_of(batch), strict=True):
        for name in ("weights", "token_type_ids", "special_tokens_mask", "offset_mapping", "kept", "word_labels"):
            assert document_[name] == torch.as_tensor(row[name]).tolist(), name
    padding = batch["attention_mask"] == 0
    fills = {"special_tokens_mask": 1, "token_type_ids": 0, "weights": 0, "word_labels": -100, "kept": False}
    for name, fill in fills.items():
        assert (batch[name][padding] == fill).all(), name
    # A dataset's text or number is of no token.
    assert not {"text", "words", "number", "nothing"} & batch.keys()


def test_carried_columns_reach_the_shard_with_their_padding(rng):
    """17 tokens over two ranks are filled up to 18 or 20."""
    row = document(rng, 17, special_tokens_mask=[0] * 17, weights=[0.5] * 17, word_labels=[3] * 17)
    batch = ra.PaddingCollator()([row])

    def sharded(ring):
        return ra.shard_batch(batch, ring, ra.Pattern.exact())

    shards = ra.run_simulated(sharded, 2)
    masks = torch.cat([shard["attention_mask"] for shard in shards], 1)
    assert masks.shape[1] > 17 and int(masks.sum()) == 17
    for name, fill in (("special_tokens_mask", 1), ("weights", 0.0), ("word_labels", -100)):
        whole = torch.cat([shard[name] for shard in shards], 1)
        assert (whole[masks == 0] == fill).all() and (whole[masks == 1] != fill).all(), name


@BOTH
def test_rows_that_were_packed_before_keep_their_borders(collator):
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [3, 2]},
        {"input_ids": [6, 7, 8], "seq_lengths": [3]},
        {"input_ids": [9, 10, 11], "seq_lengths": [1, 2]},
    ]
    theirs = ra.shard_batch(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows), ra.Ring.alone())
    ours = ra.shard_batch(collator(rows), ra.Ring.alone())
    seen = ours["attention_mask"] == 1 if "attention_mask" in ours else torch.ones_like(ours["input_ids"]) == 1
    for name in ("input_ids", "position_ids", "shift_labels"):
        assert ours[name][seen].tolist() == theirs[name].flatten().tolist(), name
    # The same, said in other ways.
    for name, said in {
        "seq_idx": [[0, 0, 0, 1, 1], [0, 0, 0], [0, 1, 1]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 1, 2], [0, 0, 1]],
    }.items():
        other = collator([{"input_ids": row["input_ids"], name: x} for row, x in zip(rows, said, strict=True)])
        assert {key: x.tolist() for key, x in other.items()} == {key: x.tolist() for key, x in collator(rows).items()}


def test_trl_packs_a_dataset_for_these_collators(rng):
    from datasets import Dataset
    from trl import pack_dataset

    rows = [document(rng, rng.randrange(1, 12)) for _ in range(9)]
    packed = pack_dataset(Dataset.from_list(rows), 12, "bfd")
    found = documents_of(ra.shard_batch(ra.PaddingCollator()(list(packed)), ra.Ring.alone()))
    assert sorted(x["input_ids"] for x in found) == sorted(row["input_ids"] for row in rows)


def test_positions_of_a_documents_own_are_carried():
    rows = [{"input_ids": [1, 2, 3], "position_ids": [0, 1, 40]}, {"input_ids": [4, 5]}]
    assert ra.PaddingCollator()(rows)["position_ids"].tolist() == [[0, 1, 40], [0, 1, 0]]
    packed = ra.PackingCollator()(rows)
    assert packed["position_ids"].tolist() == [[0, 1, 40, 0, 1]] and packed["seq_idx"].tolist() == [[0, 0, 0, 1, 1]]
    # Those that count each token say nothing new.
    assert "position_ids" not in ra.PaddingCollator()([{"input_ids": [1, 2], "position_ids": [0, 1]}])


def test_what_tokenizers_and_arrays_give_is_taken():
    for ids in ([5, 6], (5, 6), np.array([5, 6]), torch.tensor([5, 6], dtype=torch.int32)):
        assert ra.PaddingCollator()([BatchEncoding({"input_ids": ids})])["input_ids"].tolist() == [[5, 6]]


# ---- what is refused

BAD_DOCUMENTS = {
    "no list": ({"input_ids": [1, 2]}, "a list of documents"),
    "no documents": ([], "a list of documents, .* got none"),
    "no mapping": ([[1, 2]], "document 0 .* must be a mapping"),
    "no tokens given": ([{"text": "abc"}], "input_ids.*text"),
    "no tokens": ([{"input_ids": []}], "no tokens"),
    "floats": ([{"input_ids": [1.7, 2.0]}], "input_ids .* integers"),
    "booleans": ([{"input_ids": [True, False]}], "input_ids .* integers"),
    "a row of rows": ([{"input_ids": [[1, 2]]}], r"\(1, 2\).*return_tensors"),
    "ragged": ([{"input_ids": [[1, 2], [3]]}], "input_ids"),
    "text": ([{"input_ids": "abc"}], "input_ids"),
    "negative": ([{"input_ids": [1, -5]}], "input_ids .* -5"),
    "negative labels": ([{"input_ids": [1, 2], "labels": [1, -1]}], "labels .* -1"),
    "short labels": ([{"input_ids": [1, 2], "labels": [1]}], "labels .* 2 tokens"),
    "one label": ([{"input_ids": [1, 2], "labels": 1}], "labels .* 2 tokens"),
    "a gap in a mask": ([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}], "inside"),
    "nothing but padding": ([{"input_ids": [1, 2], "attention_mask": [0, 0]}], "no tokens"),
    "a mask of numbers": ([{"input_ids": [1, 2], "attention_mask": [1, 2]}], "0 or 1"),
    "a short mask": ([{"input_ids": [1, 2], "completion_mask": [1]}], "completion_mask .* 2 tokens"),
    "labels that a mask denies": (
        [{"input_ids": [1, 2], "labels": [1, 2], "completion_mask": [0, 1]}],
        "completion_mask .* labels",
    ),
    "shifted labels": ([{"input_ids": [1, 2], "shift_labels": [2, -100]}], "shift_labels"),
    "another length": ([{"input_ids": [1, 2], "pixel_values": torch.ones(3, 4)}], "pixel_values .* 2 tokens"),
    "one without": ([{"input_ids": [1], "weights": [1.0]}, {"input_ids": [1]}], "document 1 .* weights"),
    "another width": (
        [{"input_ids": [1], "places": [[1, 2]]}, {"input_ids": [1], "places": [[1]]}],
        "places",
    ),
    "lengths of other tokens": ([{"input_ids": [1, 2, 3], "seq_lengths": [2, 2]}], "seq_lengths .* 4 .* 3"),
    "borders that differ": (
        [{"input_ids": [1, 2, 3], "seq_lengths": [2, 1], "position_ids": [0, 0, 1]}],
        "seq_lengths .* position_ids",
    ),
}


@BOTH
@pytest.mark.parametrize("name", BAD_DOCUMENTS)
def test_documents_that_no_row_can_be_made_of_are_refused(collator, name):
    rows, message = BAD_DOCUMENTS[name]
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        collator(rows)


def test_a_side_to_pad_is_right_or_left():
    with pytest.raises(ValueError, match="padding_side must be 'right' or 'left'"):
        ra.PaddingCollator(padding_side="middle")


@pytest.mark.parametrize("kind", [ra.PaddingCollator, ra.PackingCollator])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pad_token_id": None}, "pad_token_id .* None.*eos_token_id"),
        ({"pad_token_id": -1}, "pad_token_id"),
        ({"pad_token_id": True}, "pad_token_id"),
        ({"pad_token_id": 0.0}, "pad_token_id"),
        ({"row_length": True}, "row_length"),
        ({"row_length": 0}, "row_length"),
        ({"row_length": 8.0}, "row_length"),
        ({"row_length": 8, "excess_length_strategy": "cut"}, "excess_length_strategy .* 'cut'"),
        ({"excess_length_strategy": "split"}, "row_length"),
    ],
)
def test_settings_of_collators_are_checked(kind, settings, message):
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        kind(**settings)
    assert kind(row_length=np.int64(8))([{"input_ids": [1]}])["input_ids"].shape == (1, 8)


# ---- documents longer than a row


def long_and_short(rng):
    n = rng.randrange(9, 30)
    long = document(rng, n, weights=[float(i) for i in range(n)])
    long["labels"] = [token if rng.random() < 0.7 else -100 for token in long["input_ids"]]
    long["labels"][0] = long["input_ids"][0]
    return [{**document(rng, 5), "labels": [1, 2, 3, 4, 5], "weights": [1.0] * 5}, long]


@pytest.mark.parametrize("kind", [ra.PaddingCollator, ra.PackingCollator])
def test_a_document_longer_than_a_row_is_what_was_asked_for(kind, rng):
    rows = long_and_short(rng)
    short, long = rows
    with pytest.raises(ValueError, match=f"document 1 has {len(long['input_ids'])} tokens, .* row of 8"):
        kind(row_length=8)(rows)
    found = documents_of(kind(row_length=8, excess_length_strategy="truncate")(rows))
    assert [x["input_ids"] for x in found] == [short["input_ids"], long["input_ids"][:8]]
    assert found[1]["labels"] == long["labels"][:8] and found[1]["weights"] == long["weights"][:8]

    batch = kind(row_length=8, excess_length_strategy="split")(rows)
    # A short last piece may share its row with another document, in either order.
    found = sorted(documents_of(batch), key=lambda x: (x["weights"] == [1.0] * 5, x["weights"]))
    pieces = [x for x in found if x["input_ids"] != short["input_ids"]]
    for name in ("input_ids", "labels", "weights"):
        assert list(itertools.chain.from_iterable(x[name] for x in pieces)) == long[name], name
    assert [len(x["input_ids"]) for x in pieces[:-1]] == [8] * (len(pieces) - 1)
    shard = ra.shard_batch(batch, ra.Ring.alone())
    # Each piece is a document of its own: it counts from 0, and nothing predicts its first token.
    firsts = shard["position_ids"][shard.get("attention_mask", torch.ones_like(shard["input_ids"])) == 1] == 0
    assert int(firsts.sum()) == len(pieces) + 1
    learned = sum(label != -100 for x in (*pieces, short) for label in x["labels"][1:])
    assert int((shard["shift_labels"] != -100).sum()) == learned

    found = documents_of(kind(row_length=8, excess_length_strategy="drop")(rows))
    assert [x["input_ids"] for x in found] == [short["input_ids"]]


@pytest.mark.parametrize("kind", [ra.PaddingCollator, ra.PackingCollator])
def test_a_batch_of_which_all_is_dropped_is_padding(kind, rng):
    row = {**document(rng, 9), "weights": [0.5] * 9}
    batch = kind(row_length=8, excess_length_strategy="drop")([row])
    assert batch["attention_mask"].tolist() == [[0] * 8] and batch["weights"].tolist() == [[0.0] * 8]
    shard = ra.shard_batch(batch, ra.Ring.alone())
    assert (shard["shift_labels"] == -100).all()


def test_a_truncated_document_that_teaches_nothing_is_told_of():
    row = {"input_ids": [1, 2, 3, 4], "completion_mask": [0, 0, 0, 1]}
    with pytest.warns(UserWarning, match="nothing to learn"):
        ra.PaddingCollator(row_length=3, excess_length_strategy="truncate")([row])


def test_splitting_keeps_the_borders_of_packed_rows():
    rows = [{"input_ids": [1, 2, 3, 4, 5, 6, 7], "seq_lengths": [2, 4, 1]}]
    found = documents_of(ra.PaddingCollator(row_length=4, excess_length_strategy="split")(rows))
    assert [x["input_ids"] for x in found] == [[1, 2], [3, 4], [5, 6], [7]]
    with pytest.raises(ValueError, match="position_ids of its own"):
        ra.PaddingCollator(row_length=2, excess_length_strategy="split")(
            [{"input_ids": [1, 2, 3], "position_ids": [0, 1, 40]}]
        )


def test_an_attention_mask_leaves_a_document_as_short_as_it_is():
    row = {"input_ids": [1, 2, 3, 0, 0, 0], "attention_mask": [1, 1, 1, 0, 0, 0]}
    assert ra.PaddingCollator(row_length=4)([row])["input_ids"].tolist() == [[1, 2, 3, 0]]


@pytest.mark.parametrize("column", [{"length": [3]}, {"num_truncated_tokens": [2, 1]}])
def test_what_a_tokenizer_tells_of_a_text_is_left_out(column):
    (name,) = column
    assert name not in ra.PaddingCollator()([{"input_ids": [1, 2, 3], **column}])
