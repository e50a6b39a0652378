"""What stands inside a decoder: adapters, modules, hooks, copied layers, other models, and embeddings of the caller."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import hf_ring_attention as ra
from tests.hf.alike import assert_alike, assert_on_ranks, logits, refused
from tests.support.adapters import KINDS, NOT_INSTALLED, survey_adapter
from tests.support.neighbours import llama
from tests.support.probe import batch, over_ring
from tests.support.ranks import on_ranks
from tests.support.tiny_models import tiny_model

IDS = batch("plain")[0]["input_ids"]
LABELS = batch("left")[1]


@pytest.mark.drawn(16)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of FROD, under torch 2.11
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # SHADOW passes it on.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_INSTALLED])
def test_every_kind_of_adapter(kind):
    """The page says what PEFT's adapters do over a ring; those that are equal have stock's loss, logits and gradients."""
    page = (Path(ra.__file__).parent / "hf" / "ADAPTERS.md").read_text(encoding="utf-8")
    assert f"| {kind} | {survey_adapter(kind)} |" in page


# ---- hooks and modules


def on_states(change):
    """A hook after a module, which returns new hidden states."""

    def hook(module, args, output):
        first, *others = output if isinstance(output, tuple) else (output,)
        return (change(first), *others) if others else change(first)

    return hook


def with_hook(path, change):
    model = llama()
    model.get_submodule(path).register_forward_hook(on_states(change))
    return model


def steer_last(x):
    return torch.cat([x[:, :-1], x[:, -1:] + 0.1], 1)


def steer_in_place(x):
    x[:, -1] += 0.1
    return x


def shift(x):
    return 0.5 * (x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


class Around(nn.Module):
    """A module with a function of its input, and a gate that may begin as zero."""

    def __init__(self, inner, function, gate=1.0):
        super().__init__()
        self.inner, self.function, self.gate = inner, function, nn.Parameter(torch.tensor(gate))

    def forward(self, x):
        return self.inner(x + self.gate * self.function(x))


def with_mlp(function, gate=1.0):
    model = llama()
    model.model.layers[1].mlp = Around(model.model.layers[1].mlp, function, gate)
    return model


LOOKING = {
    "the last token, in place": (partial(with_hook, "model.layers.1", steer_in_place), "layers.1 or a hook"),
    "one place": (partial(with_hook, "model.norm", lambda x: x.index_fill(1, torch.tensor(5), 0)), "norm or a hook"),
    "the mean": (partial(with_hook, "model.embed_tokens", lambda x: x + x.mean(1, keepdim=True)), "embed_tokens or"),
    "keys": (partial(with_hook, "model.layers.0.self_attn.k_proj", steer_last), "layers.0.self_attn.k_proj or"),
    "a token shift": (partial(with_mlp, shift), "layers.1.mlp or a hook"),
    "a choice of tokens": (
        partial(with_mlp, lambda x: x * (x.norm(dim=2) >= x.norm(dim=2).median(1, keepdim=True)[0])[..., None]),
        "layers.1.mlp or a hook",
    ),
    "tables of the row": (partial(with_mlp, lambda x: x + torch.ones(1, 20, 1)), "cannot compute 17 tokens of the row"),
}


@pytest.mark.parametrize("kind", LOOKING)
def test_what_looks_at_other_tokens_is_refused(kind):
    """One process computes it; over a ring, each rank would look at its part."""
    make, message = LOOKING[kind]
    assert_alike(logits(ra.patch_model(make()), IDS), logits(make(), IDS))
    refused(f"LlamaModel: .*{message}.*remove it, or", on_ranks, forward, make, error=NotImplementedError)


def forward(ring, model):
    return logits(model, IDS)


@pytest.mark.parametrize(
    "make", [partial(with_hook, "model.layers.0", lambda x: 1.5 * x), partial(with_mlp, torch.sin)]
)
def test_what_treats_tokens_alike_equals_one_process(make):
    """Looking for others leaves random numbers, modes and gradients as they are."""
    inputs, labels = batch("left")
    expected = over_ring(ra.patch_model(make().train()), ra.Ring.alone(), inputs, labels)
    state = torch.get_rng_state()

    def work(ring, model):
        found = over_ring(model.train(), ring, inputs, labels)
        assert all(module.training for module in model.modules())
        return tuple(found)

    assert_on_ranks(work, make, tuple(expected))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_hook_that_comes_later_is_found():
    def work(ring, model):
        expected = forward(ring, model)
        handle = model.model.layers[0].register_forward_hook(on_states(steer_last))
        for _ in range(2):
            refused("layers.0 or a hook", forward, ring, model, error=NotImplementedError)
        handle.remove()
        assert_alike(forward(ring, model), expected)

    on_ranks(work, llama)


def test_a_weight_that_begins_as_zero_hides_a_module_for_one_step():
    def work(ring, model):
        model.train()
        forward(ring, model)
        nn.init.ones_(model.model.layers[1].mlp.gate)
        refused("layers.1.mlp or a hook", forward, ring, model, error=NotImplementedError)

    on_ranks(work, partial(with_mlp, shift, 0.0))


# ---- copied layers, and models inside


def with_copy(model):
    """The model with its first layer once more; only this layer's number is new."""
    layers = model.model.layers
    layers.append(copy.deepcopy(layers[0]))
    layers[-1].self_attn.layer_idx = model.config.num_hidden_layers
    model.config.num_hidden_layers += 1
    return model


@pytest.mark.parametrize("kind", ["right", "packed"])
def test_copied_layers(kind):
    inputs, labels = batch(kind)
    inputs["ids"] = inputs.pop("input_ids")
    expected = logits(with_copy(llama()), **inputs)
    copied = with_copy(ra.patch_model(llama()))
    assert_alike(logits(copied, **inputs), expected, labels != -100)
    ra.patch_model(copied, "window:4+2")
    assert_alike(logits(copied, **inputs), logits(ra.patch_model(with_copy(llama()), "window:4+2"), **inputs))
    for make in (lambda: with_copy(llama()), lambda: with_copy(ra.patch_model(llama()))):
        assert_on_ranks(lambda ring, model: logits(model, **inputs), make, expected, valid=labels != -100)


class Student(LlamaForCausalLM):
    def forward(self, input_ids, **kwargs):
        out = super().forward(input_ids, **kwargs)
        with torch.no_grad():
            wanted = self.teacher(input_ids).logits
        out.loss = out.loss + (out.logits - wanted).pow(2).mean()
        return out


@pytest.mark.parametrize("one_config", [False, True])
def test_a_teacher_inside_a_model(one_config):
    def make():
        model, teacher = llama(), tiny_model("llama", "eager", num_key_value_heads=1)
        if one_config:
            teacher = LlamaForCausalLM._from_config(model.config).eval()
            teacher.load_state_dict({name: 0.9 * x for name, x in model.state_dict().items()})
        model.__class__, model.teacher = Student, teacher
        return model

    expected = make()(IDS, labels=LABELS).loss.detach()
    assert_on_ranks(lambda ring, model: model(IDS, labels=LABELS).loss.detach(), make, expected)


# ---- embeddings of the caller


def adversarial_training(model, ring=None):
    """FreeLB's two steps, and the gradients of the embeddings themselves, as in integrated gradients and prompt search."""
    embed, offset = model.get_input_embeddings(), torch.zeros(*IDS.shape, 32)
    for _ in range(2):
        offset.requires_grad_()
        loss = model(inputs_embeds=embed(IDS) + offset, labels=LABELS).loss
        loss.backward()
        offset = (offset + 0.1 * offset.grad / offset.grad.norm()).detach()
    weights = {name: x.grad for name, x in model.named_parameters()}
    if ring is not None:
        weights = {name: torch.stack(ring.gather(x)).mean(0) for name, x in weights.items()}
    embeds = embed(IDS).detach().requires_grad_()
    (saliency,) = torch.autograd.grad(model(inputs_embeds=embeds, labels=LABELS).loss, embeds)
    return offset, saliency, weights


def test_gradients_of_embeddings():
    """Each rank has those of the whole row: before, of its own tokens alone, and twice as large."""
    expected = adversarial_training(llama())
    assert_on_ranks(lambda ring, model: adversarial_training(model, ring), llama, expected)
