"""Writes files whole or not at all, and lets one process at a time write to a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields the name of a new file, which replaces the file of this path once its content is on the disk."""
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


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Makes a folder if it is missing, and refuses it to other processes that call this while the context is open."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        raise ValueError(f"another process writes to the folder {str(folder)!r}: wait, or name another one") from None
    with lock:
        yield
