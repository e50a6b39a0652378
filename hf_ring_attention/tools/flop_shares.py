"""What a pattern costs a model: the attention FLOPs of all its layers, those with windows of their own too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..evaluation.calibration.result import Calibration
from ..hf.registration import IMPLEMENTATION
from ..plan.patterns import Pattern
from .model_config import attention_of_config, text_config_of


def flop_share_of_model(
    model: str, config: Mapping[str, Any], pattern: Pattern | Calibration | None, tokens: int
) -> float:
    """Returns the attention FLOPs of all layers, as a share of those of exact attention in all, for one document.

    Args:
        model: its name, for errors.
        config: what its config.json holds.
        pattern: of the layers without a window of their own; None for what the config has.
        tokens: of the document.

    Raises:
        argparse.ArgumentTypeError: a config that says too little.
    """
    of_text = dict(text_config_of(config))
    if isinstance(pattern, Calibration):
        layers = {str(layer): one.to_dict() for layer, one in pattern.layers.items()}
        of_text, pattern = of_text | {IMPLEMENTATION: {"layers": layers}}, None
    attention = attention_of_config(of_text, model, pattern)
    kinds, count = Counter(attention.layers), len(attention.layers)
    heads: dict[str, Any] = {"num_heads": attention.num_heads, "num_kv_heads": attention.num_kv_heads}
    return sum(kind.flop_share(tokens, **heads) * layers for kind, layers in kinds.items()) / count
