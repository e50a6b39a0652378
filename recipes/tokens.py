"""The tokens of documents: texts, and chats in the model's own template. Of a chat, only the assistant's turns are learned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase


def tokenize(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    columns: Sequence[str] | None = None,
    name: str | None = None,
) -> Dataset | IterableDataset:
    """Returns input_ids of each document, and assistant_masks of chats; documents that teach nothing are left out."""
    columns, chat = columns_to_learn(dataset, columns, name)
    tokens = partial(_chats, tokenizer, columns[0]) if chat else partial(_texts, tokenizer, columns)
    names = dataset.column_names or list(next(iter(dataset)))  # Some streams know their columns from rows alone.
    # With these, a stream knows its columns before it is read.
    features = {"input_ids": List(Value("int32"))} | ({"assistant_masks": List(Value("int8"))} if chat else {})
    return dataset.map(tokens, batched=True, batch_size=100, remove_columns=names, features=Features(features))


def columns_to_learn(
    dataset: Dataset | IterableDataset, wanted: Sequence[str] | None, name: str | None
) -> tuple[list[str], bool]:
    """Returns the columns that documents are made of, and whether they are a column of chats."""
    first = next(iter(dataset), None)
    if first is None:
        raise SystemExit(f"the data set {name!r} is empty in this split")
    columns = list(wanted or [next((x for x in ("messages", "text") if x in first), "text")])
    missing = [column for column in columns if column not in first]
    if missing:
        raise SystemExit(
            f"the data set {name!r} has no column {missing[0]!r}, but {', '.join(first)}: name one of them with --columns"
        )
    chats = [x for x in columns if isinstance(first[x], list) and first[x] and isinstance(first[x][0], dict)]
    wrong = [x for x in columns if x not in chats and not isinstance(first[x], str)]
    if wrong or (chats and len(columns) > 1):
        column = (wrong or chats)[0]
        raise SystemExit(
            f"the column {column!r} of {name!r} has {type(first[column]).__name__}: texts are needed, or one column alone of "
            f"chats, which are lists of messages with 'role' and 'content'"
        )
    return columns, bool(chats)


def _texts(tokenizer: PreTrainedTokenizerBase, columns: Sequence[str], batch: Any) -> dict[str, list]:
    """Returns the tokens of texts, with an end token after each if the tokenizer has one."""
    documents = ["\n\n".join(parts) for parts in zip(*(batch[name] for name in columns), strict=True)]
    ids = tokenizer(documents, return_attention_mask=False, verbose=False).input_ids
    end = tokenizer.eos_token_id
    ids = [x if end is None or x[-1:] == [end] else [*x, end] for x in ids]
    return {"input_ids": [x for x in ids if len(x) > 1]}


def _chats(tokenizer: PreTrainedTokenizerBase, column: str, batch: Any) -> dict[str, list]:
    tokens = [chat_tokens(tokenizer, messages) for messages in batch[column]]
    chats = [(ids, mask) for ids, mask in tokens if any(mask[1:])]
    return {"input_ids": [ids for ids, _ in chats], "assistant_masks": [mask for _, mask in chats]}


def chat_tokens(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Returns the tokens of a chat, and a mask of the assistant's tokens, with its ends of turns.

    Some templates mark them by {% generation %}. For others, a turn is what the template adds to the turns before it and
    the beginning of an answer; an assistant's turn that opens the chat is not learned.
    """
    template = tokenizer.get_chat_template()
    if "generation %}" in template or "generation -%}" in template:
        encoding = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return encoding["input_ids"], encoding["assistant_masks"]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    turns = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number == 0:
            continue
        before = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
        after = tokenizer.apply_chat_template(messages[: number + 1], tokenize=False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise SystemExit(
                "the chat template of this tokenizer writes a turn differently when others follow, so the assistant's "
                "tokens cannot be found: give the tokenizer a template with {% generation %} around it, such as "
                "trl.chat_template_utils.get_training_chat_template(tokenizer) gives, and save both in a folder"
            )
        turns.append((len(before), len(after)))
    encoding = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    mask = [int(any(start <= a < stop for start, stop in turns)) for a, _ in encoding.offset_mapping]
    return encoding.input_ids, mask
