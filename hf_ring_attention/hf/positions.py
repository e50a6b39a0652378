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
    """Logs once that packed documents are scaled by their places in the row, for a model whose temperatures depend on these."""
    floor = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and isinstance(floor, (int, float)) and seq_len >= floor:
        warn_once(
            f"{type(config).__name__} has attn_temperature_tuning: in layers without RoPE, Transformers scales a query by its "
            f"place in the row of {seq_len} tokens, in steps every {floor} tokens, so that packed documents are not computed "
            f"as they are alone: pack rows of fewer than {floor} tokens, pad documents instead, or set "
            f"config.attn_temperature_tuning=False before the model is made"
        )
