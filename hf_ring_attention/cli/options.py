"""The options that several commands share, for typer, with the strict types of `arguments` and their errors."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer

from ..plan.choices import TransportKind
from ..plan.layouts import LayoutKind
from ..plan.problem import Documents
from .arguments import (
    MOST,
    at_least,
    comma_list,
    device,
    existing_file,
    memory_size,
    new_folder,
    one_of,
    pattern_text,
    picture_file,
    positive,
    token_count,
)

Value = TypeVar("Value")

#: The errors of click for wrong arguments, and for all that ends a command. Some releases of typer have a click of their own.
UsageError: Any = typer.BadParameter.__bases__[0]
CommandError: Any = UsageError.__bases__[0]


class Refusal(UsageError):
    """The error of a command that was understood and is not carried out; its help would not tell why."""


DTYPES = ("float32", "bfloat16", "float16", "float64")
#: The patterns that a checkpoint is measured under, unless others are named.
MEASURED_PATTERNS = ["exact", "window:512+4", "pyramid:512,3"]


def parsed(kind: Callable[[str], Value]) -> Callable[[str], Value]:
    """Returns a type of `arguments` for typer, which calls it on defaults too."""

    def read_value(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return kind(value)
        except argparse.ArgumentTypeError as error:
            raise typer.BadParameter(str(error)) from None

    return read_value


def refuse(message: str, option: str | None = None) -> Any:
    """Returns the error of an option, or of several that do not go together, to be raised."""
    return Refusal(message) if option is None else typer.BadParameter(message, param_hint=f"'{option}'")


def checked(option: str, kind: Callable[..., Value], *values: Any) -> Value:
    """Returns what a type of `arguments` makes of values; wrong ones are refused in the name of an option."""
    try:
        return kind(*values)
    except (argparse.ArgumentTypeError, ValueError, NotImplementedError) as error:
        raise refuse(str(error), option) from None


def read_text(path: Path, option: str) -> str:
    """Returns the text of a file in UTF-8; another file is refused in the name of an option."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise refuse(f"{path} is not a text in UTF-8: {error.reason} at byte {error.start}", option) from None


def names_of_files(paths: Sequence[Path]) -> dict[Path, str]:
    """Returns the name that tables and reports give each file: its own, or the paths of all where two files share one."""
    alike = len({path.name for path in paths}) < len(set(paths))
    return {path: str(path) if alike else path.name for path in paths}


def number_option(name: str, text: str, least: int = 1, most: int = MOST) -> Any:
    """Returns an option that takes a whole number."""
    return typer.Option(name, parser=parsed(at_least(least, most=most)), metavar="N", help=text)


def positive_option(name: str, text: str, metavar: str = "X") -> Any:
    """Returns an option that takes a finite number above 0."""
    return typer.Option(name, parser=parsed(positive), metavar=metavar, help=text)


def memory_option(name: str, text: str) -> Any:
    """Returns an option that takes a size of memory."""
    return typer.Option(name, parser=parsed(memory_size), metavar="SIZE", help=text)


def model_option(text: str) -> Any:
    """Returns the option that names a model of the hub or a folder."""
    return typer.Option("--model", metavar="ID_OR_FOLDER", help=text)


def pattern_option(
    text: str, name: str = "--pattern", kind: Callable[[str], str] = pattern_text, default: str | bool = True
) -> Any:
    """Returns an option that takes patterns.

    Args:
        default: what --help shows where the parameter has no default, since the model or the command says it.
    """
    return typer.Option(name, parser=parsed(kind), metavar="TEXT", help=text, show_default=default)


def texts_option(name: str, text: str) -> Any:
    """Returns an option that takes files of text."""
    return typer.Option(name, parser=parsed(existing_file), metavar="FILE", help=text)


def folder_option(name: str, text: str, kind: Callable[[str], Path] = new_folder) -> Any:
    """Returns an option that takes a folder to write to."""
    return typer.Option(name, parser=parsed(kind), metavar="FOLDER", help=text)


def picture_option(name: str, text: str) -> Any:
    """Returns an option that takes the file of a picture; matplotlib must be installed."""
    return typer.Option(name, parser=parsed(picture_file), metavar="FILE.png", help=text)


def tokens_option(name: str, text: str, least: int = 1, multiple_of: int = 1) -> Any:
    """Returns an option that takes a number of tokens."""
    return typer.Option(name, parser=parsed(token_count(least, multiple_of)), metavar="N", help=text)


def list_option(name: str, kind: Callable[[str], Any], text: str, metavar: str = "N,N,...") -> Any:
    """Returns an option that takes one or several values with commas between them."""
    return typer.Option(name, parser=parsed(comma_list(kind)), metavar=metavar, help=text)


def documents_of_lengths(lengths: list[int], tokens: int) -> Documents:
    """Returns one row of documents of these lengths, one behind the other."""
    ends = list(itertools.accumulate(lengths, initial=0))
    if ends[-1] > tokens:
        numbers = " + ".join(map(str, lengths))
        raise refuse(f"a row has {tokens} tokens, and the documents {numbers} = {ends[-1]}", "--documents")
    return (tuple(itertools.pairwise(ends)),)


def choice_option(name: str, choices: tuple[str, ...], text: str) -> Any:
    """Returns an option that takes one of several names."""
    return typer.Option(name, parser=parsed(one_of(*choices)), metavar="NAME", help=f"{text}: {', '.join(choices)}.")


AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to stdout, and nothing else there.")]
OnePattern = Annotated[str, pattern_option("A pattern, such as exact or window:512+4.")]
CausalModel = Annotated[str, model_option("A causal language model: hub id or folder.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that the model brings; read it first.")
]
ModelDtype = Annotated[str, choice_option("--dtype", ("float32", "bfloat16", "float16"), "Type of numbers")]
AnyDtype = Annotated[str, choice_option("--dtype", DTYPES, "Type of numbers")]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", parser=parsed(device), metavar="NAME", help="cpu or cuda; default: cuda if there is one."),
]
RingSize = Annotated[int | None, number_option("--ring-size", "Processes that share each sequence; default: all.")]
QueryHeads = Annotated[int | None, number_option("--heads", "Query heads, without --model.")]
KeyValueHeads = Annotated[
    int | None, number_option("--kv-heads", "Key/value heads, without --model; default: as --heads.")
]
HeadDim = Annotated[int | None, number_option("--head-dim", "Size of a head, without --model.")]
RowTokens = Annotated[int, tokens_option("--tokens", "Tokens of the whole sequence: 4096, 128k, 1M.")]
RingRanks = Annotated[int, number_option("--ranks", "Ranks of the ring.")]
LayoutName = Annotated[
    str, choice_option("--layout", ("auto", *get_args(LayoutKind)), "How the row is divided among the ranks")
]
TransportName = Annotated[str, choice_option("--transport", get_args(TransportKind), "How keys travel")]
RingHeads = Annotated[
    int | None,
    number_option("--ring-heads", "With --transport heads: neighbours that exchange heads; default: all ranks."),
]
DocumentLengths = Annotated[
    Any, list_option("--documents", token_count(), "Lengths of the documents that are packed into a row. Default: one.")
]
Bidirectional = Annotated[bool, typer.Option("--bidirectional", help="Queries also see keys after them.")]
