"""The types and the shared options of commands. An error names what was expected and what came.

A type reads the text of an option, for argparse, before anything is loaded or started.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

from ..plan.layouts import LayoutKind
from ..plan.patterns import Pattern
from ..plan.traffic import TransportKind

Value = TypeVar("Value")

#: The most layers, heads, ranks or rows that a command takes; it makes lists of them.
MOST = 65536
#: The folders of the recipes in an installed package, and in a checkout.
RECIPE_FOLDERS = (Path(__file__).parents[1] / "recipes", Path(__file__).parents[2] / "recipes")
#: A model of 4 bits that the recipes install: SmolLM2-135M-Instruct.
BUNDLED = "smollm2-135m"
#: The ends of the names of files that pictures are written to.
PICTURE_FORMATS = (".png", ".svg", ".pdf")
#: The packages that some features need: the name to import, and the requirement for pip.
EXTRAS = {"matplotlib": "matplotlib>=3.8", "rich": "rich>=13", "lm_eval": "lm-eval>=0.4.13"}


class Refusal(Exception):
    """Ends a command with one line and status 2."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message if option is None else f"argument {option}: {message}")


class Parser(argparse.ArgumentParser):
    """A parser whose help has 80 columns, whose errors are `Refusal`s, and which adds options that several commands share."""

    def __init__(self, **settings: Any) -> None:
        formatter: Any = partial(argparse.RawDescriptionHelpFormatter, max_help_position=26, width=80)
        super().__init__(formatter_class=formatter, allow_abbrev=False, **settings)

    def add_argument(self, *names: Any, **settings: Any) -> Any:
        """Adds an option or argument; help marks the options that are required."""
        if settings.get("required"):
            settings["help"] = f"{settings['help']} Required."
        return super().add_argument(*names, **settings)

    def error(self, message: str) -> Any:
        """Raises a `Refusal` that names the help."""
        raise Refusal(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        # Numbers behind --tokens are one word: a type sees one word, and nargs would also take a file behind them.
        numbers, text = r"(?<=\0--tokens\0)\d[\d,kKmM]*(\0\d[\d,kKmM]*)+(?=\0|$)", "\0".join(["", *words])
        words = re.sub(numbers, lambda found: found[0].replace("\0", ","), text).split("\0")[1:]
        parsed, rest = super().parse_known_args(words, namespace)
        if hasattr(parsed, "words"):  # It has the first positional words; `rest` has those behind options.
            parsed.words += [word for word in rest if not word.startswith("-")]
            rest = [word for word in rest if word.startswith("-")]
        return parsed, rest

    def add_choice(self, name: str, choices: Sequence[str], text: str, default: str) -> None:
        text = f"{text}: {', '.join(choices)} (default {default})."
        self.add_argument(name, choices=choices, metavar="NAME", default=default, help=text)

    def add_json(self) -> None:
        text = "Write the figures as JSON to this file; without a file, print only JSON."
        self.add_argument("--json", metavar="FILE.json", nargs="?", const="", type=json_file, help=text)

    def add_pattern(self, text: str, name: str = "--pattern", file: bool = False, **settings: Any) -> None:
        kind = pattern_or_file if file else pattern_text
        several = {"nargs": "+", "action": "extend"} if settings.pop("several", False) else {}
        self.add_argument(name, metavar="TEXT", type=kind, help=text, **several, **settings)

    def add_picture(self, name: str, text: str, **settings: Any) -> None:
        self.add_argument(name, metavar="FILE.png", type=picture_file, help=text, **settings)

    def add_model(self, text: str, required: bool = False) -> None:
        """Adds --model, and the permission to run its code."""
        self.add_argument("--model", metavar="ID_OR_FOLDER", type=model_source, required=required, help=text)
        text = "Run the Python code that comes with the model; read it first."
        self.add_argument("--trust-remote-code", action="store_true", help=text)

    def add_row(self) -> None:
        """Adds the options for one row over a ring: its tokens, its documents, the ranks, and the layout."""
        add, text = self.add_argument, "Lengths of the documents packed into the row (default: one document)."
        add("--tokens", type=token_count(), metavar="N", required=True, help="Tokens in a row, such as 128k or 1M.")
        add("--ranks", type=at_least(1), metavar="N", required=True, help="Ranks in the ring.")
        add("--documents", type=comma_list(token_count()), metavar="N,N,...", help=text)
        self.add_layout()

    def add_heads(self) -> None:
        add = self.add_argument
        add("--heads", type=at_least(1), metavar="N", help="Query heads, without --model.")
        add("--kv-heads", type=at_least(1), metavar="N", help="Key/value heads, without --model (default: --heads).")
        add("--head-dim", type=at_least(1), metavar="N", help="Size of a head, without --model.")

    def add_layout(self) -> None:
        self.add_choice("--layout", ("auto", *get_args(LayoutKind)), "How the row is divided among the ranks", "auto")

    def add_speeds(self) -> None:
        add, text = self.add_argument, "Gbit/s of links between ranks (default 3600, like NVLink 4, and 400)."
        add("--gbps", metavar="X", nargs="+", type=above_zero(), default=[3600, 400], help=text)
        add("--tflops", metavar="X", type=above_zero(), default=400, help="TFLOP/s of a device (default 400).")

    def add_transport(self) -> None:
        self.add_choice("--transport", get_args(TransportKind), "How keys travel", "auto")
        text = "With --transport heads: how many neighbours exchange heads (default: all ranks)."
        self.add_argument("--ring-heads", type=at_least(1), metavar="N", help=text)


def checked(option: str | None, function: Callable[..., Value], *values: Any, **settings: Any) -> Value:
    """Returns the result of a function; refuses its errors, in the name of an option if one is at fault."""
    try:
        return function(*values, **settings)
    except (OSError, ValueError, NotImplementedError, argparse.ArgumentTypeError) as error:
        raise Refusal(str(error), option) from None


def at_least(least: int, most: int = MOST, tokens: bool = False) -> Callable[[str], int]:
    """Returns the type of whole numbers from `least` to `most`; numbers of tokens may end in k (* 1024) or M (* 1024^2)."""

    def number(text: str) -> int:
        # Python refuses to read thousands of digits.
        match = re.fullmatch(r"([+-]?[0-9]{1,40})([kKmM]?)" if tokens else r"([+-]?[0-9]{1,40})()", text.strip())
        if match is None:
            kind = "number of tokens such as 4096, 128k or 1M" if tokens else f"whole number of at least {least}"
            raise argparse.ArgumentTypeError(f"a {kind} was expected, got {text!r:.40}")
        value = int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]
        if not least <= value <= most:
            bound = f"least {least}" if value < least else f"most {most}"
            raise argparse.ArgumentTypeError(f"a whole number of at {bound} was expected, got {value}")
        return value

    return number


def token_count(least: int = 1) -> Callable[[str], int]:
    """Returns the type of numbers of tokens: 4096, 128k or 1M."""
    return at_least(least, 2**40, tokens=True)


def above_zero(most: float = math.inf) -> Callable[[str], float]:
    """Returns the type of finite numbers above 0 and up to `most`."""

    def number(text: str) -> float:
        with suppress(ValueError):
            if 0 < float(text) <= min(most, sys.float_info.max):
                return float(text)
        bound = "" if most == math.inf else f" and at most {most:g}"
        raise argparse.ArgumentTypeError(f"a number above 0{bound} was expected, got {text!r:.40}")

    return number


def memory_size(text: str) -> int:
    """Reads a size of memory in bytes: 80GB (80 * 1000^3), or 80GiB (80 * 1024^3); also in MB, MiB, TB and TiB."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?) ?([MGT])(i?)B", text.strip())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"a size of memory such as 80GB or 80GiB was expected, got {text!r:.40}")
    return round(float(match[1]) * (1024 if match[3] else 1000) ** (2 + "MGT".index(match[2])))


def comma_list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Returns the type of one or several values with commas between them."""
    return lambda text: [kind(part) for part in text.split(",")]


def text_for(read: Callable[[str], Any], text: str) -> str:
    """Returns a text that `read` accepts; its ValueError becomes the error of the argument."""
    try:
        read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def model_source(text: str) -> str:
    """Reads a file, or a model as the recipes do; `BUNDLED` becomes the folder that they make of its package."""
    if Path(text).exists():
        return text
    sys.path.insert(0, str(next(place for place in RECIPE_FOLDERS if (place / "common.py").is_file())))
    common = importlib.import_module("common")  # of the recipes
    source: str = common.model_source(text)
    return str(common.installed_model()) if source == BUNDLED else source


def pattern_text(text: str) -> str:
    """Reads the text of a pattern."""
    return text_for(Pattern.parse, text)


def pattern_or_file(text: str) -> str:
    """Reads a pattern, or the file of a calibration."""
    if not text.endswith(".json"):
        return pattern_text(text)
    from ..evaluation.calibration.result import Calibration  # It imports torch.

    return text_for(Calibration.load, text_file(text)[0])


def text_file(text: str) -> tuple[str, str]:
    """Reads the name of a file in UTF-8, and returns it with the text in the file."""
    try:
        return text, Path(text).read_text(encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read (from {Path.cwd()}): {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a text in UTF-8: {error}") from None


def new_folder(text: str) -> Path:
    """Reads the name of a folder to write to; the command makes it."""
    for part in (Path(text), *Path(text).parents):
        if part.exists() and not part.is_dir():
            raise argparse.ArgumentTypeError(f"a folder was expected, but {str(part)!r} is a file")
    return Path(text)


def new_file(text: str, ends: Sequence[str]) -> Path:
    """Reads the name of a file to write, with one of these ends, in a folder that exists."""
    path = Path(text)
    if path.suffix not in ends:
        raise argparse.ArgumentTypeError(f"a file that ends in {' or '.join(ends)} was expected, got {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r} for {path.name!r}: make it first")
    return path


def picture_file(text: str) -> Path:
    """Reads the name of a picture to write; matplotlib must be there."""
    path = new_file(text, PICTURE_FORMATS)
    require_extra("a picture", "matplotlib")
    return path


def json_file(text: str) -> Path | str:
    """Reads the name of a file of figures to write; "" is stdout."""
    return text and new_file(text, (".json",))


def require_extra(purpose: str, module: str) -> None:
    """Refuses to go on if one of `EXTRAS` is missing; says what to install."""
    if importlib.util.find_spec(module) is None:
        raise Refusal(f"{purpose} needs {module}, which is not installed: pip install '{EXTRAS[module]}'")
