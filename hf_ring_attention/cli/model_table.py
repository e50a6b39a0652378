"""The page of model types, hf/MODELS.md: which types "ring_dilated" computes, and the reasons against the others.

A reason names the class and the layers of one model. The page leaves those names out, so that types which are refused for the
same reason stand together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..hf.models import ModelSupport

#: A reason begins with the name of a model's class, which may stand before a colon; AutoModelForCausalLM is not such a name.
_CLASS = re.compile(r"^(?!Auto)[A-Za-z]\w*(For[A-Z]\w+|Model|LMHeadModel)(?=[ :]):? ?")
#: The layers that a reason lists, such as "layer 0 is of type 'conv' (of this or another such type are layers [0, 2]): ".
_LAYERS = re.compile(r"^layer \d+ is of type ('\w+') \([^)]*\): ")

_HEAD = """# Model types

`make models` runs a tiny model of every causal type of Transformers in float64 and writes this page and `models.json`, which
`ra.supported_models()` reads. A supported type has the logits and gradients of eager attention: alone, with padding on either
side, and, where the columns say yes, over a ring of two ranks and with several documents in a row. The tests run every line
again. A type that is not listed here is not refused for that: `ra.patch_model` decides by what it finds in the model.
"""


def general_reason(model: ModelSupport) -> str:
    """Returns why a type is refused, without the names of its class and the numbers of its layers."""
    reason = _CLASS.sub("", model.reason, count=1)
    reason = _LAYERS.sub(r"layers of type \1: ", reason)
    return reason if reason.startswith("ring_dilated") else reason[:1].upper() + reason[1:]


def types_by_reason(models: Iterable[ModelSupport]) -> list[tuple[str, list[str]]]:
    """Returns pairs (reason, model types), those with the most types first; models without a reason are left out."""
    groups: dict[str, list[str]] = {}
    for model in models:
        if model.reason:
            groups.setdefault(general_reason(model), []).append(model.model_type)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))


def counts(models: Sequence[ModelSupport], release: str) -> str:
    """Returns one sentence that says how many types of a release of Transformers are supported, refused and untested."""
    count = {status: sum(model.status == status for model in models) for status in ("supported", "refused", "untested")}
    ring, packed = sum(model.ring for model in models), sum(model.packed for model in models)
    return (
        f"Of the {len(models)} causal model types of Transformers {release}, {count['supported']} are supported ({ring} of "
        f"them also over a ring, {packed} with packed rows), {count['refused']} are refused with a reason, and "
        f"{count['untested']} are untested."
    )


def models_page(models: Sequence[ModelSupport], release: str) -> str:
    """Returns the text of hf/MODELS.md, of the models of a release of Transformers."""
    supported = [model for model in models if model.status == "supported"]
    lines = [_HEAD, counts(models, release), "", "## Supported", "", "| type | ring | packed |", "|---|---|---|"]
    yes = {True: "yes", False: "no"}
    lines += [f"| `{model.model_type}` | {yes[model.ring]} | {yes[model.packed]} |" for model in supported]
    for title, chosen in (
        ("Supported on one device, not over a ring", supported),
        ("Refused", [model for model in models if model.status == "refused"]),
        ("Untested", [model for model in models if model.status == "untested"]),
    ):
        lines += ["", f"## {title}"]
        for reason, types in types_by_reason(chosen):
            lines += ["", f"**{len(types)}**: " + ", ".join(f"`{name}`" for name in types), "", f"> {reason}"]
    return "\n".join(lines) + "\n"
