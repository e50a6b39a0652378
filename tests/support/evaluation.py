"""A tiny checkpoint and a text of made-up words for the tests of evaluations."""

import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.checkpoints import save_tiny_checkpoint
from tests.support.tiny_models import with_large_weights

SIZES = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 8192}


def made_up_text(seed, words=2997):
    """Sentences of nine words each, of some 700 different ones."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randint(4, 7))) for _ in range(700)]
    drawn = rng.choices(vocabulary, k=words)
    return " ".join(f"{word}." if number % 9 == 8 else word for number, word in enumerate(drawn))


def save_checkpoint(folder):
    """A model whose attention is far from uniform, and a tokenizer of bytes."""
    save_tiny_checkpoint(folder, "<end>", **SIZES)
    with_large_weights(AutoModelForCausalLM.from_pretrained(folder)).save_pretrained(folder)


def load(folder, dtype=torch.float64):
    """The model, which computes with "ring_dilated", and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="ring_dilated", dtype=dtype)
    return model, AutoTokenizer.from_pretrained(folder)
