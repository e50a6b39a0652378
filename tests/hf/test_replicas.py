"""Ranks of a ring whose weights differ are refused, whatever made them differ; parts that FSDP gives to ranks may differ."""

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_ring_attention as ra
from tests.support.neighbours import with_lora
from tests.support.ranks import on_ranks
from tests.support.tolerance import EXACT, distance

from .test_whole_rows import model_of, rows

pytestmark = pytest.mark.usefixtures("in_float64")

REFUSED = (
    r"the ranks of the ring disagree on the model's weights: rank 0: \[\d+\] \w+, rank 1: \[\d+\] \w+; all must use "
    "one seed, and train under DDP, FSDP or ZeRO"
)
CAUSAL = partial(model_of, AutoModelForCausalLM, "llama")
CLASSIFIER = partial(model_of, AutoModelForSequenceClassification, "llama", num_labels=3)


def draw_again(module):
    """As of another seed."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn_like(weight))


def raise_last(weight):
    """The smallest change of the last number."""
    with torch.no_grad():
        weight.view(-1)[-1:] = torch.nextafter(weight.view(-1)[-1:], torch.full((1,), torch.inf))


#: How a model is made, and what one rank has otherwise.
OTHERWISE = {
    "all weights": (CAUSAL, draw_again),
    "a new head": (CLASSIFIER, lambda model: draw_again(model.score)),
    "a new token": (CAUSAL, lambda model: raise_last(model.model.embed_tokens.weight)),
    "a frozen layer": (
        lambda: CAUSAL().requires_grad_(False), lambda model: raise_last(model.model.layers[0].mlp.up_proj.weight),
    ),
    "an adapter": (
        lambda: with_lora(CAUSAL()).base_model.model,
        lambda model: raise_last(model.model.layers[0].mlp.up_proj.lora_B["default"].weight),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "trains"), [(name, number % 2 == 0) for number, name in enumerate(OTHERWISE)])
def test_weights_that_differ_are_refused_on_all_ranks(name, trains):
    make, change = OTHERWISE[name]
    inputs, _ = rows("plain")

    def work(ring, model):
        before = {key: x.clone() for key, x in model.state_dict().items()}
        if ring.rank == 1:
            change(model)
        with torch.set_grad_enabled(trains), pytest.raises(ValueError, match=REFUSED):
            model.train(trains)(**inputs, use_cache=False)
        model.load_state_dict(before)
        return model(**inputs, use_cache=False).logits.detach()

    first, second = on_ranks(work, make)
    assert torch.equal(first, second)


def test_a_loop_that_does_not_average_gradients_ends_at_its_second_step():
    inputs, _ = rows("plain")

    def work(ring, model):
        model.train()
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        with pytest.raises(ValueError, match=REFUSED):
            model(**inputs, labels=inputs["input_ids"], use_cache=False)

    on_ranks(work, CAUSAL)


def divided(rank, inputs):
    """Losses of a model that FSDP 1 and 2 divide."""
    wrap = partial(FullyShardedDataParallel, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), device_id="cpu")
    losses = []
    for kind in ("views of parts", "flat parts", "DTensor"):
        model = CAUSAL("window:6+2", ra.Ring())
        if kind == "DTensor":
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        else:
            model = wrap(model, use_orig_params=kind == "views of parts")
        for _ in range(2):
            losses.append(model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.detach())
    return losses


def test_parts_of_weights_are_not_compared(ranks):
    inputs, _ = rows("plain")
    expected = CAUSAL("window:6+2")(**inputs, labels=inputs["input_ids"]).loss
    for losses in ranks.run(divided, 2, inputs):
        assert len(losses) == 6 and max(distance(loss, expected) for loss in losses) <= EXACT
