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
        positions: [B, n], or [1, n] for all rows; a document begins where they restart. Other positions are ignored.
        mask: [B, n], 0 for padding.
        first: the position id of a document's first token.
        cu_seq_lens: [documents + 1] 0 and the ends of the documents of one batch row (`DataCollatorWithFlattening`).
        seq_idx: [B, n] the number of each token's document, from 0.
        length: the number n of tokens in a row, if a collator describes it.

    Raises:
        ValueError: descriptions that are not of such rows, or contradict each other; padding inside a document.
    """
    collator = _documents_of_collator(batch, length, cu_seq_lens, seq_idx)
    found = _documents_of_positions(batch, positions, mask, first)
    if collator is None:
        return found, False
    if positions is not None and positions.dim() == 2 and any(len(row) > 1 for row in collator):
        _check_beginnings(collator, positions, first)
    by_mask = None if mask is None else documents_from_mask(mask != 0)
    # A mask knows padding, but no borders between documents.
    for other in (by_mask, found):
        if other not in (None, (((0, length),),) * batch, collator, _merged(collator)):
            raise ValueError(
                f"cu_seq_lens or seq_idx describe the documents {collator}, and the attention mask or position_ids describe "
                f"{other}: pass the collator's batch unchanged"
            )
    return collator, True


def _documents_of_collator(batch: int, length: int, cu_seq_lens: Any, seq_idx: Any) -> Documents | None:
    by_ends = by_number = None
    if cu_seq_lens is not None:
        if not isinstance(cu_seq_lens, Tensor) or cu_seq_lens.dim() != 1:
            raise ValueError(f"cu_seq_lens must be a tensor of one dimension, got {cu_seq_lens!r}")
        ends = [int(end) for end in cu_seq_lens.tolist()]
        rising = all(a < b for a, b in itertools.pairwise(ends))
        if batch != 1 or not ends or ends[0] != 0 or ends[-1] != length or not rising:
            raise ValueError(
                f"cu_seq_lens must rise from 0 to the {length} tokens of one batch row, got {ends} for {batch} "
                f"batch rows: pass the cu_seq_lens of the collator together with its input_ids"
            )
        by_ends = (tuple(itertools.pairwise(ends)),)
    if seq_idx is not None:
        if not isinstance(seq_idx, Tensor) or tuple(seq_idx.shape) != (batch, length):
            got = tuple(seq_idx.shape) if isinstance(seq_idx, Tensor) else type(seq_idx).__name__
            raise ValueError(
                f"seq_idx must be a tensor [{batch}, {length}] like input_ids, got {got}: pass the collator's"
            )
        by_number = documents_from_mask(seq_idx + 1)
    if by_ends is not None and by_number is not None and by_ends != by_number:
        raise ValueError(
            f"cu_seq_lens and seq_idx contradict each other: they describe the documents {by_ends} and {by_number}: pass the "
            f"collator's batch unchanged"
        )
    return by_number if by_ends is None else by_ends


def _documents_of_positions(batch: int, positions: Tensor | None, mask: Tensor | None, first: int) -> Documents | None:
    """Returns the documents of whole sequences whose positions restart; None if they do not.

    A document begins where positions go down, and between two neighbours that both have the position of a first token: the
    former is a document of one token. Positions that skip or repeat other numbers are the caller's own numbering of one
    document, such as a pruned prompt.
    """
    if positions is None or positions.dim() != 2:
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
        for number, (start, stop) in enumerate(runs):
            goes_on = number and runs[number - 1][1] == start and int(rows[row, start]) > int(rows[row, start - 1])
            lowest = int(rows[row, start:stop].min())
            if goes_on or lowest < first:
                before, here = (int(rows[row, max(place, 0)]) for place in (start - 1, start))
                wrong = f"go on there from {before} to {here}" if goes_on else f"have {lowest} in it"
                raise ValueError(
                    f"a document begins at token {start} of batch row {row}, and position_ids {wrong}: pass position_ids that "
                    f"count each document from {first}, or leave them out"
                )
