"""The folder of a run that goes on after its end, and the journal of an evaluation in it.

A folder belongs to one process at a time, and to runs with the same settings. The journal has one line of JSON for each
finished part, on the disk before the next begins.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .whole_files import write_whole

#: The files of a run: what was asked for, and what was found.
RUN_FILE, SAMPLES_FILE = "run.json", "samples.jsonl"
_LOCK_FILE = ".lock"


class Journal:
    """The records of a run in a folder, those that are already there and those to come.

    Attributes:
        records: all of them, in the order in which they were written.
        launches: the machines and times of the starts of the run, this one last.
    """

    def __init__(self, folder: Path, records: list[dict[str, Any]], launches: list[dict[str, Any]]) -> None:
        self.folder, self.records, self.launches = folder, records, launches

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds records, each a line; they are on the disk when this returns, and none of them is when it fails.

        Raises:
            OSError: a file that cannot be written to.
        """
        left = memoryview("".join(f"{json.dumps(record)}\n" for record in records).encode())
        with (self.folder / SAMPLES_FILE).open("ab", buffering=0) as file:
            before = file.tell()
            try:
                while left:  # A disk that fills up takes a part, without an error.
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise
        self.records += [dict(record) for record in records]


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Makes a folder if it is missing, and keeps others that call this from writing to it while the context is open.

    Raises:
        ValueError: a folder that another process writes to.
        OSError: one that cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"another process writes to the folder {str(folder)!r}: wait for it, or name another one"
        ) from None
    try:
        yield
    finally:
        lock.release()


def check_same_settings(folder: Path, content: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses the folder of a run with other settings.

    Args:
        content: what the folder has of that run, for the error.
        before, now: the settings of that run and of this one, in plain JSON types.

    Raises:
        ValueError: for settings that differ.
    """
    differences = [
        f"{name} was {json.dumps(before.get(name))} and is {json.dumps(now.get(name))}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    if differences:
        raise ValueError(
            f"the folder {str(folder)!r} has {content}: {'; '.join(differences)}. Name another folder, or ask for the same"
        )


@contextmanager
def journal_of(folder: Path, settings: Mapping[str, Any], launch: Mapping[str, Any]) -> Iterator[Journal]:
    """Opens the journal of a run in a folder: a new one, or that of an equal run that did not end.

    Args:
        settings: what decides the figures, as JSON; it must be what it was when the run began.
        launch: what is told of this start, and decides nothing.

    Raises:
        ValueError: a folder of another run, of another program, or one that another process writes to.
        OSError: a folder that cannot be made or written to.
    """
    files = folder.iterdir() if folder.is_dir() else ()
    found = sorted(path.name for path in files if path.name not in (_LOCK_FILE, f"{RUN_FILE}.part"))
    if found and RUN_FILE not in found:
        raise ValueError(
            f"the folder {str(folder)!r} has files that no evaluation wrote ({', '.join(found[:4])}): name a new one"
        )
    with own_folder(folder):
        wanted, launches = json.loads(json.dumps(settings)), []
        if found:
            run = json_in(folder / RUN_FILE, "name another folder")
            check_same_settings(folder, "the report of another run", run["settings"], wanted)
            launches = run["launches"]
        launches = [*launches, dict(launch)]
        write_whole(folder / RUN_FILE, json.dumps({"settings": wanted, "launches": launches}, indent=1))
        yield Journal(folder, _whole_lines(folder / SAMPLES_FILE), launches)


def json_in(file: Path, remedy: str) -> Any:
    """Returns what a file of JSON holds.

    Raises:
        ValueError: a file that was damaged.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}): {remedy}") from None


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file; the beginning of a line that a killed process left at its end is cut off.

    Raises:
        ValueError: another line that is no JSON.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
            os.fsync(file.fileno())
    records = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}, is no JSON ({error}): delete that line, and it is made again"
            ) from None
    return records
