"""Types that keep the attention of Transformers compute over rings, from gathered keys, what one process does."""

import logging

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.hf.model.config import warn_once
from hf_ring_attention.hf.model.types import OWN_ATTENTION, OWN_ATTENTION_OVER_RINGS

from ..support.probe import BOUNDS, STOCK
from ..support.ranks import on_ranks
from ..support.tiny_models import VOCAB, tiny_model
from ..support.tolerance import distance, gradients_distance
from ..support.training import checkpointed_step
from .alike import refused

TYPES = [*OWN_ATTENTION, *OWN_ATTENTION_OVER_RINGS]


def stock(model_type, **changes):
    implementation, dtype = STOCK.get(model_type, ("eager", torch.float64))
    return tiny_model(model_type, implementation, **changes).to(dtype)


def rows(length=19, padded=True):
    """Two rows, of which the first begins with padding, and the second one ends with some."""
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4], mask[1, -6:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model_type", TYPES)
def test_checkpointed_training_is_that_of_one_process(model_type, ranks):
    """Checkpointing takes caches away from layers. 19 tokens do not divide among the ranks."""
    loss, gradients = checkpointed_step(stock(model_type), rows(), checkpoints=False)
    found = on_ranks(lambda ring, model: checkpointed_step(model, rows()), lambda: stock(model_type), ranks)
    bound = BOUNDS[loss.dtype]
    mean = {name: sum(of_rank[name] for _, of_rank in found) / ranks for name in gradients}
    assert all(abs(x - loss) <= bound * loss for x, _ in found)
    assert gradients_distance(mean, gradients) <= bound


@pytest.mark.parametrize(("model_type", "wrap"), [("falcon", "ddp"), ("bart", "fsdp2")])
def test_processes(ranks, model_type, wrap):
    expected, gradients = checkpointed_step(stock(model_type), rows(), checkpoints=False)
    for (loss, mean), moved in ranks.run(step_of_process, 2, model_type, wrap):
        assert abs(loss - expected) <= BOUNDS[torch.float64] * expected
        assert gradients_distance(mean, gradients) <= BOUNDS[torch.float64]
        assert moved > 0


def step_of_process(rank, model_type, wrap):
    ring = ra.Ring()
    model = ra.patch_model(stock(model_type), ring=ring)
    return checkpointed_step(model, rows(), wrap), ring.traffic().sent_bytes


@torch.no_grad()
def test_what_users_do_with_a_model(caplog):
    """Perplexity and losses over the ring; generation on each process, as in Transformers; then one process again."""
    model, inputs = stock("falcon"), rows(padded=False)
    ids = inputs["input_ids"]
    expected = model(ids, use_cache=False).logits
    text = model.generate(ids, max_new_tokens=4, do_sample=False)
    own = ra.perplexity(stock("falcon"), ids).perplexity

    def work(ring, model):
        assert distance(model(ids).logits[:], expected) <= 1e-10
        first = model(ids, return_dict=False)[0]
        assert distance(first[:], expected) <= 1e-10
        with pytest.raises(RuntimeError, match="each rank of a ring"):
            model(ids).past_key_values.get_seq_length()
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), text)
        assert abs(ra.perplexity(model, ids).perplexity - own) <= 1e-10 * own
        assert distance(torch.compile(model, backend="eager")(ids).logits[:], expected) <= 1e-10
        alone = ra.patch_model(model)
        assert torch.equal(alone(ids, use_cache=False).logits[:], expected)
        return True

    warn_once.cache_clear()
    with caplog.at_level(logging.INFO):
        assert all(on_ranks(work, lambda: stock("falcon"), 2))
    assert "FalconModel has layers that no pattern expresses: over a ring, each of them gathers its keys" in caplog.text


def test_refusals():
    model = stock("falcon")
    refused("FalconForCausalLM computes no pattern", ra.patch_model, model, "window:4", error=NotImplementedError)
    packed = {"position_ids": torch.cat([torch.arange(9), torch.arange(10)])[None]}
    ids = rows()["input_ids"][:1]
    refused("pass one document a row", ra.patch_model(model), ids, **packed)

    def work(ring, model):
        refused("pass one document a row", model, ids, **packed)
        refused("output_attentions=True was asked for", model, ids, output_attentions=True)
        refused(
            "prefill: FalconForCausalLM: it does not call Transformers' attention interface",
            ra.prefill,
            model,
            ids,
            error=NotImplementedError,
        )
        bart = stock("bart")
        refused(
            "BartForCausalLM computes no pattern", ra.patch_model, bart, "window:4", ring, error=NotImplementedError
        )
        encoder = stock("rembert", is_decoder=False)
        refused("does not call", ra.patch_model, encoder, ring=ring)
        return True

    assert all(on_ranks(work, lambda: stock("falcon"), 2))
