"""Finds the documents of batch rows in masks, in positions, and in what collators pass beside the tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from ..compute.private import version_of
from ..plan.problem import Documents

#: The attribute of a collator's tensor that caches its documents, with the version and shape that they were read from.
_DOCUMENTS = "_ring_dilated_documents"


def documents_from_mask(mask: Tensor) -> Documents:
    """Returns the (start, stop) of the documents of each batch row.

    Args:
        mask: [B, n]: 0 for padding, otherwise the number of the token's document (a padding mask has 1 everywhere else).

    Raises:
        ValueError: padding inside a document.
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


def has_padding_inside(numbers: Tensor) -> bool:
    """Returns whether a row of one document has padding between its tokens, by the numbers [B, n] of its tokens' documents."""
    valid = numbers != 0
    inside = ~valid & (valid.cumsum(1) > 0) & (valid.flip(1).cumsum(1).flip(1) > 0)
    return bool(inside.any()) and bool((numbers == numbers.amax(1, keepdim=True))[valid].all())


def packed_documents(batch: int, tokens: int, cu_seq_lens: Tensor | None, seq_idx: Tensor | None) -> Documents | None:
    """Returns the documents that Transformers' collators describe beside the tokens; None where they describe none.

    Args:
        cu_seq_lens: [documents + 1] 0 and the ends of the documents of one batch row (`DataCollatorWithFlattening`).
        seq_idx: [B, n] the number of each token's document, from 0.

    Raises:
        ValueError: cu_seq_lens that does not rise from 0 to `tokens`, a seq_idx of another shape, or two that differ.
    """
    by_ends = _cached_documents(cu_seq_lens, batch, tokens)
    if by_ends is None and cu_seq_lens is not None:
        ends = _ends_of(cu_seq_lens)
        rising = all(a < b for a, b in itertools.pairwise(ends))
        if batch != 1 or not ends or ends[0] != 0 or ends[-1] != tokens or not rising:
            raise ValueError(
                f"cu_seq_lens must rise from 0 to the {tokens} tokens of one batch row, got {ends} for {batch} "
                f"batch rows: pass the cu_seq_lens of the collator together with its input_ids"
            )
        by_ends = (tuple(itertools.pairwise(ends)),)
        _cache_documents(cu_seq_lens, batch, tokens, by_ends)
    by_number = _cached_documents(seq_idx, batch, tokens)
    if by_number is None and seq_idx is not None:
        if not isinstance(seq_idx, Tensor) or tuple(seq_idx.shape) != (batch, tokens):
            got = tuple(seq_idx.shape) if isinstance(seq_idx, Tensor) else type(seq_idx).__name__
            raise ValueError(
                f"seq_idx must be a tensor [{batch}, {tokens}] like input_ids, got {got}: pass the collator's"
            )
        by_number = documents_from_mask(seq_idx + 1)
        _cache_documents(seq_idx, batch, tokens, by_number)
    if by_ends is not None and by_number is not None and by_ends != by_number:
        raise ValueError(
            f"cu_seq_lens and seq_idx contradict each other: they describe the documents {by_ends} and {by_number}: pass what "
            f"the collator made, unchanged"
        )
    return by_number if by_ends is None else by_ends


def documents_of_collator(
    batch: int, tokens: int, cu_seq_lens: Tensor | None, seq_idx: Tensor | None, others: Iterable[Documents | None]
) -> Documents | None:
    """Returns `packed_documents`, and checks that `others`, read from masks and positions, do not contradict them.

    Other documents may be one for each batch row, or neighbours joined into one: a mask knows padding, but no borders
    between documents.

    Raises:
        ValueError: as `packed_documents`, and if any other documents differ.
    """
    documents = packed_documents(batch, tokens, cu_seq_lens, seq_idx)
    for other in others:
        if documents is not None and other not in (None, (((0, tokens),),) * batch, documents, _joined(documents)):
            raise ValueError(
                f"the collator's cu_seq_lens or seq_idx describe the documents {documents}, and the attention mask or "
                f"position_ids describe {other}: pass what the collator made, unchanged"
            )
    return documents


def _joined(documents: Documents) -> Documents:
    """Returns documents, with those that follow each other without padding between them joined into one."""
    rows = []
    for row in documents:
        runs: list[tuple[int, int]] = []
        for start, stop in row:
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        rows.append(tuple(runs))
    return tuple(rows)


def _ends_of(cu_seq_lens: Tensor) -> list[int]:
    if not isinstance(cu_seq_lens, Tensor) or cu_seq_lens.dim() != 1:
        raise ValueError(f"cu_seq_lens must be a tensor of one dimension, got {cu_seq_lens!r}")
    return [int(end) for end in cu_seq_lens.tolist()]


def _cached_documents(x: Tensor | None, batch: int, tokens: int) -> Documents | None:
    """Returns the documents that an earlier layer read from this tensor; None if none did, or the tensor has changed since."""
    cached = getattr(x, _DOCUMENTS, None)
    return cached[1] if x is not None and cached is not None and cached[0] == (version_of(x), batch, tokens) else None


def _cache_documents(x: Tensor | None, batch: int, tokens: int, documents: Documents) -> None:
    if isinstance(x, Tensor) and not x.is_inference():  # inference tensors have no ._version
        setattr(x, _DOCUMENTS, ((version_of(x), batch, tokens), documents))


def documents_of_rows(batch: int, positions: Tensor | None, mask: Tensor | None, first: int = 0) -> Documents | None:
    """Returns the documents of whole sequences whose positions restart; None where they do not, and the mask tells all.

    A document begins where positions go down. One also begins where two neighbours both have the position of a first
    token: the former is a document of one token. Positions that skip or repeat other numbers are the caller's own
    numbering of one document, such as a pruned prompt.

    Args:
        positions: [B, n], or [1, n] for all rows.
        mask: [B, n], 0 for padding.
        first: the position id of a document's first token.

    Raises:
        ValueError: a mask with padding inside a document.
    """
    if positions is None or positions.dim() != 2:
        return None
    positions = positions.cpu().to(torch.int64).expand(batch, -1)
    if mask is None:
        valid = torch.ones_like(positions)
    elif tuple(mask.shape) == tuple(positions.shape):
        valid = (mask != 0).cpu().to(torch.int64)
    else:
        return None  # The mask also covers a cache, or is not one of tokens.
    before, after = positions[:, :-1], positions[:, 1:]
    restarts = torch.zeros_like(positions)
    restarts[:, 1:] = (after < before) | ((after == first) & (before == first))
    if not bool((restarts[:, 1:] * valid[:, 1:] * valid[:, :-1]).any()):
        return None
    documents_from_mask(valid)  # This refuses padding inside a document, which is no border.
    return documents_from_mask((restarts.cumsum(-1) + 1) * valid)


def document_numbers(documents: Documents, length: int) -> Tensor:
    """Returns [B, n] int64: the number of each token's document in its batch row, -1 for padding."""
    numbers = torch.full((len(documents), length), -1)
    for row, runs in enumerate(documents):
        for number, (start, stop) in enumerate(runs):
            numbers[row, start:stop] = number
    return numbers


def positions_of_documents(documents: Documents, length: int, first: int) -> Tensor:
    """Returns [B, length] int64: positions that count each document from `first`; 0 for padding."""
    positions = torch.zeros(len(documents), length, dtype=torch.int64)
    for row, runs in enumerate(documents):
        for start, stop in runs:
            positions[row, start:stop] = torch.arange(first, first + stop - start)
    return positions


def check_beginnings(documents: Documents, positions: Tensor, first: int) -> None:
    """Refuses positions that do not restart where a document of a packed row begins.

    Args:
        positions: [B, n], or [1, n] for all rows.
        first: the position id of a document's first token.

    Raises:
        ValueError: positions below `first`, or positions that go on from one document to the next.
    """
    rows = positions.cpu().expand(len(documents), -1)
    for row, runs in enumerate(documents):
        for number, (start, stop) in enumerate(runs):
            lowest = int(rows[row, start:stop].min())
            if lowest < first:
                raise ValueError(
                    f"position_ids of batch row {row} have {lowest} in the document of tokens {start} to {stop - 1}, and "
                    f"this model numbers the first token of a document {first}, after the id of its padding: pass "
                    f"position_ids that count each document from {first}, or leave them out"
                )
            if number and int(rows[row, start]) > int(rows[row, start - 1]) and runs[number - 1][1] == start:
                raise ValueError(
                    f"seq_idx or cu_seq_lens says that a document begins at token {start} of batch row {row}, and position_ids "
                    f"go on there from {int(rows[row, start - 1])} to {int(rows[row, start])}: pass position_ids that count "
                    f"each document from {first}, or leave them out"
                )
