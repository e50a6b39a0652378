"""Fine-tunes a causal language model on long documents with Accelerate, each sequence sharded over --ring-size processes.

One device:    python recipes/finetune.py --seq-len 2048
Many devices:  accelerate launch --num_processes 8 recipes/finetune.py --model ID --text FILE --ring-size 4 --seq-len 131072
Small CPU:     ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 recipes/finetune.py --ring-size 2

With 8 processes and --ring-size 4, two rings read different sequences and the four ranks of a ring share each of theirs.
Files for --config_file of `accelerate launch`, with DDP, FSDP 2 or ZeRO-3: recipes/accelerate.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import time
from collections import UserDict
from contextlib import nullcontext
from pathlib import Path

import checkpoints
import common
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, broadcast_object_list, set_seed
from torch.autograd.graph import save_on_cpu
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import get_scheduler

import hf_ring_attention as ra
from hf_ring_attention.plan.notation import FORMS
from hf_ring_attention.tools.arguments import at_least, missing_extra, new_file, new_folder, pattern_text, positive
from hf_ring_attention.tools.benchmarks.harness import peak_memory
from hf_ring_attention.tools.plots import plot_training

#: Those of transformers.get_scheduler that need nothing but the number of steps.
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "constant_with_warmup",
    "constant",
)


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_sources(parser)
    parser.add_argument("--pattern", type=pattern_text, default="pyramid:512,3", help=FORMS)
    parser.add_argument(
        "--ring-size",
        type=at_least(1),
        help="processes that share a sequence; several processes need it: their number for one ring of all, 1 for sequences "
        "of their own",
    )
    parser.add_argument("--seq-len", type=at_least(2), default=1024, help="tokens of a sequence")
    parser.add_argument("--batch-size", type=at_least(1), default=1, help="sequences a ring reads at once")
    parser.add_argument("--steps", type=at_least(1), default=20, help="optimizer steps")
    parser.add_argument("--accumulate", type=at_least(1), default=1, help="batches of a step")
    parser.add_argument("--lr", type=positive, default=5e-5, help="highest learning rate")
    parser.add_argument("--schedule", choices=SCHEDULES, default="cosine", help="of the learning rate")
    parser.add_argument(
        "--warmup",
        type=at_least(0),
        help="steps of rising learning rate, the first with 0; default: 2, or 0 of one step",
    )
    parser.add_argument("--clip", type=positive, default=1.0, help="largest norm of the gradient")
    parser.add_argument(
        "--held-out", type=at_least(0), default=0, help="first tokens of the text kept for perplexity, not trained on"
    )
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument(
        "--offload", action="store_true", help="keep in host memory what --checkpointing leaves on the device"
    )
    parser.add_argument(
        "--dtype", choices=["no", "bf16", "fp16"], help="mixed precision; default: what Accelerate was launched with"
    )
    parser.add_argument("--seed", type=at_least(0, most=2**32 - 1), default=0)
    parser.add_argument("--save-every", type=at_least(0), default=0, help="steps between checkpoints, 0: none")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    parser.add_argument(
        "--output",
        type=new_folder,
        default=Path("runs/finetune"),
        help="folder for model, checkpoints and curve, shared by all machines",
    )
    parser.add_argument(
        "--plot", action="store_true", help="draw the losses to loss.png in --output (needs matplotlib)"
    )
    parser.add_argument("--json", type=new_file, help="file for the figures")
    args = parser.parse_args(argv)
    check_args(parser, args)
    return args


def check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses arguments that do not go together."""
    if args.warmup is None:
        args.warmup = min(2, args.steps - 1)
    if args.warmup >= args.steps and args.schedule != "constant":
        parser.error(
            f"argument --warmup: the learning rate would rise for {args.warmup} of {args.steps} steps and never be --lr: "
            f"take at most {args.steps - 1}, or more --steps"
        )
    if args.held_out == 1:
        parser.error("argument --held-out: the first token of a text is not predicted: take 0, or 2 and more")
    missing = missing_extra("argument --plot:", "matplotlib") if args.plot else None
    if missing:
        parser.error(missing)


def main() -> None:
    args = parse_args()
    resumed = checkpoints.last_saved(args.output) if args.resume else None
    if resumed is None:
        checkpoints.refuse_earlier(args.output, "--resume", "--output")
    # Steps end where this recipe's end, and not with an epoch.
    accumulation = GradientAccumulationPlugin(args.accumulate, sync_with_dataloader=False)
    accelerator = Accelerator(mixed_precision=args.dtype, gradient_accumulation_plugin=accumulation)
    if accelerator.state.deepspeed_plugin is not None:  # it clips and counts batches itself
        accelerator.state.deepspeed_plugin.deepspeed_config.update(
            train_micro_batch_size_per_gpu=args.batch_size,
            gradient_accumulation_steps=args.accumulate,
            gradient_clipping=args.clip,
        )
    ring = ra.Ring.from_accelerator(accelerator, size=common.ring_size(args.ring_size, accelerator.num_processes))
    set_seed(args.seed)

    tokenizer = common.load_tokenizer(args.model)
    ids = common.tokenize(tokenizer, common.load_text(args.text, args.dataset))[0]
    held_out, rest = ids[: args.held_out], ids[args.held_out :]
    dataset = common.rows_of(rest, args.seq_len, needed=args.batch_size * ring.dp_size)
    # What a run must not change when it goes on: the data and their order, the pattern, and what the optimizer remembers.
    names = ("pattern", "seq_len", "batch_size", "accumulate", "held_out", "lr", "seed")
    settings = {name: getattr(args, name) for name in names}
    settings |= {"rings": ring.dp_size, "tokens": hashlib.sha256(ids.numpy().tobytes()).hexdigest()}
    if resumed:
        (resumed,) = broadcast_object_list([resumed])  # all go on from the same
        checkpoints.check_settings(resumed, settings)
        done = checkpoints.step_of(resumed)
        if done > args.steps:
            raise SystemExit(f"--steps {args.steps}: {resumed} was written after step {done}: take {done} or more")

    model = common.load_model(args.model)
    ra.patch_model(model, ra.Pattern.parse(args.pattern), ring=ring)
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    loader = ring.prepare_data_loader(
        DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True, collate_fn=ra.PaddingCollator())
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    schedule = get_scheduler(args.schedule, optimizer, args.warmup, args.steps)
    raw_model = model
    model, optimizer = accelerator.prepare(model, optimizer)

    figures = Figures(world_size=accelerator.num_processes, ring_size=ring.world_size, pattern=args.pattern)
    # What a checkpoint has besides the model, its optimizer and the random states.
    accelerator.register_for_checkpointing(schedule, loader, figures)
    if resumed:
        accelerator.load_state(str(resumed))
        accelerator.print(f"going on after step {len(figures.steps)}, from {resumed}")
    elif args.held_out:
        figures["perplexity_before"] = ra.perplexity(raw_model, held_out, ring=ring).perplexity
        accelerator.print(f"held-out perplexity before: {figures['perplexity_before']:.3f}")

    model.train()
    batches = epochs(loader)
    bar = tqdm(
        range(len(figures.steps), args.steps),
        initial=len(figures.steps),
        total=args.steps,
        disable=not accelerator.is_main_process,
        desc="fine-tuning",
        unit="step",
    )
    for step in bar:
        start = time.perf_counter()
        shards = list(itertools.islice(batches, args.accumulate))
        tokens = ra.count_tokens(shards)
        total = torch.zeros((), device=accelerator.device)
        for shard in shards:
            with accelerator.accumulate(model):
                with save_on_cpu(pin_memory=accelerator.device.type != "cpu") if args.offload else nullcontext():
                    loss = ra.next_token_loss(model, shard, tokens)
                # A share of the whole step's loss already, where Accelerate takes the mean of batches.
                accelerator.backward(loss * args.accumulate)
            total += loss.detach()
        norm = accelerator.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        # Every process scales its share by the number of processes, over which gradients are averaged.
        loss = float(accelerator.reduce(total, "mean"))
        seconds = time.perf_counter() - start
        figures.steps.append(
            {
                "loss": loss,
                "grad_norm": float(norm),
                "tokens": int(tokens),
                "seconds": seconds,
                "lr": schedule.get_last_lr()[0],
            }
        )
        bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{int(tokens) / seconds:.0f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            checkpoints.save(accelerator, args.output, step + 1, settings)
    if args.held_out:
        figures["perplexity_after"] = ra.perplexity(raw_model, held_out, ring=ring).perplexity
        accelerator.print(f"held-out perplexity after: {figures['perplexity_after']:.3f}")

    memory = torch.tensor([peak_memory(accelerator.device)], device=accelerator.device)
    figures["peak_memory_bytes"] = accelerator.gather(memory).tolist()
    speed = sum(step["tokens"] for step in figures.steps) / sum(step["seconds"] for step in figures.steps)
    figures["tokens_per_second"] = speed
    weights = accelerator.get_state_dict(model)  # by all processes, which may have a part each
    accelerator.print(f"loss {figures.steps[0]['loss']:.3f} -> {figures.steps[-1]['loss']:.3f}, {speed:.0f} tokens/s")
    for rank, peak in enumerate(figures["peak_memory_bytes"]):
        accelerator.print(f"rank {rank}: peak memory {peak / 2**30:.2f} GiB")
    if accelerator.is_main_process:
        raw_model.save_pretrained(args.output, state_dict=weights)
        tokenizer.save_pretrained(args.output)
        if args.plot:
            plot_training([step["loss"] for step in figures.steps], args.output / "loss.png")
        print(f"saved to {args.output}" + (", with loss.png" if args.plot else ""))
        if args.json:
            args.json.write_text(json.dumps(figures.data))
    accelerator.wait_for_everyone()
    accelerator.end_training()


class Figures(UserDict):
    """What a run reports; a part of its checkpoints."""

    def __init__(self, **figures) -> None:
        super().__init__(figures, steps=[])

    @property
    def steps(self) -> list[dict]:
        return self["steps"]

    def state_dict(self) -> dict:
        return self.data

    def load_state_dict(self, state: dict) -> None:
        self.data.update(state)


def epochs(loader):
    """The batches of a loader, again and again, each time in another order."""
    while True:
        yield from loader


if __name__ == "__main__":
    with ra.naming_lost_processes():
        main()
