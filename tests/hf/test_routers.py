"""The loss that balances experts, over rings: that of one process, from the tokens of all ranks."""

import pytest

import hf_ring_attention as ra

from ..support.probe import batch
from ..support.ranks import on_ranks
from ..support.releases import at_least, what_lacks
from ..support.tiny_models import tiny_model
from ..support.tolerance import EXACT

#: Types that compute this loss on one process in the oldest release, too.
ALWAYS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")
TYPES = [
    name
    for name in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "jamba", "qwen3_next")
    if what_lacks(name) is None and (at_least("transformers", "5.23") or name in ALWAYS)
]


def with_routers(model_type):
    model = tiny_model(model_type, "eager", output_router_logits=True)
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
