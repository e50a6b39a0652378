"""Fine-tunes a causal language model on long documents with Accelerate, each sequence sharded over --ring-size processes.

One device:    python recipes/finetune.py --seq-len 2048
Many devices:  accelerate launch --num_processes 8 recipes/finetune.py --model ID --text FILE --ring-size 4 --seq-len 131072
Small CPU:     ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 recipes/finetune.py --ring-size 2

With 8 processes and --ring-size 4, two rings read different sequences and the four ranks of a ring share each of theirs.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path

import common
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import get_scheduler

import hf_ring_attention as ra
from hf_ring_attention import bench, cli


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="hub id or folder of a causal language model; default: the bundled SmolLM2-135M"
    )
    parser.add_argument("--text", help="text file or dataset id; default: the topics of Python's manual")
    parser.add_argument("--pattern", default="pyramid:512,3", help=cli.PATTERN_HELP)
    parser.add_argument("--ring-size", type=int, default=1, help="processes that share a sequence")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences a ring reads at once")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--lr", type=float, default=5e-5, help="highest learning rate")
    parser.add_argument("--schedule", default="cosine", help="a schedule of transformers.get_scheduler")
    parser.add_argument("--warmup", type=int, default=2, help="steps of rising learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument(
        "--held-out", type=int, default=0, help="first tokens of the text kept for perplexity, not trained on"
    )
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--dtype", choices=["no", "bf16", "fp16"], default="no", help="Accelerate's mixed precision")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/finetune"), help="folder of the checkpoint")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    pattern = cli.parse_pattern(args.pattern)
    accelerator = Accelerator(mixed_precision=args.dtype)
    ring = ra.Ring.from_accelerator(accelerator, size=args.ring_size)
    set_seed(args.seed)

    with accelerator.local_main_process_first():
        model, tokenizer = common.load(args.model)
    ra.patch_model(model, pattern, ring=ring)
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    ids = common.tokenize(tokenizer, common.load_text(args.text))[0]
    held_out, rows = ids[: args.held_out], ids[args.held_out :]
    rows = rows[: len(rows) // args.seq_len * args.seq_len].view(-1, args.seq_len)
    if len(rows) < ring.dp_size:
        raise SystemExit(
            f"the text has {len(rows)} sequences of {args.seq_len} tokens, {ring.dp_size} rings need one each"
        )
    # Ranks of a ring draw the same rows, rings draw other ones.
    rows = rows[ring.dp_rank :: ring.dp_size][: len(rows) // ring.dp_size]
    generator = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(rows, batch_size=args.batch_size, shuffle=True, generator=generator, drop_last=True)

    def batches():
        while True:
            yield from loader

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    schedule = get_scheduler(args.schedule, optimizer, args.warmup, args.steps)
    raw_model = model
    model, optimizer = accelerator.prepare(model, optimizer)

    figures = {
        "world_size": accelerator.num_processes,
        "ring_size": ring.world_size,
        "pattern": args.pattern,
        "steps": [],
    }
    if args.held_out:
        figures["perplexity_before"] = ra.perplexity(raw_model, held_out, ring=ring).perplexity
        accelerator.print(f"held-out perplexity before: {figures['perplexity_before']:.3f}")
    model.train()
    bar = tqdm(range(args.steps), disable=not accelerator.is_main_process, desc="fine-tuning", unit="step")
    source = batches()
    for _ in bar:
        start = time.perf_counter()
        shards = [
            ra.shard_batch(next(source), ring, pattern, device=accelerator.device) for _ in range(args.accumulate)
        ]
        tokens = ra.count_tokens(shards)
        total = 0.0
        for number, shard in enumerate(shards):
            # Gradients are averaged over processes once, with the last batch of the step.
            with nullcontext() if number == len(shards) - 1 else accelerator.no_sync(model):
                loss = ra.next_token_loss(model(**shard).logits, shard, tokens)
                accelerator.backward(loss)
            total += loss.detach()
        norm = accelerator.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        # Every process scales its share by the number of processes, over which gradients are averaged.
        loss = float(accelerator.reduce(total, "mean"))
        seconds = time.perf_counter() - start
        figures["steps"].append(
            {
                "loss": loss,
                "grad_norm": float(norm),
                "tokens": int(tokens),
                "seconds": seconds,
                "lr": schedule.get_last_lr()[0],
            }
        )
        bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{int(tokens) / seconds:.0f}")
    if args.held_out:
        figures["perplexity_after"] = ra.perplexity(raw_model, held_out, ring=ring).perplexity
        accelerator.print(f"held-out perplexity after: {figures['perplexity_after']:.3f}")

    memory = torch.tensor([bench.peak_memory(accelerator.device)], device=accelerator.device)
    figures["peak_memory_bytes"] = accelerator.gather(memory).tolist()
    speed = sum(step["tokens"] for step in figures["steps"]) / sum(step["seconds"] for step in figures["steps"])
    figures["tokens_per_second"] = speed
    first, last = figures["steps"][0]["loss"], figures["steps"][-1]["loss"]
    accelerator.print(f"loss {first:.3f} -> {last:.3f}, {speed:.0f} tokens/s")
    for rank, peak in enumerate(figures["peak_memory_bytes"]):
        accelerator.print(f"rank {rank}: peak memory {peak / 2**30:.2f} GiB")
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
        print(f"saved to {args.output}")
        if args.json:
            args.json.write_text(json.dumps(figures))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
