"""Tiny models for tests of what users combine models with, and their outputs and gradients."""

import torch
from peft import LoraConfig, get_peft_model

import hf_ring_attention as ra
from hf_ring_attention.hf.call import model_call
from tests.support.probe import GRADIENTS, LOGITS, errors, over_ring
from tests.support.ranks import on_ranks
from tests.support.tiny_models import draw, tiny_model

PYRAMID = ra.Pattern.pyramid(window=3, levels=3, ratio=2, sinks=2)
LONGNET = ra.Pattern.longnet([4, 12, None], [1, 2, 4])
DYNAMIC_ROPE = {
    "max_position_embeddings": 8,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}


def llama(implementation="eager", **changes):
    return tiny_model("llama", implementation, **changes)


def built(auto, config, implementation="eager"):
    """Like `tiny_model`, of any class: the same large weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config, attn_implementation=implementation, dtype=torch.get_default_dtype())
    draw(model)
    return model.eval()


@torch.no_grad()
def logits_of(model, inputs, labels):
    """Of the tokens that have labels."""
    return model(**inputs).logits[labels != -100]


def check(found, expected, bounds=(LOGITS, GRADIENTS)):
    for name, error, bound in zip(("logits", "gradients"), errors(found, expected), bounds, strict=True):
        assert error <= bound, f"{name} are {error} off, of {bound}"


def on_two_ranks(make, inputs, labels, pattern=None, use=lambda model: model):
    """`logits_and_gradients` of the model that each of two simulated ranks makes, patches and uses; of rank 0."""

    def work(ring, model):
        return over_ring(use(ra.patch_model(model, pattern, ring)), ring, inputs, labels)

    return on_ranks(work, make)[0]


def with_lora(model):
    """LoRA on all projections, with weights that change the model."""
    lora = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in lora.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return lora.eval()


def hooks(model):
    """Names of this package's hooks by the module that has them."""
    return sorted(
        (name, hook.__name__)
        for name, module in model.named_modules()
        for kind in (module._forward_pre_hooks, module._forward_hooks)
        for hook in kind.values()
        if hook.__module__ == model_call.__name__
    )
