"""Fine-tunes a causal language model on long documents with Transformers' Trainer, over rings of --ring_size processes.

One device:    python recipes/finetune_trainer.py --seq_len 2048
Many devices:  accelerate launch --num_processes 8 recipes/finetune_trainer.py --model ID --text FILE --ring_size 4
Small CPU:     ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 recipes/finetune_trainer.py --ring_size 2

Every option of Transformers' TrainingArguments is one here: --gradient_checkpointing, --bf16, --fsdp, --deepspeed FILE,
--save_strategy steps, --resume_from_checkpoint true, --use_liger_kernel.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import checkpoints
import common
import torch
from accelerate.utils import broadcast_object_list
from transformers import HfArgumentParser

import hf_ring_attention as ra
from hf_ring_attention.plan.notation import FORMS
from hf_ring_attention.tools.arguments import (
    at_least,
    check,
    existing_file,
    missing_extra,
    new_folder,
    pattern_text,
    positive,
)
from hf_ring_attention.tools.benchmarks.harness import peak_memory
from hf_ring_attention.tools.plots import plot_training


@dataclass
class Arguments:
    """What is trained, on which text."""

    model: str = field(default=common.BUNDLED, metadata={"help": common.MODEL_HELP})
    text: str | None = field(default=None, metadata={"help": common.TEXT_HELP})
    dataset: str | None = field(default=None, metadata={"help": common.DATASET_HELP})
    pattern: str = field(default="pyramid:512,3", metadata={"help": FORMS})
    seq_len: int = field(default=1024, metadata={"help": "tokens of a sequence"})
    held_out: int = field(default=0, metadata={"help": "sequences for evaluation, not trained on"})
    plot: bool = field(
        default=False, metadata={"help": "draw the losses to loss.png in --output_dir (needs matplotlib)"}
    )


@dataclass
class TrainingArguments(ra.RingTrainingArguments):
    """RingTrainingArguments with the defaults of a short run."""

    output_dir: str = field(default="runs/finetune_trainer")
    max_steps: int = field(default=20)
    per_device_train_batch_size: int = field(default=1)
    per_device_eval_batch_size: int = field(default=1)
    learning_rate: float = field(default=5e-5)
    logging_steps: float = field(default=1)
    save_strategy: str = field(default="no")
    report_to: str = field(default="none")


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and defaults."""


def parse_args(argv=None) -> tuple[Arguments, TrainingArguments]:
    parser = HfArgumentParser(
        (Arguments, TrainingArguments),
        description=__doc__,
        usage="%(prog)s [--model ID] [--text FILE] [--pattern PATTERN] [--ring_size N] [--seq_len N] ...; all: --help",
        formatter_class=Help,
    )
    args, training = parser.parse_args_into_dataclasses(argv)
    check(parser, "--model", common.model_source, args.model)
    check(parser, "--pattern", pattern_text, args.pattern)
    check(parser, "--seq_len", at_least(2), args.seq_len)
    check(parser, "--held_out", at_least(0), args.held_out)
    if training.ring_size is not None:
        check(parser, "--ring_size", at_least(1), training.ring_size)
    check(parser, "--learning_rate", positive, training.learning_rate)
    check(parser, "--output_dir", new_folder, training.output_dir)
    if args.text is not None:
        check(parser, "--text", existing_file, args.text)
    if args.dataset is not None:
        check(parser, "--dataset", common.dataset_id, args.dataset)
    if args.text is not None and args.dataset is not None:
        parser.error("argument --dataset: not allowed with argument --text")
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        check(parser, f"--{name}", at_least(1), getattr(training, name))
    if training.max_steps == 0:
        parser.error("argument --max_steps: 1 or more was expected, or -1 for --num_train_epochs, got 0")
    missing = missing_extra("argument --plot:", "matplotlib") if args.plot else None
    if missing:
        parser.error(missing)
    return args, training


def resumed(training: TrainingArguments) -> str | None:
    """The checkpoint that --resume_from_checkpoint means: a folder, or "true" for the last whole one in --output_dir."""
    asked, output = training.resume_from_checkpoint, Path(training.output_dir)
    if asked in (None, "false", "False", False):
        checkpoints.refuse_earlier(output, "--resume_from_checkpoint true", "--output_dir")
        return None
    if asked in ("true", "True", True):
        last = [checkpoints.last_of_trainer(output, training.world_size)]
        return str(broadcast_object_list(last)[0])  # all go on from the same
    checkpoints.check_trainer(Path(asked), output)
    return asked


def main() -> None:
    args, training = parse_args()
    training.ring_size = common.ring_size(training.ring_size, training.world_size, "--ring_size")
    resume = resumed(training)
    tokenizer = common.load_tokenizer(args.model)
    rows = common.rows_of(
        common.tokenize(tokenizer, common.load_text(args.text, args.dataset))[0],
        args.seq_len,
        needed=args.held_out + 1,
    )
    model = common.load_model(args.model)
    ra.patch_config(model.config, ra.Pattern.parse(args.pattern))
    trainer = ra.RingTrainer(
        model,
        training,
        train_dataset=rows[args.held_out :],
        eval_dataset=rows[: args.held_out] or None,
        data_collator=ra.PaddingCollator(),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=resume)
    if args.held_out:
        trainer.evaluate()
    if trainer.is_fsdp_enabled:  # checkpoints are of parts; the model is saved whole
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()
    peak = trainer.accelerator.gather(torch.tensor([peak_memory(training.device)], device=training.device))
    if trainer.is_world_process_zero():
        for rank, memory in enumerate(peak.tolist()):
            print(f"rank {rank}: peak memory {memory / 2**30:.2f} GiB")
        if args.plot:
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            plot_training(losses, Path(training.output_dir) / "loss.png")
        print(f"saved to {training.output_dir}" + (", with loss.png" if args.plot else ""))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
