"""Cuts whole rows into each rank's part, before the decoder of a model or in the workers of a loader.

Every rank has the whole row, so all find the same documents and make the same layout: nothing is negotiated.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..plan.layouts import SequenceLayout
from ..plan.problem import Documents
from ..ring.ring import Ring
from .config import layer_pattern
from .documents import documents_from_mask, documents_of_rows, positions_of_documents
from .forward_pass import WholeRows
from .positions import first_position

#: Arguments that describe the documents of whole rows; the parts of rows do without them.
_DESCRIPTIONS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

#: Types whose decoders count positions by the mask, from its first token on.
_COUNT_BY_MASK = ("biogpt", "opt")


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of a model by their names, also if its class passes them on as *args."""
    if not args:
        return dict(kwargs)
    forwards = [inspect.signature(vars(x)["forward"]).parameters for x in type(module).__mro__ if "forward" in vars(x)]
    names = next((list(x)[1:] for x in forwards if "input_ids" in x), [])
    if len(args) > len(names):
        raise TypeError(
            f"{type(module).__name__} takes {len(names)} arguments by position, got {len(args)}: pass names"
        )
    return {**dict(zip(names, args, strict=False)), **kwargs}


def tokens_in(arguments: Mapping[str, Any]) -> Tensor | None:
    """Returns the tokens [B, n] or embeddings [B, n, width] among the arguments of a model; None if there are none."""
    return next((arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None), None)


def rows_of_call(runner: nn.Module, tokens: Tensor, arguments: Mapping[str, Any]) -> WholeRows:
    """Returns the rows of a call without a cache; their documents are None if the mask alone describes them."""
    batch, length = tokens.shape[:2]
    mask, positions = arguments.get("attention_mask"), _text_positions(arguments)
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return WholeRows(batch, length, None)
    collators = arguments.get("cu_seq_lens_q"), arguments.get("seq_idx")
    found = documents_of_rows(batch, positions, mask, first_position(runner), *collators, length)
    return WholeRows(batch, length, *found)


def _text_positions(arguments: Mapping[str, Any]) -> Tensor | None:
    """Returns the positions [B, n] of text; of positions in four dimensions [4, B, n] they are the first."""
    positions = arguments.get("position_ids")
    if not isinstance(positions, Tensor):
        return None
    if positions.dim() == 3 and positions.shape[0] == 4:
        return positions[0]
    return positions if positions.dim() == 2 else None


def rows_to_cut(
    runner: nn.Module,
    ring: Ring,
    arguments: Mapping[str, Any],
    pattern: Any = None,
    layout: SequenceLayout | None = None,
) -> WholeRows:
    """Returns the rows of a call, and how the ring divides them; refuses padding and unclear borders inside documents.

    Args:
        arguments: the arguments of a model, or the entries of a batch.
        pattern: the pattern that decides the layout; None for the pattern of the decoder's config.
        layout: the layout of a sharded cache that these rows fill.
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
        layout = ring.layout_for(rows.length, pattern, documents)
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
            f"attention_mask must be [{batch}, {length}] like the tokens, got {tuple(mask.shape)}: pass the tokenizer's mask"
        )
    sizes = tuple(positions.shape) if isinstance(positions, Tensor) else ()
    if positions is not None and not (len(sizes) in (2, 3) and sizes[-2:] in (shape, (1, length))):
        got = f"{sizes}" if isinstance(positions, Tensor) else f"a {type(positions).__name__}"
        raise ValueError(f"position_ids must be a tensor [{batch}, {length}] like the tokens, got {got}")
    return tokens


def _check_gaps(positions: Tensor | None, documents: Documents) -> None:
    """Refuses positions that skip or repeat inside a document without a mask: some models begin another document there."""
    if positions is None or positions.shape[1] < 2:
        return
    for row, token in (positions.diff(dim=1) != 1).nonzero().tolist():
        spans = documents if positions.shape[0] == len(documents) else documents[:1]
        if token + 1 not in [start for start, _ in spans[row]]:
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
    if rows.from_collator and rows.packed:
        assert rows.documents is not None
        return positions_of_documents(rows.documents, rows.length, first).to(tokens.device)
    if first and ids is not None:  # RoBERTa and its relatives count the tokens that are not padding, by their ids.
        valid = (ids != first - 1).long()
    elif getattr(runner.config, "model_type", None) in _COUNT_BY_MASK and isinstance(mask, Tensor) and mask.dim() == 2:
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
    for name, value in parts.items():
        if isinstance(value, Tensor):
            parts[name] = _cut_tensor(name, value, rows, ring)
    seen, features = arguments.get("visual_pos_masks"), arguments.get("deepstack_visual_embeds")
    if isinstance(seen, Tensor) and features is not None:
        numbers = (seen.flatten().cumsum(0) - 1).view(seen.shape)
        chosen = ring.shard(numbers, layout)[ring.shard(seen, layout)]
        parts["deepstack_visual_embeds"] = [x[chosen.to(x.device)] for x in features]
    return parts


def _cut_tensor(name: str, x: Tensor, rows: WholeRows, ring: Ring) -> Tensor:
    assert rows.layout is not None
    if name == "position_ids" and x.dim() == 3:
        return ring.shard(x.movedim(0, -1).expand(rows.batch, -1, -1), rows.layout).movedim(-1, 0)
    if x.dim() < 2 or x.shape[1] != rows.length or x.shape[0] not in (1, rows.batch):
        return x
    return ring.shard(x.expand(rows.batch, *x.shape[1:]), rows.layout)
