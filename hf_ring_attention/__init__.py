"""Exact and dilated ring attention for Hugging Face Transformers.

Importing the package registers the attention implementation "ring_dilated", and its mask, with Transformers: at once where
Transformers has been imported, else when it is. The names below are loaded when they are first used, so that patterns and
plans need neither torch nor Transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .hf.on_import import register_with_transformers

if TYPE_CHECKING:
    from .cost.estimate import Estimate as Estimate
    from .cost.estimate import estimate as estimate
    from .cost.explain import Explanation as Explanation
    from .cost.explain import explain as explain
    from .evaluation.calibration.calibrate import calibrate as calibrate
    from .evaluation.calibration.result import Calibration as Calibration
    from .evaluation.perplexity import PerplexityReport as PerplexityReport
    from .evaluation.perplexity import perplexity as perplexity
    from .hf.config import patch_config as patch_config
    from .hf.exact import exact_attention as exact_attention
    from .hf.generation import prefill as prefill
    from .hf.models import ModelSupport as ModelSupport
    from .hf.models import supported_models as supported_models
    from .hf.patch import patch_model as patch_model
    from .plan.branches import Last as Last
    from .plan.branches import Segment as Segment
    from .plan.branches import Sink as Sink
    from .plan.branches import Window as Window
    from .plan.choices import Decision as Decision
    from .plan.layouts import SequenceLayout as SequenceLayout
    from .plan.patterns import Pattern as Pattern
    from .ring.attention import ring_attention as ring_attention
    from .ring.ring import Ring as Ring
    from .ring.simulation import run_simulated as run_simulated
    from .ring.simulation import simulate as simulate
    from .training.arguments import RingTrainingArguments as RingTrainingArguments
    from .training.distillation import distillation_loss as distillation_loss
    from .training.packing import pack_documents as pack_documents
    from .training.trainer import RingTrainer as RingTrainer
    from .training.trainer import RingTrainerMixin as RingTrainerMixin
    from .transport.lost_processes import naming_lost_processes as naming_lost_processes
    from .transport.transports import Traffic as Traffic

#: Where each public name is, as in the imports above, which only type checkers run.
_HOMES = {
    "Calibration": "evaluation.calibration.result",
    "Decision": "plan.choices",
    "Estimate": "cost.estimate",
    "Explanation": "cost.explain",
    "Last": "plan.branches",
    "ModelSupport": "hf.models",
    "Pattern": "plan.patterns",
    "PerplexityReport": "evaluation.perplexity",
    "Ring": "ring.ring",
    "RingTrainer": "training.trainer",
    "RingTrainerMixin": "training.trainer",
    "RingTrainingArguments": "training.arguments",
    "Segment": "plan.branches",
    "SequenceLayout": "plan.layouts",
    "Sink": "plan.branches",
    "Traffic": "transport.transports",
    "Window": "plan.branches",
    "calibrate": "evaluation.calibration.calibrate",
    "distillation_loss": "training.distillation",
    "estimate": "cost.estimate",
    "exact_attention": "hf.exact",
    "explain": "cost.explain",
    "naming_lost_processes": "transport.lost_processes",
    "pack_documents": "training.packing",
    "patch_config": "hf.config",
    "patch_model": "hf.patch",
    "perplexity": "evaluation.perplexity",
    "prefill": "hf.generation",
    "ring_attention": "ring.attention",
    "run_simulated": "ring.simulation",
    "simulate": "ring.simulation",
    "supported_models": "hf.models",
}

__all__ = [
    "Calibration",
    "Decision",
    "Estimate",
    "Explanation",
    "Last",
    "ModelSupport",
    "Pattern",
    "PerplexityReport",
    "Ring",
    "RingTrainer",
    "RingTrainerMixin",
    "RingTrainingArguments",
    "Segment",
    "SequenceLayout",
    "Sink",
    "Traffic",
    "Window",
    "__version__",
    "calibrate",
    "distillation_loss",
    "estimate",
    "exact_attention",
    "explain",
    "naming_lost_processes",
    "pack_documents",
    "patch_config",
    "patch_model",
    "perplexity",
    "prefill",
    "ring_attention",
    "run_simulated",
    "simulate",
    "supported_models",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value  # the next time it is found at once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_transformers()
