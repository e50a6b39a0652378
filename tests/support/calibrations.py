"""Calibrations of tiny models by random texts."""

import torch

import hf_ring_attention as ra
from tests.support.tiny_models import VOCAB, tiny_model

MENU = ("window:4+1", "pyramid:4,2", "window:16+2", "window:32", "exact")


def model_of(layers=2, kv_heads=2, kind="llama"):
    return tiny_model(kind, "ring_dilated", num_hidden_layers=layers, num_key_value_heads=kv_heads)


def random_texts(rng, count=2, length=80):
    return [torch.tensor([rng.randrange(3, VOCAB) for _ in range(length + 3 * i)]) for i in range(count)]


def calibrated(model, texts, **options):
    return ra.calibrate(model, texts, **{"menu": MENU, "budget": 0.4, "progress": False, **options})
