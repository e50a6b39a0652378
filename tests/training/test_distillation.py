"""Self-distillation: the divergence and its gradients equal a plain computation, on rings and with adapters too."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

import hf_ring_attention as ra
from hf_ring_attention.hf.loss import lm_loss
from hf_ring_attention.hf.model.config import warn_once
from tests.support.ranks import run_simulated
from tests.support.threads import in_threads
from tests.support.tiny_models import VOCAB, tiny_model, with_large_weights
from tests.support.tolerance import EXACT, assert_exact

pytestmark = pytest.mark.usefixtures("in_float64")
PATTERN = "window:4+2"
LENGTH = 37


def batch(rng, kind="padded"):
    """Rows of tokens, a third of them not learned: padded on the left and on the right, or packed."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    if kind == "packed":
        positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in ((5, 20, 12), (30, 1, 6))]
        return {"input_ids": ids, "labels": labels, "position_ids": torch.stack(positions)}
    mask = torch.ones_like(ids)
    mask[0, -9:], mask[1, :6] = 0, 0
    return {"input_ids": ids, "labels": labels.masked_fill(mask == 0, -100), "attention_mask": mask}


def student(model_type, pattern=PATTERN):
    return ra.patch_model(with_large_weights(tiny_model(model_type, "ring_dilated")), pattern)


def plain_divergence(model, teacher, rows):
    """The mean over learned tokens of sum p log(p / q), from all logits at once."""
    inputs = {name: x for name, x in rows.items() if name != "labels"} | {"use_cache": False}
    with torch.no_grad():
        p = F.softmax(teacher(**inputs).logits, -1)
    q = F.softmax(model(**inputs).logits, -1)
    divergence = (p * (p.log() - q.log())).sum(-1)[:, :-1]
    learned = rows["labels"][:, 1:] != -100
    return divergence[learned].sum() / learned.sum()


@pytest.fixture
def tokens_at_once(monkeypatch):
    """Sets how many tokens a slice of the loss has."""

    def set_to(count):
        monkeypatch.setattr(lm_loss, "tokens_at_once", lambda tokens, width, vocabulary: count)

    return set_to


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


# Output layers that are plain, tied, scaled or capped; and layers with windows in the model.
@pytest.mark.parametrize(("model_type", "kind"), [("cohere", "packed"), ("gemma2", "packed"), ("granite", "padded")])
def test_it_is_the_divergence_of_a_plain_computation(model_type, kind, rng, tokens_at_once):
    model = student(model_type).train()
    teacher = ra.patch_model(with_large_weights(tiny_model(model_type, "ring_dilated")), "exact").eval()
    if kind == "packed":
        model.activation_checkpointing_enable({"use_reentrant": False})
    rows = batch(rng, kind)
    expected = plain_divergence(model, teacher, rows)
    assert float(expected.detach()) > 1e-4
    gradients = gradients_of(model, expected)
    for at_once in (10, 1000):
        tokens_at_once(at_once)
        loss = ra.distillation_loss(model, rows)
        assert_exact(loss.detach(), expected.detach())
        assert_same_gradients(gradients_of(model, loss), gradients)
    assert model.training and all(module.training for module in model.modules())


# Layouts of exact attention and of the pattern differ if the ring chooses them.
@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("world_size", "kind", "layout"), [(2, "padded", "auto"), (2, "packed", "zigzag"), (3, "packed", "documents")]
)
def test_a_ring_learns_what_one_process_does(world_size, kind, layout, rng, tokens_at_once):
    tokens_at_once(5)
    rows, items = batch(rng, kind), None if layout == "auto" else 11
    whole = student("gemma2" if layout == "zigzag" else "llama").train()
    models = [copy.deepcopy(whole) for _ in range(world_size)]
    expected = ra.distillation_loss(whole, rows, items)
    gradients = gradients_of(whole, expected)

    def work(ring):
        model = ra.patch_model(models[ring.rank], ring=ring)
        if layout == "documents":
            model.activation_checkpointing_enable({"use_reentrant": False})
        loss = ra.distillation_loss(model, rows, items)
        return loss.detach(), gradients_of(model, loss)

    of_ranks = run_simulated(work, world_size, layout=layout)
    for loss, _ in of_ranks:
        assert_exact(loss, expected.detach())
    mean = {name: torch.stack([of_rank[name] for _, of_rank in of_ranks]).mean(0) for name in gradients}
    assert_same_gradients(mean, gradients)


def test_losses_of_routers_are_added(rng):
    rows = batch(rng)
    whole = student("mixtral").train()
    models = [copy.deepcopy(whole) for _ in range(2)]
    expected = ra.distillation_loss(whole, rows | {"output_router_logits": True})
    assert float((expected - ra.distillation_loss(whole, rows)).detach()) > 1e-4
    gradients = gradients_of(whole, expected)

    def work(ring):
        model = ra.patch_model(models[ring.rank], ring=ring)
        loss = ra.distillation_loss(model, rows | {"output_router_logits": True})
        assert_exact(loss.detach(), expected.detach())
        return {name: torch.stack(ring.gather(x)).mean(0) for name, x in gradients_of(model, loss).items()}

    for mean in run_simulated(work, 2):
        assert_same_gradients(mean, gradients)


def with_adapters(model, *modules):
    torch.manual_seed(4)
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj", *modules], init_lora_weights=False, lora_dropout=0.3)
    return get_peft_model(model, lora)


def test_adapters_learn_from_the_model_without_them(rng, tokens_at_once):
    """The student is in evaluation mode, so its dropout is not random; the teacher has none in either."""
    model = with_adapters(student("llama"), "lm_head").eval()
    teacher = ra.patch_model(with_large_weights(tiny_model("llama", "ring_dilated")), "exact").eval()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    frozen = next(name for name in sorted(trained))
    dict(model.named_parameters())[frozen].requires_grad_(False)
    rows = batch(rng)
    expected = plain_divergence(model, teacher, rows)
    gradients = gradients_of(model, expected)
    tokens_at_once(10)
    loss = ra.distillation_loss(model, rows)
    assert_exact(loss.detach(), expected.detach())
    assert_same_gradients(gradients_of(model, loss), gradients)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained - {frozen}
    teaching = model.train()
    ra.distillation_loss(teaching, rows).backward()
    assert all(module.training for module in teaching.modules())


def test_logits_of_a_slice_are_all_that_exist(rng, tokens_at_once):
    model, shapes = student("llama"), []
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: shapes.append(hidden.shape[:-1].numel()) or forward(hidden)
    tokens_at_once(8)
    ra.distillation_loss(model, batch(rng)).backward()
    assert max(shapes) == 8 and sum(shapes) > 4 * LENGTH


def test_a_teacher_that_moves_is_told_once(rng, caplog):
    rows = batch(rng)
    warn_once.cache_clear()
    for model in (with_adapters(student("llama")), student("llama"), student("llama")):
        ra.distillation_loss(model, rows)
    warnings = [x.message for x in caplog.records if "the teacher has the weights that are being trained" in x.message]
    assert len(warnings) == 1 and "LlamaForCausalLM has no adapters" in warnings[0]


class Normalized(LlamaForCausalLM):
    """A model whose logits are not functions of single numbers."""

    def forward(self, *args, labels=None, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.log_softmax(-1)
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, self.config.vocab_size, **kwargs)
        return output


def test_what_cannot_be_distilled_is_refused(rng):
    model, rows = student("llama"), batch(rng)
    with pytest.raises(ValueError, match=r"expected labels in the batch, got \['attention_mask', 'input_ids'\]"):
        ra.distillation_loss(model, {name: x for name, x in rows.items() if name != "labels"})
    with pytest.raises(ValueError, match="LlamaForCausalLM has no pattern to learn"):
        ra.distillation_loss(tiny_model("llama", "eager"), rows)
    with pytest.raises(NotImplementedError, match="computes with its logits beyond each number"):
        ra.distillation_loss(ra.patch_model(Normalized(model.config), PATTERN), rows)
    with pytest.raises(ValueError, match="expected a Transformers model"):
        ra.exact_attention(torch.nn.Linear(2, 2)).__enter__()
    with pytest.raises(ValueError, match="gradients are recorded"), ra.exact_attention(model), torch.enable_grad():
        model(rows["input_ids"])


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_exact_attention_is_that_of_the_model_without_patterns(model_type, rng):
    """Layers with windows in the model keep them, whatever `patch_config` has set for these layers."""
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
        for _ in range(8):
            with torch.no_grad(), ra.exact_attention(model) if number % 2 else contextlib.nullcontext():
                assert torch.equal(model(ids).logits, exact if number % 2 else sparse)

    in_threads(work, 4)
