"""A folder in which a calibration writes each measurement when it has it, so that a run that was killed continues."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ...ring.ring import Ring
from ...transport.agreement import digest
from ..whole_files import own_folder, whole_file

#: The version of the files.
_FORMAT = 6


class Journal:
    """Measurements in files; rank 0 of a ring writes and reads them for all. Without a folder, nothing is kept.

    The name of a file contains a checksum of everything that decides its measurement: `settings`, which decide all of them,
    and the inputs of each. So a calibration with other settings neither reads nor overwrites it.
    """

    def __init__(self, folder: str | Path | None, settings: Mapping[str, Any], ring: Ring) -> None:
        self._folder = None if folder is None else Path(folder)
        self._settings, self._ring = {**settings, "format": _FORMAT}, ring

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Makes the folder, and keeps other processes from writing to it while the context is open."""
        with ExitStack() as stack:
            if self._folder is not None:
                with self._ring.agreement("opening the folder of a calibration"):
                    if self._ring.rank == 0:
                        stack.enter_context(own_folder(self._folder))
            yield

    def measured(self, kind: str, measure: Callable[[], dict[str, Any]], *inputs: Any) -> dict[str, Any]:
        """Returns the earlier measurement of these inputs, from a file that begins with `kind`; else measures and writes it.

        An error of rank 0, such as an OSError or a ValueError for a damaged file, is a ValueError on the other ranks.
        """
        if self._folder is None:
            return measure()
        file = self._folder / f"{kind}-{digest([self._settings, *inputs])}.pt"
        with self._ring.agreement(f"reading {file.name}") as call:
            call.message = _content_of(file) if self._ring.rank == 0 else None
        content: dict[str, Any] | None = call.answers[0]
        if content is None:
            content = measure()
            with self._ring.agreement(f"writing {file.name}"):
                if self._ring.rank == 0:
                    with whole_file(file) as part:
                        torch.save(content, part)
        return content


def _content_of(file: Path) -> dict[str, Any] | None:
    """Returns the measurement in a file; None if there is no such file."""
    try:
        return torch.load(file, weights_only=True) if file.exists() else None
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} is damaged: delete it, and it is measured again") from error
