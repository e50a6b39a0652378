"""How a model numbers the tokens of a row: from where, and how many it has places for."""

from __future__ import annotations

from torch import nn

#: What models call a table of positions.
_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "positions_embed")
#: The attribute of a runner that holds how many tokens its table of positions is for.
_PLACES = "_ring_dilated_places"


def first_position(module: nn.Module) -> int:
    """The position id of a row's first token: 0, but behind the padding's id where embeddings number them so."""
    for embeddings in (getattr(module, "embeddings", None), module):
        padding = getattr(embeddings, "padding_idx", None)
        if isinstance(padding, int) and hasattr(embeddings, "create_position_ids_from_input_ids"):
            return padding + 1
    return 0


def remember_places(runner: nn.Module) -> None:
    """Looks the table of positions up once, for `remembered_places`."""
    setattr(runner, _PLACES, places_of(runner))


def remembered_places(runner: nn.Module) -> int | None:
    """What `places_of` found when the model was patched."""
    places: int | None = getattr(runner, _PLACES)
    return places


def places_of(runner: nn.Module) -> int | None:
    """How many tokens of a row a model has positions for, where it looks them up in a table; None where it does not."""
    tables = [
        module.num_embeddings - max(int(getattr(module, "offset", 0)), first_position(runner))
        for name, module in runner.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES
    ]
    return min(tables, default=None)
