"""Heads that classify rows or tokens, and outputs that need whole sequences: as under eager attention, or refused."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    EsmConfig,
    EsmModel,
    GPT2DoubleHeadsModel,
    SiglipTextConfig,
    SiglipTextModel,
)

import hf_ring_attention as ra
from tests.support.neighbours import built
from tests.support.probe import LOGITS, batch, distance
from tests.support.ranks import on_ranks
from tests.support.tiny_models import VOCAB, tiny_config
from tests.support.tolerance import largest

pytestmark = pytest.mark.usefixtures("calls")


SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
ESM = {
    "mask_token_id": 4, "token_dropout": True, "position_embedding_type": "rotary", "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
#: Models with an output that mixes the tokens of a row beside attention: the tokens it takes, class, config and output.
MIXING = {
    "the last token": (SiglipTextModel, SiglipTextConfig(**SIZES, projection_size=32), "pooler_output"),
    "the end-of-text token": (CLIPTextModel, CLIPTextConfig(**SIZES, eos_token_id=96), "pooler_output"),
    "a chosen token": (GPT2DoubleHeadsModel, tiny_config("gpt2", num_labels=1), "mc_logits"),
    "the share of masked tokens": (EsmModel, EsmConfig(**SIZES, **ESM), "last_hidden_state"),
}


@pytest.mark.parametrize("name", MIXING)
def test_outputs_that_mix_the_tokens_of_a_row(name):
    """Over a ring they are one device's, or refused by name and with a remedy."""
    model_class, config, output = MIXING[name]
    inputs, _ = batch("plain")
    ids = inputs["input_ids"].clamp_max(90)
    ids[:, 3], ids[:, 5] = 4, 96
    inputs["input_ids"] = ids

    def make():
        return built(SimpleNamespace(from_config=model_class._from_config), config)

    with torch.no_grad():
        expected = make()(**inputs)[output]
        assert distance(ra.patch_model(make())(**inputs)[output], expected) <= LOGITS
    try:
        found = on_ranks(lambda ring, model: model(**inputs)[output].detach(), make)
    except NotImplementedError as refused:
        if model_class.__name__ in str(refused) and "ring=None" in str(refused):
            return
        raise
    assert largest(distance(one, expected) for one in found) <= LOGITS
