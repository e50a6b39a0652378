"""Loads the documents to learn from: texts, a data set, or chats in the model's own template, packed into rows.

`prepare` does all of it, in the order of this file: load, tokenize, hold some out, pack the rest. Documents of a row never see
each other. Only the assistant's turns of a chat are learned.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import PartialState
from arguments import Tokens, at_least, check, existing_file, plural
from datasets import Dataset, IterableDataset
from tokens import columns_to_learn, tokenize
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

import hf_ring_attention as ra

LONG = ("split", "truncate", "drop", "raise")
# ruff: noqa: RUF009 -- an HfArg is a field.
#: The ends of the names of texts, each a document.
TEXTS = (".txt", ".md")
TEXT_HELP = "text files; default: topics of Python 3.11's manual"


@dataclass
class Texts:
    """The origin of documents. The recipes have an option for each field."""

    text: list[str] | None = HfArg(default=None, help=TEXT_HELP, metadata={"action": "extend"})
    dataset: str | None = HfArg(default=None, help="a data set's hub id, folder, or .jsonl, .csv, .parquet")
    config: str | None = HfArg(default=None, help="the data set's configuration, if it has several")
    split: str = HfArg(default="train", help="the data set's split, or a part such as 'train[:1%%]'")
    columns: list[str] | None = HfArg(default=None, help="columns of texts, or of chats; default: messages or text")


@dataclass
class Sources(Texts):
    """The origin of documents, and how they become rows."""

    streaming: bool = HfArg(default=False, help="read the data set during training, not before it")
    buffer: int = HfArg(default=1000, help="documents that are packed together, or shuffled together in a stream")
    tokens: Tokens = HfArg(default=1024, help="tokens of a row, such as 4096, 4k or 1M")
    long_documents: str = HfArg(default="split", help="for documents longer than a row", metadata={"choices": LONG})
    held_out: int = HfArg(default=0, help="how many first tokens of the data to keep for evaluation")


# ---- options


def check_arguments(parser: argparse.ArgumentParser, args: Any) -> None:
    """Refuses options of `Texts` or `Sources` that cannot load data."""
    for name in args.text or ():
        check(parser, "--text", existing_file, name)
    if args.dataset is not None and args.text is not None:
        parser.error("argument --dataset: not allowed with argument --text")
    for name in ("config", "columns", "streaming"):
        if getattr(args, name, None) and args.dataset is None:
            parser.error(f"argument --{name}: it is about a data set: name one with --dataset")
    for name, least in (("buffer", 1), ("held_out", 0)):
        check(parser, f"--{name.replace('_', '-')}", at_least(least), getattr(args, name, least))
    if getattr(args, "held_out", 0) == 1:
        parser.error("argument --held-out: the first token of a text is not predicted: take 0, or 2 and more")


def sources_of(args: Any) -> Sources:
    """Returns the `Sources` that the options of a recipe name."""
    return Sources(**{entry.name: getattr(args, entry.name, entry.default) for entry in fields(Sources)})


# ---- from options to rows


@dataclass
class HeldOut:
    """Documents to evaluate on, all three [documents, tokens of the longest]."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor  # 1 for tokens, 0 for padding
    learned: torch.Tensor  # whether a token is to be predicted

    def loss(self, model: PreTrainedModel, ring: ra.Ring) -> float:
        """Returns the mean loss in nats of the tokens to be predicted; each document is read whole, over the ring."""
        report = ra.perplexity(model, self.input_ids, ring, attention_mask=self.attention_mask, progress=True)
        predicted = report.token_nll[self.learned & ~report.token_nll.isnan()]
        if not len(predicted):
            raise SystemExit("the documents held out have no token to predict: hold out more")
        return float(predicted.double().mean())


@dataclass
class Data:
    """The data that a recipe trains and evaluates on."""

    rows: Dataset | IterableDataset
    held_out: HeldOut | None
    held_out_rows: Dataset | None  # the same documents, for Trainer
    description: str
    digest: str  # a checksum by which a run that goes on recognizes its documents


def prepare(sources: Sources, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0, needed: int = 1) -> Data:
    """Returns rows of `sources`, `needed` or more; one process of a machine makes them first, and others read its cache."""
    with _one_process_first():
        documents = tokenize(load(sources), tokenizer, sources.columns, sources.dataset)
        if next(iter(documents), None) is None:
            raise SystemExit(
                "the data have no document to learn from: a text needs two tokens or more, and a chat an assistant's turn"
            )
        checksum = digest(documents)
        held_out, documents = hold_out(documents, sources.held_out)
        if isinstance(documents, IterableDataset):
            documents = documents.shuffle(seed=seed, buffer_size=sources.buffer)
        rows = pack(documents, sources)
        held_out_rows = pack(Dataset.from_list(held_out), sources) if held_out else None
    return Data(
        rows=rows,
        held_out=_as_tensors(held_out) if held_out else None,
        held_out_rows=held_out_rows,
        description=describe(rows, sources, needed),
        digest=checksum,
    )


@contextmanager
def _one_process_first() -> Iterator[None]:
    state = PartialState()
    if not state.is_local_main_process:
        datasets.disable_progress_bars()
        state.wait_for_everyone()
    try:
        yield
    finally:  # If this process fails, the others must not wait for it, but fail for the same reason.
        if state.is_local_main_process:
            state.wait_for_everyone()


# ---- loading


def load(sources: Sources) -> Dataset | IterableDataset:
    """Returns the data set with all columns that it has; texts become a data set with the column "text"."""
    if sources.dataset is None:
        return Dataset.from_dict({"text": texts(sources.text)})
    path, streaming = Path(sources.dataset), sources.streaming
    try:
        files = sorted(x for x in path.rglob("*") if x.is_file() and x.name != "README.md") if path.is_dir() else [path]
        all_texts = path.exists() and bool(files) and all(file.suffix in TEXTS for file in files)
        on_disk = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
        if sources.config and (on_disk or all_texts or path.is_file()):
            raise ValueError("files have no configurations: leave --config out.")
        if on_disk:
            saved = datasets.load_from_disk(str(path))
            if isinstance(saved, dict):
                if sources.split not in saved:
                    raise ValueError(f"there is no split {sources.split!r}, only {', '.join(saved)}.")
                saved = saved[sources.split]
            return saved.to_iterable_dataset() if streaming else saved
        if all_texts:
            # By default, each line of a file would be a document.
            arguments = {"path": "text", "data_files": [*map(str, files)], "sample_by": "document"}
        elif path.is_file():
            arguments = {"path": str(path.absolute().parent), "data_files": path.name}
        else:
            arguments = {"path": sources.dataset}
        return datasets.load_dataset(**arguments, name=sources.config, split=sources.split, streaming=streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise SystemExit(
            f"the data set {sources.dataset!r} cannot be loaded: {reason} Name it with --dataset, and its parts with "
            f"--config and --split."
        ) from None


def texts(files: Iterable[str] | None) -> list[str]:
    """Returns the contents of files; without files, the topics of Python 3.11's manual as one text."""
    if files is None:
        return [gzip.decompress(Path(__file__).with_name("python_topics.txt.gz").read_bytes()).decode()]
    contents = []
    for file in files:
        try:
            contents.append(Path(file).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise SystemExit(f"{file} is not a text in UTF-8: {error.reason} at byte {error.start}") from None
    return contents


def whole_text(sources: Sources) -> str:
    """Returns all texts of `sources` as one, with empty lines between them."""
    dataset = load(sources)
    columns, chat = columns_to_learn(dataset, sources.columns, sources.dataset)
    if chat:
        raise SystemExit(
            f"the column {columns[0]!r} of {sources.dataset!r} has chats, and texts are needed: name --columns"
        )
    return "\n\n".join(row[name] for row in dataset for name in columns)


# ---- rows


def hold_out(
    documents: Dataset | IterableDataset, tokens: int
) -> tuple[list[dict[str, Any]], Dataset | IterableDataset]:
    """Returns the first documents, which have `tokens` tokens together, and the others.

    If the last of them is cut, training reads its rest. A stream goes on with the next document instead.
    """
    held_out: list[dict[str, Any]] = []
    left, rest = tokens, {"input_ids": []}
    for document in documents if tokens else ():
        held_out.append({name: values[:left] for name, values in document.items()})
        rest = {name: values[left:] for name, values in document.items()}
        left -= len(held_out[-1]["input_ids"])
        if left == 0:
            break
    if left > 0:
        raise SystemExit(f"the data have {tokens - left} tokens, and {tokens} are to be held out: hold out fewer")
    if isinstance(documents, IterableDataset):
        return held_out, documents.skip(len(held_out))
    others = [Dataset.from_list([rest], features=documents.features)] if len(rest["input_ids"]) > 1 else []
    if len(held_out) < len(documents):
        others.append(documents.select(range(len(held_out), len(documents))))
    if not others:
        raise SystemExit(f"the data have {tokens} tokens, and all are held out: hold out fewer, or name more data")
    return held_out, datasets.concatenate_datasets(others)


def pack(documents: Dataset | IterableDataset, sources: Sources) -> Dataset | IterableDataset:
    """Returns rows of `seq_len` tokens; none of their documents sees another."""
    options = {"buffer": sources.buffer, "excess_length_strategy": sources.long_documents}
    return ra.pack_documents(documents, sources.tokens, **options)


def describe(rows: Dataset | IterableDataset, sources: Sources, needed: int = 1) -> str:
    """Returns one line about the rows; ends the program if there are fewer than `needed`."""
    if isinstance(rows, IterableDataset):
        found = sum(1 for _ in itertools.islice(rows, needed))
        if found < needed:
            rows_found = plural(found, "row")
            raise SystemExit(f"the stream has {rows_found} of {sources.tokens} tokens, and {needed} or more are needed")
        return f"a stream of documents, packed into rows of {sources.tokens} by {sources.buffer}"
    tokens = pieces = 0
    for batch in rows.with_format("numpy", columns=["attention_mask", "position_ids"]).iter(batch_size=100):
        tokens += int(batch["attention_mask"].sum())
        pieces += int(((batch["position_ids"] == 0) & (batch["attention_mask"] == 1)).sum())
    if len(rows) < needed:
        raise SystemExit(
            f"the data have {tokens} tokens to train on, in {plural(len(rows), 'row')} of {sources.tokens}, and {needed} or "
            f"more rows are needed: about {needed} * {sources.tokens} = {needed * sources.tokens} tokens"
        )
    full = f"{tokens / (len(rows) * sources.tokens):.1%} full"
    documents = f"{plural(pieces, 'document')}{' and parts of documents' if sources.long_documents == 'split' else ''}"
    return f"{tokens} tokens in {plural(len(rows), 'row')} of {sources.tokens}, {full}: {documents}"


def digest(documents: Dataset | IterableDataset) -> str:
    """Returns a checksum of the documents; of the first ones of a stream, whose end nobody knows."""
    checksum, count = hashlib.sha256(), 10 if isinstance(documents, IterableDataset) else None
    for document in itertools.islice(documents, count):
        checksum.update(repr(document["input_ids"]).encode())
    return checksum.hexdigest()


def _as_tensors(documents: list[dict[str, Any]]) -> HeldOut:
    ids = [torch.tensor(document["input_ids"]) for document in documents]
    every = [torch.ones_like(row) for row in ids]
    learned = [torch.tensor(x.get("assistant_masks", ones.tolist())) for x, ones in zip(documents, every)]
    ids, every, learned = (pad_sequence(rows, batch_first=True) for rows in (ids, every, learned))
    return HeldOut(ids, every, learned.bool())
