"""`python -m tests.survey` runs a tiny model of every causal type of Transformers, as `tests/support/probe.py` describes it.

`python -m tests.survey --adapters` runs every kind of adapter of PEFT alone.
"""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import peft
import torch
import transformers

from hf_ring_attention import hf
from hf_ring_attention.hf.model.types import INDEXED, OWN_ATTENTION
from tests.support.adapters import KINDS, survey_adapter
from tests.support.probe import survey
from tests.support.tiny_models import CAUSAL_TYPES, SEEING_TYPES
from tests.support.tolerance import float64

_FOLDER = Path(hf.__file__).parent

#: The first lines of hf/MODELS.md.
_HEAD = """# Model types

`make models` runs a tiny model of every causal type of Transformers in float64 and writes this page and `models.json`, which
`ra.supported_models()` reads. A supported type has the logits and gradients of eager attention: alone, with padding on either
side, and, with a yes in the columns, over a ring of two ranks and with several documents in a row. The tests run every line
again. A type that is not listed here may still be supported: `ra.patch_model` looks at the model to decide.
"""


#: Families by the names of their checkpoints, newest first, and the types of their text models.
_NAMES = {
    "zai-org/GLM-5.3-Flash": "glm5_next",
    "Qwen/Qwen4-Exp": "qwen4_exp",
    "mistralai/Mistral-Large-4-1T-A52B": "mistral_large4",
    "tencent/Hy4-preview": "hy_v4",
    "tencent/Hy4": "hy_v4_vl",
    "dots-studio/dots3-note-prev": "dots3_note",
    "MiniMaxAI/MiniMax-M3": "minimax_m3_vl_text",
    "skt/A.X-K2": "axk2",
    "deepseek-ai/DeepSeek-V4-Flash-Base": "deepseek_v4",
    "inclusionAI/Ling-3.0-Flash": "bailing_hybrid",
    "JetBrains/Mellum2-12B-A2.5B-Base": "mellum",
    "zai-org/GLM-5": "glm_moe_dsa",
    "google/gemma-4-e2b-it": "gemma4_text",
    "Qwen/Qwen3.5-27B": "qwen3_5_text",
    "Qwen/Qwen3.5-35B-A3B": "qwen3_5_moe_text",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron_h",
    "mistralai/Ministral-3-8B-Base-2512": "ministral3",
    "deepseek-ai/DeepSeek-V3.2-Exp": "deepseek_v32",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "kimi_linear",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3_next",
    "openai/gpt-oss-20b": "gpt_oss",
    "zai-org/GLM-4.5": "glm4_moe",
    "HuggingFaceTB/SmolLM3-3B": "smollm3",
    "Qwen/Qwen3-8B": "qwen3",
    "meta-llama/Llama-3.1-8B": "llama",
}
_OF_NAMES = """\
## By name

"Patterns" says whether `ra.patch_model(model, "window:512+4")` computes them; the others choose their keys at run time, or keep
their own attention, and take `ra.patch_model(model)`. `hf-ring-attention explain --model NAME` shows what a ring does.

| checkpoint | type | one device | ring | packed | patterns |
|---|---|---|---|---|---|"""


#: The layers that a reason lists, such as "layers 0 and 2 are 'conv', which".
_LAYERS = re.compile(r"^layers? [\d, and]+ (?:is|are) ('\w+'(?: or '\w+')*), which")


_ADAPTERS = """# Adapters

`make models` runs every kind of adapter of PEFT {release}, and the variants of LoRA, on a tiny Llama over a ring of two ranks
in float64. "equal" means: loss, logits and gradients equal those of one process with eager attention. The tests run the lines
again. Settings of LoRA that only change how its weights begin (PiSSA, OLoRA, EVA, CorDA, LoftQ, LoRA-GA) are not listed.

| adapter | over a ring |
|---|---|
"""


def write_adapters():
    """Writes hf/ADAPTERS.md."""
    with float64():
        lines = [f"| {kind} | {survey_adapter(kind)} |" for kind in KINDS]
    text = _ADAPTERS.format(release=peft.__version__) + "\n".join(lines) + "\n"
    (_FOLDER / "ADAPTERS.md").write_text(text, encoding="utf-8")


def run_survey(types):
    """Surveys these types and prints the results; without types, surveys all and writes their table."""
    surveyed = sorted((*CAUSAL_TYPES, *SEEING_TYPES))
    unknown = [name for name in types if name not in surveyed]
    if unknown:
        sys.exit(f"Transformers lacks the causal model type {', '.join(unknown)}: take the model_type of config.json")
    torch.set_num_threads(1)
    if not types:
        write_adapters()
    models = []
    for model_type in types or surveyed:
        with float64():
            models.append(survey(model_type))
        print(model_type, models[-1].status, models[-1].reason if types else "", flush=True)
    if not types:
        lines = json.dumps([asdict(model) for model in models], indent=1)
        text = f'{{"transformers": "{transformers.__version__}", "models": {lines}}}\n'
        (_FOLDER / "model" / "models.json").write_text(text, encoding="utf-8")
        (_FOLDER / "MODELS.md").write_text(models_page(models, transformers.__version__), encoding="utf-8")


def models_page(models, release):
    """Returns the text of hf/MODELS.md, of the models of a release of Transformers."""
    supported = [model for model in models if model.status == "supported"]
    by_type = {model.model_type: model for model in models}
    yes = {True: "yes", False: "no"}
    names = []
    for name, kind in _NAMES.items():
        of_text = {kind, f"{kind}_text", kind.removesuffix("_vl")}
        model, own = by_type[kind], bool(of_text & {*INDEXED, *OWN_ATTENTION})
        cells = yes[model.status == "supported"], yes[model.ring], yes[model.packed], yes[not own]
        names.append(f"| {name} | `{kind}` | {' | '.join(cells)} |")
    lines = [
        _HEAD,
        counts(models, release),
        "",
        _OF_NAMES,
        *names,
        "",
        "## Supported",
        "",
        "| type | ring | packed |",
        "|---|---|---|",
    ]
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


def general_reason(model):
    """Returns why a type is refused, without the names of its class and the numbers of its layers."""
    reason = model.reason.removeprefix(model.model_class).lstrip(": ")
    reason = _LAYERS.sub(r"layers are \1, which", reason)
    return reason if reason.startswith("ring_dilated") else reason[:1].upper() + reason[1:]


def types_by_reason(models):
    """Returns pairs (reason, model types), those with the most types first; leaves out models without a reason."""
    groups = {}
    for model in models:
        groups.setdefault(general_reason(model), []).append(model.model_type)
    groups.pop("", None)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))


def counts(models, release):
    """Returns one sentence with the numbers of types that are supported, refused and untested."""
    count = {status: sum(model.status == status for model in models) for status in ("supported", "refused", "untested")}
    ring, packed = sum(model.ring for model in models), sum(model.packed for model in models)
    return (
        f"Of the {len(models)} causal model types of Transformers {release}, {count['supported']} are supported ({ring} of "
        f"them also over a ring, {packed} with packed rows), {count['refused']} are refused with a reason, and "
        f"{count['untested']} are untested. Of types that see, those are listed whose text models choose their keys."
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--adapters"]:
        write_adapters()
    else:
        run_survey(sys.argv[1:])
