"""Fine-tunes a causal language model on long documents with Transformers' Trainer, over rings of --ring_size processes.

One device:    python recipes/finetune_trainer.py --seq_len 2048
Many devices:  accelerate launch --num_processes 8 recipes/finetune_trainer.py --model ID --text FILE --ring_size 4
Small CPU:     ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 recipes/finetune_trainer.py --ring_size 2

Every option of Transformers' TrainingArguments is one here: --gradient_checkpointing, --bf16, --fsdp, --deepspeed FILE,
--save_strategy steps, --resume_from_checkpoint true, --use_liger_kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import common
import torch
from transformers import HfArgumentParser
from transformers.trainer_utils import get_last_checkpoint

import hf_ring_attention as ra
from hf_ring_attention import bench, cli
from hf_ring_attention.plots import plot_training


@dataclass
class Arguments:
    """What is trained, on which text."""

    model: str | None = field(default=None, metadata={"help": "hub id or folder; default: the bundled SmolLM2-135M"})
    text: str | None = field(default=None, metadata={"help": "text file or dataset id; default: Python's manual"})
    pattern: str = field(default="pyramid:512,3", metadata={"help": cli.PATTERN_HELP})
    seq_len: int = field(default=1024, metadata={"help": "tokens of a sequence"})
    held_out: int = field(default=0, metadata={"help": "sequences for evaluation, not trained on"})


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


def main() -> None:
    args, training = HfArgumentParser((Arguments, TrainingArguments), description=__doc__).parse_args_into_dataclasses()
    model, tokenizer = common.load(args.model)
    ra.patch_config(model.config, cli.parse_pattern(args.pattern))
    ids = common.tokenize(tokenizer, common.load_text(args.text))[0]
    rows = common.rows_of(ids, args.seq_len)
    trainer = ra.RingTrainer(
        model,
        training,
        train_dataset=rows[args.held_out :],
        eval_dataset=rows[: args.held_out] or None,
        data_collator=ra.PaddingCollator(),
        processing_class=tokenizer,
    )
    resume = training.resume_from_checkpoint
    if resume in ("true", "True", True):
        resume = get_last_checkpoint(training.output_dir)
    trainer.train(resume_from_checkpoint=resume)
    if args.held_out:
        trainer.evaluate()
    if trainer.is_fsdp_enabled:  # checkpoints are of parts; the model is saved whole
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()
    peak = trainer.accelerator.gather(torch.tensor([bench.peak_memory(training.device)], device=training.device))
    if trainer.is_world_process_zero():
        for rank, memory in enumerate(peak.tolist()):
            print(f"rank {rank}: peak memory {memory / 2**30:.2f} GiB")
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        plot_training(losses, Path(training.output_dir) / "loss.png")
        print(f"saved to {training.output_dir}, with loss.png")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
