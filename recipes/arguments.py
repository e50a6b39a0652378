"""The types of command-line options that the recipes share. Each error names what was expected and what came."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.timing import count

import hf_ring_attention as ra

#: The packages that single options need, as pip takes them.
EXTRAS = {"matplotlib": "'matplotlib>=3.8'", "peft": "'peft>=0.21'", "gguf": "'gguf>=0.17.1'", "rich": "'rich>=13'"}
#: In place of a pattern's text: the pattern that the model was saved with.
OWN = "own"
DTYPES = ("float32", "bfloat16", "float16")
PATTERN_HELP = (
    "exact, window:LENGTH+SINKS, pyramid:WINDOW,LEVELS, longnet:LENGTH/RATE,... or the file calibration.json that "
    "hf-ring-attention calibrate wrote"
)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Prints a docstring in 80 columns, with commands that can be pasted, and the defaults that no help names yet."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=80)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = []
        for paragraph in text.split("\n\n"):
            labelled = [re.match(r"([\w' ]+: ) +(.*)", line) for line in paragraph.splitlines()]
            commands = [
                f"{found[1].strip()}\n  "
                + " \\\n      ".join(textwrap.wrap(found[2], width - 8, break_on_hyphens=False))
                for found in labelled
                if found is not None
            ]
            points = re.split(r"\n(?=\d+\. )", paragraph)
            filled = [textwrap.fill(x, width, subsequent_indent="   " * (len(points) > 1)) for x in points]
            paragraphs.append("\n".join(commands or filled))
        return "\n\n".join(paragraphs)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return action.dest.upper() if len(action.dest) < 24 else "VALUE"

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        listed = ",".join(map(str, action.choices or ()))
        return (
            super()._metavar_formatter(action, default_metavar) if len(listed) < 40 else lambda size: ("NAME",) * size
        )

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Shows one spelling of an option that has two, with "-" and with "_"."""
        shown, names = copy.copy(action), action.option_strings
        shown.option_strings = [name for name in names if "_" not in name or name.replace("_", "-") not in names]
        return super()._format_action_invocation(shown)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        named = action.default in (None, False, []) or "default" in (action.help or "")
        return action.help if named else super()._get_help_string(action)


def plural(count: int, one: str, many: str = "") -> str:
    """Returns a number with the noun that fits it: "1 ring", "2 rings"."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def at_least(least: int) -> Callable[[str], int]:
    """Returns the type of whole numbers from `least` on."""

    def number(text: str) -> int:
        if not text.strip().lstrip("+-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"a whole number of at least {least} was expected, got {text}")
        return int(text)

    return number


def token_count(least: int) -> Callable[[str], int]:
    """Returns the type of numbers of tokens from `least` on, such as 4096, 4k or 1M."""
    return lambda text: at_least(least)(str(count(text)) if re.fullmatch(r"\d+[kKmM]", text) else text)


class Tokens(int):
    """The type of the field of a dataclass, at least 2 tokens."""

    def __new__(cls, value: str | int) -> Tokens:
        return super().__new__(cls, token_count(2)(str(value)))


def comma_list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Returns the type of values with commas between them."""
    return lambda text: [kind(part) for part in text.split(",")]


def positive(text: str) -> float:
    """Reads a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"a number above 0 was expected, got {text!r}")
    return value


def existing_file(text: str) -> Path:
    """Reads the name of a file to read."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r} (from {Path.cwd()})")
    return Path(text)


def new_file(text: str) -> Path:
    """Reads the name of a file to write, in a folder that exists."""
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(Path(text).parent)!r}: make it first")
    return Path(text)


def load_pattern(text: str) -> ra.Pattern | ra.Calibration:
    """Returns the pattern of a text, or the calibration in a file that ends in .json."""
    return ra.Calibration.load(text) if text.endswith(".json") else ra.Pattern.parse(text)


def pattern_source(text: str) -> str:
    """Reads what `load_pattern` takes."""
    try:
        load_pattern(text)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def pattern_or_own(text: str) -> str:
    """Reads what `pattern_source` reads, or "own"."""
    return text if text == OWN else pattern_source(text)


def missing_extra(*modules: str) -> str | None:
    """Returns what to install, if one of `EXTRAS` is missing."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    command = " ".join(EXTRAS[module] for module in missing)
    return f"needs {' and '.join(missing)}, which is not installed: pip install {command}" if missing else None


def check_extra(parser: argparse.ArgumentParser, option: str, used: Any, module: str) -> None:
    """Refuses an option whose package is not installed."""
    missing = missing_extra(module) if used else None
    if missing:
        parser.error(f"argument {option}: {missing}")


def check(parser: argparse.ArgumentParser, option: str, kind: Callable[[str], Any], value: Any) -> None:
    """Refuses a value that another parser took as a text, as a type of this file would."""
    try:
        kind(str(value))
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument {option}: {error}")
