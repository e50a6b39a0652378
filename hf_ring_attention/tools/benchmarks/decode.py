"""Measures the seconds of a token with many tokens in the cache of a model, against sdpa on a copy of the same cache.

The floor is the bytes that must be read: all weights, and the cached keys and values that the pattern shows. In addition,
Transformers' dynamic cache copies itself at each token, for every implementation.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from ...hf.cache import cache_argument
from ...hf.config import patch_config
from ...hf.registration import IMPLEMENTATION
from ..output import Sheet
from .harness import CallShape, alternately, progress, timed
from .speed import SDPA

#: The number of first steps of each that do not count.
_UNCOUNTED_STEPS = 3
#: The pattern that fills the cache, and how many tokens it takes at once.
_FILLING, _TOKENS_AT_ONCE = "window:512", 8192


def decoding_model(source: str | None, shape: CallShape) -> Any:
    """Returns the checkpoint of a folder or hub id; for None, a model of the size of SmolLM2-135M with random weights."""
    if source is not None:
        model: Any = AutoModelForCausalLM.from_pretrained(source, attn_implementation=SDPA, trust_remote_code=False)
    else:
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=49152,
                hidden_size=576,
                intermediate_size=1536,
                num_hidden_layers=30,
                num_attention_heads=9,
                num_key_value_heads=3,
                max_position_embeddings=1 << 20,
                tie_word_embeddings=True,
            )
        )
    return model.to(shape.device, getattr(torch, shape.dtype)).eval()


def measure_decoding(
    shape: CallShape, model: Any, tokens: int, patterns: Sequence[str], repeats: int
) -> list[dict[str, Any]]:
    """Returns the median seconds of a step by both implementations for each pattern, and the median of the paired ratios.

    Both caches go on from pattern to pattern, as long as each other.
    """
    rows = []
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, tokens + 1), generator=generator).to(shape.device)
    with torch.inference_mode():
        # A step takes as long whatever the cache contains, so a window fills it, whose time does not grow with the tokens.
        patch_config(model.config, _FILLING)
        model.set_attn_implementation(IMPLEMENTATION)
        cache = DynamicCache()
        for part in progress(ids[:, :tokens].split(_TOKENS_AT_ONCE, 1), "the cache"):
            model.base_model(part, use_cache=True, **cache_argument(cache))
        caches = {SDPA: cache, IMPLEMENTATION: copy.deepcopy(cache)}
        for name in progress(patterns, "decode"):
            patch_config(model.config, name)
            seconds: dict[str, list[float]] = {implementation: [] for implementation in caches}
            for number in range(repeats + _UNCOUNTED_STEPS):
                for implementation in alternately([*seconds], number):
                    model.set_attn_implementation(implementation)
                    elapsed, _ = timed(
                        partial(model, ids[:, -1:], use_cache=True, **cache_argument(caches[implementation])),
                        shape.device,
                    )
                    if number >= _UNCOUNTED_STEPS:
                        seconds[implementation].append(elapsed)
            ratio = statistics.median(ring / sdpa for sdpa, ring in zip(*seconds.values()))
            medians = {implementation: statistics.median(steps) for implementation, steps in seconds.items()}
            rows.append({"pattern": name, **medians, "ratio": ratio})
    return rows


def decoding_report(rows: list[dict[str, Any]], source: str | None, tokens: int, repeats: int) -> Sheet:
    """Returns the table of `measure_decoding`."""
    name = source or "a model of the size of SmolLM2-135M, random weights"
    return Sheet(
        f"a token with {tokens} in the cache, median of {repeats} paired steps: {name}",
        ("pattern", "sdpa ms", "ring_dilated ms", "ratio"),
        [
            (row["pattern"], f"{1e3 * row[SDPA]:.1f}", f"{1e3 * row[IMPLEMENTATION]:.1f}", f"{row['ratio']:.3f}")
            for row in rows
        ],
    )
