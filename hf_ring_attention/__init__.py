"""Exact and dilated ring attention for Hugging Face Transformers.

Importing the package registers the attention implementation "ring_dilated", and its mask, with Transformers.
"""

from ._version import __version__
from .attention import ring_attention
from .configuration import patch_config
from .explain import Explanation, explain
from .generation import prefill
from .layouts import SequenceLayout
from .modeling import patch_model
from .models import ModelSupport, supported_models
from .patterns import Pattern, Segment, Sink, Window
from .perplexity import PerplexityReport, perplexity
from .ring import Ring
from .selection import Decision
from .simulation import run_simulated, simulate
from .training import count_tokens, next_token_loss, shard_batch
from .transports import Traffic

__all__ = [
    "Decision",
    "Explanation",
    "ModelSupport",
    "Pattern",
    "PerplexityReport",
    "Ring",
    "Segment",
    "SequenceLayout",
    "Sink",
    "Traffic",
    "Window",
    "__version__",
    "count_tokens",
    "explain",
    "next_token_loss",
    "patch_config",
    "patch_model",
    "perplexity",
    "prefill",
    "ring_attention",
    "run_simulated",
    "shard_batch",
    "simulate",
    "supported_models",
]
