"""`python -m tests.survey` runs a tiny model of every causal type of Transformers, as `tests/support/probe.py` describes it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from hf_ring_attention.cli.checks.precision import float64
from hf_ring_attention.cli.checks.tiny_models import CAUSAL_TYPES
from hf_ring_attention.cli.model_table import models_page
from hf_ring_attention.hf import models as models_module
from tests.support.probe import survey


def run_survey(types: list[str]) -> None:
    """Surveys these types and prints the results; without types, surveys all and writes their table."""
    unknown = [name for name in types if name not in CAUSAL_TYPES]
    if unknown:
        sys.exit(
            f"Transformers has no causal model type {', '.join(unknown)}: a type is what config.json calls model_type"
        )
    torch.set_num_threads(1)
    models = []
    for model_type in types or CAUSAL_TYPES:
        with float64():
            models.append(survey(model_type))
        print(model_type, models[-1].status, models[-1].reason if types else "", flush=True)
    if not types:
        folder = Path(models_module.__file__).parent
        lines = json.dumps([asdict(model) for model in models], indent=1)
        text = f'{{"transformers": "{transformers.__version__}", "models": {lines}}}\n'
        (folder / "models.json").write_text(text, encoding="utf-8")
        (folder / "MODELS.md").write_text(models_page(models, transformers.__version__), encoding="utf-8")


if __name__ == "__main__":
    run_survey(sys.argv[1:])
