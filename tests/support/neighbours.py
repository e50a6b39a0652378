"""Tiny models for tests of what users combine models with, and their outputs and gradients."""

import torch
from peft import LoraConfig, get_peft_model

import hf_ring_attention as ra
from hf_ring_attention import sharding
from tests.support.probe import (
    GRADIENTS,
    LOGITS,
    errors,
    of_shards,
)
from tests.support.tiny_models import draw, tiny_model

PYRAMID = ra.Pattern.pyramid(window=3, levels=3, ratio=2, sinks=2)
LONGNET = ra.Pattern.longnet([4, 12, None], [1, 2, 4])
DYNAMIC_ROPE = {
    "max_position_embeddings": 8,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}
ENCODER = {"is_decoder": False}


def llama(implementation="eager", **changes):
    return tiny_model("llama", implementation, **changes)


def built(auto, config, implementation="eager"):
    """Like `tiny_model`, of any class: the same large weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    draw(model)
    return model.eval()


@torch.no_grad()
def logits_of(model, inputs, labels):
    """Of the tokens that have labels."""
    return model(**inputs).logits[labels != -100]


def check(found, expected):
    logits, gradients = errors(found, expected)
    assert logits <= LOGITS
    assert gradients <= GRADIENTS


def on_two_ranks(make, inputs, labels, pattern=None, use=lambda model: model):
    """`logits_and_gradients` of the model that each of two simulated ranks makes, patches and uses; of rank 0."""

    def work(ring):
        return of_shards(use(ra.patch_model(made[ring.rank], pattern, ring)), ring, inputs, labels)

    made = [make() for _ in range(2)]
    return ra.run_simulated(work, 2, timeout=60)[0]


def with_lora(model):
    """LoRA on all projections, with weights that change the model."""
    lora = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return lora.eval()


def hooks(model):
    """Names of this package's hooks by the module that has them."""
    return sorted(
        (name, hook.__name__)
        for name, module in model.named_modules()
        for kind in (module._forward_pre_hooks, module._forward_hooks)
        for hook in kind.values()
        if hook.__module__ == sharding.__name__
    )
