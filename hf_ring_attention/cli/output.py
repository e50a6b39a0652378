"""Prints the results of commands: tables of 80 columns, and JSON for programs."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from ..evaluation.whole_files import write_whole

#: The width of a table in characters if stdout is a file or a pipe.
WIDTH_OF_FILES = 80
#: Table cells of up to this many characters stay on one line, if the terminal is wide enough.
LONGEST_UNBROKEN = 16
#: Of more patterns than this, as a calibration has, explain and estimate print only the sums of all layers.
MOST_SHOWN = 4
#: Words of up to this many characters stay in a table that is too wide.
SHORT_ENOUGH = 8


def terminal() -> Any:
    """Returns a rich console for stdout."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES, highlight=False)


def print_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = (), *, left: int = 1
) -> None:
    """Prints a table, and below it notes, a line each; all columns but the first `left` ones are aligned to the right.

    Where a long word would have to be broken, as the name of a file, the left columns have a number, which the notes explain.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = terminal()
    if title:
        console.print(Text(title, style="bold"))
    texts, room = [[str(cell) for cell in row] for row in rows], console.width - 2 * len(headings)
    notes = [*_number_long_cells(headings, texts, left, room), *notes]
    columns = [*zip(headings, *texts)]
    widths: list[Any] = [None] * len(columns)
    if sum(max(map(len, column)) for column in columns) > room >= sum(map(_unbroken, columns)):
        # Break headings first, then cells, from the right, and no words.
        widths = [_unbroken(column) for column in columns]
        for number, (_, *cells) in enumerate(columns):
            widths[number] += min(room - sum(widths), max(0, max(map(len, cells), default=0) - widths[number]))
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for number, (heading, width) in enumerate(zip(headings, widths)):
        shown.add_column(heading, justify="left" if number < left else "right", overflow="fold", width=width)
    for row in texts:
        shown.add_row(*map(Text, row))
    console.print(shown)
    console.print()
    if notes:
        console.print(Text("\n".join((*notes, ""))))


def _number_long_cells(headings: Sequence[str], texts: list[list[str]], left: int, room: int) -> list[str]:
    """Puts numbers in place of long cells of the left columns, if words need more room; returns what the numbers mean."""
    numbers: dict[str, str] = {}
    longest = [_longest_word(column) for column in zip(headings, *texts)]
    for place in sorted(range(min(left, len(longest))), key=longest.__getitem__, reverse=True):
        if sum(longest) <= room:
            break
        for row in texts:
            if _longest_word([row[place]]) > SHORT_ENOUGH:
                row[place] = numbers.setdefault(row[place], f"[{len(numbers) + 1}]")
        longest[place] = _longest_word([headings[place], *(row[place] for row in texts)])
    return [f"{number} {cell}" for cell, number in numbers.items()]


def _longest_word(texts: Sequence[str]) -> int:
    return max((len(word) for text in texts for word in text.split()), default=1)


def _unbroken(column: Sequence[str]) -> int:
    """Returns the width at which no word and no short cell of a column is broken."""
    return max([len(cell) for cell in column[1:] if len(cell) <= LONGEST_UNBROKEN] + [_longest_word(column)])


def wrote_json(figures: Any, place: Path | str | None) -> bool:
    """Writes figures to the place that --json names, if any, and returns whether that was stdout, where nothing may follow."""
    text = json.dumps(figures, indent=1)
    if place:
        write_whole(Path(place), f"{text}\n")
    elif place is not None:
        print(text)
    return place == ""


@contextmanager
def stdout_left_alone(place: Path | str | None) -> Iterator[None]:
    """Sends the output of libraries and other processes to stderr, if JSON is to stand by itself on stdout."""
    if place != "":
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


def plural(count: int, noun: str) -> str:
    """Returns a number with its noun: "1 rank", "2 ranks"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def short_count(tokens: int) -> str:
    """Returns 128k for 131072 and 1M for 1048576; other numbers as they are."""
    for size, letter in ((1024**2, "M"), (1024, "k")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{letter}"
    return str(tokens)


def tell_loading(model: str) -> None:
    """Prints at a terminal that a model is being loaded, since nothing else is shown for some seconds."""
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print(f"loading {model}", file=sys.stderr, flush=True)


def short_number(number: float, digits: int = 3) -> str:
    """Returns a number with this many digits, and with all digits before the point."""
    return f"{number:,.0f}" if abs(number) >= 10 ** (digits - 1) else f"{number:.{digits}g}"


def short_seconds(seconds: float) -> str:
    """Returns a time in the unit that suits it."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def layer_numbers(numbers: Sequence[int]) -> str:
    """Returns layer numbers as ranges: 0-4, 6-10."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(pairs) for _, pairs in runs)]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
