"""The bar of work that takes minutes: it moves in a terminal or a notebook, and a file gets a line every half minute."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.auto import tqdm

#: The time between two lines in a file.
SECONDS_BETWEEN_LINES = 30.0


def progress_bar(label: str, total: int, unit: str = "it", silent: bool = False) -> Any:
    """Returns tqdm's bar on stderr, which disappears when the work is done; ranks above 0 are `silent`."""
    moves = sys.stderr.isatty() or "ipykernel" in sys.modules
    pause = 0.0 if moves else SECONDS_BETWEEN_LINES
    options = {"delay": pause, "mininterval": pause or 0.1, "leave": False}
    return tqdm(desc=label, total=total, unit=unit, disable=silent, **options)
