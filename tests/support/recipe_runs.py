"""Short runs of recipes on a tiny model: their folder, their arguments, their losses, and what two runs are compared by."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import save_tiny_checkpoint
from tests.support.tolerance import allowed, distance, largest

RECIPES = Path(__file__).parents[2] / "recipes"
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
STEPS = 6


def save_inputs(folder, width=32, times=100):
    """Saves a tiny model with a byte-level tokenizer, and a text."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "max_position_embeddings": 4096}
    save_tiny_checkpoint(folder / "model", **sizes)
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog, again and again. " * times)
    return folder


def words(folder, output, *more):
    """The arguments of a run."""
    options = ["--model", folder / "model", "--text", folder / "text.txt", "--pattern", "window:32+2", "--seq-len", 128]
    options += ["--steps", STEPS, "--lr", "1e-2", "--schedule", "constant", "--output", output]
    return [str(word) for word in (*options, "--json", output / "figures.json", *more)]


def losses_of(output):
    return [step["loss"] for step in json.loads((output / "figures.json").read_text())["steps"]]


def at_step(monkeypatch, module, number, act):
    """Has a recipe `act` in the step of this number, from 1, before its loss."""
    calls = iter(range(1, 100))
    loss = module.batch_loss

    def counted(*args, **options):
        if next(calls) == number:
            act()
        return loss(*args, **options)

    monkeypatch.setattr(module, "batch_loss", counted)


def finetuned(output):
    """What two runs are compared by."""
    figures = json.loads((output / "figures.json").read_text())
    return {
        "losses": [step["loss"] for step in figures["steps"]],
        "norms": [step["grad_norm"] for step in figures["steps"]],
        **({"perplexity": [figures["perplexity_after"]]} if "perplexity_after" in figures else {}),
        "parameters": AutoModelForCausalLM.from_pretrained(output).state_dict(),
    }


def assert_same_perplexity(found, expected, *nudged):
    """Of rows of figures: the losses of all tokens but the first, and their mean.

    One token may be so close to another choice that a nudge moves it ten times as far as the next nudge does: what several
    of them do tells how far rounding can move it.
    """
    found_losses, losses, *others = (
        torch.tensor(row["token_nll"][1:], dtype=torch.float64) for row in (found, expected, *nudged)
    )
    errors = distance(found_losses, losses), abs(found["perplexity"] / expected["perplexity"] - 1)
    # The errors of tokens may cancel in the mean of one run and not in that of another, so their sizes bound that of a mean.
    bounds = largest(distance(x, losses) for x in others), largest(float((x - losses).abs().mean()) for x in others)
    for error, bound in zip(errors, map(allowed, bounds), strict=True):
        assert 0 <= error <= bound, (error, bound)
