"""Representative model types over 2 and 4 gloo ranks: logits and gradients of one device, padded and packed."""

import itertools

import pytest
import torch
import torch.distributed as dist

import hf_ring_attention as ra
from hf_ring_attention.hf.positions import first_position
from hf_ring_attention.hf.wrappers import runner_of

from ..support.probe import BATCHES, GRADIENTS, LOGITS, batch, errors, logits_and_gradients, of_shards
from ..support.ranks import run_ranks
from ..support.tiny_models import tiny_model
from ..support.tolerance import float64

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
WAYS = list(itertools.product(("contiguous", "zigzag"), ("ring", "collective")))


def on_each_rank(rank):
    """Case -> (rank's number in its ring, errors): rings of 2, which share the cases, then the ring of 4."""
    torch.set_grad_enabled(True)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = {}
    for world_size, group in ((2, pairs[rank // 2]), (4, dist.group.WORLD)):
        for number, ((name, changes), kind) in enumerate(itertools.product(CASES.items(), BATCHES)):
            if world_size == 2 and number // len(BATCHES) % 2 != rank // 2:
                continue
            # Every type takes all ways over its four batches, and other ones on 4 ranks than on 2.
            layout, transport = WAYS[(number + number // len(BATCHES) + world_size // 4) % len(WAYS)]
            model = tiny_model(name.split(",")[0], "eager", **changes)
            inputs, labels = batch(kind, first_position(runner_of(model)))
            expected = logits_and_gradients(ra.patch_model(model), inputs, labels)
            expected = expected[0], {name: gradient.clone() for name, gradient in expected[1].items()}
            model = ra.patch_model(model, ring=ra.Ring(group, layout=layout, transport=transport))
            found[name, world_size, kind] = errors(
                of_shards(model, ra.Ring(group, layout=layout), inputs, labels), expected
            )
    return found


@pytest.fixture(scope="module")
def answers():
    with float64():
        return run_ranks(on_each_rank, 4)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", CASES)
def test_results_of_one_device(answers, name, kind, world_size):
    found = [answer[name, world_size, kind] for answer in answers if (name, world_size, kind) in answer]
    assert len(found) == world_size
    for logits, gradients in found:
        assert logits <= LOGITS
        assert gradients <= GRADIENTS
