"""The columns of one document, as a data set has them: read, checked, and cut to what is no padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .shards import ASIDE, IGNORED

#: Columns that say which tokens are learned, as TRL names them: 0 for those that are not.
_LEARNED = ("completion_mask", "assistant_masks")

#: Columns that a document may have for its own sake; all others of tokens are carried along.
TOKEN_COLUMNS = ("input_ids", "labels", "attention_mask", *_LEARNED, "position_ids", "seq_idx", "seq_lengths")


def is_integer(x: Any) -> bool:
    return isinstance(x, Integral) and not isinstance(x, (bool, np.bool_))


# ---- reading documents


@dataclass(frozen=True)
class Document:
    """What is read of one: columns of its tokens; `lengths` are those of the documents in it, of which it may have several.

    It has position_ids only where they do not count each document from 0.
    """

    columns: dict[str, Tensor]
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def cut(self, start: int, stop: int) -> Document:
        """Tokens [start, stop)."""
        ends = [min(max(end, start), stop) for end in itertools.accumulate(self.lengths, initial=0)]
        lengths = tuple(b - a for a, b in itertools.pairwise(ends) if b > a)
        return Document({name: x[start:stop] for name, x in self.columns.items()}, lengths)

    def positions(self) -> Tensor:
        own = self.columns.get("position_ids")
        return torch.cat([torch.arange(length) for length in self.lengths]) if own is None else own

    def numbers(self) -> Tensor:
        """Of each token that of its document."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))


def read_all(documents: Any, collator: str) -> list[Document]:
    iterable = isinstance(documents, Iterable) and not isinstance(documents, (Mapping, str, Tensor))
    read = [read_document(x, f"document {number} of a batch") for number, x in enumerate(documents)] if iterable else []
    if not read:
        got = "none" if iterable else type(documents).__name__
        raise ValueError(f"{collator} expected a list of documents, mappings that have input_ids, got {got}")
    return read


def read_document(document: Any, who: str) -> Document:
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
    return Document(columns, _lengths(columns, given, (start, stop, len(ids) if mask is None else len(mask)), who))


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
        said["seq_idx"] = _lengths_between(numbers[1:] != numbers[:-1], count)
    if positions is not None:
        positions = columns["position_ids"] = _integers(positions, "position_ids", who)
        # As packing counts them: the first token of a document has position 0, or one below its neighbour's.
        said["position_ids"] = _lengths_between((positions[1:] == 0) | (positions[1:] < positions[:-1]), count)
    found: dict[str, tuple[int, ...]] = {name: tuple(sorted(set(ends) - {0})) for name, ends in said.items()}
    if len(set(found.values())) > 1:
        raise ValueError(f"{who} has documents that end elsewhere by {' than by '.join(found)}: {found}")
    ends = (0, *next(iter(found.values()), (count,)))
    lengths = tuple(b - a for a, b in itertools.pairwise(ends))
    if positions is not None and torch.equal(positions, torch.cat([torch.arange(length) for length in lengths])):
        del columns["position_ids"]
    return lengths


def _lengths_between(borders: Tensor, count: int) -> list[int]:
    return [*(torch.nonzero(borders).flatten() + 1).tolist(), count]
