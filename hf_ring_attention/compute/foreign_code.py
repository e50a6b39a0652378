"""Code of other libraries: what a function names, and copies of functions in which some names mean something else."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from .private import code_of


def names_in(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of globals and attributes that a function reads."""
    code = code_of(function)
    return () if code is None else code.co_names


def keywords_in(function: Callable[..., Any]) -> list[tuple[str, ...]]:
    """Returns the names of the arguments that a function passes by name, one tuple for each of its calls."""
    code = code_of(function)
    constants = () if code is None else code.co_consts
    return [x for x in constants if isinstance(x, tuple) and all(isinstance(name, str) for name in x)]


@functools.cache
def strings_in(function: Callable[..., Any]) -> frozenset[str]:
    """Returns the strings in a function, the names of the arguments that it passes among them."""
    code = code_of(function)
    constants = () if code is None else code.co_consts
    return frozenset(x for x in constants if isinstance(x, str)).union(*keywords_in(function))


def globals_called(function: Callable[..., Any]) -> set[str]:
    """Returns the globals that a function reads by name."""
    code = code_of(function)
    steps = () if code is None else dis.get_instructions(code)
    return {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}


def rebound(function: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a copy of a function, without its decorators, in which these globals mean something else.

    It looks up all other globals in the function's module, each time anew. The function and its module stay unchanged.
    """
    own: Any = inspect.unwrap(function)
    space = _Namespace(own.__globals__, names)
    clone = FunctionType(own.__code__, space, own.__name__, own.__defaults__, own.__closure__)
    clone.__kwdefaults__ = own.__kwdefaults__
    return clone


class _Namespace(dict[str, Any]):
    """The globals of a copy, which lacks all but those that are rebound."""

    def __init__(self, behind: dict[str, Any], names: Mapping[str, Any]) -> None:
        super().__init__(names, __builtins__=behind["__builtins__"])
        self.behind = behind

    def __missing__(self, name: str) -> Any:
        return self.behind[name]
