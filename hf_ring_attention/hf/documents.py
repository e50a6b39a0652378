"""Finds the documents of batch rows in masks, in positions, and in the descriptions that collators pass beside the tokens."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ..plan.problem import Documents


def documents_from_mask(mask: Tensor) -> Documents:
    """Returns the (start, stop) of the documents of each batch row; refuses padding inside a document.

    Args:
        mask: [B, n]: 0 for padding, otherwise the number of the token's document (a padding mask has 1 everywhere else).
    """
    documents = []
    for row, numbers in enumerate(mask.to(torch.int64).cpu()):
        borders = (torch.nonzero(numbers[1:] != numbers[:-1]).flatten() + 1).tolist()
        starts = [0, *borders]
        runs = [run for run in zip(starts, [*borders, len(numbers)]) if numbers[run[0]] != 0]
        marks = [int(numbers[start]) for start, _ in runs]
        if len(set(marks)) < len(marks):
            raise ValueError(
                f"batch row {row} of the attention mask has padding inside a document: tokens {runs} are marked as "
                f"{marks}; ring_dilated takes padding before and after a document"
            )
        documents.append(tuple(runs))
    return tuple(documents)


def documents_of_rows(
    batch: int,
    positions: Tensor | None,
    mask: Tensor | None,
    first: int = 0,
    cu_seq_lens: Any = None,
    seq_idx: Any = None,
    length: int = 0,
) -> tuple[Documents | None, bool]:
    """Returns the documents of packed rows, and whether a collator describes them; None if the mask alone describes the rows.

    Args:
        positions: [B, n], or [1, n] for all rows; a document begins if they restart.
        mask: [B, n], 0 for padding.
        first: the position id of a document's first token.
        cu_seq_lens: [documents + 1] 0 and the ends of the documents of one batch row (`DataCollatorWithFlattening`).
        seq_idx: [B, n] the number of each token's document, from 0.
        length: the number n of tokens in a row, if a collator describes it.
    """
    by_ends = None if cu_seq_lens is None else (_documents_of_ends(batch, length, cu_seq_lens),)
    collator = by_ends if seq_idx is None else _documents_of_numbers(batch, length, seq_idx)
    found = _documents_of_positions(batch, positions, mask, first)
    if collator is None:
        return found, False
    if positions is not None and any(len(row) > 1 for row in collator):
        _check_beginnings(collator, positions, first)
    by_mask = None if mask is None else documents_from_mask(mask != 0)
    # A mask knows padding, but no borders between documents.
    same_tokens = (((0, length),),) * batch, _merged(collator)
    for name, other in (("cu_seq_lens", by_ends), ("the attention mask", by_mask), ("position_ids", found)):
        if other not in (None, collator) and (other is by_ends or other not in same_tokens):
            raise ValueError(
                f"cu_seq_lens or seq_idx describe the documents {collator}, and {name} contradict them with {other}: pass the "
                f"collator's batch unchanged"
            )
    return collator, True


def _documents_of_ends(batch: int, length: int, cu_seq_lens: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(cu_seq_lens, Tensor) or cu_seq_lens.dim() != 1:
        raise ValueError(f"cu_seq_lens must be a tensor of one dimension, got {cu_seq_lens!r}")
    documents = tuple(itertools.pairwise(cu_seq_lens.tolist()))
    rising = documents and all(start < stop for start, stop in documents)
    if batch != 1 or not rising or (documents[0][0], documents[-1][1]) != (0, length):
        raise ValueError(
            f"cu_seq_lens must rise from 0 to the {length} tokens of one batch row, got {cu_seq_lens.tolist()} for {batch} "
            f"batch rows: pass the cu_seq_lens of the collator together with its input_ids"
        )
    return documents


def _documents_of_numbers(batch: int, length: int, seq_idx: Any) -> Documents:
    if not isinstance(seq_idx, Tensor) or tuple(seq_idx.shape) != (batch, length):
        got = tuple(seq_idx.shape) if isinstance(seq_idx, Tensor) else type(seq_idx).__name__
        raise ValueError(f"seq_idx must be a tensor [{batch}, {length}] like input_ids, got {got}: pass the collator's")
    return documents_from_mask(seq_idx + 1)


def _documents_of_positions(batch: int, positions: Tensor | None, mask: Tensor | None, first: int) -> Documents | None:
    """Returns the documents of whole sequences whose positions restart; None if they do not.

    A document begins if positions go down, and between two neighbours at the position of a first token. Positions that skip or
    repeat other numbers are the caller's own numbering of one document, such as a pruned prompt.
    """
    if positions is None:
        return None
    positions = positions.cpu().to(torch.int64).expand(batch, -1)
    valid = torch.ones_like(positions) if mask is None else (mask != 0).cpu().to(torch.int64)
    if valid.shape != positions.shape:
        return None  # The mask also covers a cache, or is not one of tokens.
    before, after = positions[:, :-1], positions[:, 1:]
    restarts = torch.zeros_like(positions)
    restarts[:, 1:] = (after < before) | ((after == first) & (before == first))
    if not bool((restarts[:, 1:] * valid[:, 1:] * valid[:, :-1]).any()):
        return None
    documents_from_mask(valid)  # This refuses padding inside a document, which is not a border.
    return documents_from_mask((restarts.cumsum(-1) + 1) * valid)


def _merged(documents: Documents) -> Documents:
    """Returns documents, with those that follow each other without padding between them joined into one."""
    borders = [({start for start, _ in row}, {stop for _, stop in row}) for row in documents]
    return tuple(tuple(zip(sorted(starts - stops), sorted(stops - starts))) for starts, stops in borders)


def positions_of_documents(documents: Documents, length: int, first: int) -> Tensor:
    """Returns [B, length] int64: positions that count each document from `first`; 0 for padding."""
    positions = torch.zeros(len(documents), length, dtype=torch.int64)
    for row, runs in enumerate(documents):
        for start, stop in runs:
            positions[row, start:stop] = torch.arange(first, first + stop - start)
    return positions


def _check_beginnings(documents: Documents, positions: Tensor, first: int) -> None:
    """Refuses positions that do not restart at the documents of a packed row, or lie below `first`."""
    rows = positions.cpu().expand(len(documents), -1)
    for row, runs in enumerate(documents):
        stops = {stop for _, stop in runs}
        for start, stop in runs:
            begin, lowest = int(rows[row, start]), int(rows[row, start:stop].min())
            if lowest < first or (start in stops and begin > int(rows[row, start - 1])):
                raise ValueError(
                    f"a document begins at token {start} of batch row {row}, and its position_ids begin at {begin} and are at "
                    f"least {lowest}: pass position_ids that count each document from {first}, or leave them out"
                )
