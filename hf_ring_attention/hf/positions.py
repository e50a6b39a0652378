"""What models do with the places of tokens in a row: the first position id, how many there are, and temperatures by them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..plan.layouts import SequenceLayout
from .config import warn_once

#: The names that models give to a table of positions.
_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "positions_embed")


def first_position(module: nn.Module) -> int:
    """Returns the position id of a row's first token: 0, or one more than the padding's id if embeddings count so."""
    for embeddings in (getattr(module, "embeddings", None), module):
        padding = getattr(embeddings, "padding_idx", None)
        if isinstance(padding, int) and hasattr(embeddings, "create_position_ids_from_input_ids"):
            return padding + 1
    return 0


#: Types whose decoders count positions by the mask, from its first token on.
_COUNT_BY_MASK = ("biogpt", "opt")


def own_positions(runner: nn.Module, ids: Tensor | None, mask: Any, tokens: Tensor) -> Tensor:
    """Returns the positions [B or 1, n] that a decoder counts itself if the caller passes none.

    Args:
        ids: [B, n]; None if the caller passes embeddings.
        mask: the attention_mask, if there is one.
        tokens: what has the rows' shape and device, [B, n, ...].
    """
    first = first_position(runner)
    if first and ids is not None:  # RoBERTa and its relatives count the tokens that are not padding, by their ids.
        valid = (ids != first - 1).long()
        return valid.cumsum(1) * valid + first - 1
    if getattr(runner.config, "model_type", None) in _COUNT_BY_MASK and isinstance(mask, Tensor) and mask.dim() == 2:
        valid = mask.long()
        return (valid.cumsum(1) * valid - 1).long()
    return torch.arange(first, first + tokens.shape[1], device=tokens.device)[None]


def places_of(runner: nn.Module) -> int | None:
    """Returns how many tokens of a row a model has positions for, if it looks them up in a table; else None."""
    tables = [
        module.num_embeddings - max(int(getattr(module, "offset", 0)), first_position(runner))
        for name, module in runner.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES
    ]
    return min(tables, default=None)


def at_its_place_in_the_row(module: nn.Module, query: Tensor, layout: SequenceLayout, rank: int) -> Tensor:
    """Returns the queries of a shard, scaled by their places in the row instead of their places in the shard.

    Llama 4 scales the queries of layers without RoPE by their places in the row (arXiv 2501.19399), which it counts itself,
    padding and packed documents included. All other layers' queries are returned as they are.

    Args:
        query: [B, H, n, D], this rank's tokens.
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
    """Logs once that packed documents are scaled by their places in the row, for a model whose temperatures depend on these."""
    floor = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and isinstance(floor, (int, float)) and seq_len >= floor:
        warn_once(
            f"{type(config).__name__} has attn_temperature_tuning: in layers without RoPE, Transformers scales a query by its "
            f"place in the row of {seq_len} tokens, in steps every {floor} tokens, so that packed documents are not computed "
            f"as they are alone: pack rows of fewer than {floor} tokens, pad documents instead, or set "
            f"config.attn_temperature_tuning=False before the model is made"
        )
