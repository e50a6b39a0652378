"""`hf-ring-attention models`: which model types of Transformers work, and why others do not."""

from __future__ import annotations

import difflib
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version

from ..hf.model.models import release_of_table, supported_models
from .options import Parser, Refusal
from .output import print_table, wrote_json


def add_models(parser: Parser) -> None:
    text = "Model types, as config.json names them; default: all."
    parser.add_argument("types", nargs="*", metavar="TYPE", help=text)
    parser.add_json()


def models_command(args: Namespace) -> None:
    """Show which model types work on one device, over a ring and with packed rows.

    The answers come from a test that ran a tiny model of each type.

    Examples:
      hf-ring-attention models
      hf-ring-attention models llama qwen3 bloom
    """
    by_type = {model.model_type: model for model in supported_models()}
    models = [by_type[name] for name in args.types or by_type if name in by_type]
    installed, tested = version("transformers"), release_of_table()  # Transformers itself takes seconds to load.
    newer = (
        f"Transformers {installed} is installed, but this table is for {tested}; patch_model checks the model itself."
    )
    yes = {True: "yes", False: "no"}
    rows = [(x.model_type, x.status, yes[x.ring], yes[x.packed], x.reason or "") for x in models]
    if models and not wrote_json([asdict(model) for model in models], args.json):
        headings = ("type", "status", "ring", "packed rows", "reason")
        print_table("", headings, rows, [newer] if installed != tested else [], left=5)
    unknown = [_not_listed(name, by_type) for name in args.types if name not in by_type]
    if unknown:
        raise Refusal("; ".join(unknown), "TYPE")


def _not_listed(name: str, listed: Iterable[str]) -> str:
    from transformers import CONFIG_MAPPING  # It takes seconds to load.

    if name in CONFIG_MAPPING:
        kind = f"the table lists models that predict the next token, and {name!r} is of another kind"
        return f"{kind}: ra.patch_model(model) accepts or refuses it"
    near = difflib.get_close_matches(name, listed, n=3)
    hint = f": did you mean {' or '.join(near)}?" if near else ""
    return f"{name!r} is not a model type of Transformers {release_of_table()}{hint or ', as config.json names them'}"
