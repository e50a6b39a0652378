"""The bar of work that takes minutes: it moves in a terminal or a notebook, and a file gets a line every half minute."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from tqdm.auto import tqdm
from transformers.modeling_layers import GradientCheckpointingLayer

#: The time between two lines in a file.
SECONDS_BETWEEN_LINES = 30.0


def progress_bar(label: str, total: float, silent: bool = False) -> Any:
    """Returns a bar of tokens on stderr, which disappears when the work is done; ranks above 0 are `silent`."""
    moves = sys.stderr.isatty() or "ipykernel" in sys.modules
    pause = 0.0 if moves else SECONDS_BETWEEN_LINES
    options: dict[str, Any] = {"delay": pause, "mininterval": pause or 0.1, "leave": False, "unit_scale": True}
    return tqdm(desc=label, total=total, unit=" tokens", disable=silent, **options)


@contextmanager
def moved_by_layers(bar: Any, model: nn.Module, *tokens: int) -> Iterator[None]:
    """Moves a bar as each layer of a model begins its part of passes of so many tokens; without layers, it moves at the end.

    A backward pass with checkpointing computes the layers again, so it counts as another pass.
    """
    layers = [] if bar.disable else [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    count = max(1, len(layers))  # Whole tokens: their sum is exactly the total, where tqdm warns of the least excess.
    steps = [size * n // count - size * (n - 1) // count for size in reversed(tokens) for n in range(1, count + 1)]

    def move(*_: Any) -> None:  # What a hook returns would be the module's input.
        bar.update(steps.pop() if steps else 0)

    # Checkpointing may leave the layer's own hooks out, and ends once the last saved tensor is there: a first part is called.
    hooks = [next(layer.children(), layer).register_forward_pre_hook(move) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    bar.update(sum(steps))
