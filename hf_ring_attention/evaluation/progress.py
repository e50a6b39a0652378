"""The bar of work that takes minutes: it moves in a terminal or a notebook, and a file gets a line every half minute."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

#: The time between two lines in a file.
SECONDS_BETWEEN_LINES = 30.0


def progress_bar(
    label: str, of: Iterable[Any] | None = None, *, total: int | None = None, unit: str = "it", silent: bool = False
) -> Any:
    """Returns tqdm's bar on stderr, over steps or for a caller that counts `total`; it disappears when the work is done.

    Ranks above 0 leave the bar to rank 0: they are `silent`.
    """
    moves = sys.stderr.isatty() or "ipykernel" in sys.modules
    pause = 0.0 if moves else SECONDS_BETWEEN_LINES
    options = {"delay": pause, "mininterval": pause or 0.1, "leave": False}
    return tqdm(of, desc=label, total=total, unit=unit, disable=silent, **options)
