"""Data sets of the datasets library, told from others without it: whoever has one has imported it."""

from __future__ import annotations

import sys
from typing import Any


def is_table(x: Any) -> bool:
    """Returns whether x is a `datasets.Dataset`."""
    return isinstance(x, getattr(sys.modules.get("datasets"), "Dataset", ()))


def is_streamed(x: Any) -> bool:
    """Returns whether x is a `datasets.IterableDataset`."""
    return isinstance(x, getattr(sys.modules.get("datasets"), "IterableDataset", ()))
