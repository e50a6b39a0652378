"""Fine-tunes a causal language model on long documents with Transformers' Trainer, over rings of --ranks processes.

One device:     python recipes/finetune_trainer.py --tokens 2048
Many devices:   accelerate launch --num_processes 8 recipes/finetune_trainer.py --model ID --text FILE --ranks 4
With torchrun:  torchrun --nproc-per-node 8 recipes/finetune_trainer.py --model ID --dataset ID --ranks 8
Small CPU:      ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 recipes/finetune_trainer.py --ranks 2
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import checkpoints
import common
import documents
import torch
from accelerate.utils import broadcast_object_list
from arguments import PATTERN_HELP, Help, at_least, check, check_extra, load_pattern, pattern_source, positive
from transformers import HfArgumentParser, default_data_collator, set_seed
from transformers.hf_argparser import HfArg

import hf_ring_attention as ra


@dataclass
class Arguments(documents.Sources):
    """The options of this recipe: the model, and the documents that it learns from."""

    model: str = HfArg(default=common.BUNDLED, help=common.MODEL_HELP)
    trust_remote_code: bool = HfArg(default=False, help=common.TRUST_HELP)
    pattern: str = HfArg(default="exact", help=PATTERN_HELP)
    lora: int = HfArg(default=0, help=common.LORA_HELP)


@dataclass
class TrainingArguments(ra.RingTrainingArguments):
    """RingTrainingArguments with the defaults of a short run."""

    ring_size: int | None = HfArg(default=None, aliases="--ranks", help="processes that share each row")
    ring_layout: str = HfArg(default="auto", aliases="--layout", help="auto, contiguous, zigzag or documents")
    ring_transport: str = HfArg(default="auto", aliases="--transport", help="auto, ring, collective, heads or local")
    output_dir: str = field(default="runs/finetune_trainer")
    max_steps: int = field(default=20)
    per_device_train_batch_size: int = field(default=1)
    per_device_eval_batch_size: int = field(default=1)
    learning_rate: float = field(default=5e-5)
    logging_steps: float = field(default=1)
    include_num_input_tokens_seen: str = field(default="non_padding")  # The logs then have train_tokens_per_second.
    dataloader_pin_memory: bool = field(default=torch.cuda.is_available())
    save_strategy: str = field(default="no")
    report_to: list[str] = field(default_factory=lambda: ["none"])
    # A model that takes no position_ids must refuse packed rows, and not see them without.
    remove_unused_columns: bool = field(default=False)


def parse_args(argv=None) -> tuple[Arguments, TrainingArguments]:
    parser = HfArgumentParser(
        (Arguments, TrainingArguments),
        description=__doc__,
        usage="%(prog)s [option ...]",
        formatter_class=Help,
    )
    args, training = parser.parse_args_into_dataclasses(argv)
    check(parser, "--model", common.model_to_train, args.model)
    check(parser, "--pattern", pattern_source, args.pattern)
    documents.check_arguments(parser, args)
    check(parser, "--lora", at_least(0), args.lora)
    if training.ring_size is not None:
        check(parser, "--ranks", at_least(1), training.ring_size)
    check(parser, "--learning_rate", positive, training.learning_rate)
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        check(parser, f"--{name}", at_least(1), getattr(training, name))
    if training.max_steps == 0:
        parser.error("argument --max_steps: 1 or more was expected, or -1 for --num_train_epochs, got 0")
    if training.eval_strategy != "no" and not args.held_out:
        parser.error("argument --eval_strategy: there is nothing to evaluate on: keep some tokens with --held_out")
    check_extra(parser, "--lora", args.lora, "peft")
    return args, training


def resumed(training: TrainingArguments) -> str | None:
    """Returns the checkpoint of --resume_from_checkpoint: a folder, or for "true" the last whole one in --output_dir."""
    option, output = training.resume_from_checkpoint, Path(training.output_dir)
    if option in (None, "false", "False", False):
        checkpoints.refuse_earlier(output, "--resume_from_checkpoint true", "--output_dir")
        return None
    if option in ("true", "True", True):
        last = [checkpoints.last_saved(output, training.world_size)]
        return str(broadcast_object_list(last)[0])  # Every process goes on from the same checkpoint.
    checkpoints.check_trainer(Path(option), output)
    return option


class Trainer(ra.RingTrainer):
    """Stops at the first loss or gradient norm that is not finite, before a checkpoint holds the broken weights."""

    def when_not_finite(self, loss: float, grad_norm: float) -> None:
        last = checkpoints.last_whole(Path(self.args.output_dir), self.args.world_size)
        self.accelerator.end_training()
        checkpoints.end_not_finite(self.state.global_step + 1, loss, grad_norm, last, "--learning_rate")


def main() -> None:
    args, training = parse_args()
    training.ring_size = common.ring_size(training.ring_size, training.world_size)
    with checkpoints.own_run(Path(training.output_dir), "--output_dir"):
        train(args, training)


def train(args: Arguments, training: TrainingArguments) -> None:
    """Trains, evaluates and saves, in a folder that no other run writes to."""
    resume, trust = resumed(training), args.trust_remote_code
    set_seed(training.seed)  # Adapters begin with random numbers.
    training.eval_on_start = bool(args.held_out) and resume is None
    pattern = load_pattern(args.pattern)
    tokenizer = common.load_tokenizer(args.model, trust=trust)
    replaces = common.check_heads(args.model, pattern, trust=trust)
    data = documents.prepare(args, tokenizer, seed=training.seed)
    model = common.load_model(args.model, trust=trust)
    ra.patch_config(model.config, pattern)
    if args.lora:
        model = common.add_lora(model, args.lora)
    if training.ddp_find_unused_parameters is None:  # A row may leave experts out; other modules all take part.
        training.ddp_find_unused_parameters = any("experts" in name for name, _ in model.named_modules())
    trainer = Trainer(
        model,
        training,
        train_dataset=data.rows,
        eval_dataset=data.held_out_rows,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.accelerator.print(common.describe_run(trainer.ring, args.model, args.pattern, replaces, data.description))
    output = Path(training.output_dir)
    remedy = "make space there, and go on with --resume_from_checkpoint true"
    with checkpoints.Stop() as stop, checkpoints.writing("a checkpoint", output, remedy):
        trainer.add_callback(checkpoints.StopTrainer(stop))
        trainer.train(resume_from_checkpoint=resume)
    if stop.agreed:
        trainer.accelerator.end_training()
        stop.end(output / f"checkpoint-{trainer.state.global_step}", "--resume_from_checkpoint true")
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    if args.held_out and trainer.state.global_step not in evaluated:
        loss = trainer.evaluate()["eval_loss"]
        trainer.accelerator.print(f"eval_loss after {trainer.state.global_step} steps, the mean of rows: {loss:.3f}")
    if trainer.is_fsdp_enabled:  # FSDP's checkpoints hold parts of the model, but here it is saved whole.
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    with checkpoints.writing("the model", output, remedy):
        trainer.save_model()
    common.report_memory(trainer.accelerator)
    if trainer.is_world_process_zero():
        common.report_saved(training.output_dir, args.lora)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
