"""Asks questions about a long text: reads it once into a cache, prints the answers word by word, and what they took.

One device:    python recipes/ask.py --text book.txt --question "Who is the author?" --pattern window:512+4
Calibrated:    python recipes/ask.py --model ID --text book.txt --question Q1 Q2 --pattern calibrated/calibration.json
Many devices:  torchrun --nproc-per-node 8 recipes/ask.py --model ID --text book.txt --question "Who is the author?"
Small CPU:     ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 recipes/ask.py --tokens 1024

One process keeps only the rows that the pattern can still see (`ra.PatternCache`). Several processes form one ring, and each
keeps those rows of its part of the text (`ra.prefill`). Without --model and --text, the recipe takes the demo's.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from collections.abc import Sequence
from typing import Any

import checkpoints
import common
import documents
import torch
from accelerate import Accelerator
from accelerate.utils import gather
from arguments import (
    DTYPES,
    PATTERN_HELP,
    Help,
    at_least,
    existing_file,
    load_pattern,
    new_file,
    pattern_source,
    token_count,
)
from transformers import TextStreamer

import hf_ring_attention as ra

#: The question about the text of the demo.
QUESTION = "What is this text about? Answer in one sentence."


class Clock(TextStreamer):
    """Prints an answer as it comes, and keeps the time of each token."""

    def __init__(self, tokenizer: Any, shown: bool) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.shown, self.times = shown, [time.perf_counter()]

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.shown:
            super().on_finalized_text(text, stream_end)


def written(tokenizer: Any, text: str, question: str, tokens: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens [1, n] of a text, with what its template puts in front, and those of a question behind it."""
    text, behind = text.strip(), f"\n\nQuestion: {question}\nAnswer:"
    if not text:
        raise SystemExit("--text: the file is empty: name one with text")
    before, plain = "", {"add_special_tokens": False, "return_tensors": "pt", "verbose": False}
    if tokenizer.chat_template:
        content = [{"role": "user", "content": f"{text}\n\n{question}"}]
        chat = tokenizer.apply_chat_template(content, tokenize=False, add_generation_prompt=True)
        before, _, behind = chat.partition(text)
        head, body = (tokenizer(part, **plain).input_ids.long() for part in (before, text))
    else:
        head, body = torch.empty(1, 0, dtype=torch.long), common.tokenize(tokenizer, text)
    if tokens is not None and body.shape[1] < tokens:
        raise SystemExit(f"--tokens {tokens}: the text has {body.shape[1]} tokens: name a longer one, or fewer tokens")
    return torch.cat([head, body[:, :tokens]], 1), tokenizer(behind, **plain).input_ids


def cache_name(model: Any) -> str:
    """Returns the argument of `generate` that takes a cache: Transformers 5.24 renamed it."""
    names = inspect.signature(model.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in names else "past_key_values"


@torch.no_grad()
def read(model: Any, ids: torch.Tensor, ring: ra.Ring, piece: int | None, shown: bool) -> tuple[Any, str]:
    """Reads a text into a cache, `piece` tokens at a time; returns the cache and its description."""
    cache, description = None, f"by ra.prefill, shared by {ring.world_size} processes"
    if ring.world_size == 1:
        latent = getattr(model.config.get_text_config(), "kv_lora_rank", None) is not None
        cache, description = ra.PatternCache(model, every_row=latent), "the rows that the pattern can still see"
        if latent:
            description = "every row: latent attention keeps a small row for all heads"
    with common.reading(model, ids.shape[1], shown) as bar:
        if cache is None:
            cache = ra.prefill(model, ids)
        else:
            for part in ids.split(piece or ids.shape[1], 1):
                bar.piece = part.shape[1]
                model.base_model(input_ids=part, use_cache=True, **{cache_name(model): cache})
    return cache, f"{type(cache).__name__}, {description}"


def answer(model: Any, cache: Any, prompt: torch.Tensor, clock: Clock, longest: int) -> torch.Tensor:
    """Returns the tokens [m] of an answer to a prompt, whose text is in the cache."""
    options = {cache_name(model): cache, "max_new_tokens": longest, "do_sample": False, "streamer": clock}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, prompt.shape[1] :]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    common.add_model(parser)
    add = parser.add_argument
    add("--text", type=existing_file, metavar="FILE", help="text file; default: the topics of Python 3.11's manual")
    add(
        "--question", nargs="+", default=[QUESTION], help=f"questions, each about the same text (default: {QUESTION!r})"
    )
    add(
        "--tokens",
        type=token_count(1),
        help="first tokens of the text to read, beside those of the chat (default: all)",
    )
    add("--pattern", type=pattern_source, help=f"{PATTERN_HELP} (default: the model's, else exact)")
    add("--answer-tokens", type=at_least(1), default=128, help="most tokens of an answer (default 128)")
    piece = "tokens that one process reads at once; fewer take less memory (default 4096)"
    add("--at-once", type=token_count(1), default=4096, help=piece)
    add("--dtype", choices=DTYPES, default="float32", help="data type (default float32)")
    add("--json", type=new_file, help="file for the answers and figures")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    accelerator, ring, trust = Accelerator(), ra.Ring(), args.trust_remote_code
    pattern = None if args.pattern is None else load_pattern(args.pattern)
    replaces = pattern is not None and common.check_heads(args.model, pattern, trust=trust)
    [text] = documents.texts(None if args.text is None else [args.text])
    tokenizer = common.load_tokenizer(args.model, trust=trust)
    parts = [written(tokenizer, text, question, args.tokens) for question in args.question]
    ids = parts[0][0].to(accelerator.device)
    model = common.load_model(args.model, getattr(torch, args.dtype), trust=trust).to(accelerator.device).eval()
    ra.patch_model(model, pattern, ring=ring)
    named = args.pattern or "of the model"
    accelerator.print(common.describe_run(ring, args.model, named, replaces, f"{ids.shape[1]} tokens"))
    shown = accelerator.is_main_process
    start = time.perf_counter()
    cache, description = read(model, ids, ring, args.at_once, shown)
    seconds = time.perf_counter() - start
    figures: dict[str, Any] = {"world_size": ring.world_size, "tokens": ids.shape[1], "read_seconds": seconds}
    accelerator.print(f"read {ids.shape[1]:,} tokens in {seconds:.1f} s, {ids.shape[1] / seconds:,.0f} tokens/s")
    figures |= {"cache": description, "answers": []}
    for number, (question, (_, tail)) in enumerate(zip(args.question, parts)):
        accelerator.print(f"\n{question}")
        if ring.world_size == 1 and number + 1 < len(parts):
            cache.activate_past_recording()  # The next question goes back to the end of the text.
        clock = Clock(tokenizer, shown)
        found = answer(model, cache, torch.cat([ids, tail.to(ids.device)], 1), clock, args.answer_tokens)
        held = gather(torch.tensor([cache.nbytes], device=ids.device)).tolist()
        first, rest = clock.times[1] - clock.times[0], clock.times[-1] - clock.times[1]
        each = rest / max(1, len(found) - 1)
        row = {
            "question": question,
            "answer": tokenizer.decode(found, skip_special_tokens=True),
            "tokens": found.tolist(),
        }
        figures["answers"].append(row | {"first_seconds": first, "token_seconds": each, "cache_bytes": held})
        speed = f", then {1 / each:.1f} tokens/s, {1000 * each:.1f} ms a token" if len(found) > 1 else ""
        accelerator.print(f"-- {common.plural(len(found), 'token')}: the first after {first:.2f} s{speed}")
        if number + 1 < len(parts):
            cache.crop(ids.shape[1] - cache.get_seq_length())
    size = " + ".join(f"{size / 2**20:.1f}" for size in held)
    accelerator.print(f"cache: {size} MiB ({description})")
    if args.json and accelerator.is_main_process:
        checkpoints.write_text(args.json, json.dumps(figures))
    accelerator.end_training()


if __name__ == "__main__":
    with ra.naming_lost_processes():
        main()
