"""The documents of batch rows, as masks, positions and collators tell them; of whole rows, and of the shards of a ring."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from ..compute.private import version_of
from ..plan.problem import Documents

#: Attribute of a collator's tensor that keeps what was read from it, and of which version and shape.
_DOCUMENTS = "_ring_dilated_documents"


def documents_from_mask(mask: Tensor) -> Documents:
    """Per batch row the (start, stop) of its documents.

    Args:
        mask: [B, n]: 0 for padding, otherwise a number of the token's document (a padding mask has 1 everywhere else).

    Raises:
        ValueError: a document with a gap.
    """
    documents = []
    for row, numbers in enumerate(mask.to(torch.int64).cpu()):
        borders = (torch.nonzero(numbers[1:] != numbers[:-1]).flatten() + 1).tolist()
        starts = [0, *borders]
        runs = [run for run in zip(starts, [*borders, len(numbers)]) if numbers[run[0]] != 0]
        seen = [int(numbers[start]) for start, _ in runs]
        if len(set(seen)) < len(seen):
            raise ValueError(
                f"batch row {row} of the attention mask has padding inside a document: tokens {runs} are marked as "
                f"{seen}; ring_dilated takes padding before and after a document"
            )
        documents.append(tuple(runs))
    return tuple(documents)


def packed_documents(batch: int, tokens: int, cu_seq_lens: Tensor | None, seq_idx: Tensor | None) -> Documents | None:
    """The documents that Transformers' collators describe beside the tokens; None where they do not.

    Args:
        cu_seq_lens: [documents + 1] ends of the documents of one batch row (`DataCollatorWithFlattening`).
        seq_idx: [B, n] number of each token's document, from 0.

    Raises:
        ValueError: ends that are not those of `tokens` tokens, or that contradict the numbers.
    """
    by_ends = _kept(cu_seq_lens, batch, tokens)
    if by_ends is None and cu_seq_lens is not None:
        ends = _ends_of(cu_seq_lens)
        rising = all(a < b for a, b in itertools.pairwise(ends))
        if batch != 1 or not ends or ends[0] != 0 or ends[-1] != tokens or not rising:
            raise ValueError(
                f"cu_seq_lens must rise from 0 to the {tokens} tokens of one batch row, got {ends} for {batch} rows: "
                f"pass those of the collator, with the input_ids it made"
            )
        by_ends = (tuple(itertools.pairwise(ends)),)
        _keep(cu_seq_lens, batch, tokens, by_ends)
    by_number = _kept(seq_idx, batch, tokens)
    if by_number is None and seq_idx is not None:
        if not isinstance(seq_idx, Tensor) or tuple(seq_idx.shape) != (batch, tokens):
            got = tuple(seq_idx.shape) if isinstance(seq_idx, Tensor) else type(seq_idx).__name__
            raise ValueError(f"seq_idx must be a tensor [{batch}, {tokens}] as input_ids, got {got}")
        by_number = documents_from_mask(seq_idx + 1)
        _keep(seq_idx, batch, tokens, by_number)
    if by_ends is not None and by_number is not None and by_ends != by_number:
        raise ValueError(f"cu_seq_lens and seq_idx contradict each other: {by_ends} and {by_number}")
    return by_number if by_ends is None else by_ends


def documents_of_collator(
    batch: int, tokens: int, cu_seq_lens: Tensor | None, seq_idx: Tensor | None, others: Iterable[Documents | None]
) -> Documents | None:
    """`packed_documents`, where `others`, which masks and positions tell, are one document a row or the same.

    A mask knows padding, but no borders between documents.

    Raises:
        ValueError: as `packed_documents`, and if any other documents differ.
    """
    said = packed_documents(batch, tokens, cu_seq_lens, seq_idx)
    for documents in others:
        if said is not None and documents not in (None, (((0, tokens),),) * batch, said, _joined(said)):
            raise ValueError(
                f"the collator's cu_seq_lens or seq_idx describe documents {said}, the attention mask or position_ids "
                f"{documents}: pass what the collator made, unchanged"
            )
    return said


def _joined(documents: Documents) -> Documents:
    """Documents that follow each other as one."""
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


def _kept(x: Tensor | None, batch: int, tokens: int) -> Documents | None:
    """What all layers but the first find with a collator's tensor, unless it was written to since."""
    kept = getattr(x, _DOCUMENTS, None)
    return kept[1] if x is not None and kept is not None and kept[0] == (version_of(x), batch, tokens) else None


def _keep(x: Tensor | None, batch: int, tokens: int, documents: Documents) -> None:
    if isinstance(x, Tensor) and not x.is_inference():  # inference tensors have no ._version
        setattr(x, _DOCUMENTS, ((version_of(x), batch, tokens), documents))


def documents_of_rows(batch: int, positions: Tensor | None, mask: Tensor | None, first: int = 0) -> Documents | None:
    """The documents of whole rows whose positions restart; None where they do not, and the mask says all.

    A document begins where positions go down, or where the position of a first token stands twice, the first being a
    document of one token. Positions that leave some out or repeat one are the caller's own numbering of one document, as
    when a prompt was pruned: only positions that go down cannot be that.

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
        return None  # of a cache, or no mask of tokens
    before, after = positions[:, :-1], positions[:, 1:]
    restarts = torch.zeros_like(positions)
    restarts[:, 1:] = (after < before) | ((after == first) & (before == first))
    if not bool((restarts[:, 1:] * valid[:, 1:] * valid[:, :-1]).any()):
        return None
    documents_from_mask(valid)  # padding inside a document is no border
    return documents_from_mask((restarts.cumsum(-1) + 1) * valid)


def document_numbers(documents: Documents, length: int) -> Tensor:
    """[B, n] int64: the number of each token's document in its row, -1 for padding."""
    numbers = torch.full((len(documents), length), -1)
    for row, runs in enumerate(documents):
        for number, (start, stop) in enumerate(runs):
            numbers[row, start:stop] = number
    return numbers


def positions_of_documents(documents: Documents, length: int, first: int) -> Tensor:
    """[B, length] int64: positions that count each document from `first`; 0 for padding."""
    positions = torch.zeros(len(documents), length, dtype=torch.int64)
    for row, runs in enumerate(documents):
        for start, stop in runs:
            positions[row, start:stop] = torch.arange(first, first + stop - start)
    return positions


def check_beginnings(documents: Documents, positions: Tensor, first: int) -> None:
    """Refuses positions that do not begin again where a document of a packed row does.

    Args:
        positions: [B, n], or [1, n] for all rows.
        first: the position id of a document's first token.

    Raises:
        ValueError: positions below `first`, or that go on from one document to the next.
    """
    rows = positions.cpu().expand(len(documents), -1)
    for row, runs in enumerate(documents):
        for number, (start, stop) in enumerate(runs):
            lowest = int(rows[row, start:stop].min())
            if lowest < first:
                raise ValueError(
                    f"position_ids of batch row {row} have {lowest} in the document of tokens {start} to {stop - 1}, and "
                    f"this model numbers the first token of a document {first}, behind the id of its padding: pass "
                    f"position_ids that count each document from {first}, or leave them out"
                )
            if number and int(rows[row, start]) > int(rows[row, start - 1]) and runs[number - 1][1] == start:
                raise ValueError(
                    f"seq_idx or cu_seq_lens says that a document begins at token {start} of batch row {row}, and position_ids "
                    f"go on there from {int(rows[row, start - 1])} to {int(rows[row, start])}: pass position_ids that count "
                    f"each document from {first}, or leave them out"
                )
