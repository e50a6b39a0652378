"""Arguments of command lines, for `hf-ring-attention` and the recipes: read strictly, before anything is loaded or started.

The types say what was expected and what came; argparse, or typer, puts the name of the argument in front and ends the program.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..plan.branches import LARGEST
from ..plan.patterns import Pattern

#: The most layers, heads, ranks or rows that a command takes; it makes lists of so many.
MOST = 65536
#: The most tokens of a sequence.
MOST_TOKENS = 2**40
#: The ends of the names of files that pictures are written to.
PICTURE_FORMATS = (".png", ".svg", ".pdf")


def pattern_text(text: str) -> str:
    """Returns the text itself, after checking that `Pattern.parse` makes a pattern of it."""
    try:
        Pattern.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def pattern_source(text: str) -> str:
    """Returns the text of a pattern, or the name of the file of a calibration, after checking that it is one."""
    if not text.endswith(".json"):
        return pattern_text(text)
    from ..evaluation.calibration.result import Calibration  # It imports torch.

    try:
        Calibration.load(existing_file(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def at_least(least: int, multiple_of: int = 1, most: int = LARGEST) -> Callable[[str], int]:
    """Returns the type of whole numbers from `least` to `most` that `multiple_of` divides."""

    def number(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text.strip()):
            raise argparse.ArgumentTypeError(f"a whole number of at least {least} was expected, got {text!r:.40}")
        digits = len(text.strip().lstrip("+-0"))
        if digits > len(str(LARGEST)):  # Python refuses to read thousands of digits.
            raise argparse.ArgumentTypeError(f"a whole number of at most {most} was expected, got {digits} digits")
        value = int(text)
        if not least <= value <= most:
            bound = f"least {least}" if value < least else f"most {most}"
            raise argparse.ArgumentTypeError(f"a whole number of at {bound} was expected, got {value}")
        if value % multiple_of:
            below = value - value % multiple_of
            near = [str(x) for x in (below, below + multiple_of) if x >= least and (most is None or x <= most)]
            raise argparse.ArgumentTypeError(
                f"a multiple of {multiple_of} was expected, got {value} = {value // multiple_of} * {multiple_of} + "
                f"{value % multiple_of}: take {' or '.join(near)}"
            )
        return value

    return number


def positive(text: str) -> float:
    """Reads a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"a number above 0 was expected, got {text!r:.40}")
    return value


def device(text: str) -> str:
    """Reads "cpu", or "cuda" where there is a CUDA device."""
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"'cpu' or 'cuda' was expected, got {text!r}")
    import torch

    if text == "cuda" and not torch.cuda.is_available():
        built = "was built without CUDA" if torch.version.cuda is None else "finds no CUDA device"
        raise argparse.ArgumentTypeError(f"torch {torch.__version__} {built} on this machine: take 'cpu'")
    return text


def existing_file(text: str) -> Path:
    """Reads the name of a file that must exist."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"a file was expected, got the folder {text!r}")
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r} (from {Path.cwd()})")
    return path


def new_file(text: str) -> Path:
    """Reads the name of a file to write; its folder must exist."""
    path = Path(text)
    if path.is_dir() or not path.name:
        raise argparse.ArgumentTypeError(f"a file was expected, got the folder {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"there is no folder {str(path.parent)!r} to write {path.name!r} to: make it first"
        )
    return path


def new_folder(text: str) -> Path:
    """Reads the name of a folder to write to, which its user makes if it is missing."""
    path = Path(text)
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise argparse.ArgumentTypeError(f"a folder was expected, but {str(part)!r} is a file")
    return path


def picture_file(text: str) -> Path:
    """Reads the name of a file that a picture is written to; matplotlib must be installed."""
    path = new_file(text)
    if path.suffix not in PICTURE_FORMATS:
        raise argparse.ArgumentTypeError(
            f"a file that ends in one of {', '.join(PICTURE_FORMATS)} was expected, got {text!r}"
        )
    _check_that_pictures_can_be_drawn()
    return path


def _check_that_pictures_can_be_drawn() -> None:
    missing = missing_extra("a picture", "matplotlib")
    if missing:
        raise argparse.ArgumentTypeError(missing)


def check(parser: argparse.ArgumentParser, name: str, kind: Callable[[str], Any], value: Any) -> Any:
    """Returns what a type makes of a value that another parser took; a wrong value is refused as that parser would do."""
    try:
        return kind(str(value))
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument {name}: {error}")


def key_value_heads(heads: int, kv_heads: int | None) -> int:
    """Returns the number of key/value heads, by default that of query heads, which must be a multiple of it."""
    if kv_heads is None:
        return heads
    if heads % kv_heads:
        fitting = [str(number) for number in range(1, heads + 1) if heads % number == 0]
        raise argparse.ArgumentTypeError(
            f"the number of query heads must be a multiple of the number of key/value heads, got "
            f"{heads} and {kv_heads}: {heads} = {heads // kv_heads} * {kv_heads} + {heads % kv_heads}; take one of "
            f"{', '.join(fitting)}"
        )
    return kv_heads


def token_count(least: int = 1, multiple_of: int = 1) -> Callable[[str], int]:
    """Returns the type of numbers of tokens: 4096, 128k (128 * 1024) or 1M (1024 * 1024)."""
    number = at_least(least, multiple_of, MOST_TOKENS)

    def count(text: str) -> int:
        match = re.fullmatch(r"([0-9]+)([kKmM])", text.strip())
        if match:
            return number(str(at_least(0)(match.group(1)) * (1024 if match.group(2) in "kK" else 1024**2)))
        if re.fullmatch(r"[+-]?[0-9]+", text.strip()):
            return number(text)
        raise argparse.ArgumentTypeError(f"a number of tokens such as 4096, 128k or 1M was expected, got {text!r:.40}")

    return count


#: The bytes of the units of `memory_size`.
_UNITS = {
    f"{letter}{end}": base**power
    for power, letter in ((2, "M"), (3, "G"), (4, "T"))
    for end, base in (("B", 1000), ("iB", 1024))
}


def memory_size(text: str) -> int:
    """Reads a size of memory in bytes: 80GB (80 * 1000^3), or 80GiB (80 * 1024^3); also in MB, MiB, TB and TiB."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?) ?([MGT]i?B)", text.strip())
    size = round(float(match.group(1)) * _UNITS[match.group(2)]) if match else 0
    if not size:
        raise argparse.ArgumentTypeError(f"a size of memory such as 80GB or 80GiB was expected, got {text!r:.40}")
    return size


def one_of(*names: str) -> Callable[[str], str]:
    """Returns the type of a choice among names."""

    def name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"one of {', '.join(names)} was expected, got {text!r}")
        return text

    return name


def comma_list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Returns the type of one or several values with commas between them."""
    return lambda text: [kind(part) for part in text.split(",")]


#: The packages that only some features need: the name that is imported, and what `pip install` takes.
EXTRAS = {
    "matplotlib": "'matplotlib>=3.8'",
    "rich": "'rich>=13'",
    "typer": "'typer>=0.15'",
    "gguf": "'gguf>=0.17.1'",
    "peft": "'peft>=0.18'",
    "lm_eval": "'lm-eval>=0.4.13'",
}


def missing_extra(purpose: str, *modules: str) -> str | None:
    """Returns what to install for a purpose where one of `EXTRAS` is missing; else None."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if not missing:
        return None
    verb = "is" if len(missing) == 1 else "are"
    command = " ".join(EXTRAS[module] for module in missing)
    return f"{purpose} needs {' and '.join(missing)}, which {verb} not installed: pip install {command}"
