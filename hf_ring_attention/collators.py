"""Collators of tokenized documents: a row each, padded; or several packed into a row, none of which sees another."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Number
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .batches import ASIDE, IGNORED, fill_of

#: What becomes of documents longer than a row; the name and three of the words are axolotl's.
Strategy = Literal["raise", "truncate", "split", "drop"]
_STRATEGIES = ("raise", "truncate", "split", "drop")
#: Columns that say which tokens are learned, as TRL names them: 0 for those that are not.
_LEARNED = ("completion_mask", "assistant_masks")
#: Columns that a document may have for its own sake; all others of tokens are carried along.
TOKEN_COLUMNS = ("input_ids", "labels", "attention_mask", *_LEARNED, "position_ids", "seq_idx", "seq_lengths")


@dataclass(frozen=True)
class PaddingCollator:
    """Makes a row of each document, padded to the longest, or to `row_length`.

    Args:
        pad_token_id: what padding is; it is never seen, nor learned from.
        row_length: tokens of a row; None for those of the longest document.
        padding_side: "right" or "left".
        excess_length_strategy: what becomes of a document longer than `row_length`. "raise" refuses it, when a loader is
            prepared where the dataset tells its lengths (a list, a `datasets.Dataset`; see `Ring.prepare_data_loader`).
            "truncate" keeps its first tokens. "split" makes documents of its pieces: each counts its positions from 0,
            and nothing predicts its first token. "drop" leaves it out; a batch of which nothing is left is padding.

    A document is a mapping of columns, lists or arrays with a value for each token:

    - input_ids.
    - labels, where they differ from these; -100 is not learned. Labels of tokens that equal `pad_token_id`, such as an
      end token, are kept.
    - attention_mask, 0 for padding at its ends, which is cut off.
    - completion_mask and assistant_masks, 0 for tokens that are not learned, as TRL makes them.
    - position_ids, where they do not count the tokens from 0.
    - seq_lengths (TRL's packing), seq_idx, or position_ids that restart: a row that was packed before, of several
      documents.
    - others, such as weights, token_type_ids or special_tokens_mask: they are columns of the batch, [B, n, ...].

    What is not of tokens, such as a text, a number, or what a tokenizer tells of a text (length), is left out; but a
    list of numbers, fewer or more than the tokens, is refused, since it may be a column of tokens that went wrong.
    """

    pad_token_id: int = 0
    row_length: int | None = None
    padding_side: str = "right"
    _: KW_ONLY
    excess_length_strategy: Strategy = "raise"

    def __post_init__(self) -> None:
        if self.padding_side not in ("right", "left"):
            raise ValueError(f"PaddingCollator: padding_side must be 'right' or 'left', got {self.padding_side!r}")
        _check_settings(self)

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """[B, n] input_ids, attention_mask and labels of B documents, and what they have besides.

        Several documents in a row are told by position_ids that restart and by seq_idx, the number of each token's
        document in its row (-1 for padding).

        Raises:
            ValueError: a document longer than a row, or without tokens; a column that is not as the others.
        """
        read = _read_all(documents, type(self).__name__)
        fitting = _fitting(read, self.row_length, self.excess_length_strategy)
        length = self.row_length or max(map(len, fitting))
        rows = [[(length - len(x) if self.padding_side == "left" else 0, x)] for x in fitting] or [[]]
        several = any(len(x.lengths) > 1 for x in read)
        own = any("position_ids" in x.columns for x in read)
        return _batch(rows, length, self.pad_token_id, _carried(read), positions=several or own, numbers=several)


@dataclass(frozen=True)
class PackingCollator:
    """Packs documents into rows of `row_length` tokens, each into the first row that has room for it.

    Args:
        row_length: tokens of a row; None for a single row as long as all documents together.
        pad_token_id: what fills the end of a row.
        excess_length_strategy: see `PaddingCollator`; "split" packs pieces as documents.

    Documents are those of `PaddingCollator`. Their borders are told by position_ids that restart and by seq_idx, the
    number of each token's document in its row.
    """

    row_length: int | None = None
    pad_token_id: int = 0
    _: KW_ONLY
    excess_length_strategy: Strategy = "raise"

    def __post_init__(self) -> None:
        _check_settings(self)

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """[rows, n] input_ids, attention_mask, labels, position_ids and seq_idx (-1 for padding), and what they have besides.

        Raises:
            ValueError: a document longer than a row, or without tokens; a column that is not as the others.
        """
        read = _read_all(documents, type(self).__name__)
        fitting = _fitting(read, self.row_length, self.excess_length_strategy)
        length = self.row_length or sum(map(len, fitting))
        rows: list[list[tuple[int, _Document]]] = [[]]
        taken = [0]
        for document in fitting:
            row = next((row for row, stop in enumerate(taken) if stop + len(document) <= length), len(taken))
            if row == len(taken):
                rows.append([])
                taken.append(0)
            rows[row].append((taken[row], document))
            taken[row] += len(document)
        return _batch(rows, length, self.pad_token_id, _carried(read), positions=True, numbers=True)


def _check_settings(collator: PaddingCollator | PackingCollator) -> None:
    name = type(collator).__name__
    row_length, pad, strategy = collator.row_length, collator.pad_token_id, collator.excess_length_strategy
    if row_length is not None and (not _is_integer(row_length) or row_length < 1):
        raise ValueError(f"{name}: row_length must be a number of tokens of at least 1, or None, got {row_length!r}")
    if not _is_integer(pad) or pad < 0:
        raise ValueError(
            f"{name}: pad_token_id must be the id of a token, got {pad!r}: a tokenizer without a padding token has None; "
            f"padding is never seen, so any token will do, such as tokenizer.eos_token_id"
        )
    if strategy not in _STRATEGIES:
        raise ValueError(f"{name}: excess_length_strategy must be one of {_STRATEGIES}, got {strategy!r}")
    if row_length is None and strategy != "raise":
        raise ValueError(f"{name}: excess_length_strategy={strategy!r} needs a row_length, without which all fits")


def _is_integer(x: Any) -> bool:
    return isinstance(x, Integral) and not isinstance(x, (bool, np.bool_))


# ---- reading documents


@dataclass(frozen=True)
class _Document:
    """What is read of one: columns of its tokens; `lengths` are those of the documents in it, of which it may have several.

    It has position_ids only where they do not count each document from 0.
    """

    columns: dict[str, Tensor]
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def cut(self, start: int, stop: int) -> _Document:
        """Tokens [start, stop)."""
        ends = [min(max(end, start), stop) for end in itertools.accumulate(self.lengths, initial=0)]
        lengths = tuple(b - a for a, b in itertools.pairwise(ends) if b > a)
        return _Document({name: x[start:stop] for name, x in self.columns.items()}, lengths)

    def positions(self) -> Tensor:
        own = self.columns.get("position_ids")
        return torch.cat([torch.arange(length) for length in self.lengths]) if own is None else own

    def numbers(self) -> Tensor:
        """Of each token that of its document."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))


def _read_all(documents: Any, collator: str) -> list[_Document]:
    iterable = isinstance(documents, Iterable) and not isinstance(documents, (Mapping, str, Tensor))
    read = [_read(x, f"document {number} of a batch") for number, x in enumerate(documents)] if iterable else []
    if not read:
        got = "none" if iterable else type(documents).__name__
        raise ValueError(f"{collator} expected a list of documents, mappings that have input_ids, got {got}")
    return read


def _read(document: Any, who: str) -> _Document:
    if not isinstance(document, Mapping):
        raise ValueError(f"{who} must be a mapping that has input_ids, got {type(document).__name__}")
    if document.get("input_ids") is None:
        raise ValueError(f"{who} has no input_ids, only {sorted(map(str, document))}: tokenize documents first")
    columns = _columns(document, who)
    mask = columns.pop("attention_mask", None)
    start, stop = (0, len(columns["input_ids"])) if mask is None else _unpadded(mask, who)
    columns = {name: x[start:stop] for name, x in columns.items()}
    ids = columns["input_ids"] = _integers(columns["input_ids"], "input_ids", who)
    if len(ids) == 0:
        raise ValueError(f"{who} has no tokens: leave such documents out of the dataset")
    if int(ids.min()) < 0:
        raise ValueError(f"{who} has input_ids that are no tokens, such as {int(ids.min())}")
    columns["labels"] = _labels(columns, who)
    given = document.get("seq_lengths")
    return _Document(columns, _lengths(columns, given, (start, stop, len(ids) if mask is None else len(mask)), who))


def _columns(document: Mapping[str, Any], who: str) -> dict[str, Tensor]:
    """The columns that have a value for each token."""
    if "shift_labels" in document:
        raise ValueError(f"{who} has shift_labels: pass labels, which are shifted when rows are cut")
    ids = _tensor(document["input_ids"], "input_ids", who)
    if ids is None or ids.dim() != 1:
        got = type(document["input_ids"]).__name__ if ids is None else f"{tuple(ids.shape)}"
        raise ValueError(
            f"{who} needs input_ids [tokens], a list of integers, got {got}: a tokenizer's return_tensors='pt' adds a "
            f"dimension, leave it out"
        )
    columns = {"input_ids": ids}
    for name, value in document.items():
        if value is None or name in ("input_ids", "seq_lengths", *ASIDE):
            continue
        x, known = _tensor(value, name, who), name in TOKEN_COLUMNS
        if (x is None and known) or (x is not None and (x.shape[:1] != ids.shape or (known and x.dim() != 1))):
            if x is not None and x.dim() == 0 and not known:  # a number is of no token
                continue
            raise ValueError(
                f"{who} has {name} {type(value).__name__ if x is None else tuple(x.shape)}, which must have a value for "
                f"each of its {len(ids)} tokens"
                + ("" if known else ": leave other columns out, dataset.remove_columns")
            )
        if x is not None:
            columns[str(name)] = x
    return columns


def _tensor(value: Any, name: str, who: str) -> Tensor | None:
    """Numbers as a tensor; None for what is none."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    leaf = value
    while isinstance(leaf, (list, tuple)) and leaf:
        leaf = leaf[0]
    if isinstance(leaf, np.ndarray) and leaf is value:
        unsigned = value.dtype.kind == "u"  # torch has few operations for them
        return torch.as_tensor(value.astype(np.int64) if unsigned else value) if value.dtype.kind in "biuf" else None
    if not isinstance(value, (list, tuple)) or not isinstance(
        leaf, (Number, np.bool_, Tensor, np.ndarray, list, tuple)
    ):
        return None
    if leaf is value or isinstance(leaf, (list, tuple)):  # empty
        return torch.zeros(0, dtype=torch.int64) if name in TOKEN_COLUMNS else None
    try:
        return torch.as_tensor(np.asarray(value) if isinstance(leaf, np.ndarray) else value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{who} has {name} that make no tensor: {error}") from error


def _integers(x: Tensor, name: str, who: str) -> Tensor:
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        raise ValueError(f"{who} has {name} of {x.dtype}, where integers are expected")
    return x.to(torch.int64)


def _marked(mask: Tensor, name: str, who: str) -> Tensor:
    """Where a mask is 1."""
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"{who} has {name} with values other than 0 or 1: {mask.unique().tolist()}")
    return mask == 1


def _unpadded(mask: Tensor, who: str) -> tuple[int, int]:
    """(start, stop) of the tokens that a mask leaves."""
    seen = torch.nonzero(_marked(mask, "attention_mask", who)).flatten()
    start, stop = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 0)
    if stop - start != len(seen):
        raise ValueError(
            f"{who} has an attention_mask with padding inside: of tokens {start} to {stop - 1} it leaves {len(seen)} of "
            f"{stop - start}: only padding at the ends of a document can be cut off; set labels to -100 for tokens that are "
            f"seen but not learned"
        )
    return start, stop


def _labels(columns: dict[str, Tensor], who: str) -> Tensor:
    """Labels without what is not learned; takes the masks that say so out of the columns."""
    masks = {name: _marked(columns.pop(name), name, who) for name in _LEARNED if name in columns}
    if "labels" not in columns:
        labels = columns["input_ids"].clone()
        for mask in masks.values():
            labels[~mask] = IGNORED
        return labels
    labels = _integers(columns["labels"], "labels", who)
    wrong = labels[(labels < 0) & (labels != IGNORED)]
    if len(wrong):
        raise ValueError(f"{who} has labels that are neither tokens nor {IGNORED}, such as {int(wrong[0])}")
    for name, mask in masks.items():
        both = int(((labels != IGNORED) & ~mask).sum())
        if both:
            raise ValueError(
                f"{who} has a {name} that leaves {both} tokens out which its labels learn: leave one of the columns out, or "
                f"make the labels {IGNORED} there"
            )
    return labels


def _lengths(columns: dict[str, Tensor], given: Any, cut: tuple[int, int, int], who: str) -> tuple[int, ...]:
    """Those of the documents in it; leaves position_ids only where they are not what follows from these.

    Args:
        given: seq_lengths, of all tokens; cut: where those that are left start and stop, and how many there were.
    """
    count, said = len(columns["input_ids"]), {}
    if given is not None:
        start, stop, tokens = cut
        all_ends = list(itertools.accumulate(_integers(torch.as_tensor(given), "seq_lengths", who).tolist(), initial=0))
        if all_ends != sorted(set(all_ends)) or all_ends[-1] != tokens:
            raise ValueError(
                f"{who} has seq_lengths {list(given)}, {all_ends[-1]} tokens together, and {tokens} input_ids"
            )
        said["seq_lengths"] = [min(max(end, start), stop) - start for end in all_ends[1:]]
    numbers, positions = columns.pop("seq_idx", None), columns.get("position_ids")
    if numbers is not None:
        said["seq_idx"] = _ends(numbers[1:] != numbers[:-1], count)
    if positions is not None:
        positions = columns["position_ids"] = _integers(positions, "position_ids", who)
        # As packing counts them: the first token of a document has position 0, or one below its neighbour's.
        said["position_ids"] = _ends((positions[1:] == 0) | (positions[1:] < positions[:-1]), count)
    found: dict[str, tuple[int, ...]] = {name: tuple(sorted(set(ends) - {0})) for name, ends in said.items()}
    if len(set(found.values())) > 1:
        raise ValueError(f"{who} has documents that end elsewhere by {' than by '.join(found)}: {found}")
    ends = (0, *next(iter(found.values()), (count,)))
    lengths = tuple(b - a for a, b in itertools.pairwise(ends))
    if positions is not None and torch.equal(positions, torch.cat([torch.arange(length) for length in lengths])):
        del columns["position_ids"]
    return lengths


def _ends(borders: Tensor, count: int) -> list[int]:
    return [*(torch.nonzero(borders).flatten() + 1).tolist(), count]


# ---- making rows


def _fitting(documents: list[_Document], row_length: int | None, strategy: Strategy) -> list[_Document]:
    """Documents that fit into a row."""
    fitting = []
    for number, document in enumerate(documents):
        if row_length is None or len(document) <= row_length:
            fitting.append(document)
        elif strategy == "raise":
            raise ValueError(
                f"document {number} has {len(document)} tokens, and does not fit a row of {row_length}: {REMEDY}"
            )
        elif strategy == "truncate":
            first = document.cut(0, row_length)
            if bool((first.columns["labels"] == IGNORED).all()) and bool((document.columns["labels"] != IGNORED).any()):
                warnings.warn(
                    "documents that were truncated to the length of a row have nothing to learn in what is left: their "
                    "labels come later; make rows longer, or leave such documents out",
                    stacklevel=2,
                )
            fitting.append(first)
        elif strategy == "split":
            if "position_ids" in document.columns:
                raise ValueError(
                    f"document {number} has {len(document)} tokens with position_ids of its own, and pieces of {row_length} "
                    f"tokens would count from 0: make rows longer, or truncate or drop such documents"
                )
            fitting += [
                document.cut(x, min(x + row_length, len(document))) for x in range(0, len(document), row_length)
            ]
    return fitting


def is_longer(document: Any, collator: PaddingCollator | PackingCollator) -> bool:
    """Whether a document, without its padding, is longer than a row."""
    return collator.row_length is not None and len(_read(document, "a document of the dataset")) > collator.row_length


#: What can be done about a document that is longer than a row.
REMEDY = (
    "make rows longer, or choose the collator's excess_length_strategy: 'truncate' keeps the first tokens, 'split' makes "
    "several documents, 'drop' leaves it out"
)


def _carried(documents: list[_Document]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Type and shape, per token, of the columns that all documents have besides those of every batch.

    Raises:
        ValueError: documents that differ in them.
    """
    own = ("input_ids", "labels", "position_ids")
    kinds = {name: (x.dtype, x.shape[1:]) for name, x in documents[0].columns.items() if name not in own}
    for number, document in enumerate(documents):
        names = document.columns.keys() - {*own}
        if names != kinds.keys():
            name = min(names ^ kinds.keys())
            which = (f"document {number}", "document 0") if name in kinds else ("document 0", f"document {number}")
            raise ValueError(f"{which[0]} of a batch has no {name}, which {which[1]} has: all need the same columns")
        for name, (dtype, shape) in kinds.items():
            x = document.columns[name]
            if x.shape[1:] != shape:
                raise ValueError(
                    f"document {number} of a batch has {name} of {tuple(x.shape[1:])} for each token, document 0 of "
                    f"{tuple(shape)}"
                )
            kinds[name] = torch.promote_types(dtype, x.dtype), shape
    return kinds


def _batch(
    rows: list[list[tuple[int, _Document]]],
    length: int,
    pad_token_id: int,
    carried: dict[str, tuple[torch.dtype, torch.Size]],
    *,
    positions: bool,
    numbers: bool,
) -> dict[str, Tensor]:
    """Rows of (start, document)."""
    shape = (len(rows), length)
    batch = {
        "input_ids": torch.full(shape, int(pad_token_id)),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
        "labels": torch.full(shape, IGNORED),
    }
    for name, (dtype, trailing) in carried.items():
        batch[name] = torch.full((*shape, *trailing), fill_of(name, dtype), dtype=dtype)
    if positions:
        batch["position_ids"] = torch.zeros(shape, dtype=torch.int64)
    if numbers:
        batch["seq_idx"] = torch.full(shape, -1)
    for row, contents in enumerate(rows):
        number = 0
        for start, document in contents:
            columns = {**document.columns, "attention_mask": torch.ones(len(document), dtype=torch.int64)}
            if positions:
                columns["position_ids"] = document.positions()
            if numbers:
                columns["seq_idx"] = document.numbers() + number
            for name, x in columns.items():
                batch[name][row, start : start + len(document)] = x
            number += len(document.lengths)
    return batch
