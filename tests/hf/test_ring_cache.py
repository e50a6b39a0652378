"""Types that keep the attention of Transformers compute over rings, from gathered keys, what one process does."""

import functools
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


def trained(model, checkpoints=True, **inputs):
    """The loss of a step in training mode, and the gradients by name."""
    model.train()
    if checkpoints and model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model_type", TYPES)
def test_checkpointed_training_is_that_of_one_process(model_type, ranks):
    """Checkpointing takes caches away from layers. 19 tokens do not divide among the ranks."""
    loss, gradients = trained(stock(model_type), False, **rows())
    found = on_ranks(lambda ring, model: trained(model, **rows()), lambda: stock(model_type), ranks)
    bound = BOUNDS[loss.dtype]
    mean = {name: sum(of_rank[name] for _, of_rank in found) / ranks for name in gradients}
    assert all(abs(x - loss) <= bound * loss for x, _ in found)
    assert gradients_distance(mean, gradients) <= bound


@torch.no_grad()
def test_qwen_with_embeddings_of_several_tokens():
    """Its n-grams and convolutions reach into the parts of other ranks."""
    sizes = {"ple_layer_ids": [1], "ple_embed_dim": 16, "ngram_vocab_size_base": 53, "heads_per_ngram": 2}
    inputs = {name: x for name, x in rows().items() if name != "labels"}
    make = functools.partial(stock, "qwen4_exp_text", make_ngram_vocab_size_divisible_by=8, **sizes)
    expected, valid = make()(**inputs, use_cache=False).logits, inputs["attention_mask"].bool()
    for found in on_ranks(lambda ring, model: model(**inputs, use_cache=False).logits[:], make, 3):
        assert distance(found[valid], expected[valid]) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("model_type", ["falcon", "bart"])
def test_processes(ranks, model_type):
    expected = trained(stock(model_type), False, **rows())[0]
    for loss, moved in ranks.run(loss_of_process, 2, model_type):
        assert abs(loss - expected) <= BOUNDS[torch.float64] * expected
        assert moved > 0


def loss_of_process(rank, model_type):
    ring = ra.Ring()
    loss = trained(ra.patch_model(stock(model_type), ring=ring), **rows())[0]
    return loss, ring.traffic().sent_bytes


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
