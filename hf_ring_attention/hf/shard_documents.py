"""The documents of whole sequences, found from the positions of their shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.layouts import SequenceLayout
from ..plan.problem import Documents


class ShardRun(NamedTuple):
    """Tokens [start, stop) of the whole sequence that are neighbours in position too.

    Attributes:
        origin: the index in the whole sequence at which their positions would be 0.
        number: the number of their document in seq_idx; None without seq_idx.
    """

    start: int
    stop: int
    origin: int
    number: int | None


def _remedy(layout: SequenceLayout) -> str:
    return (
        f"a ring needs positions that count each document from its first token, without a gap or a repeat; pass "
        f"position_ids=ring.shard(positions, layout), where positions [batch, seq_len] count each document from 0, and "
        f"input_ids sharded likewise, with the layout of ring.layout_for(seq_len, pattern) for the model's pattern "
        f"({layout.kind} here)"
    )


def runs_of_shard(
    positions: Tensor | None,
    mask: Tensor | None,
    seq_idx: Tensor | None,
    layout: SequenceLayout,
    rank: int,
    batch: int,
    first: int,
) -> tuple[list[list[ShardRun]], int]:
    """Returns the runs of a shard's tokens in each batch row, without padding, and the shard's last position.

    Raises:
        ValueError: missing positions, or a tensor of another shape.
    """
    if positions is None:
        raise ValueError(
            f"position_ids are missing, and a model would number the tokens of every shard from 0: {_remedy(layout)}"
        )
    expected = [(batch, layout.local_len), (1, layout.local_len)]
    for name, x, shapes in (("position_ids", positions, expected), ("seq_idx", seq_idx, expected[:1])):
        if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) not in shapes):
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{name} must be a tensor [{batch}, {layout.local_len}], one entry for each token of the shard, got {got}: "
                f"{_remedy(layout)}"
            )
    if mask is not None and tuple(mask.shape) != (batch, layout.local_len):
        raise ValueError(
            f"a sharded forward pass takes a mask [{batch}, {layout.local_len}], sharded like input_ids, got "
            f"{tuple(mask.shape)}"
        )
    index = torch.tensor(layout.positions(rank))
    positions = positions.cpu().reshape(-1, layout.local_len).expand(batch, -1) - first
    origin = index - positions
    valid = (index < layout.seq_len).expand(batch, -1)
    if mask is not None:
        valid = valid & (mask != 0).cpu()
    cut = (origin[:, 1:] != origin[:, :-1]) | (valid[:, 1:] != valid[:, :-1]) | (index[1:] != index[:-1] + 1)
    if seq_idx is not None:
        cut = cut | (seq_idx[:, 1:] != seq_idx[:, :-1]).cpu()
    rows = []
    for row in range(batch):
        starts = [0, *(torch.nonzero(cut[row]).flatten() + 1).tolist()]
        rows.append(
            [
                ShardRun(
                    int(index[start]),
                    int(index[stop - 1]) + 1,
                    int(origin[row, start]),
                    None if seq_idx is None else int(seq_idx[row, start]),
                )
                for start, stop in zip(starts, [*starts[1:], layout.local_len])
                if valid[row, start]
            ]
        )
    return rows, int(positions.max()) + first


def documents_of_row(
    row: int, runs: Iterable[ShardRun], masked: bool, layout: SequenceLayout, first: int
) -> tuple[tuple[int, int], ...]:
    """Returns the documents of a whole batch row, from the runs of all ranks.

    Raises:
        ValueError: positions that do not count each document from its first token, or that seq_idx contradicts.
    """
    merged: list[ShardRun] = []
    for run in runs:
        last = merged[-1] if merged else None
        adjacent = last is not None and last.stop == run.start
        in_tail = not masked and run.start > layout.padded_len - layout.num_pieces
        if last is not None and adjacent and run.number is not None and last.number is not None:
            if in_tail and run.origin != last.origin and run.number <= last.number:
                break  # The rest fills the row up to its layout.
            if (run.origin == last.origin) != (run.number == last.number):
                raise ValueError(
                    f"seq_idx goes from {last.number} to {run.number} at token {run.start} of the whole sequence (batch row "
                    f"{row}), and position_ids from {first + last.stop - 1 - last.origin} to {first + run.start - run.origin}: "
                    f"one says that a document begins there, the other that it does not"
                )
        if last is not None and adjacent and last.origin == run.origin:
            merged[-1] = last._replace(stop=run.stop)
        else:
            merged.append(run)
    begins = f", where the first token of a row has position {first}" if first else ""
    for number, run in enumerate(merged):
        if masked and number and run.start > merged[number - 1].stop and run.origin != run.start:
            raise ValueError(
                f"batch row {row} of the attention mask has padding inside a document: tokens {merged[number - 1].stop} to "
                f"{run.start - 1} of the whole sequence; ring_dilated takes padding before and after a document"
            )
        # The positions of a row may also count the padding on its left.
        counts_padding = masked and number == 0 and 0 <= run.origin <= run.start
        # The tokens that fill a row up to its layout are fewer than its pieces, and their positions are below `first`. (Those
        # at position `first` are documents of one token, which no other token sees.)
        if not masked and run.start > layout.padded_len - layout.num_pieces and run.origin > run.start:
            merged = merged[:number]
            break
        if run.origin != run.start and not counts_padding:
            raise ValueError(
                f"position_ids contradict the layout: in batch row {row}, tokens {run.start} to {run.stop - 1} of the "
                f"whole sequence have positions {first + run.start - run.origin} to {first + run.stop - 1 - run.origin}, but "
                f"nothing before them ends at position {first + run.start - run.origin - 1}{begins}: {_remedy(layout)}"
            )
    return tuple((run.start, run.stop) for run in merged)


def check_not_local(documents: Documents, layout: SequenceLayout) -> None:
    """Refuses rows in which every rank has one document: they look the same as positions that every rank counts from 0.

    Raises:
        ValueError: such a row.
    """
    for row, runs in enumerate(documents):
        # The tokens that fill a row up to its layout may look like documents of one token.
        tail = layout.padded_len - layout.num_pieces
        runs = tuple((start, stop) for start, stop in runs if start <= tail or stop - start > 1)
        shards = [start // layout.local_len for start, _ in runs]
        within = all(start // layout.local_len == (stop - 1) // layout.local_len for start, stop in runs)
        if layout.kind == "contiguous" and within and len(runs) > 1 and len(set(shards)) == len(shards):
            raise ValueError(
                f"position_ids contradict the layout, or every rank happens to have one packed document of its own: in "
                f"batch row {row} every shard of {layout.local_len} tokens counts from 0: {_remedy(layout)}; if they are "
                f"packed documents, say so by cu_seq_lens_q or seq_idx, as Transformers' collators do"
            )
