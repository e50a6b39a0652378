"""Models whose heads tensor parallelism divides: every pattern is what one process computes, alone and beside a ring.

torch keeps meshes whose process groups are gone, so each test starts fresh processes.
"""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import hf_ring_attention as ra
from hf_ring_attention.hf.model.wrappers import cache_argument
from tests.support.ranks import run_ranks
from tests.support.releases import at_least
from tests.support.tiny_models import tiny_model
from tests.support.tolerance import assert_exact, float64

#: Earlier releases divide vocabularies of an even number alone.
VOCAB = 96
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
SIZES = {**HEADS, "vocab_size": VOCAB}
BY_HEAD = "kv0=exact;kv1=window:3;kv2=pyramid:2,2;kv3=branches:window=3,segment=all/4"
LONGNET = "longnet:8/1,16/2,all/4"
#: Attention sinks and sliding windows; heads that are gathered before attention; recurrent layers.
TYPES = {"llama": BY_HEAD, "gpt_oss": LONGNET, "phi3": BY_HEAD, "qwen3_next": LONGNET}

GREEDY = {
    "do_sample": False, "max_new_tokens": 3, "min_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    with float64():
        for name in TYPES:
            tiny_model(name, "eager", **SIZES).save_pretrained(folder / name)
        ra.patch_model(tiny_model("llama", "eager", **SIZES), BY_HEAD).save_pretrained(folder / "patched")
    return folder


def loaded(folder, **sizes):
    ways = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    ways |= {"dtype": torch.float64, "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **ways).eval()


def drawn(rows, tokens, seed=0):
    """The same on each rank."""
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def weights_of(logits):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(logits.shape, generator=generator, dtype=torch.float64)


def gradients(model):
    """The gradients of whole parameters; None for those whose parts this release of torch cannot join."""
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {name: _whole(x) if hasattr(x, "full_tensor") else x for name, x in found.items()}


def _whole(x):
    strided = any("Strided" in type(placement).__name__ for placement in x.placements)
    return None if strided and not at_least("torch", "2.13") else x.full_tensor()


def outputs(model, **inputs):
    """The logits of tokens, and all gradients of their weighted sum."""
    logits = model(**inputs).logits
    scored = logits if inputs.get("attention_mask") is None else logits[inputs["attention_mask"] > 0]
    (scored * weights_of(scored)).sum().backward()
    return scored.detach(), gradients(model)


def generated(model, ids, **options):
    made = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY, **options)
    return torch.stack(made.logits).detach(), {}


def assert_alike(found, expected, what):
    assert_exact(found[0], expected[0], f"logits: {what}")
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        if gradient is None:
            continue
        assert_exact(gradient, expected[1][name], f"the gradient of {name}: {what}")


# ---- two ranks with half of the heads each


def compare(folder, pattern, *works):
    """Compares one process, which has all heads, with two."""
    models = [loaded(folder), loaded(folder, tp_size=2)]
    if pattern is not None:
        models = [ra.patch_model(model, pattern) for model in models]
    for work in works:
        expected, found = (work(model) for model in models)
        assert_alike(found, expected, f"{folder.name} under {pattern}")


def packed_rows():
    return {"input_ids": drawn(2, 30), "position_ids": torch.cat([torch.arange(17), torch.arange(13)]).expand(2, -1)}


def each_type(rank, folder):
    calls = [("llama", "pyramid:3,3"), *TYPES.items()]
    for number, (name, pattern) in enumerate(calls):
        works = partial(outputs, **packed_rows(), use_cache=False), partial(generated, ids=drawn(2, 12))
        compare(folder / name, pattern, *works[: 1 + number % 2])


def other_ways(rank, folder):
    ids, llama, places = drawn(2, 30), folder / "llama", torch.arange(30)
    mask = torch.stack([places >= 9, places < 19]).long()  # padded at the left, and at the right
    compare(llama, BY_HEAD, partial(outputs, input_ids=ids, attention_mask=mask, use_cache=False))
    # A model that is loaded with its pattern was never patched.
    compare(folder / "patched", None, partial(outputs, input_ids=ids, use_cache=False))
    ways = {"cache_implementation": "static"}, {"num_beams": 2, "prefill_chunk_size": 7}
    compare(llama, LONGNET, *(partial(generated, ids=ids[:, :12], **way) for way in ways))

    def with_labels(model):
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach().double(), gradients(model)

    nll = lambda model: (ra.perplexity(model, ids).token_nll[:, 1:].double(), {})  # noqa: E731
    compare(llama, BY_HEAD, nll, with_labels)


def refused(rank, folder):
    def tried(error, call):
        with pytest.raises(ValueError, match=error):
            call()

    whole = r"patch_model: tensor parallelism divides LlamaForCausalLM among ranks \[0, 1\], which cannot share a ring: use ra"
    tried(whole, lambda: ra.patch_model(loaded(folder, tp_size=2), "exact", ring=ra.Ring()))
    texts = {"texts": [torch.arange(1, 65)], "retrieval": 0, "progress": False}
    tried("tensor parallelism divides them among 2 ranks", lambda: ra.calibrate(loaded(folder, tp_size=2), **texts))
    mesh, ring = init_device_mesh("cpu", (2,)), ra.Ring()
    queries = ra.patch_model(divided_by_torch(folder, mesh, "q"), "exact")
    tried("layer 0 has 8 query heads, and this rank 4 with 4 key/value heads", lambda: queries(drawn(1, 8)))
    model = ra.patch_model(divided_by_torch(folder, mesh), "exact", ring=ring)
    tried(
        "disagree on the number of the first key/value head: rank 0: 0, rank 1: 2",
        lambda: model(drawn(1, 8), use_cache=False),
    )


def on_two(rank, folder):
    each_type(rank, folder)
    other_ways(rank, folder)
    refused(rank, folder / "llama")


def test_two_ranks_compute_what_one_process_does_or_refuse(folder):
    """Patterns and types; padding, saved patterns, caches and losses; and what cannot be right."""
    run_ranks(on_two, 2, folder)


# ---- four ranks: a ring of those that have the same heads


def whole_row(tokens):
    return {"input_ids": drawn(2, tokens), "position_ids": torch.arange(tokens).expand(2, -1)}


def divided_by_torch(folder, mesh, projections="qkv"):
    """The model of a folder, divided without Transformers."""
    model = loaded(folder)
    for layer in model.model.layers:
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in projections}
        plan |= {"self_attn.o_proj": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)
    return model


def over_ring(folder, pattern, mesh, transport):
    model = ra.patch_model(loaded(folder, tp_size=2, fsdp_size=2), pattern, ring=ra.Ring(mesh, transport=transport))
    return outputs(model, **whole_row(32), use_cache=False)


def beside_a_ring(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    for name, pattern, transport in (("llama", BY_HEAD, "heads"), ("qwen3_next", LONGNET, "ring")):
        one = ra.patch_model(loaded(folder / name), pattern)
        expected = outputs(one, **whole_row(32), use_cache=False)
        assert_alike(over_ring(folder / name, pattern, mesh, transport), expected, f"{name}, {pattern}, {transport}")


def generated_beside_a_ring(rank, folder):
    mesh, row = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp")), drawn(2, 24)
    one = ra.patch_model(loaded(folder), BY_HEAD)
    model = ra.patch_model(divided_by_torch(folder, mesh["tp"]), BY_HEAD, ring=ra.Ring(mesh))
    expected, found = (generated(each, row, **cache_argument(ra.prefill(each, row[:, :21]))) for each in (one, model))
    assert_alike(found, expected, "generation beside a ring")


def on_four(rank, folder):
    if at_least("transformers", "5.24"):  # Earlier releases divide no model by FSDP beside tensor parallelism.
        beside_a_ring(rank, folder)
    generated_beside_a_ring(rank, folder / "llama")


def test_a_ring_beside_it_computes_what_one_process_does(folder):
    run_ranks(on_four, 4, folder)
