"""Prints the results of commands: tables of 80 columns, JSON for programs, and progress on stderr, apart from both."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

#: The width of a table in characters if stdout is a file or a pipe.
WIDTH_OF_FILES = 80
#: Table cells of up to this many characters stay on one line, if the terminal is wide enough.
LONGEST_UNBROKEN = 16


@dataclass(frozen=True)
class Sheet:
    """A table to print, with notes below it, a line each.

    Attributes:
        left: how many of the first columns are aligned to the left; the others are aligned to the right.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str] = ()
    left: int = 1

    def markdown(self) -> str:
        """Returns the table in Markdown, with its title as a heading."""
        rule = ["---" if number < self.left else "---:" for number in range(len(self.headings))]
        cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (self.headings, rule, *self.rows)]
        lines = "\n".join(f"| {' | '.join(row)} |" for row in cells)
        notes = "\n".join(f"- {note}" for note in self.notes)
        return "\n\n".join(filter(None, (f"## {self.title}", lines, notes))) + "\n"


def terminal(stderr: bool = False) -> Any:
    """Returns a rich console for stdout or stderr."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else WIDTH_OF_FILES, highlight=False)


def print_sheet(sheet: Sheet) -> None:
    """Prints a table and its notes to stdout."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = terminal()
    if sheet.title:
        console.print(Text(sheet.title, style="bold"))
    columns = [[str(row[number]) for row in sheet.rows] for number in range(len(sheet.headings))]
    narrow = [_unbroken(heading, column) for heading, column in zip(sheet.headings, columns)]
    wide = [max(map(len, (heading, *column))) for heading, column in zip(sheet.headings, columns)]
    room = console.width - 2 * len(columns)
    # If the lines are too long, break headings first, and words only if that is not enough.
    broken = sum(wide) > room >= sum(narrow)
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for number, (heading, column) in enumerate(zip(sheet.headings, columns)):
        justify: Any = "left" if number < sheet.left else "right"
        is_short = max(map(len, column), default=0) <= LONGEST_UNBROKEN
        width = narrow[number] if broken and is_short else None
        shown.add_column(heading, justify=justify, overflow="fold", width=width)
    for row in zip(*columns):
        shown.add_row(*map(Text, row))
    console.print(shown)
    console.print()
    if sheet.notes:
        console.print(Text("\n".join((*sheet.notes, ""))))


def _unbroken(heading: str, cells: Sequence[str]) -> int:
    """Returns the width at which no word and no short cell of a column is broken."""
    words = [word for text in (heading, *cells) for word in text.split()]
    short = [len(cell) for cell in cells if len(cell) <= LONGEST_UNBROKEN]
    return max((*short, *(min(len(word), LONGEST_UNBROKEN) for word in words)), default=1)


@contextmanager
def stdout_left_alone(active: bool = True) -> Iterator[None]:
    """Sends the output of libraries and other processes to stderr, so that JSON stands alone on stdout."""
    if not active:
        yield
        return
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


def print_json(figures: Any) -> None:
    """Prints figures as JSON to stdout."""
    print(json.dumps(figures, indent=1))


def spinner(text: str) -> AbstractContextManager[Any]:
    """Shows on stderr, if that is a terminal, that the command is working."""
    status: AbstractContextManager[Any] = terminal(stderr=True).status(text)
    return status


def short_count(tokens: int) -> str:
    """Returns 128k for 131072 and 1M for 1048576; other numbers as they are."""
    for size, letter in ((1024**2, "M"), (1024, "k")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{letter}"
    return str(tokens)


def short_bytes(size: float) -> str:
    """Returns bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def unit_of_seconds(seconds: float) -> tuple[float, str]:
    """Returns the seconds of the unit that suits a time, and its name."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    return next(((size, unit) for size, unit in units if seconds >= size), (1e-9, "ns"))


def short_seconds(seconds: float) -> str:
    """Returns a time in the unit that suits it."""
    size, unit = unit_of_seconds(seconds)
    return f"{seconds / size:.3g} {unit}"


def layer_numbers(numbers: Sequence[int]) -> str:
    """Returns layer numbers as ranges: 0-4, 6-10."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(pairs) for _, pairs in runs)]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
