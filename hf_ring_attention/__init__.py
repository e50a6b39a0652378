"""Exact and dilated ring attention for Hugging Face Transformers.

Importing the package registers the attention implementation "ring_dilated", and its mask, with Transformers.
"""

from ._version import __version__
from .attention import ring_attention
from .batches import shard_batch
from .collators import PackingCollator, PaddingCollator
from .configuration import patch_config
from .explain import Explanation, explain
from .failures import naming_lost_processes
from .generation import prefill
from .layouts import SequenceLayout
from .losses import count_tokens, next_token_loss, sliced_loss
from .modeling import patch_model
from .models import ModelSupport, supported_models
from .patterns import Pattern, Segment, Sink, Window
from .perplexity import PerplexityReport, perplexity
from .ring import Ring
from .selection import Decision
from .simulation import run_simulated, simulate
from .training import RingTrainer, RingTrainerMixin, RingTrainingArguments
from .transports import Traffic

__all__ = [
    "Decision",
    "Explanation",
    "ModelSupport",
    "PackingCollator",
    "PaddingCollator",
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
    "count_tokens",
    "explain",
    "naming_lost_processes",
    "next_token_loss",
    "patch_config",
    "patch_model",
    "perplexity",
    "prefill",
    "ring_attention",
    "run_simulated",
    "shard_batch",
    "simulate",
    "sliced_loss",
    "supported_models",
]
