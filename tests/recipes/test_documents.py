"""The recipes' data: from texts, files and data sets to rows whose documents never see each other."""

import itertools
import json

import documents
import pytest
import tokens
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from documents import Sources
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_ring_attention as ra
from tests.support.training import tiny_llama

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
#: The same, and it says what the assistant says.
MARKED = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>\n"
    "{% endgeneration %}{% else %}{{ m.content }}</s>\n{% endif %}{% endfor %}"
)
#: What was thought is left out when other turns follow.
FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split(';')[-1] }}")
CHAT = [
    {"role": "user", "content": "one and one?"},
    {"role": "assistant", "content": "hm; two"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


@pytest.fixture
def tokenizer():
    """A token for each letter, and two for the ends of turns."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={x: n for n, x in enumerate([*letters, "<s>", "</s>"])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", additional_special_tokens=["<s>"])
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def said(tokenizer, data):
    """The texts of documents."""
    return [tokenizer.decode(document["input_ids"]) for document in data]


def loaded(tokenizer, **sources):
    sources = Sources(**sources)
    return tokens.tokenize(documents.load(sources), tokenizer, sources.columns, sources.dataset)


FILES = ("folder/a.txt", "folder/b.txt")
OF_FILES = [f"first line of {name}\n\nsecond line</s>" for name in FILES]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Texts in a folder, a file of rows, and a saved data set, all in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "README.md").write_text("About these texts.")
    for name in FILES:
        (tmp_path / name).write_text(f"first line of {name}\n\nsecond line")
    rows = [{"title": "A", "text": "one"}, {"title": "B", "text": ""}, {"title": "C", "text": "three"}]
    write_rows(tmp_path / "rows.jsonl", rows)
    splits = {"train": Dataset.from_list([{"text": "one"}]), "test": Dataset.from_list([{"text": "two"}])}
    DatasetDict(splits).save_to_disk("saved")


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"text": [*FILES]}, OF_FILES),
        ({"dataset": "folder"}, OF_FILES),  # Files are documents, and not lines.
        ({"dataset": "rows.jsonl"}, ["one</s>", "three</s>"]),
        ({"dataset": "rows.jsonl", "streaming": True}, ["one</s>", "three</s>"]),
        ({"dataset": "rows.jsonl", "split": "train[:1]"}, ["one</s>"]),
        ({"dataset": "rows.jsonl", "columns": ["text", "title"], "split": "train[2:]"}, ["three\n\nC</s>"]),
        ({"dataset": "saved", "split": "test"}, ["two</s>"]),
    ],
    ids=str,
)
def test_sources_are_documents_with_an_end(sources, expected, here, tokenizer):
    data = loaded(tokenizer, **sources)
    assert isinstance(data, IterableDataset) == ("streaming" in sources)
    assert said(tokenizer, data) == expected


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"split": "test"}, r"cannot be loaded: Unknown split \"test\"\. Should be one of \['train'\]\. Name it with"),
        ({"columns": ["words"]}, "has no column 'words', but text, n, chat: name one of them with --columns"),
        ({"columns": ["n"]}, "the column 'n' of .* has int: texts are needed, or one column alone of chats"),
        ({"columns": ["text", "chat"]}, "'chat' of .* has list: texts are needed, or one column alone of chats"),
        ({"split": "train[:0]"}, "cannot be loaded: .* corresponds to no data"),
    ],
)
def test_what_a_data_set_does_not_have_is_said_with_what_it_has(sources, message, tokenizer, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [{"text": "one", "n": 1, "chat": CHAT}])
    with pytest.raises(SystemExit, match=message):
        loaded(tokenizer, dataset=file, **sources)


def test_data_that_cannot_be_read_are_named(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.xyz").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(SystemExit, match=r"text\.xyz is not a text in UTF-8: .* at byte 3"):
        documents.texts(["text.xyz"])
    for name in ("nobody/nothing", "a/b/c", "text.xyz"):
        with pytest.raises(SystemExit, match=f"the data set '{name}' cannot be loaded: .* Name it with --dataset"):
            loaded(tokenizer, dataset=name)
    with pytest.raises(SystemExit, match="the data set 'empty' is empty in this split"):
        tokens.tokenize(Dataset.from_dict({"text": []}), tokenizer, name="empty")


@pytest.mark.parametrize("dataset", [FILES[0], "folder", "rows.jsonl", "saved"])
def test_files_have_no_configurations(dataset, here, tokenizer):
    with pytest.raises(SystemExit, match=f"'{dataset}' cannot be loaded: files have no configurations: leave --config"):
        loaded(tokenizer, dataset=dataset, config="en")


def test_perplexity_reads_all_texts_as_one(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [{"text": "one"}, {"text": "two"}])
    assert documents.whole_text(Sources(dataset=file)) == "one\n\ntwo"
    file = write_rows(tmp_path / "chats.jsonl", [{"messages": CHAT}])
    with pytest.raises(SystemExit, match=r"the column 'messages' .* has chats, and texts are needed: name --columns"):
        documents.whole_text(Sources(dataset=file))


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["plain", "marked"])
def test_of_a_chat_the_assistant_s_turns_are_learned(template, tokenizer, tmp_path):
    tokenizer.chat_template = template
    file = write_rows(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"messages": CHAT[:1]}])
    (chat,) = loaded(tokenizer, dataset=file)  # in the other one there is nothing to learn
    whole = "<s>user: one and one?</s>\n<s>assistant: hm; two</s>\n<s>user: sure?</s>\n<s>assistant: yes</s>\n"
    assert said(tokenizer, [chat]) == [whole]
    learned = [x for x, mask in zip(chat["input_ids"], chat["assistant_masks"]) if mask]
    assert tokenizer.decode(learned) == "hm; two</s>\nyes</s>\n"


def test_a_template_that_rewrites_turns_is_refused(tokenizer):
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(SystemExit, match=r"writes a turn differently when others follow.*get_training_chat_template"):
        tokens.chat_tokens(tokenizer, CHAT)
    assert tokens.chat_tokens(tokenizer, CHAT[:2])[1][-6:] == [1] * 6


def tokens_of(*lengths):
    ids = [[100 * number + place for place in range(length)] for number, length in enumerate(lengths)]
    return Dataset.from_dict({"input_ids": ids})


@pytest.mark.parametrize(
    ("tokens", "kept", "others"),
    [(0, [], [5, 4, 6]), (5, [5], [4, 6]), (7, [5, 2], [2, 6]), (8, [5, 3], [6]), (13, [5, 4, 4], [2])],
)
def test_the_first_tokens_are_held_out_and_the_others_left(tokens, kept, others):
    held_out, rest = documents.hold_out(tokens_of(5, 4, 6), tokens)
    assert [len(x["input_ids"]) for x in held_out] == kept
    assert [len(x["input_ids"]) for x in rest] == others
    assert not {t for x in held_out for t in x["input_ids"]} & {t for x in rest for t in x["input_ids"]}
    streamed, rest = documents.hold_out(tokens_of(5, 4, 6).to_iterable_dataset(), tokens)
    assert [len(x["input_ids"]) for x in streamed] == kept  # A stream goes on with the next document.
    assert [x["input_ids"][0] for x in rest] == [100 * number for number in range(len(kept), 3)]


def lengths_of(row):
    """The lengths of the documents in a row."""
    starts = [n for n in range(sum(row["attention_mask"])) if row["position_ids"][n] == 0]
    return [b - a for a, b in itertools.pairwise([*starts, sum(row["attention_mask"])])]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_are_packed_and_their_fill_is_told(streaming, tokenizer, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [{"text": "x" * length} for length in (30, 59, 19, 9, 39, 130)])
    sources = Sources(dataset=file, streaming=streaming, tokens=60, held_out=31)
    data = documents.prepare(sources, tokenizer, needed=5)
    if streaming:
        assert data.description == "a stream of documents, packed into rows of 60 by 1000"
    else:
        assert data.description.startswith("261 tokens in 5 rows of 60, 87.0% full: ")
    # The long document is cut into 60 + 60 + 11, and the first one is held out.
    assert sorted(sorted(lengths_of(row)) for row in data.rows) == [[10, 11], [20, 40], [60], [60], [60]]
    assert data.held_out.attention_mask.sum() == 31 and [lengths_of(x) for x in data.held_out_rows] == [[31]]


@pytest.mark.parametrize("sources", [{"text": ["file"]}, {"dataset": "rows.jsonl", "streaming": True}], ids=str)
def test_data_without_a_document_to_learn_from_are_refused(sources, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    write_rows(tmp_path / "rows.jsonl", [{"text": ""}, {"text": ""}])
    with pytest.raises(SystemExit, match="the data have no document to learn from: a text needs two tokens or more"):
        documents.prepare(Sources(**sources), tokenizer)


def test_other_data_have_another_digest():
    assert documents.digest(tokens_of(5, 4)) == documents.digest(tokens_of(5, 4))
    assert len({documents.digest(x) for x in (tokens_of(5, 4), tokens_of(4, 5), tokens_of(5, 4, 3))}) == 3


def too_few_rows(streaming):
    sources = Sources(tokens=4)
    rows = documents.pack(tokens_of(10), sources)
    return documents.describe(rows.to_iterable_dataset() if streaming else rows, sources, needed=5)


def nothing_to_predict():
    ones = torch.ones(1, 4, dtype=torch.int64)
    return documents.HeldOut(ones, ones, ones == 0).loss(tiny_llama(), ra.Ring.alone())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: documents.hold_out(tokens_of(5, 4, 6), 16), "have 15 tokens, and 16 are to be held out: hold out fewer"),
        (lambda: documents.hold_out(tokens_of(5, 4, 6), 15), "15 tokens, and all are held out: hold out fewer, or name more"),
        (lambda: too_few_rows(False), r"in 3 rows of 4, and 5 or more rows are needed: about 5 \* 4 = 20"),
        (lambda: too_few_rows(True), r"the stream has 3 rows of 4 tokens, and 5 or more are needed"),
        (nothing_to_predict, "have no token to predict: hold out more"),
    ],
)  # fmt: skip
def test_too_few_tokens_are_refused_with_the_arithmetic(call, message):
    with pytest.raises(SystemExit, match=message):
        call()
