"""A scale or cap that the config names is found exactly, whatever the dtype; other heads form the logits of whole rows."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
)

import hf_ring_attention as ra
from hf_ring_attention.hf.config import warn_once
from hf_ring_attention.hf.heads import watched
from tests.support.ranks import run_simulated
from tests.support.tolerance import allowed, assert_exact

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Changed(LlamaForCausalLM):
    """A model that changes its logits in a way that its config does not tell."""

    def forward(self, *args, labels=None, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = self.change(output.logits)
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, self.config.vocab_size, **kwargs)
        return output


def changed(change, dtype=torch.float32, **settings):
    """A model of a class of its own: what a first call finds out about a class holds for later ones."""
    torch.manual_seed(0)
    model = large(type("Changed", (Changed,), {})(LlamaConfig(**SIZES, **settings)), dtype)
    model.change = change
    return model


def large(model, dtype):
    """Weights that make logits of some size."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.to(dtype).eval()


def build(config, dtype):
    torch.manual_seed(0)
    return large(AutoModelForCausalLM.from_config(config), dtype)


def tokens(seed=0, rows=2):
    return torch.randint(1, 97, (rows, 30), generator=torch.Generator().manual_seed(seed))


def found_and_right(model, ids):
    """Logits by what is found from two tokens of each row, and the model's own."""
    with torch.no_grad():
        with watched(model.get_output_embeddings()) as call:
            made = model(input_ids=ids, use_cache=False).logits
        assert made.shape[1] == 2
        head = call.head(made, model.config)
        return None if head is None else head(call.hidden), model(input_ids=ids, use_cache=False).logits


MODELS = {
    "granite": lambda scale: GraniteConfig(**SIZES, logits_scaling=scale),
    "cohere": lambda scale: Cohere2Config(**SIZES, logit_scale=scale),
    "gemma": lambda scale: Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=20 * (scale - 0.9)),
    "bias": lambda scale: PhiConfig(**SIZES),
}


@pytest.mark.own_dtypes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_scales_and_caps_of_a_config_are_found_to_the_bit(name, dtype, rng):
    seed = rng.randrange(10**6)
    for scale in (1.0, 1.001, 8.0, rng.uniform(1, 1.05), rng.uniform(0.95, 1)):
        model = build(MODELS[name](scale), dtype)
        if name == "bias":
            torch.nn.init.normal_(model.lm_head.bias)
        found, right = found_and_right(model, tokens(seed))
        assert torch.equal(found, right), scale


@pytest.mark.own_dtypes
@pytest.mark.parametrize(
    ("change", "scale"),
    [(lambda x: x.float() / 1.003, 1.003), (lambda x: (x / 1.02).float(), 1.02)],
    ids=["before", "behind"],
)
def test_logits_in_float32_of_a_model_in_16_bits(change, scale):
    """Scaled in the one or the other."""
    found, right = found_and_right(changed(change, torch.bfloat16, logits_scaling=scale), tokens())
    assert found.dtype == right.dtype == torch.float32
    assert torch.equal(found, right)


@pytest.mark.own_dtypes
def test_a_cap_that_small_logits_hardly_show():
    """In bfloat16 the cap changes no logit of the tokens that are tried, but those of larger ones."""
    config = Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=32.0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.01)
    with torch.no_grad(), watched(model.get_output_embeddings()) as call:
        made = model(input_ids=tokens()).logits
        assert torch.equal(made, call.plain)
        head = call.head(made, model.config)
    hidden = torch.full((1, 1, 32), 1e5, dtype=torch.bfloat16)
    with torch.no_grad():
        assert float(head(hidden).abs().max()) <= 32 < float(model.lm_head(hidden).abs().max())


def test_logits_beyond_the_vocabulary_are_left_out():
    found, right = found_and_right(changed(lambda x: (x * 1.02)[..., :90], torch.float64, logit_scale=1.02), tokens())
    assert found.shape[-1] == 90
    assert_exact(found, right)


def masked_in_place(logits):
    logits[..., 5] = torch.finfo(logits.dtype).min
    return logits


UNKNOWN = {
    "a scale that the config does not name": lambda x: x * 1.02,
    "a mask": lambda x: x.masked_fill(torch.arange(97) == 5, -torch.inf),
    "a mask in place": masked_in_place,
    "a square": lambda x: x * x.abs(),
    "a bias": lambda x: x + torch.arange(97) * 0.01,
    "an unknown cap": lambda x: torch.tanh(x / 3) * 3,
    "a scale of each token": lambda x: x / x.norm(dim=-1, keepdim=True),
    "a softmax": lambda x: x.log_softmax(-1),
}
#: The warning of a model with such a head.
WARNING = "forms its logits in a way that its config does not name"


@pytest.mark.own_dtypes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", UNKNOWN)
def test_perplexity_of_other_heads(name, dtype, caplog):
    warn_once.cache_clear()
    model, ids = changed(UNKNOWN[name], dtype), tokens(rows=1)
    assert found_and_right(model, ids)[0] is None
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1]
    low, right = (
        float(torch.nn.functional.cross_entropy(logits.to(dtype), ids[0, 1:], reduction="sum"))
        for dtype in (torch.float32, torch.float64)
    )
    assert ra.perplexity(model, ids).nll == pytest.approx(right, rel=allowed(abs(low / right - 1)))
    assert WARNING in caplog.text


def loss_and_gradients(model, ids):
    model.zero_grad()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return output.loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", [*[*UNKNOWN][::2], "a scale that is trained", "a named scale that is not applied"])
def test_losses_of_other_heads_over_a_ring(name, caplog):
    """The first call finds out that the head is not known, and is made again; the second one knows."""
    warn_once.cache_clear()
    named = {"logits_scaling": 1.02} if "named" in name else {}
    model, ids = changed(UNKNOWN.get(name, lambda x: x), torch.float64, **named), tokens()
    if "trained" in name:
        model.scale = nn.Parameter(torch.tensor(1.02))
        model.change = lambda x: x * model.scale
    models = [copy.deepcopy(model) for _ in range(2)]
    loss, gradients = loss_and_gradients(model, ids)  # It is not patched, so Transformers alone computes this.
    with torch.no_grad():
        nll = ra.perplexity(model, ids).nll

    def work(ring):
        own = models[ring.rank]
        if "trained" in name:
            own.change = lambda x: x * own.scale
        ra.patch_model(own, "exact", ring=ring)
        for _ in range(2):
            found, of_rank = loss_and_gradients(own, ids)
            assert_exact(found, loss)
            for parameter, gradient in of_rank.items():
                assert_exact(torch.stack(ring.gather(gradient)).mean(0), gradients[parameter])
        assert ra.perplexity(own, ids).nll == pytest.approx(nll, rel=1e-12)
        return own(input_ids=ids, labels=ids).logits.shape

    assert run_simulated(work, 2) == [(2, 30, 97)] * 2
    assert caplog.text.count(f"{WARNING}, so the logits of whole rows are formed at once for its loss") == 1


def test_ranks_decide_alike_when_one_of_them_sees_no_difference():
    """Only the rank that has token 96 has logits that the model changes."""
    ids = torch.randint(1, 90, (1, 24), generator=torch.Generator().manual_seed(0))
    ids[0, 20] = 96
    models = [changed(None, torch.float64) for _ in range(3)]
    for model in models:
        with torch.no_grad():
            model.model.embed_tokens.weight[96] *= 100
            model.model.norm.register_forward_hook(
                lambda module, args, output: output * (args[0].abs() > 9).any(-1, True)
            )
        model.change = lambda x: x + 0.5 * (x != 0)
    with torch.no_grad():
        assert models[2](input_ids=ids).logits.abs().amax(-1).nonzero()[:, 1].tolist() == [20]
    loss, gradients = loss_and_gradients(models[2], ids)

    def work(ring):
        own = ra.patch_model(models[ring.rank], "exact", ring=ring)
        found, of_rank = loss_and_gradients(own, ids)
        assert_exact(found, loss)
        assert_exact(torch.stack(ring.gather(of_rank["lm_head.weight"])).mean(0), gradients["lm_head.weight"])

    run_simulated(work, 2, layout="contiguous")


@pytest.mark.own_dtypes
def test_autocast_is_that_of_the_model():
    """Perplexity forms logits outside of the forward pass, which Accelerate wraps in autocast."""
    model = build(LlamaConfig(**SIZES), torch.float32)
    forward = model.forward

    def wrapped(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*args, **kwargs)

    model.forward = wrapped
    found, right = found_and_right(model, tokens())
    assert found.dtype == torch.bfloat16 and torch.equal(found, right)
