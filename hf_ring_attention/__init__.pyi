"""The public names, and where they are: type checkers and `__init__.py` read this."""

from ._version import __version__ as __version__
from .cost.estimate import Estimate as Estimate
from .cost.estimate import estimate as estimate
from .cost.explain import Explanation as Explanation
from .cost.explain import explain as explain
from .evaluation.calibration.calibrate import calibrate as calibrate
from .evaluation.calibration.result import Calibration as Calibration
from .evaluation.perplexity import PerplexityReport as PerplexityReport
from .evaluation.perplexity import perplexity as perplexity
from .hf.cache.pattern_cache import PatternCache as PatternCache
from .hf.cache.prefill import prefill as prefill
from .hf.forward_pass import exact_attention as exact_attention
from .hf.model.config import patch_config as patch_config
from .hf.model.models import ModelSupport as ModelSupport
from .hf.model.models import supported_models as supported_models
from .hf.patch import patch_model as patch_model
from .plan.branches import Segment as Segment
from .plan.branches import Sink as Sink
from .plan.branches import Window as Window
from .plan.choices import Decision as Decision
from .plan.layouts import SequenceLayout as SequenceLayout
from .plan.patterns import Pattern as Pattern
from .ring.attention import ring_attention as ring_attention
from .ring.operator import keep_attention as keep_attention
from .ring.ring import Ring as Ring
from .ring.simulation import run_simulated as run_simulated
from .ring.simulation import simulate as simulate
from .training.distillation import distillation_loss as distillation_loss
from .training.mtp import mtp_loss as mtp_loss
from .training.packing import pack_documents as pack_documents
from .training.sliced_layers import sliced_layers as sliced_layers
from .training.trainer import RingTrainer as RingTrainer
from .training.trainer import RingTrainerMixin as RingTrainerMixin
from .training.trainer import RingTrainingArguments as RingTrainingArguments
from .transport.lost_processes import naming_lost_processes as naming_lost_processes
from .transport.transports import Traffic as Traffic

__all__ = [
    "Calibration",
    "Decision",
    "Estimate",
    "Explanation",
    "ModelSupport",
    "Pattern",
    "PatternCache",
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
    "keep_attention",
    "mtp_loss",
    "naming_lost_processes",
    "pack_documents",
    "patch_config",
    "patch_model",
    "perplexity",
    "prefill",
    "ring_attention",
    "run_simulated",
    "simulate",
    "sliced_layers",
    "supported_models",
]
