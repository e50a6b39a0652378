"""The time of a token and the bytes of a cache while a model generates, by attention and length.

A small CPU:        OMP_NUM_THREADS=1 python recipes/bench/decoding.py
As in the figures:  OMP_NUM_THREADS=1 python recipes/bench/decoding.py --tokens 2k 4k 8k 32k \\
                        --pattern exact window:512+4 calibrated/calibration.json --plot decoding.png
A GPU:              python recipes/bench/decoding.py --tokens 16k 128k --dtype bfloat16

The model has random weights and, unless other sizes are given, the shape of SmolLM2-135M. Each pattern first
reads a random text into a `ra.PatternCache`; sdpa gets a cache with as many random keys and values. The calls then take turns,
a few tokens at a time.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from memory import model_of
from timing import Shape, alternate, clock, median, options, ratio, table
from transformers import DynamicCache, LlamaForCausalLM

import hf_ring_attention as ra

SDPA = "sdpa, whole cache"
#: The tokens that are read at once.
AT_ONCE = 2048
SIZES = {"num_hidden_layers": 30, "vocab_size": 49152, "intermediate_size": 1536, "tie_word_embeddings": True}


def sdpa_cache(shape: Shape, tokens: int, layers: int) -> DynamicCache:
    """Returns a cache with the keys and values of a text, which are random."""
    cache, (_, *rows, _) = DynamicCache(), shape.tensors(tokens)
    for number in range(layers):
        cache.update(*(x.detach() for x in rows), number)
    return cache


def step_of(model: LlamaForCausalLM, cache: Any, device: str) -> Callable[[torch.Tensor], Any]:
    """Returns a call that reads tokens [1, n] behind those in a cache."""
    names = inspect.signature(model.prepare_inputs_for_generation).parameters
    name = "cache" if "cache" in names else "past_key_values"  # Transformers 5.24 renamed it.

    @torch.no_grad()
    def step(ids: torch.Tensor) -> Any:
        return model(input_ids=ids.to(device), use_cache=True, logits_to_keep=1, **{name: cache})

    return step


def bytes_of(cache: Any) -> int:
    """Returns the bytes of the keys and values in a cache."""
    if isinstance(cache, ra.PatternCache):
        return cache.nbytes
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def measure(
    shape: Shape, tokens: int, patterns: Sequence[str], repeats: int, steps: int, layers: int
) -> list[dict[str, Any]]:
    """Returns the milliseconds of a token and the bytes of the cache, for sdpa and for each pattern."""
    sizes, caches, calls = SIZES | {"num_hidden_layers": layers}, {}, {}
    random = torch.Generator().manual_seed(0)
    text = torch.randint(3, sizes["vocab_size"], (1, tokens), generator=random)
    for name in (SDPA, *patterns):
        model = model_of(shape, 2 * tokens, checkpointing=False, **sizes).eval()
        caches[name] = sdpa_cache(shape, tokens, layers) if name == SDPA else None
        if name != SDPA:
            caches[name] = ra.PatternCache(ra.patch_model(model, name))
        step = step_of(model, caches[name], shape.device)
        for part in text.split(AT_ONCE, 1) if name != SDPA else ():
            step(part)

        def decode(step: Callable[[torch.Tensor], Any] = step) -> tuple[float]:
            seconds = clock(lambda: [step(text[:, number : number + 1]) for number in range(steps)], shape.device)[0]
            return (seconds / steps,)

        calls[name] = decode
    runs, whole = alternate(calls, repeats), bytes_of(caches[SDPA])
    return [
        {
            "attention": name,
            "tokens": tokens,
            "ms": 1000 * median(runs, name),
            "faster": ratio(runs, SDPA, name),
            "bytes": bytes_of(cache),
            "share": bytes_of(cache) / whole,
        }
        for name, cache in caches.items()
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Measures, prints a table for each length, and draws a picture if it is asked for."""
    defaults = {"heads": 9, "kv_heads": 3, "layers": 30, "patterns": ["exact", "window:512+4"], "tokens": [2048, 8192]}
    args, shape = options(__doc__ or "", words, **defaults, repeats=5, steps=4, plot="")
    every = []
    for tokens in args.tokens:
        rows = measure(shape, tokens, args.patterns, args.repeats, args.steps, args.layers)
        table(
            f"A token behind {tokens} in the cache, {args.layers} layers, medians of {args.repeats} turns of {args.steps}",
            "attention|ms|times as\nfast as sdpa|MiB of\nthe cache|share of\nsdpa's",
            [(row["attention"], row["ms"], row["faster"], row["bytes"] / 2**20, row["share"]) for row in rows],
        )
        every += rows
    if args.plot:
        sys.path.append(str(Path(__file__).parents[1]))
        from pictures import plot_decoding

        plot_decoding(every, args.plot)


if __name__ == "__main__":
    main()
