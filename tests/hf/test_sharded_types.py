"""Heads that do not divide among ranks, the loss of routers, and scaled RoPE: over rings as on one device."""

import functools

import pytest
import torch

import hf_ring_attention as ra
from hf_ring_attention.hf.model.config import warn_once
from hf_ring_attention.hf.model.wrappers import cache_argument, cache_in

from ..support.probe import batch
from ..support.ranks import on_ranks
from ..support.tiny_models import VOCAB, tiny_model
from ..support.tolerance import EXACT
from .alike import assert_alike, assert_on_ranks, refused

#: Documents on both sides of the length up to which RoPE is not scaled.
OF_LENGTHS = (12, 28, 20, 7)
LENGTH = {"original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **LENGTH, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
SCALED = {
    "llama": {"max_position_embeddings": 16, "rope_parameters": DYNAMIC},
    "phi3": {"head_dim": 8, **LENGTH, "rope_parameters": LONGROPE},
}


@pytest.mark.parametrize(("model_type", "heads"), [("llama", 2), ("phi3", None)])
def test_tokens_behind_a_prefill_with_scaled_rope(model_type, heads):
    """One device fills its cache likewise, which matters if RoPE goes by length; ranks exchange heads, all or in two groups."""
    make = functools.partial(tiny_model, model_type, "eager", **SCALED[model_type])
    row, document, one = torch.randint(3, VOCAB, (2, 20)), 17, ra.patch_model(make())
    with torch.no_grad():
        cache = cache_in(one(row[:, :document], position_ids=torch.arange(document)[None], use_cache=True))
    ways = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "output_logits": True}

    def answer(model, cache):
        settings = {**ways, "attention_mask": torch.ones_like(row), "return_dict_in_generate": True}
        output = model.generate(row, **settings, **cache_argument(cache))
        return output.sequences, torch.stack(output.logits)

    def work(ring, model):
        return answer(model, ra.prefill(model, row[:, :document]))

    assert_on_ranks(work, make, answer(one, cache), 4 if heads else 2, transport="heads", heads=heads)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "groups_of", "message"),
    [
        (6, 2, None, r"6 / 4 = 1\.50"),
        (12, 3, None, "3 key/value heads and 4 ranks divide neither way"),
        (3, 1, 2, r"3 / 2 = 1\.50"),
    ],
)
def test_a_model_whose_heads_do_not_divide_is_refused_by_name_on_every_rank(heads, kv_heads, groups_of, message):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 8 * heads}
    row = torch.randint(3, VOCAB, (1, 16))

    def work(ring, model):
        message_of_layer = rf"LlamaAttention: layer 0: transport='heads'.*{message}"
        refused(message_of_layer, model, row, use_cache=False)
        refused(message_of_layer, ra.prefill, model, row)
        return ring.traffic().hops

    assert_on_ranks(work, lambda: tiny_model("llama", "eager", **sizes), 0, 4, transport="heads", heads=groups_of)


WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "jamba", "qwen3_next")


def with_routers(model_type):
    model = tiny_model(model_type, "eager", output_router_logits=True)
    model.router_aux_loss_coef = model.aux_loss_coef = 0.5  # It counts as much as the loss of labels.
    return model


@pytest.mark.drawn(8)
@pytest.mark.parametrize("model_type", WITH_EXPERTS)
def test_the_loss_that_balances_experts_is_that_of_one_process(model_type):
    inputs, labels = batch("left" if WITH_EXPERTS.index(model_type) % 2 else "packed")

    def step(model):
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    loss, gradients = step(ra.patch_model(with_routers(model_type)))
    without = ra.patch_model(with_routers(model_type))
    without.config.output_router_logits = False
    assert abs(loss - step(without)[0]) > 0.05, "the loss of routers is too small to be seen"
    largest = max(float(x.abs().max()) for x in gradients.values())
    found = on_ranks(lambda ring, model: step(model), lambda: with_routers(model_type), 2)
    for own, _ in found:
        assert abs(own - loss) <= EXACT * abs(loss)
    for name, gradient in gradients.items():
        mean = sum(own[name] for _, own in found) / 2
        assert float((mean - gradient).abs().max()) <= EXACT * largest, name


def rows_of_lengths(how):
    """The inputs of one row of all documents, or of a row for each, and of documents whose tokens take turns."""
    row = batch_of = torch.randint(3, VOCAB, (1, sum(OF_LENGTHS)), generator=torch.Generator().manual_seed(1))
    if how == "packed":
        inputs = {"position_ids": torch.cat([torch.arange(n) for n in OF_LENGTHS])[None]}
        return row, {"input_ids": batch_of, **inputs}, torch.ones_like(row).bool()
    mask = torch.zeros(len(OF_LENGTHS), 30, dtype=torch.long)
    for number, length in enumerate(OF_LENGTHS):
        first = 2 * (number % 2)
        mask[number, first : first + length] = 1
    ids = torch.zeros_like(mask).masked_scatter(mask.bool(), row)
    return row, {"input_ids": ids, "attention_mask": mask}, mask.bool()


@pytest.mark.parametrize("how", ["packed", "padded"])
@pytest.mark.parametrize("model_type", SCALED)
def test_rope_is_scaled_by_the_length_of_each_document(model_type, how, caplog):
    row, inputs, inside = rows_of_lengths(how)
    make = functools.partial(tiny_model, model_type, "eager", **SCALED[model_type])
    alone = [make()(ids, use_cache=False).logits for ids in row.split(OF_LENGTHS, 1)]
    expected = torch.cat(alone, 1)[0].detach()

    def of_tokens(model):
        return model(**inputs, use_cache=False).logits[inside].detach()

    assert_alike(of_tokens(ra.patch_model(make())), expected)
    if how == "padded":
        warn_once.cache_clear()
        padded_left = {name: x[::2].flip(1) for name, x in inputs.items()}
        ra.patch_model(make()).generate(**padded_left, max_new_tokens=2, do_sample=False)
        assert "scales RoPE by the length of the longest row" in caplog.text
    assert_on_ranks(lambda ring, model: of_tokens(model), make, expected)
