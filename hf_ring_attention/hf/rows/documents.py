"""The documents of the rows of a call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...plan.problem import Documents
from ..forward_pass import WholeRows
from ..model.wrappers import numbers_documents


def documents_from_mask(mask: Tensor) -> Documents:
    """Returns the (start, stop) of the documents of each batch row; refuses padding inside a document.

    A mask [B, n] has 0 for padding, otherwise the number of the token's document (a padding mask has 1 everywhere else).
    """
    documents = []
    for row, numbers in enumerate(mask.to(torch.int64).cpu()):
        marks, counts = (x.tolist() for x in numbers.unique_consecutive(return_counts=True))
        stops = itertools.accumulate(counts)
        runs = {(stop - count, stop): mark for mark, count, stop in zip(marks, counts, stops) if mark}
        if len({*runs.values()}) < len(runs):
            raise ValueError(
                f"batch row {row} of the attention mask has padding inside a document: tokens {[*runs]} are marked as "
                f"{[*runs.values()]}; ring_dilated takes padding before and after a document"
            )
        documents.append(tuple(runs))
    return tuple(documents)


def rows_of_call(runner: nn.Module, tokens: Tensor, arguments: Mapping[str, Any], divided: bool = False) -> WholeRows:
    """Returns the rows of a call without a cache; without documents if only the mask describes whole rows.

    Args:
        arguments: with `position_ids` [B or 1, n] or [axes, B or 1, n], a document begins where they restart at the decoder's
            first position. A collator describes documents by `cu_seq_lens_q` [documents + 1], 0 and the ends of the documents
            of one batch row (`DataCollatorWithFlattening`), by `seq_idx` [B, n], each token's document, from 0, or by an
            `attention_mask` [B, n] of their numbers, from 1.
        divided: whether a ring divides the rows, which then may have no padding and no unclear borders inside documents.
    """
    batch, length = tokens.shape[:2]
    mask, positions, first = arguments.get("attention_mask"), arguments.get("position_ids"), first_position(runner)
    _check_shapes((batch, length), arguments, divided)
    numbers = _numbers_of_collator(batch, length, arguments.get("cu_seq_lens_q"), arguments.get("seq_idx"))
    if mask is not None and numbers_documents(mask):
        numbers["attention_mask"] = mask.cpu().to(torch.int64)
    described = bool(numbers) or divided or isinstance(positions, Tensor)  # else no mask is brought to the CPU
    if not described or (mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2)):
        return WholeRows(batch, length, None)
    valid = torch.ones(batch, length, dtype=torch.bool) if mask is None else (mask != 0).cpu()
    positions = positions.cpu().to(torch.int64) if isinstance(positions, Tensor) else torch.empty(0)
    if positions.dim() == 3 and len(positions) == 4:
        positions = positions[0]  # of text; the others are those of images
    collator = next(iter(numbers.values()), None)
    inside = valid if collator is None else collator != 0
    restarts = _restarts(positions, inside, first)
    if collator is None and restarts.any():
        numbers["position_ids"] = (restarts.cumsum(1) + 1) * valid
    if not numbers and not divided:
        return WholeRows(batch, length, None)
    found, by_mask = {name: documents_from_mask(x) for name, x in numbers.items()}, documents_from_mask(valid)
    # A mask knows padding, but no borders between documents.
    if mask is not None and not any(torch.equal(valid, x) for x in (inside, torch.ones_like(inside))):
        found["the padding of attention_mask"] = by_mask
    _check_equal(found)
    if collator is not None or (divided and mask is None):
        _check_positions(positions, restarts, collator, first)
    return WholeRows(batch, length, next(iter(found.values()), by_mask), from_collator=collator is not None)


def _check_equal(descriptions: Mapping[str, Documents]) -> None:
    """Refuses descriptions, by their names, of other documents."""
    for (name, documents), (other, others) in itertools.pairwise(descriptions.items()):
        if documents != others:
            raise ValueError(
                f"{name} and {other} contradict each other: they describe the documents {documents} and {others}: pass the "
                f"collator's batch unchanged"
            )


def _check_shapes(shape: tuple[int, int], arguments: Mapping[str, Any], divided: bool) -> None:
    """Refuses arguments that are not tensors [B, n] like the tokens; positions may also be [1, n] or [axes, B or 1, n]."""
    for name in ("attention_mask", "position_ids", "seq_idx") if divided else ("seq_idx",):
        x = arguments.get(name)
        sizes = tuple(x.shape) if isinstance(x, Tensor) else ()
        shared = name == "position_ids" and len(sizes) in (2, 3) and sizes[-2:] in (shape, (1, shape[1]))
        if x is not None and sizes != shape and not shared:
            raise ValueError(
                f"{name} must be a tensor {[*shape]} like the tokens, got {sizes or type(x).__name__}: pass the tokenizer's "
                f"mask, and for packed documents position_ids that restart, or the collator's seq_idx"
            )


def _numbers_of_collator(batch: int, length: int, ends: Any, seq_idx: Any) -> dict[str, Tensor]:
    """Returns the number of each token's document [B, n], 0 for padding, by the names of a collator's descriptions."""
    numbers = {}
    if ends is not None:
        if not isinstance(ends, Tensor) or ends.dim() != 1:
            raise ValueError(f"cu_seq_lens must be a tensor of one dimension, got {ends!r}")
        stops = [int(end) for end in ends.tolist()]
        if batch != 1 or stops[:1] != [0] or stops[-1:] != [length] or stops != sorted({*stops}):
            raise ValueError(
                f"cu_seq_lens must rise from 0 to the {length} tokens of one batch row, got {stops} for {batch} "
                f"batch rows: pass the cu_seq_lens of the collator together with its input_ids"
            )
        numbers["cu_seq_lens"] = torch.bucketize(torch.arange(length), torch.tensor(stops), right=True)[None]
    if seq_idx is not None:
        numbers["seq_idx"] = seq_idx.cpu().to(torch.int64) + 1
    return numbers


def _restarts(positions: Tensor, valid: Tensor, first: int) -> Tensor:
    """Returns [B, n]: whether positions restart at a token that follows another `valid` token of its row.

    A document begins if positions go down, and between two neighbours that both have the position of a first token: the
    former is a document of one token. Positions that skip or repeat other numbers are the caller's own numbering of one
    document, such as a pruned prompt. Positions in time, height and width go down inside images and between frames and their
    sound, so a document begins there where all three are those of a first token.
    """
    if positions.dim() not in (2, 3) or positions.shape[-1] != valid.shape[1]:  # The mask also covers a cache.
        return torch.zeros_like(valid)
    before, after = positions[..., :-1], positions[..., 1:]
    at_first = after == first
    restarts = at_first.all(0) if positions.dim() == 3 else (after < before) | (at_first & (before == first))
    return F.pad(restarts & valid[:, 1:] & valid[:, :-1], (1, 0))


def _check_positions(positions: Tensor, restarts: Tensor, collator: Tensor | None, first: int) -> None:
    """Refuses positions that restart elsewhere than a collator's documents with these numbers [B, n], or lie below `first`.

    Without a collator and a mask, they may not skip or repeat: some models begin another document there.
    """
    if positions.dim() != 2 and not (collator is not None and restarts.any()):
        return
    if positions.dim() == 2:
        goes_on, too_low = F.pad(positions.diff(dim=1) > 0, (1, 0)), positions < first
    else:
        goes_on, too_low, positions = ~restarts, torch.zeros_like(restarts), positions[0]
    positions = positions.expand(len(restarts), -1)
    if collator is None:
        wrong = F.pad(positions.diff(dim=1) != 1, (1, 0)) & ~restarts
        remedy = "pass an attention_mask of ones if that is one document, else seq_idx or cu_seq_lens_q"
    else:
        inside = collator != 0
        begins = F.pad(collator.diff(dim=1) != 0, (1, 0), value=True) & inside
        behind = begins & F.pad(inside[:, :-1], (1, 0))  # documents directly behind others
        wrong = (restarts & ~behind) | (goes_on & behind) | (too_low & inside & behind.any())
        remedy = f"pass position_ids that count each document from {first}, or leave them out"
    for row, token in wrong.nonzero().tolist():
        before, after = int(positions[row, max(0, token - 1)]), int(positions[row, token])
        where = "" if collator is None else f", where {'a' if begins[row, token] else 'no'} document begins"
        raise ValueError(f"position_ids of row {row} go from {before} to {after} at token {token}{where}: {remedy}")


def first_position(module: nn.Module) -> int:
    """Returns the position id of a row's first token: 0, or one more than the padding's id if embeddings count so."""
    for embeddings in (getattr(module, "embeddings", None), module):
        padding = getattr(embeddings, "padding_idx", None)
        if isinstance(padding, int) and hasattr(embeddings, "create_position_ids_from_input_ids"):
            return padding + 1
    return 0
