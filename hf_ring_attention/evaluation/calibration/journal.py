"""A folder in which a calibration writes each text's measurements as they come, so that one that was ended goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ...ring.ring import Ring
from ..whole_files import own_folder, write_whole

_SETTINGS_FILE = "settings.json"


@contextmanager
def calibration_journal(folder: Path | None, settings: Mapping[str, Any], ring: Ring) -> Iterator[CalibrationJournal]:
    """Opens the journal of a calibration in a folder, for rank 0 of its ring: a new one, or that of one that was ended.

    Args:
        folder: None keeps nothing.
        settings: what the measurements follow from.

    Raises:
        ValueError: on every rank: a folder of another calibration, or one that another process writes to, or, on the other
            ranks, that rank 0 cannot write to.
        OSError: on rank 0, a folder that cannot be made or written to.
    """
    with ExitStack() as stack:
        if folder is not None:
            with ring.agreement("opening the folder of a calibration"):
                if ring.rank == 0:
                    stack.enter_context(own_folder(folder))
                    _check_settings_in(folder, json.loads(json.dumps(settings)))
        yield CalibrationJournal(folder, ring)


class CalibrationJournal:
    """Measurements by name, in plain JSON types; rank 0 of a ring writes and reads them for all."""

    def __init__(self, folder: Path | None, ring: Ring) -> None:
        self._folder, self._ring = folder, ring

    def measured(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns what `measure` returned under this name in an earlier run, or returns now and writes down.

        Raises:
            ValueError: on every rank: a file that is damaged, or, on the other ranks, that rank 0 cannot read or write.
            OSError: on rank 0, a file that it cannot read or write.
        """
        if self._folder is None:
            return measure()
        file = self._folder / f"{name}.json"
        with self._ring.agreement(f"reading the measurement {name}") as call:
            call.message = _measurement_in(file) if self._ring.rank == 0 else None
        written: dict[str, Any] | None = call.answers[0]
        if written is not None:
            return written
        made = measure()
        with self._ring.agreement(f"writing the measurement {name}"):
            if self._ring.rank == 0:
                write_whole(file, json.dumps(made))
        return made


def _check_settings_in(folder: Path, settings: dict[str, Any]) -> None:
    """Writes the settings into a new folder, or compares them with the settings of the folder's calibration.

    Raises:
        ValueError: settings that differ.
    """
    file = folder / _SETTINGS_FILE
    if not file.exists():
        write_whole(file, json.dumps(settings))
        return
    before = _json_in(file, "name another folder")
    differences = [
        f"{name} was {json.dumps(before.get(name))} and is {json.dumps(settings.get(name))}"
        for name in dict.fromkeys([*before, *settings])
        if before.get(name) != settings.get(name)
    ]
    if differences:
        raise ValueError(
            f"the folder {str(folder)!r} has the measurements of another calibration: {'; '.join(differences)}. Name another "
            f"folder, or ask for the same"
        )


def _measurement_in(file: Path) -> dict[str, Any] | None:
    """Returns the content of a file; None if there is no such file."""
    return _json_in(file, "delete it, and it is measured again") if file.exists() else None


def _json_in(file: Path, remedy: str) -> dict[str, Any]:
    """Returns the content of a file of JSON.

    Raises:
        ValueError: a damaged file.
    """
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}): {remedy}") from None
    return content
