"""Files that are written whole or not at all: whoever reads one finds the old content or the new, whenever its writer ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields the name of a new file beside a path, which gets the path's name once its content is on the disk.

    Where the caller raises, the new file is removed, and what was under the path stays.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        with part.open("r+b") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a text in UTF-8 as `whole_file` does."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")
