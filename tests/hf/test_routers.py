"""The loss that balances experts, over rings: that of one process, from the tokens of all ranks."""

from importlib import resources

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_ring_attention as ra
from hf_ring_attention.hf.cache import cache_argument, cache_in

from ..support.probe import batch
from ..support.ranks import on_ranks
from ..support.releases import at_least, needs, what_lacks
from ..support.tiny_models import VOCAB, tiny_model
from ..support.tolerance import EXACT


def balances(model_type):
    """Whether the module of a type defines the loss, and its class computes it where its config asks for it."""
    name = CONFIG_MAPPING[model_type].__module__.split(".")[-2]
    file = resources.files("transformers.models").joinpath(name, f"modeling_{name}.py")
    return file.is_file() and "load_balancing_loss_func(" in file.read_text(encoding="utf-8")


#: Those that compute this loss on one process in the oldest release, too.
ALWAYS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")
TYPES = [
    model.model_type
    for model in ra.supported_models()
    if model.status == "supported"
    and model.ring
    and what_lacks(model.model_type) is None
    and (at_least("transformers", "5.23") or model.model_type in ALWAYS)
    and balances(model.model_type)
    and "output_router_logits" in CONFIG_MAPPING[model.model_type]().get_text_config().to_dict()
]


@needs("transformers", "5.23", "all of these types")
def test_most_types_with_experts_are_among_these():
    assert {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "jamba", "granitemoe", "gpt_oss", "qwen3_next"} <= {*TYPES}


def with_routers(model_type):
    changes = {"mlp_only_layers": [0]} if model_type == "flint" else {}  # The tiny one has no experts.
    model = tiny_model(model_type, "eager", output_router_logits=True, **changes)
    model.router_aux_loss_coef = model.aux_loss_coef = 0.5  # It counts as much as the loss of labels.
    return model


@pytest.mark.drawn
@pytest.mark.parametrize("model_type", TYPES)
def test_losses_and_gradients_are_those_of_one_process(model_type):
    inputs, labels = batch("left" if TYPES.index(model_type) % 2 else "packed")

    def step(model):
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    loss, gradients = step(ra.patch_model(with_routers(model_type)))
    without = ra.patch_model(with_routers(model_type))
    without.config.output_router_logits = False
    assert abs(loss - step(without)[0]) > 0.05, "the loss of routers is too small to be seen"
    largest = max(float(x.abs().max()) for x in gradients.values())
    found = on_ranks(lambda ring, model: step(model), lambda: with_routers(model_type), 3)
    for own, _ in found:
        assert abs(own - loss) <= EXACT * abs(loss)
    for name, gradient in gradients.items():
        mean = sum(own[name] for _, own in found) / 3
        assert float((mean - gradient).abs().max()) <= EXACT * largest, name


def test_steps_after_a_prefill_have_all_of_it():
    one = ra.patch_model(with_routers("mixtral"))
    ids = torch.randint(3, VOCAB, (1, 16))
    with torch.no_grad():
        step = one(ids[:, :1], **cache_argument(cache_in(one(ids, use_cache=True)))).aux_loss

    def work(ring, model):
        with torch.no_grad():
            cache = ra.prefill(model, ids)
            return model(ids[:, :1], position_ids=torch.tensor([[16]]), **cache_argument(cache)).aux_loss

    assert all(abs(found - step) <= EXACT for found in on_ranks(work, lambda: with_routers("mixtral"), 2))
