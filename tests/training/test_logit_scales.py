"""What a model does to the logits of its output layer is found exactly, whatever the dtype, or refused."""

import math

import pytest
import torch
from torch import nn
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

import hf_ring_attention as ra
from hf_ring_attention.hf.heads import HeadCall, running, watching
from tests.support.tolerance import allowed, assert_exact
from tests.support.training import SIZES

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Changed(LlamaForCausalLM):
    """A model that changes its logits in a way that its config does not tell."""

    def forward(self, *args, labels=None, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = self.change(output.logits)
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, self.config.vocab_size)
        return output


def changed(change, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    model = large(Changed(LlamaConfig(**SIZES, **settings)), dtype)
    model.change = change
    return model


def large(model, dtype):
    """Weights that make logits of some size."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.to(dtype).eval()


def build(model_class, config, dtype):
    torch.manual_seed(0)
    return large(model_class(config), dtype)


def tokens(seed=0, rows=2):
    return torch.randint(1, 97, (rows, 30), generator=torch.Generator().manual_seed(seed))


def found_and_right(model, ids):
    """Logits by what is found from two tokens of each row, and the model's own."""
    call = HeadCall(model.get_output_embeddings())
    with torch.no_grad():
        with watching(call.output), running(call):
            made = model(input_ids=ids, use_cache=False).logits
        assert made.shape[1] == 2
        head = call.head(made, model.config)
        return None if head is None else head(call.hidden), model(input_ids=ids, use_cache=False).logits


MODELS = {
    "granite": lambda scale: (GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=scale)),
    "cohere": lambda scale: (Cohere2ForCausalLM, Cohere2Config(**SIZES, logit_scale=scale)),
    "gemma": lambda scale: (
        Gemma2ForCausalLM,
        Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=20 * (scale - 0.9)),
    ),
    "bias": lambda scale: (PhiForCausalLM, PhiConfig(**SIZES)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_scales_and_caps_of_a_config_are_found_to_the_bit(name, dtype, rng):
    seed = rng.randrange(10**6)
    for scale in (1.0, 1.001, 1.004, 1.02, 1.05, 0.98, 8.0, rng.uniform(1, 1.05), rng.uniform(0.95, 1)):
        model = build(*MODELS[name](scale), dtype)
        if name == "bias":
            torch.nn.init.normal_(model.lm_head.bias)
        found, right = found_and_right(model, tokens(seed))
        assert torch.equal(found, right), scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scale_that_no_config_names_is_found(dtype, rng):
    seed = rng.randrange(10**6)
    for scale in (1.001, 1.004, 1.02, 1.05, 0.98, 0.125, rng.uniform(0.95, 1.05)):
        many = len(str(scale)) > 5
        for change in (lambda x, scale=scale: x * scale, lambda x, scale=scale: x / scale):
            found, right = found_and_right(changed(change, dtype), tokens(seed))
            # The number of the fewest digits that fits: the right one, but for some that have many or are as near as that.
            assert many or float((found != right).double().mean()) < 0.01, scale
            error = (found - right).double() / right.double().abs().clamp_min(1e-3)
            assert float(error.abs().max()) <= 2 * torch.finfo(dtype).eps, scale
            # A scale is known from rounded logits: each is off by eps / sqrt(12) or less, their mean by sqrt(N) times less.
            known = torch.finfo(dtype).eps / math.sqrt(12 * error.numel())
            assert float(error.mean().abs()) <= 8 * (known + torch.finfo(torch.float32).eps), scale


@pytest.mark.parametrize("wider", ["before", "behind"])
def test_logits_in_float32_of_a_model_in_16_bits(wider):
    """Scaled in the one or the other."""
    change = {"before": lambda x: x.float() / 1.003, "behind": lambda x: (x / 1.02).float()}[wider]
    found, right = found_and_right(changed(change, torch.bfloat16), tokens())
    assert found.dtype == right.dtype == torch.float32
    assert torch.equal(found, right)


def test_a_cap_that_small_logits_hardly_show():
    """In bfloat16 the cap changes no logit of the tokens that are tried, but those of larger ones."""
    config = Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=32.0)
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.01)
    call = HeadCall(model.get_output_embeddings())
    with torch.no_grad(), watching(call.output), running(call):
        made = model(input_ids=tokens()).logits
        assert torch.equal(made, call.plain)
        head = call.head(made, model.config)
    hidden = torch.full((1, 1, 32), 1e5, dtype=torch.bfloat16)
    with torch.no_grad():
        assert float(head(hidden).abs().max()) <= 32 < float(model.lm_head(hidden).abs().max())


def test_a_scale_that_was_changed_after_loading():
    model = build(Cohere2ForCausalLM, Cohere2Config(**SIZES, logit_scale=1.02), torch.bfloat16)
    model.logit_scale = 1.03
    found, right = found_and_right(model, tokens())
    assert float((found == right).double().mean()) > 0.98


@pytest.mark.usefixtures("in_float64")
def test_logits_beyond_the_vocabulary_are_left_out():
    found, right = found_and_right(changed(lambda x: (x * 1.02)[..., :90], torch.float64), tokens())
    assert found.shape[-1] == 90
    assert_exact(found, right)


def masked_in_place(logits):
    logits[..., 5] = torch.finfo(logits.dtype).min
    return logits


UNKNOWN = {
    "a mask": lambda x: x.masked_fill(torch.arange(97) == 5, -torch.inf),
    "a mask in place": masked_in_place,
    "a square": lambda x: x * x.abs(),
    "a bias": lambda x: x + torch.arange(97) * 0.01,
    "an unknown cap": lambda x: torch.tanh(x / 3) * 3,
    "a scale of each token": lambda x: x / x.norm(dim=-1, keepdim=True),
    "a softmax": lambda x: x.log_softmax(-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", UNKNOWN)
def test_other_changes_are_refused_or_kept_for_the_whole_row(name, dtype, caplog):
    model = changed(UNKNOWN[name], dtype)
    ids = tokens(rows=1)
    assert found_and_right(model, ids)[0] is None
    with ra.sliced_loss(model, 7), pytest.raises(NotImplementedError, match="forms its logits in a way of its own"):
        model(input_ids=ids, labels=ids)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1]
    low, right = (
        float(torch.nn.functional.cross_entropy(logits.to(dtype), ids[0, 1:], reduction="sum"))
        for dtype in (torch.float32, torch.float64)
    )
    assert ra.perplexity(model, ids).nll == pytest.approx(right, rel=allowed(abs(low / right - 1)))
    assert "forms its logits in a way of its own" in caplog.text


@pytest.mark.usefixtures("in_float64")
def test_a_scale_that_is_trained_is_refused():
    """Its gradient would be lost."""
    model = changed(None, torch.float64)
    model.scale = nn.Parameter(torch.tensor(1.02))
    model.change = lambda x: x * model.scale
    ids = tokens()
    with ra.sliced_loss(model, 7), pytest.raises(NotImplementedError, match="forms its logits in a way of its own"):
        model(input_ids=ids, labels=ids)
    for parameter in model.parameters():  # an adapter, elsewhere
        parameter.requires_grad_(False)
    with ra.sliced_loss(model, 7):
        sliced = model(input_ids=ids, labels=ids).loss
    assert_exact(sliced, model(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize("kind", ["granite", "unnamed"])
def test_losses_and_perplexity_of_a_scale_near_one(kind):
    """In 16 bits, where logits are rounded by as much as the scale changes them."""
    if kind == "granite":
        model = build(GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=1.02), torch.bfloat16)
    else:
        model = changed(lambda x: x / 1.02, torch.bfloat16)
    ids = tokens()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # for a loss of which the scale changes much
        output = model(input_ids=ids, labels=ids)
        with ra.sliced_loss(model, 7):
            sliced = model(input_ids=ids, labels=ids).loss
    assert float(sliced) == pytest.approx(float(output.loss), rel=1e-3)
    right = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
    )
    assert ra.perplexity(model, ids).nll == pytest.approx(float(right), rel=1e-3)


def test_autocast_is_that_of_the_model():
    """Perplexity forms logits outside of the forward pass, which Accelerate wraps in autocast."""
    model = build(LlamaForCausalLM, LlamaConfig(**SIZES), torch.float32)
    forward = model.forward

    def wrapped(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*args, **kwargs)

    model.forward = wrapped
    found, right = found_and_right(model, tokens())
    assert found.dtype == torch.bfloat16 and torch.equal(found, right)
