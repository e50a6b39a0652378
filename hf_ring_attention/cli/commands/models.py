"""`hf-ring-attention models`: which model types of Transformers work, and why others do not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Any

import typer

from ...hf.models import ModelSupport, release_of_table, supported_models
from ..model_table import counts, types_by_reason
from ..options import AsJson, refuse
from ..output import Sheet, print_json, print_sheet, terminal

EXAMPLES_OF_MODELS = """\b
Examples:
  hf-ring-attention models
  hf-ring-attention models llama qwen3 bloom
  hf-ring-attention models --refused
"""


def support_of(model_type: str) -> ModelSupport | None:
    """Returns the line of a model type in the table; None if it has none."""
    return next((model for model in supported_models() if model.model_type == model_type), None)


def models_command(
    types: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TYPE]...", help="Model types, as config.json names them; default: all."),
    ] = None,
    refused: Annotated[bool, typer.Option("--refused", help="Show only what does not work, by reason.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which model types work, on one device, over a ring and with packed rows.

    The answers come from running a tiny model of each type.
    """
    by_type = {model.model_type: model for model in supported_models()}
    chosen = [by_type[name] for name in types or by_type if name in by_type]
    if refused:
        chosen = [model for model in chosen if model.status != "supported"]
    if as_json:
        print_json([asdict(model) for model in chosen])
    elif chosen or not types:
        _print(chosen, bool(types) and not refused)
    for name in types or ():
        if name not in by_type:
            raise refuse(_not_listed(name, by_type), "TYPE")


def _not_listed(name: str, listed: Iterable[str]) -> str:
    from transformers import CONFIG_MAPPING  # It takes seconds to load.

    if name in CONFIG_MAPPING:
        return (
            f"the table lists models that predict the next token, and {name!r} is of another kind: ra.patch_model(model) "
            f"tells whether it is computed"
        )
    near = difflib.get_close_matches(name, listed, n=3)
    hint = f": did you mean {' or '.join(near)}?" if near else "."
    return (
        f"{name!r} is no model type of the Transformers release that was tested{hint} A type is the 'model_type' of a "
        f"config.json, such as llama"
    )


def _print(chosen: list[ModelSupport], by_name: bool) -> None:
    console = terminal()
    installed = version("transformers")  # Transformers itself takes seconds to load.
    if installed != release_of_table():
        console.print(
            f"Transformers {installed} is installed, and this table was made with {release_of_table()}: a type "
            f"may be another class there. patch_model decides by what it finds in a model.\n"
        )
    if by_name:
        _print_single(chosen, console)
    else:
        _print_all(chosen, console)


def _print_single(models: list[ModelSupport], console: Any) -> None:
    rows = [
        (model.model_type, model.status, _yes(model.ring), _yes(model.packed), model.reason or "") for model in models
    ]
    print_sheet(Sheet("", ("type", "status", "ring", "packed rows", "reason"), rows, left=5), console)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _print_all(models: list[ModelSupport], console: Any) -> None:
    console.print(counts(supported_models(), release_of_table()) + "\n")
    groups: dict[str, list[str]] = {}
    for model in models:
        if model.status == "supported":
            groups.setdefault(_how_far(model), []).append(model.model_type)
    working = [(name, len(types), ", ".join(types)) for name, types in sorted(groups.items(), key=lambda x: -len(x[1]))]
    if working:
        print_sheet(Sheet("Supported", ("where", "number", "types"), working, left=3), console)
    for status in ("refused", "untested"):
        grouped = types_by_reason([model for model in models if model.status == status])
        rows = [(reason, len(types), ", ".join(types)) for reason, types in grouped]
        if rows:
            print_sheet(Sheet(status.capitalize(), ("why", "number", "types"), rows, left=3), console)


def _how_far(model: ModelSupport) -> str:
    where = "one device and rings" if model.ring else "one device only"
    return f"{where}, {'packed rows too' if model.packed else 'no packed rows'}"
