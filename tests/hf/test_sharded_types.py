"""Representative model types over 2 and 4 gloo ranks: logits and gradients of one device, padded and packed."""

import functools
import itertools

import pytest

import hf_ring_attention as ra
from hf_ring_attention.hf.positions import first_position
from hf_ring_attention.hf.wrappers import runner_of

from ..support.probe import BATCHES, GRADIENTS, LOGITS, batch, errors, logits_and_gradients, of_shards
from ..support.tiny_models import tiny_model

ROPE = {"rope_theta": 1e4, "factor": 4.0}
#: What each shows beside grouped heads, full causal attention and plain RoPE.
CASES = {
    "llama": {},
    "llama, dynamic RoPE": {"max_position_embeddings": 8, "rope_parameters": {**ROPE, "rope_type": "dynamic"}},
    "llama, yarn RoPE": {"rope_parameters": {**ROPE, "rope_type": "yarn", "original_max_position_embeddings": 8}},
    "phi3, longrope": {
        "head_dim": 8,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        },
    },
    "mistral": {},  # a window in all layers
    "mixtral": {},  # experts
    "qwen2, windows in some layers": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {},  # norms of queries and keys
    "qwen3_moe": {},
    "gemma": {},  # one key/value head
    "gemma2": {},  # softcap, windows in turn, a scale of its own
    "gemma3_text": {},  # RoPE by kind of layer
    "gemma4_text": {},  # head sizes by kind of layer
    "cohere2": {},  # parallel layers, windows, layers without RoPE
    "gpt_oss": {},  # sinks with logits, windows in turn
    "deepseek_v2": {},  # latent attention: values narrower than keys
    "deepseek_v3": {},
    "granite": {},  # a scale of its own
    "olmo2": {},
    "smollm3": {},  # layers without RoPE
    "stablelm": {},  # RoPE of a part of each head
    "gpt_bigcode": {},  # absolute positions, one key/value head
    "gpt2": {},  # absolute positions, biases, no groups
    "gpt_neox": {},
    "opt": {},  # scaled queries, positions by mask
    "bert": {},  # an encoder as a decoder
    "roberta": {},  # positions that begin behind the padding's
    "ministral": {},
}
#: Layout and transport, in turn over the batches of a type.
WAYS = list(itertools.product(("contiguous", "zigzag"), ("ring", "collective", "heads")))


@functools.lru_cache(maxsize=1)  # for the ring of 2, and then for the ring of 4
def expected_answers(name):
    """What one device answers to each kind of batch."""
    model = case_model(name)
    answers = {}
    for kind in BATCHES:
        logits, gradients = logits_and_gradients(ra.patch_model(model), *batch(kind, first_position(runner_of(model))))
        answers[kind] = logits, {parameter: gradient.clone() for parameter, gradient in gradients.items()}
    return answers


def case_model(name):
    return tiny_model(name.split(",")[0], "eager", **CASES[name])


def errors_of_a_rank(rank, name, answers, turn):
    model = case_model(name)
    by_kind = {}
    for number, kind in enumerate(BATCHES):
        layout, transport = WAYS[(number + turn) % len(WAYS)]
        inputs, labels = batch(kind, first_position(runner_of(model)))
        ring = ra.Ring(layout=layout, transport=transport)
        by_kind[kind] = errors(of_shards(ra.patch_model(model, ring=ring), ring, inputs, labels), answers[kind])
    return by_kind


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_results_of_one_device(ranks, name, world_size):
    """Every type takes all ways over its four batches, and other ones on 4 ranks than on 2."""
    turn = list(CASES).index(name) + world_size // 4
    for by_kind in ranks.run(errors_of_a_rank, world_size, name, expected_answers(name), turn):
        for kind, (logits, gradients) in by_kind.items():
            assert logits <= LOGITS, kind
            assert gradients <= GRADIENTS, kind
