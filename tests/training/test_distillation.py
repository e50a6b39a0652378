"""Self-distillation: the divergence and its gradients are those of a plain computation, on rings and with adapters too."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

import hf_ring_attention as ra
from hf_ring_attention.compute.private import checkpoint_activations
from hf_ring_attention.training.distillation import _warn_of_moving
from tests.support.ranks import run_simulated
from tests.support.threads import in_threads
from tests.support.tiny_models import VOCAB, tiny_model, with_large_weights
from tests.support.tolerance import EXACT, assert_exact

pytestmark = pytest.mark.usefixtures("in_float64")
PATTERN = "window:4+2"
LENGTH = 37


def batch(rng, rows=2):
    """Rows of tokens, of which a third is not learned."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    ids = torch.randint(3, VOCAB, (rows, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)}


def student(model_type, pattern=PATTERN):
    return ra.patch_model(with_large_weights(tiny_model(model_type, "ring_dilated")), pattern)


def plain_divergence(model, teacher, shard):
    """The mean over learned tokens of sum p log(p / q), from all logits at once."""
    inputs = {name: shard[name] for name in ("input_ids", "position_ids")} | {"use_cache": False}
    with torch.no_grad():
        p = F.softmax(teacher(**inputs).logits, -1)
    q = F.softmax(model(**inputs).logits, -1)
    divergence = (p * (p.log() - q.log())).sum(-1)
    learned = shard["shift_labels"] != -100
    return (divergence * learned).sum() / learned.sum()


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(gradients, expected):
    assert gradients.keys() == expected.keys() and expected
    largest = max(float(x.abs().max()) for x in expected.values())
    assert largest > 0
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).abs().max()) <= EXACT * largest, name


# Plain and tied heads, scaled and capped ones, and layers with windows of their own.
@pytest.mark.parametrize("model_type", ["llama", "cohere", "gemma2", "granite"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_is_the_divergence_of_a_plain_computation(model_type, checkpointing, rng):
    model = student(model_type).train()
    teacher = ra.patch_model(with_large_weights(tiny_model(model_type, "ring_dilated")), "exact").eval()
    if checkpointing:
        checkpoint_activations(model, {"use_reentrant": False})
    shard = ra.shard_batch(batch(rng), ra.Ring.alone())
    expected = plain_divergence(model, teacher, shard)
    assert float(expected.detach()) > 1e-4
    gradients = gradients_of(model, expected)
    for at_once in (1, 10, 1000):
        loss = ra.distillation_loss(model, shard, ra.count_tokens(shard), tokens_at_once=at_once)
        assert_exact(loss.detach(), expected.detach())
        assert_same_gradients(gradients_of(model, loss), gradients)
    assert model.training and all(module.training for module in model.modules())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_ring_learns_what_one_process_does(world_size, checkpointing, rng):
    rows = batch(rng)
    whole, alone = student("llama").train(), ra.shard_batch(rows, ra.Ring.alone())
    tokens = ra.count_tokens(alone)
    expected = ra.distillation_loss(whole, alone, tokens)
    gradients = gradients_of(whole, expected)
    models = [copy.deepcopy(whole) for _ in range(world_size)]

    def work(ring):
        model = ra.patch_model(models[ring.rank], ring=ring)
        if checkpointing:
            checkpoint_activations(model, {"use_reentrant": False})
        loss = ra.distillation_loss(model, ra.shard_batch(rows, ring), tokens, tokens_at_once=5)
        return loss.detach(), gradients_of(model, loss)

    of_ranks = run_simulated(work, world_size)
    assert_exact(sum(loss for loss, _ in of_ranks), expected.detach())
    summed = {name: sum(gradients[name] for _, gradients in of_ranks) for name in gradients}
    assert_same_gradients(summed, gradients)


def with_adapters(model, *modules):
    torch.manual_seed(4)
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj", *modules], init_lora_weights=False, lora_dropout=0.3)
    return get_peft_model(model, lora)


@pytest.mark.parametrize("modules", [(), ("lm_head",)])
def test_adapters_learn_from_the_model_without_them(modules, rng):
    """The student is in evaluation mode, where its dropout is not random; the teacher has none in either."""
    model = with_adapters(student("llama"), *modules).eval()
    teacher = ra.patch_model(with_large_weights(tiny_model("llama", "ring_dilated")), "exact").eval()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    frozen = next(name for name in sorted(trained))
    dict(model.named_parameters())[frozen].requires_grad_(False)
    shard = ra.shard_batch(batch(rng), ra.Ring.alone())
    expected = plain_divergence(model, teacher, shard)
    gradients = gradients_of(model, expected)
    loss = ra.distillation_loss(model, shard, ra.count_tokens(shard), tokens_at_once=10)
    assert_exact(loss.detach(), expected.detach())
    assert_same_gradients(gradients_of(model, loss), gradients)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained - {frozen}
    teaching = model.train()
    ra.distillation_loss(teaching, shard, ra.count_tokens(shard)).backward()
    assert all(module.training for module in teaching.modules())


def test_logits_of_a_slice_are_all_that_exist(rng):
    model, seen = student("llama"), []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape[-2]))
    shard = ra.shard_batch(batch(rng), ra.Ring.alone())
    ra.distillation_loss(model, shard, ra.count_tokens(shard), tokens_at_once=8).backward()
    assert max(seen) == 8 and sum(seen) > 4 * LENGTH


def test_a_teacher_that_moves_is_told_once(rng, caplog):
    shard = ra.shard_batch(batch(rng), ra.Ring.alone())
    _warn_of_moving.cache_clear()
    for model in (with_adapters(student("llama")), student("llama"), student("llama")):
        ra.distillation_loss(model, shard, ra.count_tokens(shard))
    told = [
        record.message
        for record in caplog.records
        if "the teacher has the weights that are being trained" in record.message
    ]
    assert len(told) == 1 and "LlamaForCausalLM has no adapters" in told[0]


def test_what_cannot_be_distilled_is_refused(rng):
    model, rows = student("llama"), batch(rng)
    shard = ra.shard_batch(rows, ra.Ring.alone())
    with pytest.raises(ValueError, match="tokens_at_once must be at least 1, got 0"):
        ra.distillation_loss(model, shard, 1, tokens_at_once=0)
    with pytest.raises(ValueError, match="distillation_loss: a batch has no shift_labels"):
        ra.distillation_loss(model, rows, 1)
    with pytest.raises(ValueError, match="expected a Transformers model"):
        ra.exact_attention(torch.nn.Linear(2, 2)).__enter__()
    with pytest.raises(ValueError, match="gradients are recorded"), ra.exact_attention(model), torch.enable_grad():
        model(rows["input_ids"])


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_exact_attention_is_that_of_the_model_without_patterns(model_type, rng):
    """Layers with windows of their own keep these, whatever `patch_config` has set for them."""
    ids = batch(rng)["input_ids"]
    plain = with_large_weights(tiny_model(model_type, "eager")).eval()
    model = student(model_type).eval()
    ra.patch_config(model.config, "window:2", layers=[0])
    with torch.no_grad():
        expected, before = plain(ids).logits, model(ids).logits
        with ra.exact_attention(model):
            assert_exact(model(ids).logits, expected)
        assert float((before - expected).abs().max()) > 1e-3
        assert torch.equal(model(ids).logits, before)


def test_other_threads_keep_their_patterns(rng):
    ids, model = batch(rng)["input_ids"], student("llama").eval()
    with torch.no_grad():
        sparse = model(ids).logits
        with ra.exact_attention(model):
            exact = model(ids).logits

    def work(number):
        for _ in range(20):
            with torch.no_grad(), ra.exact_attention(model) if number % 2 else contextlib.nullcontext():
                assert torch.equal(model(ids).logits, exact if number % 2 else sparse)

    in_threads(work, 4)
