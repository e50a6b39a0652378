"""The bar of work that takes minutes: in a terminal or a notebook it moves, and a file gets a line every half minute."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

#: How often a stderr that is no terminal hears how far the work is.
SECONDS_BETWEEN_LINES = 30.0


def progress_bar(
    label: str, of: Iterable[Any] | None = None, *, total: int | None = None, unit: str = "it", silent: bool = False
) -> Any:
    """Returns tqdm's bar on stderr, which is gone when the work is done.

    Args:
        of: what is gone through; None where the caller counts.
        total: how much there is to count.
        silent: whether nothing is shown, as by ranks that leave it to another one.
    """
    moves = sys.stderr.isatty() or "ipykernel" in sys.modules
    pause = 0.0 if moves else SECONDS_BETWEEN_LINES
    options = {"delay": pause, "mininterval": pause or 0.1, "leave": False}
    return tqdm(of, desc=label, total=total, unit=unit, disable=silent, **options)
