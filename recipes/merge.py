"""Merges LoRA adapters into their model, and saves an ordinary checkpoint with the adapters' pattern in config.json.

Adapters:     python recipes/merge.py --model runs/lora --output merged
In bfloat16:  python recipes/merge.py --model runs/lora --output merged --dtype bfloat16

It merges in float32, and then rounds to --dtype. No GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import checkpoints
import common
import torch
from arguments import DTYPES, Help

import hf_ring_attention as ra


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--model", type=common.model_source, required=True, help="folder with LoRA adapters")
    parser.add_argument("--trust-remote-code", action="store_true", help=common.TRUST_HELP)
    parser.add_argument("--output", type=Path, required=True, help="new folder for the whole model and its tokenizer")
    kept = "data type of the saved weights (default float32)"
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help=kept)
    args = parser.parse_args(argv)
    if not common.has_adapters(args.model):
        parser.error(f"argument --model: the folder of adapters was expected, and {args.model!r} has none to merge")
    if args.output.exists() and any(args.output.iterdir()):
        parser.error(f"argument --output: the folder {str(args.output)!r} has files: name a new one")
    return args


def main() -> None:
    args = parse_args()
    from peft import PeftModel

    tokenizer = common.load_tokenizer(args.model, trust=args.trust_remote_code)
    name, settings = common.adapters_of(args.model)
    base = common.load_model(name, trust=args.trust_remote_code)
    common.set_pattern(base, settings)
    adapted = PeftModel.from_pretrained(ra.patch_model(base), args.model)
    model = adapted.merge_and_unload().to(getattr(torch, args.dtype))
    with checkpoints.writing("the model", args.output, "make space there, or name a folder on another disk"):
        model.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
    kept = f"attention as in {name}" if settings is None else "the pattern of the adapters"
    print(f"saved to {args.output} in {args.dtype}, with {kept}")


if __name__ == "__main__":
    main()
