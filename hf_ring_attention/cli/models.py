"""`hf-ring-attention models`: which model types of Transformers work, and why others do not."""

from __future__ import annotations

import difflib
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version

from ..hf.models import ModelSupport, release_of_table, supported_models
from .options import Parser, Refusal
from .output import print_json, print_table, terminal

#: The layers that a reason lists, such as "layer 0 is of type 'conv' (of this or another such type are layers [0, 2]): ".
_LAYERS = re.compile(r"^layer \d+ is of type ('\w+') \([^)]*\): ")


def add_models(parser: Parser) -> None:
    """Adds the options of `models`."""
    add, text = parser.add_argument, "Model types, as config.json names them; default: all."
    add("types", nargs="*", metavar="TYPE", help=text)
    parser.add_json()


def models_command(args: Namespace) -> None:
    """Show which model types work, on one device, over a ring and with packed rows.

    The answers come from running a tiny model of each type.

    Examples:
      hf-ring-attention models
      hf-ring-attention models llama qwen3 bloom
    """
    by_type = {model.model_type: model for model in supported_models()}
    models = [by_type[name] for name in args.types or by_type if name in by_type]
    if args.json:
        print_json([asdict(model) for model in models])
    elif models or not args.types:
        _warn_of_release()
        _print_each(models) if args.types else _print_by_reason(models)
    for name in args.types:
        if name not in by_type:
            raise Refusal(_not_listed(name, by_type), "TYPE")


def why_not(model_type: str, ranks: int) -> str | None:
    """Returns why a model type is not computed on so many ranks, by the table; None if the table does not refuse it."""
    support = next((model for model in supported_models() if model.model_type == model_type), None)
    accepted = {"supported": ranks == 1, "untested": True, "refused": False}
    if support is None or support.ring or accepted[support.status]:
        return None
    where = " over a ring" if support.status == "supported" else ""
    return f"models of type {model_type!r} are not computed{where}: {support.reason}"


def _not_listed(name: str, listed: Iterable[str]) -> str:
    from transformers import CONFIG_MAPPING  # It takes seconds to load.

    if name in CONFIG_MAPPING:
        return (
            f"the table lists models that predict the next token, and {name!r} is of another kind: ra.patch_model(model) "
            f"accepts or refuses it"
        )
    near = difflib.get_close_matches(name, listed, n=3)
    hint = f": did you mean {' or '.join(near)}?" if near else "."
    return f"{name!r} is not a model type of Transformers {release_of_table()}{hint} Types are such as llama, in config.json"


def _warn_of_release() -> None:
    installed, tested = version("transformers"), release_of_table()  # Transformers itself takes seconds to load.
    if installed != tested:
        text = f"Transformers {installed} is installed, and this table is of {tested}: patch_model looks at the model."
        terminal().print(f"{text}\n")


def _print_each(models: list[ModelSupport]) -> None:
    yes = {True: "yes", False: "no"}
    rows = [(x.model_type, x.status, yes[x.ring], yes[x.packed], x.reason or "") for x in models]
    print_table("", ("type", "status", "ring", "packed rows", "reason"), rows, left=5)


def _print_by_reason(models: list[ModelSupport]) -> None:
    terminal().print(counts(models, release_of_table()) + "\n")
    for status, reason in (("supported", _reach), ("refused", general_reason), ("untested", general_reason)):
        groups = types_by_reason([model for model in models if model.status == status], reason)
        rows = [(text, len(types), ", ".join(types)) for text, types in groups]
        if rows:
            print_table(status.capitalize(), ("reach, or reason", "number", "types"), rows, left=3)


def _reach(model: ModelSupport) -> str:
    packed = "packed rows too" if model.packed else "no packed rows"
    return f"{'one device and rings' if model.ring else 'one device only'}, {packed}"


def general_reason(model: ModelSupport) -> str:
    """Returns why a type is refused, without the names of its class and the numbers of its layers."""
    reason = model.reason.removeprefix(model.model_class).lstrip(": ")
    reason = _LAYERS.sub(r"layers of type \1: ", reason)
    return reason if reason.startswith("ring_dilated") else reason[:1].upper() + reason[1:]


def types_by_reason(
    models: Iterable[ModelSupport], reason: Callable[[ModelSupport], str] = general_reason
) -> list[tuple[str, list[str]]]:
    """Returns pairs (reason, model types), those with the most types first; leaves out models without a reason."""
    groups: dict[str, list[str]] = {}
    for model in models:
        groups.setdefault(reason(model), []).append(model.model_type)
    groups.pop("", None)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))


def counts(models: Sequence[ModelSupport], release: str) -> str:
    """Returns one sentence with the numbers of types that are supported, refused and untested."""
    count = {status: sum(model.status == status for model in models) for status in ("supported", "refused", "untested")}
    ring, packed = sum(model.ring for model in models), sum(model.packed for model in models)
    return (
        f"Of the {len(models)} causal model types of Transformers {release}, {count['supported']} are supported ({ring} of "
        f"them also over a ring, {packed} with packed rows), {count['refused']} are refused with a reason, and "
        f"{count['untested']} are untested."
    )
