"""The loss that balances experts, over rings: that of one process, from the tokens of all ranks."""

import sys
from importlib import resources

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_ring_attention as ra
from hf_ring_attention.hf import routers
from hf_ring_attention.hf.cache import cache_argument, cache_in

from ..support.ranks import run_simulated
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
LENGTHS = {"padded": ([21], [13]), "packed": ([7, 9, 4], [12])}


@needs("transformers", "5.23", "all of these types")
def test_most_types_with_experts_are_among_these():
    assert {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "jamba", "granitemoe", "gpt_oss", "qwen3_next"} <= {*TYPES}


def rows(kind):
    """Two rows of tokens with labels: padded, on the left, or packed behind each other, with padding at the end."""
    generator = torch.Generator().manual_seed(3)
    documents = [[torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in row] for row in LENGTHS[kind]]
    if kind == "padded":
        return ra.PaddingCollator(padding_side="left")([{"input_ids": row[0]} for row in documents])
    return ra.PackingCollator(row_length=21)([{"input_ids": x} for row in documents for x in row])


def with_routers(model_type):
    changes = {"mlp_only_layers": [0]} if model_type == "flint" else {}  # The tiny one has no experts.
    model = tiny_model(model_type, "eager", output_router_logits=True, **changes)
    model.router_aux_loss_coef = model.aux_loss_coef = 0.5  # It counts as much as the loss of labels.
    return model


def loss_and_gradients(model, ring, kind, tokens_at_once):
    """The sum of the losses of all ranks, of their auxiliary losses, and of their gradients."""
    model.zero_grad()
    shard = ra.shard_batch(rows(kind), ring)
    tokens = ra.count_tokens(shard)
    tokens = sum(ring.gather(tokens if ring.world_size > 1 else torch.as_tensor(tokens)))
    loss = ra.next_token_loss(model, shard, tokens, tokens_at_once=tokens_at_once)
    loss.backward()
    gradients = {n: sum(ring.gather(p.grad)) for n, p in model.named_parameters() if p.grad is not None}
    return sum(ring.gather(loss.detach())), gradients


def assert_equal_losses(found, expected, of_labels):
    assert abs(found[0] - expected[0]) <= EXACT * abs(expected[0])
    assert abs(expected[0] - of_labels) > 0.05, "the loss of routers is too small to be seen"
    largest = max(float(x.abs().max()) for x in expected[1].values())
    for name, gradient in expected[1].items():
        assert float((found[1][name] - gradient).abs().max()) <= EXACT * largest, name


@pytest.mark.drawn
@pytest.mark.parametrize("model_type", TYPES)
def test_losses_and_gradients_are_those_of_one_process(model_type):
    one, number = ra.patch_model(with_routers(model_type)), TYPES.index(model_type)
    models = [with_routers(model_type) for _ in range(3)]
    for world_size, kind in ((2, "padded"), (3, "packed")) if number % 2 else ((3, "padded"), (2, "packed")):
        expected = loss_and_gradients(one, ra.Ring.alone(), kind, 0)
        one.config.output_router_logits = False
        of_labels, _ = loss_and_gradients(one, ra.Ring.alone(), kind, 0)
        one.config.output_router_logits = True

        def work(ring, kind=kind):
            model = ra.patch_model(models[ring.rank], ring=ring)
            return loss_and_gradients(model, ring, kind, 8)

        for found in run_simulated(work, world_size, layout=("zigzag", "contiguous")[number % 2]):
            assert_equal_losses(found, expected, of_labels)


def test_a_share_of_the_loss_is_returned_and_steps_after_a_prefill_have_all_of_it():
    models = [with_routers("mixtral") for _ in range(2)]
    one = ra.patch_model(with_routers("mixtral"))
    ids = torch.randint(3, VOCAB, (1, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = one(ids, use_cache=False).aux_loss
        cache = cache_in(one(ids, use_cache=True))
        step = one(ids[:, :1], **cache_argument(cache)).aux_loss

    def work(ring):
        model = ra.patch_model(models[ring.rank], ring=ring)
        layout = ring.layout_for(16, "exact")
        shard, positions = ring.shard(ids, layout), ring.shard(torch.arange(16)[None], layout)
        with torch.no_grad():
            own = model(shard, position_ids=positions, use_cache=False).aux_loss
            cache = ra.prefill(model, ids)
            own_step = model(ids[:, :1], position_ids=torch.tensor([[16]]), **cache_argument(cache)).aux_loss
        return own, own_step

    shares, steps = zip(*run_simulated(work, 2))
    assert abs(sum(shares) - expected) <= EXACT
    assert all(abs(found - step) <= EXACT for found in steps)


def test_a_loss_of_another_kind_is_refused_by_name(monkeypatch):
    models = [with_routers("mixtral") for _ in range(2)]
    module = sys.modules[type(models[0]).__module__]
    own = module.load_balancing_loss_func
    own = getattr(own, "function", own)
    monkeypatch.setattr(module, "load_balancing_loss_func", lambda *args: 2 * own(*args))
    routers._can_balance.cache_clear()

    def work(ring):
        model = ra.patch_model(models[ring.rank], ring=ring)
        with pytest.raises(
            ValueError, match=r"MixtralForCausalLM was asked for output_router_logits.*by the shard alone"
        ):
            ra.next_token_loss(model, ra.shard_batch(rows("padded"), ring), 10)

    run_simulated(work, 2)
    monkeypatch.undo()
    routers._can_balance.cache_clear()


def test_all_ranks_must_ask_for_it():
    models = [tiny_model("mixtral", "eager") for _ in range(2)]

    def work(ring):
        model = ra.patch_model(models[ring.rank], ring=ring)
        layout = ring.layout_for(16, "exact")
        shard, positions = torch.zeros(1, 8, dtype=torch.int64), ring.shard(torch.arange(16)[None], layout)
        with pytest.raises(ValueError, match="disagree on output_router_logits"):
            model(shard, position_ids=positions, output_router_logits=ring.rank == 0)

    run_simulated(work, 2)


def test_a_model_without_routers_that_is_asked_for_them_is_refused():
    assert not hasattr(sys.modules[type(tiny_model("deepseek_v3", "eager")).__module__], "load_balancing_loss_func")
    models = [tiny_model("deepseek_v3", "eager") for _ in range(2)]

    def work(ring):
        model = ra.patch_model(models[ring.rank], ring=ring)
        with pytest.raises(ValueError, match="DeepseekV3ForCausalLM was asked for output_router_logits"):
            model(torch.zeros(1, 8, dtype=torch.int64), output_router_logits=True)

    run_simulated(work, 2)
