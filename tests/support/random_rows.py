"""Random documents, and the batches that collators and users make of them, with the documents that each batch marks."""

import importlib.util
import itertools
from dataclasses import dataclass, field
from functools import cache

import torch
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithFlattening

from .checkpoints import word_tokenizer
from .tiny_models import POSITIONS, VOCAB
from .training import padded

PAD, IGNORED = 0, -100


@dataclass(frozen=True)
class Document:
    """Tokens, their labels (-100: nothing is learned), and the mapping that a collator gets."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    features: dict = field(compare=False)


@dataclass(frozen=True, eq=False)
class Batch:
    """A model's inputs, and their documents.

    Attributes:
        name: of what made it.
        inputs: as it was made, with labels.
        documents: per row the (start, stop) of the documents that a patched model keeps apart.
        apart: whether more than a mask marks the documents, so that eager attention may see several as one in this batch.
        as_eager: whether its documents depend on the model type, in eager attention as well.
    """

    name: str
    inputs: dict
    documents: list
    apart: bool = False
    as_eager: bool = False

    @property
    def holes(self):
        """Whether there is padding inside of documents, which rings and mixers refuse."""
        return self.name.startswith("padding_inside")

    @property
    def shape(self):
        return tuple(self.inputs["input_ids"].shape)

    def targets(self):
        """[B, n] of each token the label of the next one of its document."""
        labels, targets = self.inputs["labels"], torch.full(self.shape, IGNORED)
        for row, start, stop in self.spans():
            targets[row, start : stop - 1] = labels[row, start + 1 : stop]
        return targets

    def valid(self):
        """[B, n] whether a token is of a document."""
        valid = torch.zeros(self.shape, dtype=torch.bool)
        for row, start, stop in self.spans():
            valid[row, start:stop] = True
        return valid

    def spans(self):
        return [(row, start, stop) for row, runs in enumerate(self.documents) for start, stop in runs]


def random_batch(rng, first=0, rows_only=False):
    """A batch of any kind.

    Args:
        first: the position id of a row's first token, for models that number tokens so.
        rows_only: each row holds one document, whose positions count it.
    """
    while True:
        name = rng.choices(list(KINDS), [kind.weight for kind in KINDS.values()])[0]
        kind = KINDS[name]
        if rows_only and (kind.packs or kind.odd):
            continue
        if kind.needs and importlib.util.find_spec(kind.needs) is None:
            continue
        documents = random_documents(rng, kind)
        inputs, details = kind.make(rng, documents, first)
        if inputs["input_ids"].shape[1] > POSITIONS - 2:
            continue
        told = told_documents(inputs, first)
        apart = kind.packs or ("attention_mask" in inputs and max(map(len, told)) > 1)
        batch = Batch(f"{name} {details}", inputs, told, apart, kind.as_eager)
        if kind.collates:
            check_collator(batch, documents)
        if bool((batch.targets() != IGNORED).any()):
            return batch


def random_documents(rng, kind):
    longest = rng.choice([3, 8, 16, 24])
    lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, 5 if kind.packs else 3))]
    lengths = lengths[:1] * len(lengths) if kind.equal else lengths
    with_prompts = rng.choice(kind.styles) == "labels"
    return [random_document(rng, length, with_prompts) for length in lengths]


def random_document(rng, length, with_prompts):
    """A document of random tokens; `with_prompts`, its labels leave out a prompt."""
    ids, prompt = tuple(rng.randrange(3, VOCAB) for _ in range(length)), rng.randint(0, length)
    if not with_prompts:
        return Document(ids, ids, {"input_ids": [*ids]})
    labels = (IGNORED,) * prompt + ids[prompt:]
    return Document(ids, labels, {"input_ids": [*ids], "labels": [*labels]})


# ---- what makes batches


@dataclass(frozen=True)
class Kind:
    """How one kind of batch is made, by `make(rng, documents, first)`, which returns it and a word on its details.

    `styles`: of documents. `packs`: it marks several documents in a row. `equal`: they are of one length. `collates`:
    all of them must be found in it. `odd`: its positions do not count rows. `as_eager`: see `Batch`. `needs`: a package.
    """

    make: object
    weight: float
    styles: tuple[str, ...] = ("plain",)
    packs: bool = False
    equal: bool = False
    collates: bool = True
    odd: bool = False
    as_eager: bool = False
    needs: str | None = None


KINDS: dict[str, Kind] = {}


def made(weight, **settings):
    def register(make):
        KINDS[make.__name__] = Kind(make, weight, **settings)
        return make

    return register


def features(documents):
    return [document.features for document in documents]


@made(5, styles=("plain", "labels"), packs=True)
def flattening(rng, documents, first):
    told = rng.choice([(1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
    names = ("return_position_ids", "return_flash_attn_kwargs", "return_seq_idx")
    settings = {name: bool(flag) for name, flag in zip(names, told)}
    settings["position_ids_start"] = first
    return DataCollatorWithFlattening(**settings)(features(documents)), str(settings)


def padding(rng, documents, collator, **settings):
    side, multiple = rng.choice(["left", "right"]), rng.choice([None, 4])
    batch = collator(tokenizer(side), pad_to_multiple_of=multiple, **settings)(features(documents))
    return dict(batch), f"{side} {multiple}"


@made(1)
def language_modeling(rng, documents, first):
    return padding(rng, documents, DataCollatorForLanguageModeling, mlm=False)


@made(2, styles=("labels",))
def seq2seq(rng, documents, first):
    return padding(rng, documents, DataCollatorForSeq2Seq)


@made(2, equal=True)
def default(rng, documents, first):
    return rows_of(documents, "right", ("input_ids", "labels")), ""


@made(2, styles=("plain", "labels"), needs="trl")
def trl_padding(rng, documents, first):
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    settings = {"return_position_ids": first == 0 and rng.random() < 0.5, "pad_to_multiple_of": rng.choice([None, 8])}
    return DataCollatorForLanguageModeling(PAD, **settings)(features(documents)), str(settings)


@made(3, styles=("plain", "labels"), packs=True, needs="trl")
def trl_padding_free(rng, documents, first):
    """As SFTTrainer packs: its examples may hold several documents already."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    settings = {"pad_to_multiple_of": rng.choice([None, None, 8])}
    examples, joined = features(documents), rng.random() < 0.5
    if joined:
        examples = [
            {name: [x for d in part for x in d.features[name]] for name in documents[0].features}
            | {"seq_lengths": [len(d.ids) for d in part]}
            for part in (documents[:2], documents[2:])
            if part
        ]
    batch = DataCollatorForLanguageModeling(PAD, padding_free=True, **settings)(examples)
    return batch, f"{settings} {'joined' if joined else ''}"


@made(3, collates=False)
def handwritten(rng, documents, first):
    """Padded on a side; masks and positions in the ways in which people write them."""
    side = rng.choice(["left", "right"])
    batch = rows_of(documents, side)
    if rng.random() < 0.1:  # a row of nothing but padding
        fills = {"input_ids": PAD, "labels": IGNORED, "attention_mask": 0}
        batch = {name: torch.cat([x, torch.full_like(x[:1], fills[name])]) for name, x in batch.items()}
    mask = batch["attention_mask"]
    whole = bool(mask.all())
    how = rng.choice(["none", "cumsum", "cumsum, 1 at padding", "arange"])
    if how == "arange" and (whole or side == "right"):
        rows = rng.choice([1, len(mask)])
        batch["position_ids"] = first + torch.arange(mask.shape[1]).expand(rows, -1).clone()
    elif how.startswith("cumsum"):
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        batch["position_ids"] = first + positions.masked_fill(mask == 0, int("1 at" in how))
    if whole and rng.random() < 0.5:
        del batch["attention_mask"]
    else:
        kind = rng.choice([torch.int64, torch.int64, torch.int32, torch.bool, torch.float32])
        batch["attention_mask"] = mask.to(kind)
        how += f" {kind}"
    return batch, f"{side} {how} {'' if 'attention_mask' in batch else 'no mask'}"


@made(2, collates=False, packs=True)
def restarts(rng, documents, first):
    """A row of documents, marked by position_ids only: with a mask of ones eager attention would not look at them."""
    batch = rows_of([joined(documents)], "right")
    batch["position_ids"] = first + torch.cat([torch.arange(len(document.ids)) for document in documents])[None]
    masked = rng.random() < 0.5
    if not masked:
        del batch["attention_mask"]
    labels = batch["labels"]
    if rng.random() < 0.5:
        labels[batch["position_ids"] == first] = IGNORED
    return batch, "under a mask of ones" if masked else ""


@made(2, collates=False, odd=True)
def gaps(rng, documents, first):
    """Positions that leave some out, or begin late, as pruned prompts do; under a mask, which makes it one document."""
    batch = rows_of(documents, "right")
    step = torch.ones_like(batch["input_ids"])
    for row in step:
        for _ in range(rng.randint(0, 3)):
            row[rng.randrange(len(row))] = rng.randint(2, 9)
    batch["position_ids"] = (first + step.cumsum(-1) - rng.choice([0, 1])).clamp_max(POSITIONS - 2)
    return batch, ""


@made(1, collates=False, odd=True)
def repeats(rng, documents, first):
    """Positions that stand still, under a mask of ones: as before, one document."""
    batch = rows_of([documents[0]], "right")
    step = torch.ones_like(batch["input_ids"])
    for _ in range(rng.randint(1, 3)):
        step[0, rng.randrange(step.shape[1])] = 0
    step[0, 0] = 1
    batch["position_ids"] = first + step.cumsum(-1) - 1
    return batch, ""


@made(0.5, collates=False, odd=True, as_eager=True)
def gaps_without_mask(rng, documents, first):
    """Without a mask, Transformers takes every step other than one for a border, if the model hands it positions."""
    batch = rows_of([documents[0]], "right")
    step, index = torch.ones_like(batch["input_ids"]), rng.randrange(len(documents[0].ids))
    step[0, index] = rng.randint(2, 9)
    batch["position_ids"] = first + step.cumsum(-1) - 1
    batch["labels"][0, index] = IGNORED
    del batch["attention_mask"]
    return batch, ""


@made(0.3, collates=False, odd=True)
def padding_inside(rng, documents, first):
    batch = rows_of(documents, "right")
    row = rng.randrange(len(documents))
    batch["attention_mask"][row, rng.randrange(batch["attention_mask"].shape[1])] = 0
    return batch, ""


def joined(documents):
    return Document(sum((d.ids for d in documents), ()), sum((d.labels for d in documents), ()), {})


def rows_of(documents, side, names=("input_ids", "labels", "attention_mask")):
    """Documents as rows, padded on a side."""
    rows = padded([{"input_ids": document.ids, "labels": document.labels} for document in documents], side == "left")
    return {name: rows[name] for name in names}


@cache
def tokenizer(side):
    words = ["<pad>", *(f"w{number}" for number in range(1, VOCAB))]
    return word_tokenizer(words, pad_token=words[PAD], padding_side=side)


# ---- documents of batches


def told_documents(batch, first):
    """Per row the (start, stop) of its documents, token by token.

    Collators mark them by seq_idx or cu_seq_lens_q. Otherwise a document begins where positions go down, or where the first
    position stands twice; without a mask, at every step other than one, as in Transformers. Padding is outside documents.
    """
    size, length = batch["input_ids"].shape
    mask, positions, numbers = (batch.get(name) for name in ("attention_mask", "position_ids", "seq_idx"))
    if numbers is None and batch.get("cu_seq_lens_q") is not None:
        numbers = torch.zeros(1, length, dtype=torch.int64)
        for end in batch["cu_seq_lens_q"].tolist()[1:-1]:
            numbers[:, end:] += 1

    def begins(row, index):
        if index == 0 or (mask is not None and mask[row, index - 1] == 0):
            return True
        if numbers is not None:
            return bool(numbers[row, index] != numbers[row, index - 1])
        if positions is None:
            return False
        before, after = positions[row % len(positions), index - 1 : index + 1].tolist()
        return after != before + 1 if mask is None else after < before or after == before == first

    rows = [[] for _ in range(size)]
    for row, index in itertools.product(range(size), range(length)):
        if mask is not None and mask[row, index] == 0:
            continue
        if begins(row, index):
            rows[row].append((index, index))
        rows[row][-1] = rows[row][-1][0], index + 1
    return rows


def check_collator(batch, documents):
    """Raises AssertionError unless the batch holds these documents with their labels."""
    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
    found = sorted(
        (tuple(ids[row, start:stop].tolist()), tuple(labels[row, start + 1 : stop].tolist()))
        for row, start, stop in batch.spans()
        if stop - start > 1 or ids[row, start] != PAD  # what fills a row may be numbered as documents of one token
    )
    expected = sorted((document.ids, document.labels[1:]) for document in documents)
    assert found == expected, f"{batch.name} made documents {found} of {features(documents)}"
