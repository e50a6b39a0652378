"""Short runs of the recipe finetune.py on a tiny model: their folder, their arguments, and their losses."""

import json
from pathlib import Path

from tests.support.checkpoints import save_tiny_checkpoint

RECIPES = Path(__file__).parents[2] / "recipes"
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
STEPS = 6


def save_inputs(folder):
    """Saves a tiny model with a byte-level tokenizer, and a text."""
    save_tiny_checkpoint(folder / "model", hidden_size=32, intermediate_size=64, max_position_embeddings=4096)
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog, again and again. " * 100)
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
    loss = module.ra.next_token_loss

    def counted(*args, **options):
        if next(calls) == number:
            act()
        return loss(*args, **options)

    monkeypatch.setattr(module.ra, "next_token_loss", counted)
