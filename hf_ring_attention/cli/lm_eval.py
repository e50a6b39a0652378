"""`hf-ring-attention lm-eval`: lm-evaluation-harness, with the model "ring_dilated" added to its models."""

from __future__ import annotations

import argparse
import sys

from .options import Parser, Refusal, require_extra


def add_lm_eval(parser: Parser) -> None:
    """Adds what --help shows of the harness's options."""
    text = "Options of lm_eval; see lm-eval run --help."
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help=text)


def lm_eval_command(words: list[str]) -> None:
    """Run lm-evaluation-harness with "ring_dilated" among its models.

    The model takes the --model_args of hf, and pattern, ring_size, ring_layout, ring_transport, ring_heads, ring_kernel
    and logits_at_once. With several processes, ring_size of them share each sequence, and rings answer different requests.
    If a pattern contains a comma, write --model_args as JSON.

    Examples:
      hf-ring-attention lm-eval --model ring_dilated --tasks lambada_openai \\
          --model_args pretrained=HuggingFaceTB/SmolLM2-135M,pattern=window:512+4
      hf-ring-attention lm-eval --model ring_dilated --tasks hellaswag,wikitext \\
          --model_args '{"pretrained": "./folder", "pattern": "pyramid:512,3"}'
      torchrun --nproc-per-node 8 -m hf_ring_attention lm-eval --batch_size 1 \\
          --model ring_dilated --tasks scrolls_qasper \\
          --model_args pretrained=./folder,ring_size=4,max_length=131072
      hf-ring-attention lm-eval --model ring_dilated --tasks ruler \\
          --metadata '{"max_seq_lengths": [4096, 16384]}' \\
          --model_args pretrained=./folder,pattern=window:512+4,max_length=16384
      hf-ring-attention lm-eval ls tasks
    """
    require_extra("lm-evaluation-harness", "lm_eval")
    if not words:
        raise Refusal("the arguments of lm_eval are missing, such as --model ring_dilated --model_args ... --tasks ...")
    from lm_eval.__main__ import cli_evaluate

    from ..evaluation import lm_harness  # noqa: F401

    # The harness reads its arguments from here, and inserts "run" if the subcommand is missing.
    sys.argv = ["lm_eval", *words]
    cli_evaluate()
