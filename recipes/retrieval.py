"""Pass keys and needles: which hidden numbers a model still finds under attention patterns, judged by likelihood.

One device:    python recipes/retrieval.py --tokens 1k,2k
Many devices:  torchrun --nproc-per-node 8 recipes/retrieval.py --model ID --text FILE --tokens 32k,128k
A picture:     python recipes/retrieval.py --pattern exact window:512+4 calibration.json --plot retrieval.png
Small CPU:     ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 recipes/retrieval.py --tokens 1k

A pass key is a number in repeated noise (arXiv 2305.16300); a needle is the secret number of two words, in sentences of a text.
The number stands at a depth between 0, the beginning of the prompt, and 1. The prompt ends with the beginning of the answer,
and the model rates eight numbers; one is right. If it finds nothing, each gets 1/8, and the mean rank is 4.5.
`accelerate launch` works as well as torchrun; all processes share each prompt. By default the recipe takes the demo's model
and text.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import checkpoints
import common
import documents
import numpy as np
import torch
from accelerate import Accelerator
from arguments import (
    DTYPES,
    OWN,
    PATTERN_HELP,
    Help,
    at_least,
    check_extra,
    comma_list,
    existing_file,
    load_pattern,
    new_file,
    pattern_or_own,
    token_count,
)
from bench.timing import Several
from pictures import name_of

import hf_ring_attention as ra

PATTERNS = ("exact", "window:512+4", "pyramid:512,3")
TASKS = ("passkey", "needle")
NOISE = "The river is wide. The road is long. The lamp is lit. The night is quiet. Someone walks home."
#: The numbers that are compared, the right one first.
CANDIDATES = 8


class Writer:
    """Writes questions in the tokens of a model, with needles and their keys from a text; equal arguments, equal questions."""

    def __init__(self, tokenizer: Any, text: str, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        sentences = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", text) if part.strip()]
        self.words = sorted(set(re.findall(r"\b[a-z]{4,10}\b", text)))
        if len(self.words) < 2:
            raise SystemExit("the text has fewer than 2 words of 4 to 10 letters, for keys: name another one")
        self.hay = {"passkey": [self.ids(f" {NOISE}")], "needle": [self.ids(f" {part}") for part in sentences]}

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def parts(self, task: str, rng: random.Random) -> tuple[str, str, str, list[str]]:
        """Returns the text before the hay, the needle, the text behind the hay, and the numbers."""
        low, high = (10**4, 10**5) if task == "passkey" else (10**6, 10**7)
        numbers = [str(number) for number in rng.sample(range(low, high), CANDIDATES)]
        if task == "passkey":
            before = "A pass key is hidden in the following text. Find it and remember it.\n\n"
            needle = f" The pass key is {numbers[0]}. Remember it: {numbers[0]} is the pass key."
            return before, needle, "\n\nWhat is the pass key?\nThe pass key is", numbers
        key = "-".join(rng.sample(self.words, 2))
        before = "Secret numbers are hidden in the following text. Remember them: a question comes after it.\n\n"
        asked = f"The secret number of {key} is"
        return before, f" {asked} {numbers[0]}.", f"\n\nWhat is the secret number of {key}?\n{asked}", numbers

    def question(self, task: str, length: int, depth: float, number: int) -> tuple[list[int], list[list[int]]]:
        """Returns a prompt, whose needle is between sentences, and its candidates, the right one first: `length` tokens."""
        rng = random.Random(f"{self.seed} {task} {length} {depth} {number}")
        before, needle, behind, numbers = self.parts(task, rng)
        head, middle, tail = common.tokenize(self.tokenizer, before)[0].tolist(), self.ids(needle), self.ids(behind)
        candidates = [self.continuation(behind, tail, number) for number in numbers]
        room = length - len(head) - len(middle) - len(tail) - max(map(len, candidates))
        if room < 0:
            raise SystemExit(f"--tokens {length}: a question of {task} takes {length - room} tokens without its hay")
        units, hay, ends = self.hay[task], [], []
        start = rng.randrange(len(units))
        while len(hay) < room:
            hay += units[(start + len(ends)) % len(units)]
            ends.append(len(hay))
        cut = len(hay) - room  # of the first sentence
        place = max([0, *(end - cut for end in ends if end - cut <= depth * room)])
        hay = hay[cut:]
        return [*head, *hay[:place], *middle, *hay[place:], *tail], candidates

    def continuation(self, before: str, ids: list[int], number: str) -> list[int]:
        """Returns the tokens of a number behind a text; a tokenizer may write them differently by themselves."""
        whole = self.ids(f"{before} {number}")
        return whole[len(ids) :] if whole[: len(ids)] == ids else self.ids(f" {number}")


@torch.no_grad()
def candidate_losses(model: Any, prompt: list[int], candidates: list[list[int]]) -> list[float]:
    """Returns the negative log-likelihood of each candidate behind a prompt, in nats."""
    names = inspect.signature(model.prepare_inputs_for_generation).parameters
    name = "cache" if "cache" in names else "past_key_values"  # Transformers 5.24 renamed it.
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    read, losses = torch.tensor([prompt[:-1]], device=model.device), []
    held = read.shape[1]
    with common.reading(model, held, common.at_terminal(), leave=False):
        cache = ra.prefill(model, read)
    for candidate in candidates:
        labels = torch.tensor(candidate, device=model.device)
        step = torch.tensor([[prompt[-1], *candidate[:-1]]], device=model.device)
        positions = torch.arange(held, held + len(candidate), device=model.device)[None]
        options = {name: cache, "position_ids": positions} if takes_positions else {name: cache}
        logits = model(step, use_cache=True, **options).logits[0].float()
        losses.append(float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum")))
        cache.crop(held - cache.get_seq_length())
    if not all(map(math.isfinite, losses)):
        raise SystemExit(f"{type(model).__name__} predicts numbers with losses {losses}: take another --dtype")
    return losses


def answers(model: Any, writer: Writer, args: argparse.Namespace, ring: ra.Ring) -> Iterator[dict[str, Any]]:
    """Yields a row of figures for each question, pattern by pattern."""
    own = copy.deepcopy(getattr(model.config.get_text_config(), "ring_dilated", None))
    for name, pattern in args.patterns.items():
        if pattern is None:
            common.set_pattern(model, own)
        ra.patch_model(model.eval(), pattern, ring=ring)
        for key in itertools.product(args.tasks, args.lengths, args.depths, range(args.samples)):
            losses = candidate_losses(model, *writer.question(*key))
            yield {
                **dict(zip(("task", "length", "depth", "number"), key)),
                "pattern": name,
                "losses": losses,
                "first": losses[0] < min(losses[1:]),
                "rank": 1 + sum(loss <= losses[0] for loss in losses[1:]),  # Ties count against the right one.
                "probability": 1 / sum(math.exp(min(losses[0] - loss, 700)) for loss in losses),
            }


def mean_of(figure: str, rows: Sequence[dict[str, Any]], **wanted: Any) -> float:
    """Returns the mean of a figure over the questions that have these values."""
    chosen = [row[figure] for row in rows if all(row[name] == value for name, value in wanted.items())]
    return sum(chosen) / len(chosen)


def table(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """Returns the means over depths and samples as lines of text; patterns come last, since they may be long."""
    lines = [f"{'task':<8}{'tokens':>8}{'ranked first':>14}{'mean rank':>11}{'probability':>13}  pattern"]
    for task, length, pattern in itertools.product(args.tasks, args.lengths, args.patterns):
        wanted = {"rows": rows, "task": task, "length": length, "pattern": pattern}
        first, rank, probability = (mean_of(name, **wanted) for name in ("first", "rank", "probability"))
        lines.append(f"{task:<8}{length:>8}{first:>14.0%}{rank:>11.1f}{probability:>13.3f}  {pattern}")
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """Draws the probability of the right number by depth and length, a panel for each task and pattern."""
    from matplotlib.figure import Figure

    down, across = len(args.tasks), len(args.patterns)
    size = (1.6 + across * max(2.6, 0.5 * len(args.lengths)), 0.8 + down * max(1.6, 0.35 * len(args.depths)))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for (task, pattern), panel in zip(itertools.product(args.tasks, args.patterns), panels.flat):
        wanted = {"rows": rows, "task": task, "pattern": pattern}
        values = [[mean_of("probability", depth=d, length=n, **wanted) for n in args.lengths] for d in args.depths]
        image = panel.imshow(values, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            panel.text(column, row, f"{value:.2f}", ha="center", va="center", color="k" if value > 0.5 else "w")
        panel.set_title(f"{task}, {name_of(pattern)}", fontsize=9)
        panel.set_xticks(range(len(args.lengths)), args.lengths)
        panel.set_yticks(range(len(args.depths)), [f"{depth:.0%}" for depth in args.depths])
    figure.supxlabel("tokens", fontsize=9)
    figure.supylabel("depth of the number", fontsize=9)
    figure.colorbar(image, ax=list(panels.flat), label=f"probability among {CANDIDATES} numbers")
    with checkpoints.writing(str(args.plot), args.plot.parent, "make space there, or name a file on another disk"):
        figure.savefig(args.plot, dpi=120)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    common.add_model(parser)
    add, text = parser.add_argument, "text files for needles; default: the topics of Python 3.11's manual"
    add("--text", type=existing_file, nargs="+", action="extend", metavar="FILE", help=text)
    patterns = f"{PATTERN_HELP}, or own: the model's (default {' '.join(PATTERNS)})"
    add("--pattern", dest="patterns", type=pattern_or_own, nargs="+", action=Several, default=PATTERNS, help=patterns)
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: both")
    several = {"nargs": "+", "action": Several, "metavar": "N"}
    lengths = "tokens of prompts with their answers (default 1k 2k)"
    add("--tokens", dest="lengths", type=comma_list(token_count(1)), **several, default=[1024, 2048], help=lengths)
    add("--depths", type=float, nargs="+", default=[0.0, 0.5, 1.0], help="depths of the number (default 0 0.5 1)")
    samples = "questions of each task, length and depth (default 1)"
    add("--samples", type=at_least(1), default=1, help=samples)
    add("--seed", type=at_least(0), default=0, help="seed of the questions (default 0)")
    add("--dtype", choices=DTYPES, default="float32", help="data type (default float32)")
    add("--json", type=new_file, help="file for the figures of every question")
    add("--plot", type=new_file, help="file for a picture: probability by depth and length")
    args = parser.parse_args(argv)
    args.patterns = {name: None if name == OWN else load_pattern(name) for name in args.patterns}
    for name in ("tasks", "lengths", "depths"):
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    if not all(0 <= depth <= 1 for depth in args.depths):
        parser.error(f"argument --depths: numbers from 0, the beginning, to 1 were expected, got {args.depths}")
    check_extra(parser, "--plot", args.plot, "matplotlib")
    return args


def main() -> None:
    args = parse_args()
    accelerator, ring, trust = Accelerator(), ra.Ring(), args.trust_remote_code
    for pattern in args.patterns.values():
        common.check_heads(args.model, pattern, trust=trust)
    accelerator.print(common.describe_run(ring, args.model, ", ".join(args.patterns), False, f"lengths {args.lengths}"))
    text = "\n\n".join(documents.texts(args.text))
    writer = Writer(common.load_tokenizer(args.model, trust=trust), text, args.seed)
    model = common.load_model(args.model, getattr(torch, args.dtype), trust=trust).to(accelerator.device)
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise SystemExit(f"{type(model).__name__} numbers tokens differently behind a prompt: take another model")
    rows = []
    for row in answers(model, writer, args, ring):
        rows.append(row)
        accelerator.print("{task} {length} at {depth:.0%}, {pattern}: rank {rank}".format(**row))
    if accelerator.is_main_process:
        print(table(rows, args))
        if args.json:
            checkpoints.write_text(args.json, json.dumps({"world_size": ring.world_size, "rows": rows}))
        if args.plot:
            plot(rows, args)
            print(f"probability by depth and length: {args.plot}")
    accelerator.end_training()


if __name__ == "__main__":
    with ra.naming_lost_processes():
        main()
