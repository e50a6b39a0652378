"""`python -m tests.pages` (`make docs`) writes recipes/guide/api.md, the page of all public names, from their docstrings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hf_ring_attention as ra
from hf_ring_attention.plan import notation

API = Path(__file__).parents[1] / "recipes" / "guide" / "api.md"
#: The public names of each section.
SECTIONS = {
    "Patterns": "Pattern Segment Window Sink",
    "Models": "patch_model patch_config exact_attention supported_models ModelSupport",
    "Rings": "Ring SequenceLayout ring_attention Traffic Decision simulate run_simulated naming_lost_processes",
    "Training": "RingTrainer RingTrainerMixin RingTrainingArguments pack_documents distillation_loss keep_attention "
    "sliced_layers mtp_loss",
    "Generation": "prefill PatternCache",
    "Quality": "perplexity PerplexityReport calibrate Calibration",
    "Cost": "explain Explanation estimate Estimate",
}
#: What users call and read of a class, beside its documented attributes.
MEMBERS = {
    "Pattern": "exact window pyramid longnet by_kv_head parse flop_share multiplicity num_kv_heads of_kv_head",
    "Ring": "alone from_accelerator prepare_data_loader layout_for shard unshard kernels traffic reset_traffic",
    "SequenceLayout": "positions pieces padded_len local_len",
    "RingTrainerMixin": "when_not_finite",
    "PatternCache": "num_rows nbytes crop activate_past_recording recording reset",
    "PerplexityReport": "perplexity",
    "Calibration": "flop_share share of_heads texts_of_layers save load to_dict from_dict",
    "Explanation": "traffic busiest",
    "Estimate": "peak peak_phase host fits cache caches not_counted",
}
HEAD = """# API

Every public name, with its arguments, shapes, errors and an example. `make docs` makes this page from the docstrings.

Tests run all examples, each behind this:

```python
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import hf_ring_attention as ra


def tiny_llama():  # 2 layers, random weights
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.08, attn_implementation="ring_dilated"))
```

- A function that takes a `Pattern` also takes [its text](#patterns), such as `"window:512+4"`.
- Shapes: B rows of a batch, n tokens, H query heads, Hkv key/value heads, D numbers of a query or key, Dv of a value.
- [Ideas](ideas.md) explains patterns, rings and layouts. The [map](../../hf_ring_attention/README.md) has a glossary.
"""


def api_page() -> str:
    """Returns the text of the page; a public name in no section, or in two, is a ValueError."""
    sections = {title: names.split() for title, names in SECTIONS.items()}
    listed = sorted(sum(sections.values(), ["__version__"]))
    if listed != sorted(ra.__all__):
        raise ValueError(f"SECTIONS of {__name__} must have each public name once: {sorted({*listed} ^ {*ra.__all__})}")
    parts = [HEAD]
    for title, names in sections.items():
        links = (f"[{name}](#{heading(name).lower().replace('.', '').replace(' ', '-')})" for name in names)
        parts.append(f"- **{title}**: {', '.join(links)}")
    for title, names in sections.items():
        parts.append(f"\n## {title}")
        if title == "Patterns":
            parts.append("\n" + paragraphs((inspect.getdoc(notation) or "").rpartition("\n\n")[0]))
        for name in names:
            members = MEMBERS.get(name, "").split()
            parts += [f"\n### {heading(name)}", *entry(getattr(ra, name), f"ra.{name}", members)]
    return "\n".join(parts) + "\n"


def heading(name: str) -> str:
    """Returns the heading of a name: `Estimate` and `estimate` need different anchors."""
    return f"class ra.{name}" if inspect.isclass(getattr(ra, name)) else f"ra.{name}"


def entry(public: Any, name: str, members: Sequence[str] = ()) -> Iterator[str]:
    """Yields the lines of a name below its heading, then the entries of these methods of a class."""
    text, *pairs = re.split(r"^(Args|Attributes|Returns|Raises|Example):\n", inspect.getdoc(public) or "", flags=re.M)
    sections = dict(zip(pairs[::2], (textwrap.dedent(section).strip() for section in pairs[1::2])))
    attributes, methods = [sections.get("Attributes", "")], {}
    for member in members:
        found = inspect.getattr_static(public, member)
        if isinstance(found, (property, functools.cached_property)):
            meaning = " ".join((inspect.getdoc(found) or "").split())
            attributes.append(f"{member}: {meaning[:1].lower()}{meaning[1:]}")
        else:
            methods[member] = getattr(public, member)
    if "Attributes" not in sections or "Args" in sections:  # Other classes are results, which users do not make.
        yield f"\n```python\n{signature(public, name)}\n```"
    yield "\n" + paragraphs(text)
    yield from items("", sections.get("Args", ""))
    yield from items("\n**Attributes**", "\n".join(attributes))
    if "Returns" in sections:
        yield f"\n**Returns**\n\n{paragraphs(sections['Returns'])}"
    yield from items("\n**Errors**", sections.get("Raises", ""))
    if "Example" in sections:
        yield f"\n```pycon\n{sections['Example']}\n```"
    for member, method in methods.items():
        short = f"{public.__name__}.{member}"
        yield from (f"\n#### {short}", *entry(method, f"ra.{short}" if inspect.ismethod(method) else short))


def paragraphs(text: str) -> str:
    """Returns a docstring's text, a line for each paragraph; what is indented, such as a formula, stays as it is."""
    blocks = text.strip("\n").split("\n\n")
    return "\n\n".join(block if block.startswith("    ") else " ".join(block.split()) for block in blocks)


def items(title: str, text: str) -> Iterator[str]:
    """Yields a list of the lines "name: text", each with the indented lines below it."""
    found = re.findall(r"^(\w[\w, ]*): (.*(?:\n .*)*)", text, flags=re.M)
    yield from [f"{title}\n"] if found and title else [""] if found else []
    for names, meaning in found:
        yield f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {' '.join(meaning.split())}"


def signature(public: Any, name: str) -> str:
    """Returns a call of a name with types and defaults; one that is longer than a line has a line for each argument."""
    found = inspect.signature(public)
    parameters = [parameter for parameter in found.parameters.values() if parameter.name != "self"]
    shown = []
    bases = public.__mro__ if dataclasses.is_dataclass(public) and inspect.isclass(public) else ()
    if any(base.__module__.startswith("transformers") for base in bases):
        shown.append("...")  # The arguments of Transformers.
        parameters = [parameter for parameter in parameters if parameter.name in inspect.get_annotations(public)]
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        shown.append(str(parameter.replace(annotation=parameter.empty, default=parameter.empty)))
        shown[-1] += ("" if parameter.annotation is parameter.empty else f": {written(parameter.annotation)}") + default
    returned = "" if inspect.isclass(public) else f" -> {written(found.return_annotation)}"
    line = f"{name}({', '.join(shown)}){returned}"
    line = line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(shown) + f",\n){returned}"
    return line.replace("'", '"')


def written(annotation: Any) -> str:
    """Returns a type as the source has it, with the texts that a name such as `TransportKind` allows."""
    return re.sub(r"\w+", lambda word: literals().get(word[0], word[0]), str(annotation)).replace(
        "Iterator[None]", "AbstractContextManager[None]"
    )


@functools.cache
def literals() -> dict[str, str]:
    """Returns the Literals of the package by their names."""
    loaded = [module for name, module in sorted(sys.modules.items()) if name.startswith(ra.__name__)]
    named = (pair for module in loaded for pair in vars(module).items())
    return {name: str(kind)[len("typing.") :] for name, kind in named if typing.get_origin(kind) is typing.Literal}


if __name__ == "__main__":
    API.write_text(api_page(), encoding="utf-8")
    print(f"wrote {API}")
