"""A model whose layers choose their keys (GLM-5's proportions, small): a step beside Transformers, time and peak memory.

A small CPU:        python recipes/bench/indexed.py
As in the figures:  python recipes/bench/indexed.py --tokens 2k 4k 8k 16k 32k --stock-tokens 8k --repeats 5

Every figure is measured in new processes; on a CPU, peaks are of their resident memory. Each turn has a process of both ways.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from timing import held_memory, launch, options, reset_peak, return_memory_at_once, table, timed
from transformers import AutoModelForCausalLM, GlmMoeDsaConfig

import hf_ring_attention as ra

MIB = 2**20


def model(heads: int, tokens: int) -> torch.nn.Module:
    """Two layers, the second of which takes the choice of the first."""
    sizes = {"hidden_size": 48 * heads, "intermediate_size": 96 * heads, "num_attention_heads": heads}
    latent = {"q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64}
    indexer = {"index_topk": 256, "index_n_heads": 8, "index_head_dim": 32, "indexer_types": ["full", "shared"]}
    config = GlmMoeDsaConfig(
        vocab_size=512, num_hidden_layers=2, num_key_value_heads=heads, head_dim=16, mlp_layer_types=["dense", "dense"],
        layer_types=["indexed_attention"] * 2, max_position_embeddings=tokens, pad_token_id=0, **sizes, **latent, **indexer,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def step(way: str, heads: int, tokens: int, device: str) -> tuple[float, int]:
    """Returns the milliseconds of forward and backward, and the most bytes that they held."""
    return_memory_at_once()
    made = model(heads, tokens).to(device)
    if way == "here":
        ra.patch_model(made)
    held = 0

    def run(count: int = tokens) -> None:
        ids = torch.arange(count, device=device)[None] % 509 + 3
        made.model(ids, use_cache=False)[0].float().square().mean().backward()  # type: ignore[operator, union-attr]

    run(64)
    before = reset_peak(device)
    run()
    held = held_memory(device, peak=True) - before
    return timed(run)[0], held


def main(words: Sequence[str] | None = None) -> None:
    defaults = {"tokens": [2048, 4096], "stock_tokens": "4k", "repeats": 1}
    args, shape = options(__doc__ or "", words, **defaults)
    rows = []
    for tokens in args.tokens:
        ways = ("stock", "here") if tokens <= args.stock_tokens else ("here",)
        turns = [
            [launch(step, 1, way, shape.heads, tokens, shape.device, device=shape.device) for way in ways]
            for _ in range(args.repeats)
        ]
        figures = [[statistics.median(x for x, _ in way), max(x for _, x in way) / MIB] for way in zip(*turns)]
        stock: list[float | str] = [*figures[0]] if len(ways) > 1 else ["-", "-"]
        ratio = statistics.median(pair[1][0] / pair[0][0] for pair in turns) if len(ways) > 1 else "-"
        rows.append([str(tokens), *stock, *figures[-1], ratio])
    headings = "tokens|stock\nms|stock\npeak MiB|here\nms|here\npeak MiB|here /\nstock"
    table("Forward and backward of two layers that choose 256 keys", headings, rows)


if __name__ == "__main__":
    main()
