"""The rows of a call: finds their documents and positions, and cuts each rank's part of them.

The model cuts before its decoder, and a loader in its workers. Every rank has the whole row, so all find the same documents and
make the same layout: nothing is negotiated.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..plan.layouts import SequenceLayout
from ..plan.problem import Documents
from ..ring.ring import Ring
from .config import layer_pattern, warn_once
from .forward_pass import WholeRows
from .model_types import COUNT_BY_MASK

#: The names that models give to a table of positions.
_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "positions_embed")

#: Arguments that describe the documents of whole rows; the parts of rows do without them.
_DESCRIPTIONS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


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


def rows_of_call(runner: nn.Module, tokens: Tensor, arguments: Mapping[str, Any]) -> WholeRows:
    """Returns the rows of a call without a cache; their documents are None if the mask alone describes them.

    Args:
        arguments: with `position_ids` [B or 1, n] or [axes, B or 1, n], a document begins where they restart at the decoder's
            first position. A collator describes documents by `cu_seq_lens_q` [documents + 1], 0 and the ends of the documents
            of one batch row (`DataCollatorWithFlattening`), or by `seq_idx` [B, n], each token's document, from 0.
    """
    batch, length = tokens.shape[:2]
    mask, positions, first = arguments.get("attention_mask"), _text_positions(arguments), first_position(runner)
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return WholeRows(batch, length, None)
    collator = _documents_of_collator(batch, length, arguments.get("cu_seq_lens_q"), arguments.get("seq_idx"))
    found = _documents_of_positions(batch, positions, mask, first)
    if collator is None:
        return WholeRows(batch, length, found)
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
    return WholeRows(batch, length, collator, from_collator=True)


def _documents_of_collator(batch: int, length: int, cu_seq_lens: Any, seq_idx: Any) -> Documents | None:
    """Returns the documents that a collator describes beside the tokens; None if it describes none."""
    by_ends = by_number = None
    if cu_seq_lens is not None:
        if not isinstance(cu_seq_lens, Tensor) or cu_seq_lens.dim() != 1:
            raise ValueError(f"cu_seq_lens must be a tensor of one dimension, got {cu_seq_lens!r}")
        ends = [int(end) for end in cu_seq_lens.tolist()]
        if batch != 1 or ends[:1] != [0] or ends[-1:] != [length] or ends != sorted({*ends}):
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

    A document begins if positions go down, and between two neighbours that both have the position of a first token: the
    former is a document of one token. Positions that skip or repeat other numbers are the caller's own numbering of one
    document, such as a pruned prompt. Positions in time, height and width go down inside images and between frames and their
    sound, so a document begins there where all three are those of a first token.
    """
    if positions is None or positions.dim() not in (2, 3):
        return None
    positions = positions.cpu().to(torch.int64).expand(*positions.shape[:-2], batch, -1)
    before, after = positions[..., :-1], positions[..., 1:]
    at_first = after == first
    restarts = at_first.all(0) if positions.dim() == 3 else (after < before) | (at_first & (before == first))
    restarts = F.pad(restarts, (1, 0)).to(torch.int64)
    valid = torch.ones_like(restarts) if mask is None else (mask != 0).cpu().to(torch.int64)
    if valid.shape != restarts.shape:
        return None  # The mask also covers a cache, or is not one of tokens.
    if not bool((restarts[:, 1:] * valid[:, 1:] * valid[:, :-1]).any()):
        return None
    documents_from_mask(valid)  # This refuses padding inside a document, which is not a border.
    return documents_from_mask((restarts.cumsum(-1) + 1) * valid)


def _merged(documents: Documents) -> Documents:
    """Returns documents, with those that follow each other without padding between them joined into one."""
    borders = [({start for start, _ in row}, {stop for _, stop in row}) for row in documents]
    return tuple(tuple(zip(sorted(starts - stops), sorted(stops - starts))) for starts, stops in borders)


def _check_beginnings(documents: Documents, positions: Tensor, first: int) -> None:
    """Refuses positions that do not restart at the documents of a packed row, or lie below `first`."""
    for row, (runs, numbers) in enumerate(zip(documents, positions.expand(len(documents), -1).tolist())):
        stops = {stop for _, stop in runs}
        for start, stop in runs:
            goes_on, lowest = start in stops and numbers[start] > numbers[start - 1], min(numbers[start:stop])
            if goes_on or lowest < first:
                wrong = (
                    f"go on there from {numbers[start - 1]} to {numbers[start]}" if goes_on else f"have {lowest} in it"
                )
                raise ValueError(
                    f"a document begins at token {start} of batch row {row}, and position_ids {wrong}: pass position_ids that "
                    f"count each document from {first}, or leave them out"
                )


def first_position(module: nn.Module) -> int:
    """Returns the position id of a row's first token: 0, or one more than the padding's id if embeddings count so."""
    for embeddings in (getattr(module, "embeddings", None), module):
        padding = getattr(embeddings, "padding_idx", None)
        if isinstance(padding, int) and hasattr(embeddings, "create_position_ids_from_input_ids"):
            return padding + 1
    return 0


def places_of(runner: nn.Module) -> int | None:
    """Returns how many tokens of a row a model has positions for, if it looks them up in a table; else None."""
    tables = [
        module.num_embeddings - max(int(getattr(module, "offset", 0)), first_position(runner))
        for name, module in runner.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES
    ]
    return min(tables, default=None)


def check_places(runner: nn.Module, last_position: int) -> None:
    """Refuses a position beyond a table of positions, on which one rank alone would fail."""
    places, first = places_of(runner), first_position(runner)
    if places is not None and last_position - first >= places:
        raise ValueError(
            f"{type(runner).__name__} has learned positions for {places} tokens, and a row has a token at position "
            f"{last_position}, counted from {first}: cut rows, or take a model with rotary positions"
        )


def at_its_place_in_the_row(module: nn.Module, query: Tensor, layout: SequenceLayout, rank: int) -> Tensor:
    """Returns the queries [B, H, n, D] of a shard, scaled by their places in the row instead of their places in the shard.

    Llama 4 scales the queries of layers without RoPE by their places in the row (arXiv 2501.19399), which it counts itself,
    padding and packed documents included. All other layers' queries are returned as they are.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    batch_rows = range(len(layout.rows) or 1)
    places = torch.tensor([[*layout.positions(rank, row)] for row in batch_rows], device=query.device)  # [B or 1, n]
    counted = torch.arange(query.shape[2], device=query.device)

    def scale(place: Tensor) -> Tensor:
        blocks = torch.floor((place.float() + 1.0) / module.floor_scale)  # type: ignore[operator]
        return torch.log1p(blocks) * module.attn_scale + 1.0  # type: ignore[operator]

    ratio = scale(places).double() / scale(counted).double()
    return (query * ratio[:, None, :, None]).to(query.dtype)


def warn_of_temperatures(config: Any, seq_len: int) -> None:
    """Logs once that a model scales queries by their places in the row, so packed documents differ from those alone."""
    floor = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and isinstance(floor, (int, float)) and seq_len >= floor:
        warn_once(
            f"{type(config).__name__} has attn_temperature_tuning, so packed documents are scaled by their places in the row "
            f"of {seq_len} tokens: pack rows of fewer than {floor} tokens, pad documents, or set it to False in the "
            f"config before the model is made"
        )


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of a model by their names, also if its class passes them on as *args."""
    if not args:
        return dict(kwargs)
    forwards = [inspect.signature(vars(x)["forward"]) for x in type(module).__mro__ if "forward" in vars(x)]
    signature = next((x for x in forwards if "input_ids" in x.parameters), forwards[0])
    _, *named = signature.bind_partial(module, *args).arguments.items()
    return {**dict(named), **kwargs}


def tokens_in(arguments: Mapping[str, Any]) -> Tensor | None:
    """Returns the tokens [B, n] or embeddings [B, n, width] among the arguments of a model; None if there are none."""
    return next((arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None), None)


def _text_positions(arguments: Mapping[str, Any]) -> Tensor | None:
    """Returns the positions [B, n] or [3, B, n] of a call; of four dimensions [4, B, n] the first has those of text."""
    positions = arguments.get("position_ids")
    if not isinstance(positions, Tensor):
        return None
    return positions[0] if positions.dim() == 3 and positions.shape[0] == 4 else positions


def rows_to_cut(
    runner: nn.Module,
    ring: Ring,
    arguments: Mapping[str, Any],
    pattern: Any = None,
    layout: SequenceLayout | None = None,
    multiple: int = 1,
) -> WholeRows:
    """Returns the rows of a call, and how the ring divides them; refuses padding and unclear borders inside documents.

    Args:
        arguments: the arguments of a model, or the entries of a batch.
        pattern: the pattern that decides the layout; None for the pattern of the decoder's config.
        layout: the layout of a sharded cache that these rows fill.
        multiple: the ranks divide a multiple of so many tokens, with padding.
    """
    tokens, mask = _checked_tokens(arguments), arguments.get("attention_mask")
    rows = rows_of_call(runner, tokens, arguments)
    documents = rows.documents
    if documents is None:
        documents = (((0, rows.length),),) * rows.batch if mask is None else documents_from_mask(mask != 0)
    if mask is None and not rows.from_collator:
        _check_gaps(_text_positions(arguments), documents)
    if layout is None:
        pattern = pattern or layer_pattern(runner.config.get_text_config(), None)  # type: ignore[union-attr, operator]
        layout = ring.layout_for(-(-rows.length // multiple) * multiple, pattern, documents)
    return replace(rows, documents=documents, layout=layout)


def _checked_tokens(arguments: Mapping[str, Any]) -> Tensor:
    """Returns the tokens or embeddings of a call; refuses a call without them, and a mask or positions of other rows."""
    tokens, mask, positions = tokens_in(arguments), arguments.get("attention_mask"), arguments.get("position_ids")
    if tokens is None or tokens.dim() < 2 or 0 in tokens.shape[:2]:
        got = "neither input_ids nor inputs_embeds" if tokens is None else f"{tuple(tokens.shape)}"
        raise ValueError(f"a ring cuts rows of tokens [batch, tokens], got {got}: pass input_ids or inputs_embeds")
    shape = (batch, length) = tuple(tokens.shape[:2])
    if isinstance(mask, Tensor) and mask.dim() >= 2 and tuple(mask.shape) != shape:
        raise ValueError(
            f"attention_mask must be [{batch}, {length}] like the tokens, got {tuple(mask.shape)}: pass the tokenizer's mask, "
            f"and for packed documents position_ids that restart"
        )
    sizes = tuple(positions.shape) if isinstance(positions, Tensor) else ()
    if positions is not None and not (len(sizes) in (2, 3) and sizes[-2:] in (shape, (1, length))):
        got = f"{sizes}" if isinstance(positions, Tensor) else f"a {type(positions).__name__}"
        raise ValueError(f"position_ids must be a tensor [{batch}, {length}] like the tokens, got {got}")
    return tokens


def _check_gaps(positions: Tensor | None, documents: Documents) -> None:
    """Refuses positions that skip or repeat inside a document without a mask: some models begin another document there."""
    if positions is None or positions.dim() != 2 or positions.shape[1] < 2:
        return
    for row, token in (positions.diff(dim=1) != 1).nonzero().tolist():
        if token + 1 not in [start for start, _ in documents[row]]:
            raise ValueError(
                f"position_ids of row {row} go from {int(positions[row, token])} to {int(positions[row, token + 1])} at token "
                f"{token + 1}: pass an attention_mask of ones if that is one document, else seq_idx or cu_seq_lens_q"
            )


def whole_positions(runner: nn.Module, rows: WholeRows, arguments: Mapping[str, Any]) -> Tensor:
    """Returns the positions [B or 1, n] of whole rows: the caller's, or those that the decoder would count itself."""
    positions, tokens = arguments.get("position_ids"), tokens_in(arguments)
    assert tokens is not None
    if isinstance(positions, Tensor):
        return positions
    ids, mask, first = arguments.get("input_ids"), arguments.get("attention_mask"), first_position(runner)
    if rows.from_collator and rows.packed:  # They count each document.
        counted = torch.zeros(rows.batch, rows.length, dtype=torch.int64)
        for row, runs in enumerate(rows.documents or ()):
            for start, stop in runs:
                counted[row, start:stop] = torch.arange(first, first + stop - start)
        return counted.to(tokens.device)
    if first and ids is not None:  # RoBERTa and its relatives count the tokens that are not padding, by their ids.
        valid = (ids != first - 1).long()
    elif getattr(runner.config, "model_type", None) in COUNT_BY_MASK and isinstance(mask, Tensor) and mask.dim() == 2:
        valid = mask.long()
    else:
        return torch.arange(first, first + rows.length, device=tokens.device)[None]
    return valid.cumsum(1) * valid + first - 1


def cut(arguments: Mapping[str, Any], rows: WholeRows, ring: Ring) -> dict[str, Any]:
    """Returns the arguments of a decoder with this rank's part of each tensor that has a value for each token.

    Those are tensors [B or 1, n, ...], positions [axes, B, n], and the features that a decoder adds at visual tokens
    (`deepstack_visual_embeds`), which are picked by the mask of these (`visual_pos_masks`).
    """
    layout = rows.layout
    assert layout is not None
    parts = {name: value for name, value in arguments.items() if name not in _DESCRIPTIONS}
    for name, x in parts.items():
        if name == "position_ids" and isinstance(x, Tensor) and x.dim() == 3:
            parts[name] = ring.shard(x.movedim(0, -1).expand(rows.batch, -1, -1), layout).movedim(-1, 0)
        elif isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == rows.length and x.shape[0] in (1, rows.batch):
            parts[name] = ring.shard(x.expand(rows.batch, *x.shape[1:]), layout)
    seen, features = arguments.get("visual_pos_masks"), arguments.get("deepstack_visual_embeds")
    if isinstance(seen, Tensor) and features is not None:
        numbers = (seen.flatten().cumsum(0) - 1).view(seen.shape)
        chosen = ring.shard(numbers, layout)[ring.shard(seen, layout)]
        parts["deepstack_visual_embeds"] = [x[chosen.to(x.device)] for x in features]
    return parts
