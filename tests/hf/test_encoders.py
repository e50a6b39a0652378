"""Bidirectional models, padded and packed, and outputs that need whole sequences: on one device and over rings."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModel,
    CLIPTextConfig,
    CLIPTextModel,
    EsmConfig,
    EsmModel,
    GPT2DoubleHeadsModel,
    SiglipTextConfig,
    SiglipTextModel,
)

import hf_ring_attention as ra
from hf_ring_attention.hf.model.wrappers import runner_of
from hf_ring_attention.hf.rows.documents import first_position

from ..support.neighbours import built
from ..support.probe import BATCHES, batch, distance
from ..support.ranks import on_ranks
from ..support.tiny_models import VOCAB, tiny_config
from ..support.tolerance import EXACT, largest
from .alike import refused

TYPES = (
    "albert", "bert", "distilbert", "electra", "eurobert", "gte", "jina_embeddings_v3", "modernbert", "nomic_bert",
    "roberta", "xlm-roberta",
)  # fmt: skip


def tiny_encoder(model_type):
    changes = {"is_decoder": False}
    if model_type == "albert":
        changes |= {"num_hidden_groups": 1, "embedding_size": 16}
    return built(AutoModel, tiny_config(model_type, **changes))


def rows_of(model, kind):
    """Inputs, and a mask of the tokens without the padding."""
    inputs, labels = batch(kind, first_position(runner_of(model)))
    return inputs, inputs.get("attention_mask", torch.ones_like(labels)).bool()


def states(output, valid):
    """Hidden states of tokens, and the pooled ones if there are some."""
    return output.last_hidden_state[valid], output.get("pooler_output")


def expected_of(model, inputs, valid, kind):
    """Results of eager attention, for packed documents one by one; the pooled output comes from the row's first document."""
    with torch.no_grad():
        if kind != "packed":
            return states(model(**inputs), valid)
        positions = inputs["position_ids"][0]
        starts = (positions == positions[0]).nonzero().flatten().tolist()
        outputs = [
            model(**{name: x[:, start:stop] for name, x in inputs.items()})
            for start, stop in zip(starts, [*starts[1:], len(positions)])
        ]
        return torch.cat([output.last_hidden_state[0] for output in outputs]), outputs[0].get("pooler_output")


def worst(found, expected):
    return largest(distance(f, e) for f, e in zip(found, expected) if e is not None)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("model_type", TYPES)
def test_tiny_encoders(model_type, kind):
    model = tiny_encoder(model_type)
    inputs, valid = rows_of(model, kind)
    expected = expected_of(model, inputs, valid, kind)
    if kind == "left":
        expected = expected[0], None  # poolers read the first token, which is padding

    @torch.no_grad()
    def work(ring, model):
        return worst(states(model(**inputs), valid), expected)

    for world_size, layout in ((1, "auto"), (2, "zigzag")):
        assert largest(on_ranks(work, lambda: tiny_encoder(model_type), world_size, layout=layout)) <= EXACT


@pytest.mark.parametrize(
    ("model_type", "reason"), [("mobilebert", "together with its neighbours"), ("fnet", "no attention")]
)
def test_encoders_that_mix_tokens_outside_of_attention(model_type, reason):
    refused(reason, on_ranks, lambda ring, model: None, lambda: tiny_encoder(model_type), error=NotImplementedError)


def test_a_sharded_model_that_never_attends():
    """The gate of attention never sees it: its shards would be computed as separate rows."""

    def work(ring, model):
        for layer in model.encoder.layer:
            layer.attention.self.forward = lambda hidden_states, *args, **kwargs: (hidden_states, None)
        model(input_ids=torch.ones(1, 8, dtype=torch.long))

    said = "no layer of BertModel attended by ring_dilated"
    refused(said, on_ranks, work, lambda: tiny_encoder("bert"), layout="contiguous", error=RuntimeError)


# ---- outputs that need whole sequences


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


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("name", MIXING)
@torch.no_grad()
def test_outputs_that_mix_the_tokens_of_a_row(name):
    """Over a ring they are one device's, or refused by name and with a remedy."""
    model_class, config, output = MIXING[name]
    inputs, _ = batch("plain")
    ids = inputs["input_ids"].clamp_max(90)
    ids[:, 3], ids[:, 5] = 4, 96
    inputs["input_ids"] = ids
    make = partial(built, SimpleNamespace(from_config=model_class._from_config), config)
    expected = make()(**inputs)[output]
    assert distance(ra.patch_model(make())(**inputs)[output], expected) <= EXACT
    try:
        found = on_ranks(lambda ring, model: model(**inputs)[output].detach(), make)
    except NotImplementedError as error:
        if model_class.__name__ not in str(error) or "ring=None" not in str(error):
            raise
    else:
        assert largest(distance(one, expected) for one in found) <= EXACT
