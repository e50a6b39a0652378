"""`hf-ring-attention lm-eval`: lm-evaluation-harness, with the model "ring_dilated" beside its own."""

from __future__ import annotations

import sys

import typer

from ..arguments import missing_extra
from ..options import refuse

EXAMPLES_OF_LM_EVAL = """\b
Examples:
  hf-ring-attention lm-eval --model ring_dilated --tasks lambada_openai \\
      --model_args pretrained=HuggingFaceTB/SmolLM2-135M,pattern=window:512+4
  hf-ring-attention lm-eval --model ring_dilated --tasks hellaswag,wikitext \\
      --model_args '{"pretrained": "./folder", "pattern": "pyramid:512,3"}'
  torchrun --nproc-per-node 8 -m hf_ring_attention lm-eval --batch_size 1 \\
      --model ring_dilated --tasks scrolls_qasper \\
      --model_args pretrained=./folder,ring_size=4,max_length=131072,dtype=bfloat16
  hf-ring-attention lm-eval --model ring_dilated --tasks ruler \\
      --metadata '{"max_seq_lengths": [4096, 16384]}' \\
      --model_args pretrained=./folder,pattern=window:512+4,max_length=16384
  hf-ring-attention lm-eval ls tasks
"""
#: The harness reads its own options, of which typer knows none.
ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}


def lm_eval_command(context: typer.Context) -> None:
    """Run lm-evaluation-harness with "ring_dilated" among its models.

    It takes the arguments of lm_eval, which lm-eval run --help lists. --model_args of ring_dilated are those of hf, and
    pattern, ring_size, ring_layout, ring_transport, ring_heads and logits_at_once.

    With several processes, ring_size of them share each sequence, and rings answer different requests. A pattern with a
    comma is written in JSON.
    """
    missing = missing_extra("lm-evaluation-harness", "lm_eval")
    if missing:
        raise refuse(missing)
    if not context.args:
        raise refuse("the arguments of lm_eval are missing, such as --model ring_dilated --model_args ... --tasks ...")
    from lm_eval.__main__ import cli_evaluate

    from ...evaluation import lm_harness  # noqa: F401

    # The harness reads its arguments from here, and inserts "run" where no subcommand is named.
    sys.argv = ["lm_eval", *context.args]
    cli_evaluate()
