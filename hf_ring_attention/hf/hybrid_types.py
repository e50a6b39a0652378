"""The hybrid model types that are computed; whoever reads this table needs neither torch nor Transformers."""

from __future__ import annotations

from typing import Any

#: The first release of Transformers whose mixers are known: in earlier releases they have other names, caches and calls.
MIXERS_SINCE = "5.23"

#: The class of the mixers of each hybrid type that is computed: modules that pass a state from token to token (mixers.py).
MIXERS = {
    "bailing_hybrid": "BailingHybridDeltaAttention",
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "jamba": "JambaMambaMixer",
    "kimi_linear": "KimiLinearDeltaAttention",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "lfm3": "Lfm3ShortConv",
    "minimax": "MiniMaxLightningAttention",
    "nemotron_h": "NemotronHMamba2Mixer",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
    "zamba": "ZambaMambaMixer",
    "zamba2": "Zamba2MambaMixer",
}

#: The types of layers with mixers, as configs name them.
MIXER_LAYERS = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid")


def hybrids_of(config: Any) -> Any:
    """Returns the module `hybrids.models` for a text config of a hybrid type; None for others, which do not load it."""
    if config.model_type not in MIXERS:
        return None
    from ..hybrids import models

    return models
