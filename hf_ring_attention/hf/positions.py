"""Finds how a model numbers the tokens of a row: the first position id, and how many positions the model has."""

from __future__ import annotations

from torch import nn

#: The names that models give to a table of positions.
_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "positions_embed")
#: The attribute of a runner that holds the number of positions in its table.
_PLACES = "_ring_dilated_places"


def first_position(module: nn.Module) -> int:
    """Returns the position id of a row's first token: 0, or one more than the id of padding where embeddings count so."""
    for embeddings in (getattr(module, "embeddings", None), module):
        padding = getattr(embeddings, "padding_idx", None)
        if isinstance(padding, int) and hasattr(embeddings, "create_position_ids_from_input_ids"):
            return padding + 1
    return 0


def remember_places(runner: nn.Module) -> None:
    """Stores what `places_of` finds, for `remembered_places`."""
    setattr(runner, _PLACES, places_of(runner))


def remembered_places(runner: nn.Module) -> int | None:
    """Returns what `places_of` found when the model was patched."""
    places: int | None = getattr(runner, _PLACES)
    return places


def places_of(runner: nn.Module) -> int | None:
    """Returns how many tokens of a row a model has positions for, if it looks them up in a table; else None."""
    tables = [
        module.num_embeddings - max(int(getattr(module, "offset", 0)), first_position(runner))
        for name, module in runner.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES
    ]
    return min(tables, default=None)
