"""Fine-tunes a causal language model on long documents with Accelerate, each row shared by a ring of --ranks processes.

One device:     python recipes/finetune.py --tokens 2048
Many devices:   accelerate launch --num_processes 8 recipes/finetune.py --model ID --text FILE --ranks 4 --tokens 131072
With torchrun:  torchrun --nproc-per-node 8 recipes/finetune.py --model ID --dataset ID --split train --ranks 8
Small CPU:      ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 recipes/finetune.py --ranks 2

With 8 processes and --ranks 4, two rings read different sequences. The folder recipes/accelerate has files for
`accelerate launch --config_file`, with DDP, FSDP 2 or ZeRO-3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import checkpoints
import common
import documents
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, LoggerType, broadcast_object_list, set_seed
from arguments import (
    PATTERN_HELP,
    Help,
    at_least,
    check_extra,
    load_pattern,
    new_file,
    pattern_source,
    positive,
    token_count,
)
from batches import Batches
from torch.autograd.graph import save_on_cpu
from torch.utils.data import DataLoader, DistributedSampler
from tqdm.auto import tqdm
from transformers import HfArgumentParser, PreTrainedTokenizerBase, default_data_collator, get_scheduler

import hf_ring_attention as ra

#: The schedules of transformers.get_scheduler that need nothing but the number of steps.
SCHEDULES = "linear cosine cosine_with_restarts polynomial inverse_sqrt constant_with_warmup constant".split()
TRACKERS = sorted({*LoggerType.list()} - {"all"})
#: The options that a run must not change when it goes on.
KEPT = "tokens buffer long_documents held_out batch_size accumulate lora schedule warmup clip lr seed".split()


def parse_args(argv=None) -> argparse.Namespace:
    parser = HfArgumentParser(
        documents.Sources, usage="%(prog)s [option ...]", description=__doc__, formatter_class=Help
    )
    common.add_model(parser, train=True)
    parser.add_argument("--pattern", type=pattern_source, default="exact", help=f"{PATTERN_HELP} (default exact)")
    shared = "processes that share each row: all for one ring, 1 for data parallelism; required with several processes"
    parser.add_argument("--ranks", type=at_least(1), help=shared)
    common.add_ring(parser)

    add = parser.add_argument_group("training").add_argument
    add("--batch-size", type=at_least(1), default=1, help="rows that a ring reads at once (default 1)")
    add("--steps", type=at_least(1), default=20, help="optimizer steps (default 20)")
    add("--accumulate", type=at_least(1), default=1, help="batches per optimizer step (default 1)")
    add("--lr", type=positive, default=5e-5, help="highest learning rate of AdamW (default 5e-5)")
    add("--schedule", choices=SCHEDULES, default="cosine", help="how the learning rate changes (default cosine)")
    add("--warmup", type=at_least(0), help="warm-up steps, from a learning rate of 0 (default 2; 0 if --steps is 1)")
    add("--clip", type=positive, default=1.0, help="largest norm of the gradient (default 1)")
    add("--lora", type=at_least(0), default=0, metavar="RANK", help=f"{common.LORA_HELP} (default 0)")
    distilled = "with --lora: instead of the texts, learn the predictions of exact attention without adapters"
    add("--distill", action="store_true", help=distilled)
    add("--checkpointing", action="store_true", help="recompute layers in backward, except their attention")
    add("--offload", action="store_true", help="move to host memory what --checkpointing keeps on the device")
    sliced = "compute norms and MLPs for so many tokens at a time (ra.sliced_layers); 0: for whole rows (default 0)"
    add("--layer-tokens-at-once", type=token_count(0), default=0, metavar="N", help=sliced)
    add("--dtype", choices=["no", "bf16", "fp16"], help="mixed precision; default: Accelerate's setting")
    add("--seed", type=at_least(0), default=0, help="seed of the order of rows and of dropout (default 0)")

    add = parser.add_argument_group("evaluation, checkpoints and reports").add_argument
    evaluated = "steps between evaluations on the --held-out tokens; 0: only before and after the run"
    add("--eval-every", type=at_least(0), default=0, help=evaluated)
    add("--save-every", type=at_least(0), default=0, help="steps between checkpoints, 0: none")
    add("--keep", type=at_least(1), default=1, help="how many of the latest checkpoints to keep (default 1)")
    add("--resume", action="store_true", help="continue from the last checkpoint in --output")
    folder = "folder for model, checkpoints and logs; all machines must share it"
    add("--output", type=Path, default=Path("runs/finetune"), help=folder)
    add("--report-to", nargs="+", choices=TRACKERS, default=[], metavar="TRACKER", help=", ".join(TRACKERS))
    add("--json", type=new_file, help="file for the figures")
    args = parser.parse_args(argv)
    documents.check_arguments(parser, args)
    check_args(parser, args)
    return args


def check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses arguments that do not go together, or need a package that is not installed."""
    if args.warmup is None:
        args.warmup = min(2, args.steps - 1)
    if args.warmup >= args.steps and args.schedule != "constant":
        parser.error(
            f"argument --warmup: the learning rate would rise for {args.warmup} of {args.steps} steps and never be --lr: "
            f"take at most {args.steps - 1}, or more --steps"
        )
    if args.distill and args.pattern == "exact":
        parser.error("argument --distill: the model computes exact attention already: name another --pattern")
    if args.distill and not args.lora:
        parser.error("argument --distill: the teacher has the model's own weights, which must not move: add --lora N")
    if args.eval_every and not args.held_out:
        parser.error("argument --eval-every: there is nothing to evaluate on: keep some tokens with --held-out")
    for tracker in args.report_to:
        if LoggerType(tracker) not in get_available_trackers():
            parser.error(f"argument --report-to: {tracker} is not installed: pip install {tracker.replace('_', '-')}")
    check_extra(parser, "--lora", args.lora, "peft")


def main() -> None:
    args = parse_args()
    # Optimizer steps may cross the end of an epoch: the batches of a step are counted below.
    accumulation = GradientAccumulationPlugin(args.accumulate, sync_with_dataloader=False)
    accelerator = Accelerator(
        mixed_precision=args.dtype,
        gradient_accumulation_plugin=accumulation,
        step_scheduler_with_optimizer=False,  # The schedule counts optimizer steps, whatever the number of processes.
        log_with=args.report_to or None,
        project_dir=args.output,
    )
    if accelerator.state.deepspeed_plugin is not None:  # DeepSpeed clips and counts batches itself.
        accelerator.state.deepspeed_plugin.deepspeed_config.update(
            train_micro_batch_size_per_gpu=args.batch_size,
            gradient_accumulation_steps=args.accumulate,
            gradient_clipping=args.clip,
        )
    cp_size = getattr(accelerator.parallelism_config, "cp_size", 1)  # Accelerate's own option may give the size, too.
    given = cp_size if args.ranks is None and cp_size > 1 else args.ranks
    size = common.ring_size(given, accelerator.num_processes)
    ways = {"layout": args.layout, "transport": args.transport, "heads": args.ring_heads}
    ring = ra.Ring.from_accelerator(accelerator, size, **ways)
    with checkpoints.own_run(args.output, "--output"):
        fine_tune(args, accelerator, ring)


def fine_tune(args: argparse.Namespace, accelerator: Accelerator, ring: ra.Ring) -> None:
    """Trains, evaluates and saves, in a folder that no other run writes to."""
    resumed = checkpoints.last_saved(args.output) if args.resume else None
    if resumed is None:
        checkpoints.refuse_earlier(args.output, "--resume", "--output")
    set_seed(args.seed)
    pattern, trust = load_pattern(args.pattern), args.trust_remote_code
    tokenizer = common.load_tokenizer(args.model, trust=trust)
    replaces = common.check_heads(args.model, pattern, trust=trust)
    sources = documents.sources_of(args)
    data = documents.prepare(sources, tokenizer, seed=args.seed, needed=args.batch_size * ring.dp_size)
    accelerator.print(common.describe_run(ring, args.model, args.pattern, replaces, data.description))
    settings = {name: getattr(args, name) for name in KEPT} | {"distill": args.distill or None}
    settings |= {"model": checkpoints.stamp_of_model(args.model), "rings": ring.dp_size}
    settings |= {"documents": data.digest, "pattern": common.pattern_settings(pattern)}
    if resumed:
        (resumed,) = broadcast_object_list([resumed])  # Every process goes on from the same checkpoint.
        check_resumed(args, accelerator, resumed, settings)
    run = Run(args, accelerator, ring, data, settings)
    run.begin(resumed)
    with checkpoints.Stop() as stop:
        run.train(stop)
    run.evaluate(args.steps, "after")
    run.report()
    run.save(tokenizer)
    accelerator.end_training()


def check_resumed(args: argparse.Namespace, accelerator: Accelerator, resumed: Path, settings: dict[str, Any]) -> None:
    """Names damaged checkpoints, and ends a run that cannot go on from this one."""
    for name, lacking in checkpoints.damaged(args.output).items():
        accelerator.print(f"{name} is not whole and will be replaced: it lacks {lacking}")
    checkpoints.check_settings(resumed, settings)
    done = checkpoints.step_of(resumed)
    if done > args.steps:
        raise SystemExit(f"--steps {args.steps}: {resumed} was written after step {done}: take {done} or more")


def load_model(args: argparse.Namespace, ring: ra.Ring) -> Any:
    """Returns the model to train, under its pattern and over the ring."""
    model = common.load_model(args.model, trust=args.trust_remote_code)
    if args.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": ra.keep_attention})
    if args.layer_tokens_at_once:
        ra.sliced_layers(model, args.layer_tokens_at_once)
    if args.lora:
        model = common.add_lora(model, args.lora)
    return ra.patch_model(model, load_pattern(args.pattern), ring=ring)


class Run:
    """A run under way: its model, batches and figures. Every process calls its methods, in the order of `fine_tune`."""

    def __init__(
        self, args: Any, accelerator: Accelerator, ring: ra.Ring, data: documents.Data, settings: dict
    ) -> None:
        self.args, self.accelerator, self.ring, self.data, self.settings = args, accelerator, ring, data, settings
        self.raw_model = load_model(args, ring)
        # Rows are drawn in an order that follows from seed and epoch; a stream was shuffled so when it was prepared.
        rows = data.rows
        sampler = DistributedSampler(rows, 1, 0, seed=args.seed) if hasattr(rows, "__len__") else None
        # Its own generator leaves dropout's random numbers alone when an epoch begins or is continued.
        reading = {"sampler": sampler, "drop_last": True, "generator": torch.Generator()}
        loader = DataLoader(rows, args.batch_size, collate_fn=default_data_collator, **reading)
        trained = [parameter for parameter in self.raw_model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.1)
        schedule = get_scheduler(args.schedule, optimizer, args.warmup, args.steps)
        prepared = accelerator.prepare(self.raw_model, optimizer, loader, schedule)
        self.model, self.optimizer, loader, self.schedule = prepared
        self.batches = Batches(accelerator, loader)
        facts = {"world_size": ring.dp_size * ring.world_size, "ring_size": ring.world_size}
        facts |= {"transport": ring.transport, "pattern": args.pattern}
        self.figures = checkpoints.Figures(facts, steps=[], held_out={})
        # A checkpoint also holds these, beside the model, its optimizer, the schedule and the random states.
        accelerator.register_for_checkpointing(self.batches, self.figures)
        accelerator.init_trackers("finetune", config=settings)

    def begin(self, resumed: Path | None) -> None:
        """Goes on from a checkpoint, or evaluates the model as it came."""
        if resumed is None:
            self.evaluate(0, "before")
            return
        self.accelerator.load_state(str(resumed))
        checkpoints.set_rates(self.optimizer, self.schedule.scheduler)
        self.accelerator.print(f"going on after step {len(self.figures['steps'])}, from {resumed}")

    def evaluate(self, step: int, name: str | None = None) -> None:
        """Evaluates on the documents held out, if there are any; `name` is "before" or "after" the run."""
        if not self.data.held_out:
            return
        self.figures["held_out"][step] = loss = self.data.held_out.loss(self.raw_model, self.ring)
        perplexity = math.exp(loss)
        self.accelerator.log({"held_out/loss": loss, "held_out/perplexity": perplexity}, step=step)
        if self.accelerator.is_main_process:
            tqdm.write(f"held-out perplexity after {step} steps: {perplexity:.3f}")
        if name:
            self.figures[f"perplexity_{name}"] = perplexity
        if name and self.args.distill:
            with ra.exact_attention(self.raw_model):
                exact = math.exp(self.data.held_out.loss(self.raw_model, self.ring))
            self.figures[f"perplexity_exact_{name}"] = exact
            self.accelerator.print(f"held-out perplexity of the same weights with exact attention: {exact:.3f}")

    def train(self, stop: checkpoints.Stop) -> None:
        """Takes the steps that are left, and evaluates and saves between them; ends the program after a signal."""
        args, accelerator, done = self.args, self.accelerator, len(self.figures["steps"])
        self.model.train()
        reader = iter(self.batches)
        shown = {"initial": done, "total": args.steps, "disable": not accelerator.is_main_process}
        line = "step {n_fmt}/{total_fmt}{desc} [{elapsed}<{remaining}{postfix}]"  # It fits 80 columns.
        bar = tqdm(range(done + 1, args.steps + 1), **shown, bar_format=line)
        for step in bar:
            with self.part_of_step(bar):
                figures = self.step(step, reader)
            self.figures["steps"].append(figures)
            accelerator.log(figures, step=step)
            tokens, learned = (figures[name] / figures["seconds"] for name in ("tokens", "learned"))
            bar.set_postfix_str(f"loss {figures['loss']:.3f}, {tokens:.0f} tokens/s, {learned:.0f} learned/s")
            stopped = stop.agree(accelerator.device)  # There may be time for a checkpoint alone.
            if args.eval_every and step % args.eval_every == 0 and step < args.steps and not stopped:
                self.evaluate(step)
            if stopped or (args.save_every and step % args.save_every == 0):
                checkpoints.save(accelerator, args.output, step, self.settings, args.keep)
            if stopped:
                accelerator.end_training()
                stop.end(args.output / f"checkpoint-{step}", "--resume")

    @contextmanager
    def part_of_step(self, bar: tqdm) -> Iterator[None]:
        """Shows in a terminal how much of a step is done, since a step of long rows takes minutes."""
        if not common.at_terminal():
            yield
            return
        ended, shown = 0, time.monotonic()

        def show() -> None:
            nonlocal ended, shown
            ended += 1
            if time.monotonic() > shown + 0.5:
                shown = time.monotonic()
                bar.set_description_str(f" +{min(ended / parts, 0.99):.0%}")

        with common.after_layers(self.raw_model, show) as layers:
            parts = 2 * max(1, layers) * self.args.accumulate
            yield
        bar.set_description_str("", refresh=False)

    def step(self, number: int, reader: Iterator[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Takes an optimizer step, and returns its figures."""
        accelerator, start = self.accelerator, time.perf_counter()
        batches = list(itertools.islice(reader, self.args.accumulate))
        # The first token of a row is not predicted. The sums are over all rings.
        counts = [
            torch.stack([batch["attention_mask"].sum(), (batch["labels"][:, 1:] != -100).sum()]) for batch in batches
        ]
        tokens, learned = accelerator.reduce(torch.stack(counts).sum(0), "sum")
        loss = float(accelerator.reduce(self.backward(batches, learned.clamp(min=1)), "sum"))
        norm = accelerator.clip_grad_norm_(self.model.parameters(), self.args.clip)
        # FSDP 2 may leave each process its part.
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not checkpoints.is_finite_step(accelerator, loss, norm):
            accelerator.end_training()
            checkpoints.end_not_finite(number, loss, norm, checkpoints.last_whole(self.args.output), "--lr")
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        filled = torch.stack([batch["attention_mask"].float().mean() for batch in batches]).mean()
        fill, seconds = float(accelerator.reduce(filled, "mean")), time.perf_counter() - start
        counted = {"tokens": int(tokens), "learned": int(learned)}
        return {"loss": loss, "grad_norm": norm, **counted, "fill": fill, "seconds": seconds, "lr": rate}

    def backward(self, batches: list[dict[str, torch.Tensor]], tokens: torch.Tensor) -> torch.Tensor:
        """Adds the gradients of the batches of a step, and returns this ring's share of its loss; it learns `tokens`."""
        args, accelerator = self.args, self.accelerator
        total = torch.zeros((), device=accelerator.device)
        for batch in batches:
            with accelerator.accumulate(self.model):
                with save_on_cpu(pin_memory=accelerator.device.type != "cpu") if args.offload else nullcontext():
                    loss = batch_loss(self.model, batch, tokens, distill=args.distill)
                # The loss is a share of the step's. Accelerate takes the mean over rings, and over the batches of a ring.
                accelerator.backward(loss * self.ring.dp_size * args.accumulate)
            total += loss.detach()
        return total

    def report(self) -> None:
        """Prints the losses, the speed and the memory of the run."""
        figures, steps = self.figures, self.figures["steps"]
        seconds = sum(step["seconds"] for step in steps)
        for name in ("tokens", "learned"):  # Steps of a checkpoint that another release wrote have no "learned".
            figures[f"{name}_per_second"] = sum(step.get(name, 0) for step in steps) / seconds
        fill = sum(step["fill"] for step in steps) / len(steps)
        losses = f"loss {steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f}"
        speeds = "{tokens_per_second:.0f} tokens/s, of which {learned_per_second:.0f} are learned".format_map(figures)
        self.accelerator.print(f"{losses}, {speeds}, rows {fill:.1%} full")
        figures["peak_memory_bytes"] = common.report_memory(self.accelerator)

    def save(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Saves the model and the figures."""
        args, output = self.args, self.args.output
        weights = self.accelerator.get_state_dict(self.model)  # Every process must call this: each may hold a part.
        if self.accelerator.is_main_process:
            remedy = "make space there; --resume goes on from the last checkpoint"
            with checkpoints.writing("the model", output, remedy):
                self.raw_model.save_pretrained(output, state_dict=weights)
                tokenizer.save_pretrained(output)
            common.report_saved(output, args.lora)
            if args.json:
                checkpoints.write_text(args.json, json.dumps(self.figures))
        self.accelerator.wait_for_everyone()


def batch_loss(model, batch, tokens, *, distill):
    """Returns this ring's share of the mean loss of an optimizer step with so many tokens to predict."""
    if distill:
        return ra.distillation_loss(model, batch, tokens)
    return model(**batch, num_items_in_batch=tokens).loss


if __name__ == "__main__":
    with ra.naming_lost_processes():
        main()
