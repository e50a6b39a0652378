"""A user's own forward gets the losses and logits of the stock model, and logits are formed when they are used."""

import contextlib
import copy
import io

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
)
from transformers.modeling_outputs import CausalLMOutput

import hf_ring_attention as ra
from hf_ring_attention.hf import loss_bytes
from hf_ring_attention.hf.config import warn_once
from hf_ring_attention.hf.loss_bytes import LEAST_BYTES, tokens_at_once
from hf_ring_attention.hf.on_use import OnUse
from hf_ring_attention.hf.values import Values
from hf_ring_attention.hf.wrappers import runner_of
from tests.support.probe import batch
from tests.support.ranks import on_ranks, run_ranks, run_simulated
from tests.support.threads import in_threads
from tests.support.tiny_models import CAUSAL_TYPES, NOT_BUILT, tiny_config, tiny_model
from tests.support.tolerance import EXACT, allowed, assert_exact, distance, float64

VOCAB, WIDTH, LENGTH = 97, 32, 21
SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
WARNING = "the logits of whole rows were used, so every rank forms them: 0.000 GiB"
in_float64 = pytest.mark.usefixtures("in_float64")


class Own(LlamaForCausalLM):
    """A model with a forward of the user's own, by `loss_of(model, hidden, labels)`."""

    def __init__(self, config):
        super().__init__(config)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.02)), nn.Parameter(torch.linspace(-1, 1, VOCAB))
        self.second = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None, **kwargs):
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        loss, logits = self.loss_of(self, hidden, labels, num_items_in_batch)
        return CausalLMOutput(loss=loss, logits=logits)


def following(model, logits, labels, items=None):
    return model.loss_function(logits=logits, labels=labels, vocab_size=VOCAB, num_items_in_batch=items)


def rolled(model, hidden, labels, items):
    logits = model.lm_head(hidden)
    return following(model, logits, labels, items) + 0.3 * following(model, logits, labels.roll(-1, 1), items), logits


def two_heads(model, hidden, labels, items):
    logits = model.lm_head(hidden)
    loss = following(model, logits, labels, items) + following(model, model.second(hidden), labels.roll(-1, 1), items)
    return loss + following(model, model.lm_head(hidden * 2), labels, items), logits


def masked_in_forward(model, hidden, labels, items):
    logits = model.lm_head(hidden)
    return following(model, logits, labels.masked_fill(labels % 3 == 0, -100)), logits


def own_cross_entropy(model, hidden, labels, items):
    logits = model.lm_head(hidden)
    shifted, following = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return nn.CrossEntropyLoss(label_smoothing=0.1)(shifted.view(-1, VOCAB), following.view(-1)), logits


def trained_temperature(model, hidden, labels, items):
    logits = model.lm_head(hidden) * model.scale.exp() + model.bias
    logits = logits.masked_fill(torch.arange(VOCAB) == 5, -30.0)
    logits.div_(1.5)
    return following(model, logits, labels, items), logits


def term_of_hidden_states(model, hidden, labels, items):
    logits = model.lm_head(hidden)
    return following(model, logits, labels, items) + (hidden * torch.linspace(0, 1, WIDTH)).pow(3).mean(), logits


def term_of_logits(model, hidden, labels, items):
    logits = model.lm_head(hidden)
    return following(model, logits, labels, items) + 0.01 * logits.logsumexp(-1).pow(2).mean(), logits


def scaled_by_confidence(model, hidden, labels, items):
    logits = model.lm_head(hidden)
    with torch.no_grad():
        share = (logits.max(-1).values > 1).double().mean()
        target = logits / 2  # A value that was computed without gradients stays one.
    return following(model, logits, labels, items) * share + F.mse_loss(logits, target), logits


def masked_in_place(model, hidden, labels, items):
    logits = model.lm_head(hidden)
    logits[..., 5] = -30.0
    return following(model, logits.mul_(0.5), labels, items), logits


def rows_that_look_ahead(model, hidden, labels, items):
    logits = model.lm_head(hidden + hidden.roll(-1, 1))
    return following(model, logits, labels, items), logits


class _Product(torch.autograd.Function):
    """Computes without announcing its operations, as fused kernels do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x @ weight.mT).square().sum()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_product = 2 * grad * (x @ weight.mT)
        return of_product @ weight, of_product.flatten(0, 1).mT @ x.flatten(0, 1)


def own_function(model, hidden, labels, items):
    logits = model.lm_head(hidden)
    loss = _Product.apply(hidden, model.lm_head.weight) + _Product.apply(logits, torch.eye(VOCAB))
    return following(model, logits, labels, items) + 1e-3 * loss, logits


class _Reversed(torch.autograd.Function):
    """Returns its input, and changes gradients."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return -2 * grad


def reversed_gradients(model, hidden, labels, items):
    logits = model.lm_head(_Reversed.apply(hidden))
    return following(model, logits, labels, items), logits


def reversed_gradients_of_logits(model, hidden, labels, items):
    logits = model.lm_head(hidden)
    return following(model, _Reversed.apply(logits), labels, items), logits


def checkpointed_head(model, hidden, labels, items):
    logits = checkpoint(model.lm_head, hidden, use_reentrant=False)
    return following(model, logits, labels, items), logits


def reentrant_head(model, hidden, labels, items):
    logits = checkpoint(model.lm_head, hidden, use_reentrant=True)
    return following(model, logits, labels, items), logits


def hooked_head(model, hidden, labels, items):
    """Hooks see whole rows, and their gradients."""
    seen = []
    handles = [
        model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].square().mean())),
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(args[0].mean() + output.mean())),
        model.lm_head.register_full_backward_hook(lambda module, grads, of_output: (3 * grads[0],)),
    ]
    logits = model.lm_head(hidden)
    for handle in handles:
        handle.remove()
    return following(model, logits, labels, items) + sum(seen), logits


def picked_tokens(model, hidden, labels, items):
    picked = model.lm_head(hidden[labels != -100])
    twice = model.lm_head(hidden)[:, [0, 3, 3]]
    return F.cross_entropy(picked, labels[labels != -100]) + twice.square().mean(), model.lm_head(hidden)


#: Whether a stand-in of logits is formed; a wrapped one of hidden states is an ordinary tensor, and so are its logits.
FORWARDS = {
    picked_tokens: True,
    reversed_gradients: False,
    reversed_gradients_of_logits: True,
    checkpointed_head: False,
    reentrant_head: True,
    hooked_head: False,
    rolled: False,
    two_heads: False,
    masked_in_forward: False,
    own_cross_entropy: False,
    trained_temperature: True,
    term_of_hidden_states: False,
    rows_that_look_ahead: False,
    term_of_logits: True,
    scaled_by_confidence: True,
    masked_in_place: True,
    own_function: True,
}


def larger(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def own_model(loss_of):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = larger(Own._from_config(LlamaConfig(**SIZES), attn_implementation="eager")).eval()
    model.loss_of = loss_of
    return model


def tokens(kind="labels"):
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(LENGTH) < torch.tensor([[9], [0]]), -100)
    return {"input_ids": ids, "labels": labels if kind == "labels" else torch.full_like(ids, -100)}


def step(model, inputs):
    """The loss of a call, its logits, which all ranks form together, and the gradients."""
    model.zero_grad()
    output = model(**inputs)
    logits = torch.stack([output.logits])[0].detach() if inputs.pop("with_logits", False) else None
    output.loss.backward()
    return output.loss.detach(), logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def averaged(ring, gradients):
    return {name: torch.stack(ring.gather(x)).mean(0) for name, x in gradients.items()}


def assert_same(found, expected):
    loss, _, gradients = found
    assert_exact(loss, expected[0])
    assert gradients.keys() == expected[2].keys()
    most = max(float(x.abs().max()) for x in expected[2].values())
    for name, x in expected[2].items():
        assert float((gradients[name] - x).abs().max()) <= EXACT * max(most, 1e-300), name


def over_rings(make, inputs, check):
    """Runs a step on one process and on two simulated ranks; gradients are averaged as DDP does."""

    def work(ring, model):
        loss, logits, gradients = step(model, dict(inputs))
        return loss, logits, averaged(ring, gradients)

    for world_size in (1, 2):
        for found in on_ranks(work, make, world_size):
            check(found)


@in_float64
@pytest.mark.parametrize("loss_of", FORWARDS, ids=lambda x: x.__name__)
def test_a_forward_of_the_users_own(loss_of, caplog):
    """Loss and all gradients equal the stock model's, and logits of whole rows are formed where they are used."""
    warn_once.cache_clear()
    expected = step(own_model(loss_of), tokens())
    assert expected[2] and float(expected[0]) > 1
    over_rings(lambda: own_model(loss_of), tokens(), lambda found: assert_same(found, expected))
    assert caplog.text.count(WARNING) == FORWARDS[loss_of]


def hook_of_head(model, hidden, labels, items):
    """Hooks that change the output layer's input and output run once."""
    handles = [
        model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        model.lm_head.register_forward_hook(lambda module, args, output: output / 3),
    ]
    logits = model.lm_head(hidden)
    loss = following(model, logits, labels, items)
    for handle in handles:
        handle.remove()
    return loss, logits


def hooks_of_tensors(model, hidden, labels, items):
    """They see the gradient of all uses, also by functions that torch does not announce."""
    hidden.register_hook(lambda grad: 2 * grad)
    logits = model.lm_head(hidden)
    shifted = logits[:, 1:]
    for x in (logits, shifted):
        x.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    loss = following(model, _Tripled.apply(logits), labels, items) + shifted.pow(2).mean()
    values = F.linear(hidden, model.second[1].weight)
    values.register_hook(lambda grad: 2 * grad)
    F.leaky_relu(values, 0.3, True)
    loss = loss + values.logsumexp(-1).mean()
    return loss + _Tripled.apply(hidden).pow(2).mean(), logits


class _Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


def kept_gradients(model, hidden, labels, items):
    logits = model.lm_head(hidden)[:, :-1]
    logits.retain_grad()
    detached = hidden.detach().requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    (loss + following(model, model.lm_head(detached), labels, items)).backward(retain_graph=True)
    size = logits.grad.abs().sum() + detached.grad.abs().sum()
    model.zero_grad()
    return loss * size, logits


def copies_and_views(model, hidden, labels, items):
    """Who writes into a tensor changes its views, and no copy."""
    hidden, valid = hidden * 1, labels != -100
    copy, view = hidden[valid], hidden[:, :3]
    copy.mul_(0.5)
    view.mul_(2)
    logits = model.lm_head(hidden) * 1
    picked, flat, detached = logits[valid], logits[:, :-1].reshape(-1, VOCAB), logits.detach()
    rest = logits.contiguous().to(logits.dtype)[:, 5:]
    rest.mul_(model.scale)
    loss = F.cross_entropy(picked, labels[valid]) + F.cross_entropy(flat, labels[:, 1:].flatten())
    loss = loss + F.cross_entropy(model.lm_head(copy), labels[valid]) + (detached * logits).mean()
    return loss + _Tripled.apply(rest).pow(2).mean() + following(model, logits, labels, items), logits


def written_in_place(model, hidden, labels, items):
    hidden = hidden * 1
    F.relu(hidden, inplace=True)
    logits = model.lm_head(hidden) * 1
    F.relu(logits, inplace=True)
    logits.data.mul_(0.5)
    return following(model, logits, labels, items), logits


def other_orders(model, hidden, labels, items):
    """Tokens in another order, and tokens that are chosen twice."""
    order, labels = torch.arange(LENGTH).flip(0), labels.clamp(min=0)
    loss = following(model, model.lm_head(hidden[:, order]), labels, items)
    logits = model.lm_head(hidden)
    loss = loss + following(model, logits[torch.tensor([1, 0])], labels, items)
    for places in (torch.tensor([-1, LENGTH - 1]), order[:2].numpy() * 0):
        loss = loss + F.cross_entropy(logits[:, places].flatten(0, 1), labels[:, :2].flatten())
    return loss, logits


def gradients_of_parts(model, hidden, labels, items):
    """Gradients go where they were recorded when a value was made, and nowhere else."""
    logits = model.lm_head(hidden)
    with torch.no_grad():
        view, rows, unrecorded = logits[:, :-1], hidden[:, 2:], model.lm_head(hidden)
    with torch.inference_mode():
        share = float((logits.argmax(-1) == labels).double().mean())
    loss = following(model, logits, labels, items) * (1 + share) + model.lm_head(rows).pow(2).mean()
    loss = loss + F.cross_entropy(view.reshape(-1, VOCAB), labels[:, 1:].flatten())
    return loss + sum(following(model, x * model.scale, labels, items) for x in (logits.detach(), unrecorded)), logits


def scales_of_weights(model, hidden, labels, items):
    """Each path of a gradient counts once."""
    norm = model.lm_head.weight.norm()
    logits = (model.lm_head(hidden) * norm * hidden.pow(2).mean() + model.bias) * model.scale / norm
    return following(model, logits, labels, items) + _Tripled.apply(logits).pow(2).mean(), logits


def odd_arguments(model, hidden, labels, items):
    logits = model.lm_head(hidden)
    bias, scale = model.bias.to(logits), model.scale.to(hidden)
    assert bias.shape == (VOCAB,) and scale.shape == () and isinstance(logits.type(), str)
    values = F.linear(F.layer_norm(hidden[:, :11], (11, WIDTH)), torch.linspace(0, 1, WIDTH))
    logits = logits.view(2, LENGTH, 1, VOCAB) * bias.view(1, 1, 1, VOCAB) * scale
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.flatten()) + values.pow(2).mean(), logits


def checkpointed_terms(model, hidden, labels, items):
    logits = model.lm_head(hidden)
    terms = [checkpoint(lambda x: x.logsumexp(-1).pow(2).mean(), x, use_reentrant=False) for x in (logits, hidden)]
    return following(model, logits, labels, items) + sum(terms), logits


class _Kept(torch.autograd.Function):
    """Adds a gradient that it finds in backward, as RWKV's L2Wrap does."""

    @staticmethod
    def forward(ctx, loss, x):
        ctx.save_for_backward(x)
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad, 1e-3 * grad * x.tanh()


def kept_for_backward(model, hidden, labels, items):
    """A function saves logits that are formed later, by a view that is older."""
    logits = model.lm_head(hidden)
    view = logits[:, 1:]
    loss = _Kept.apply(_Kept.apply(following(model, logits, labels, items), logits), hidden)
    with torch.no_grad():
        share = (view.argmax(-1) == labels[:, 1:]).double().mean()
    return loss * (1 + share) + view.logsumexp(-1).mean(), logits


def written_behind_the_logits(model, hidden, labels, items):
    """Logits keep their values, and later operations see the written values."""
    view = hidden[:, 2:]
    with torch.no_grad():
        logits = model.lm_head(hidden)
    hidden[:, 3:5] *= 0.5
    hidden.detach().add_(0.1)
    with torch.no_grad():
        hidden[:1].mul_(2)
        later = hidden.data
    later.sub_(0.2)
    with torch.inference_mode():
        assert bool(view.isfinite().all())
    loss = following(model, logits * model.scale, labels, items) + following(
        model, model.lm_head(hidden), labels, items
    )
    return loss + model.lm_head(view).pow(2).mean() + following(model, model.lm_head(later), labels, items), logits


def views_without_gradients(model, hidden, labels, items):
    with torch.no_grad():
        rows = hidden[:1]
    with torch.inference_mode():
        share = float(_Reversed.apply(hidden * 2).mean()) + float(hidden.abs().mean())
    loss = rows[:, 2:].pow(2).mean() + F.cross_entropy(model.lm_head(rows[0, 1:]), labels[0, 1:])
    loss = loss + hidden[0].flip(0).pow(2).mean()
    return loss * (1 + share) + following(model, model.lm_head(hidden), labels, items), None


ODD = (
    kept_for_backward, written_behind_the_logits, views_without_gradients,
    hook_of_head, hooks_of_tensors, kept_gradients, copies_and_views, written_in_place, other_orders, gradients_of_parts,
    scales_of_weights, odd_arguments, checkpointed_terms,
)  # fmt: skip


@in_float64
@pytest.mark.parametrize("loss_of", ODD, ids=lambda x: x.__name__)
def test_hidden_states_and_logits_are_tensors_to_any_forward(loss_of):
    expected = step(own_model(loss_of), tokens())
    over_rings(lambda: own_model(loss_of), tokens(), lambda found: assert_same(found, expected))


@in_float64
@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (
            lambda loss, hidden, weight: torch.autograd.grad(loss, hidden, allow_unused=True),
            r"call retain_grad\(\) before",
        ),
        (lambda loss, hidden, weight: hidden.register_hook(lambda grad: 2 * grad), r"call retain_grad\(\) before"),
        (lambda loss, hidden, weight: torch.autograd.grad(loss, weight, create_graph=True), "gradients of gradients"),
    ],
)
def test_gradients_that_cannot_be_had_are_refused(ask, error):
    def loss_of(model, hidden, labels, items):
        loss = following(model, model.lm_head(hidden), labels)
        ask(loss, hidden, model.model.norm.weight)
        return loss, None

    model = ra.patch_model(own_model(loss_of), "exact", ring=ra.Ring.alone())
    with pytest.raises(NotImplementedError, match=error):
        model(**tokens())


def test_fsdp_forms_no_logits():
    """It asks the outputs of a model for facts, and gives them hooks."""
    run_ranks(_with_fsdp, 2)


def _with_fsdp(rank):
    with float64():
        expected = step(own_llama(), tokens())
        for freed in (None, True):
            model = ra.patch_model(own_llama(), "exact", ring=ra.Ring())
            for part in (*model.model.layers, model):
                fully_shard(part, reshard_after_forward=freed)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Values, "of_tokens", None)
                loss, _, gradients = step(model, tokens())
            assert_same((loss, None, {name: x.full_tensor() for name, x in gradients.items()}), expected)


@in_float64
@pytest.mark.parametrize("items", [None, 0])
@pytest.mark.parametrize("loss_of", [rolled, trained_temperature, term_of_logits], ids=lambda x: x.__name__)
def test_a_step_without_labels_changes_no_weight(loss_of, items):
    """A mean of no losses is NaN, and the gradient of each token's loss is 0, as in torch's cross entropy."""
    inputs = tokens("none") | {"num_items_in_batch": None if items is None else torch.tensor(items)}
    expected = step(own_model(loss_of), inputs)
    assert expected[0].isnan() and all(x.isfinite().all() for x in expected[2].values())

    def check(found):
        assert found[0].isnan()
        for name, x in expected[2].items():
            assert torch.allclose(found[2][name], x, rtol=1e-9, atol=1e-14), name

    over_rings(lambda: own_model(loss_of), inputs, check)


@in_float64
def test_training_goes_on_behind_a_step_without_labels():
    """With the same loop and weights as stock."""

    def train(model, ring=None):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for kind in ("labels", "none", "labels"):
            _, _, gradients = step(model, tokens(kind))
            for name, x in (gradients if ring is None else averaged(ring, gradients)).items():
                model.get_parameter(name).grad = x
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def make():
        return own_model(rolled)

    expected = train(make())
    assert expected.isfinite().all()
    for world_size in (1, 2):
        for found in on_ranks(lambda ring, model: train(model, ring), make, world_size):
            assert distance(found, expected) <= 1e-7  # Adam divides small gradients by their size.


def with_two_losses(model):
    """The model, whose forward of the user's own computes two losses from the logits of Transformers' forward."""

    def forward(self, *args, labels=None, **kwargs):
        output = kind.forward(self, *args, **kwargs)
        width = output.logits.shape[-1]
        losses = [
            self.loss_function(logits=output.logits, labels=x, vocab_size=width) for x in (labels, labels.roll(-1, 1))
        ]
        output.loss = losses[0] + 0.3 * losses[1]
        return output

    kind = type(model)
    model.__class__ = type(f"Own{kind.__name__}", (kind,), {"forward": forward, "__module__": __name__})
    return model


@in_float64
@pytest.mark.drawn(8)
@pytest.mark.parametrize("model_type", CAUSAL_TYPES)
def test_every_type_with_two_losses(model_type):
    """On one process and on a ring of 2, whatever the model does to its logits."""
    known = {x.model_type: x for x in ra.supported_models()}.get(model_type)
    if model_type in NOT_BUILT or known is None or known.status != "supported":
        pytest.skip("ring_dilated does not compute this type")
    inputs, labels = batch("plain")
    call = {"input_ids": inputs["input_ids"], "labels": labels, "use_cache": False}
    expected = step(with_two_losses(tiny_model(model_type, "eager")), dict(call))
    sizes = (1, 2) if known.ring else (1,)
    for world_size in sizes:

        def work(ring, model):
            loss, _, gradients = step(model, dict(call))
            return loss, None, averaged(ring, gradients)

        for found in on_ranks(work, lambda: with_two_losses(tiny_model(model_type, "eager")), world_size):
            assert_same(found, expected)


@pytest.mark.parametrize("model_type", CAUSAL_TYPES)
def test_the_decoder_never_holds_the_output_layer(model_type):
    if model_type in NOT_BUILT:
        pytest.skip(NOT_BUILT[model_type])
    with torch.device("meta"):  # Weights take time.
        model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    head, known = model.get_output_embeddings(), {x.model_type: x for x in ra.supported_models()}[model_type]
    if known.status == "supported" and head is not None:
        assert all(module is not head for module in runner_of(model).modules())


@in_float64
@pytest.mark.parametrize("model_type", ["llama4_text", "mllama"])
def test_text_models_of_larger_models(model_type):
    """Their `base_model_prefix` names a part that only the larger model has."""
    inputs, labels = batch("plain")
    for changes in ({"labels": labels}, {"labels": labels, "logits_to_keep": 20}, {"logits_to_keep": 1}):
        call = {"input_ids": inputs["input_ids"], "use_cache": False, **changes}
        with torch.no_grad():
            expected = tiny_model(model_type, "eager")(**call)

        def work(ring, model, call=call):
            with torch.no_grad():
                output = model(**call)
                return output.loss, torch.stack([output.logits])[0]

        for loss, logits in on_ranks(work, lambda: tiny_model(model_type, "eager")):
            assert logits.shape == expected.logits.shape
            assert_exact(logits, expected.logits)
            if loss is not None:
                assert_exact(loss, expected.loss)


# ---- scales, caps and dtypes


CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "granite": GraniteConfig(**SIZES, logits_scaling=8.0),
    "cohere": CohereConfig(**SIZES, logit_scale=0.3),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=5.0),
}


@pytest.mark.own_dtypes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_scales_and_caps_in_any_dtype(name, dtype):
    """Slices apply the model's scales and caps, and round no more than the stock model does."""

    def make(kind=dtype):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return larger(
                AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation="eager")
            ).to(kind)

    right, stock = (step(make(x), tokens() | {"with_logits": True}) for x in (torch.float64, dtype))
    error = allowed(distance(stock[1], right[1]))

    def check(found):
        assert found[0].dtype == torch.float32
        assert abs(float(found[0] / right[0]) - 1) <= error
        for parameter, x in right[2].items():
            most = allowed(distance(stock[2][parameter], x))
            assert found[2][parameter].dtype == stock[2][parameter].dtype
            assert distance(found[2][parameter], x) <= most, parameter

    over_rings(make, tokens(), check)


def test_a_head_of_layers_stays_in_parts(caplog):
    """BERT's head has a layer and a norm before its output layer."""
    warn_once.cache_clear()
    config = BertConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}, is_decoder=True)

    def make():
        torch.manual_seed(0)
        return BertLMHeadModel._from_config(config, attn_implementation="eager").eval()

    with float64():
        expected = step(make(), tokens())
        over_rings(make, tokens(), lambda found: assert_same(found, expected))
    assert WARNING not in caplog.text


@pytest.mark.own_dtypes
def test_logits_are_formed_under_the_autocast_of_the_call():
    """OPT's last projection has 16 bits under autocast."""
    config = OPTConfig(vocab_size=VOCAB, hidden_size=WIDTH, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4)
    config.word_embed_proj_dim = 16
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(**tokens()).logits
        output = ra.patch_model(model, "exact", ring=ra.Ring.alone())(**tokens())
    logits = torch.stack([output.logits])[0]
    assert logits.dtype == expected.dtype == torch.bfloat16
    assert distance(logits, expected) <= allowed(torch.finfo(torch.bfloat16).eps)


# ---- uses of logits


def saved_and_loaded(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@in_float64
def test_logits_serve_as_a_tensor_does(caplog):
    warn_once.cache_clear()
    expected = step(own_model(rolled), tokens() | {"with_logits": True})[1]

    def work(ring, model):
        with torch.no_grad():
            logits = model(**tokens()).logits
        sent = ring.traffic().sent_bytes
        assert isinstance(logits, OnUse) and "OnUse" in repr(logits)
        assert logits.shape == expected.shape and logits.dim() == 3 and len(logits) == 2 and not logits.requires_grad
        assert logits.dtype == expected.dtype and logits.float().dtype == torch.float64  # in this mode
        assert ring.traffic().sent_bytes == sent
        uses = [
            logits.numpy(),
            logits.tolist(),
            copy.deepcopy(logits),
            saved_and_loaded(logits),
            logits.cpu(),
        ]
        once = ring.traffic().sent_bytes
        uses += [torch.stack([logits[:, 3:5]])[0], logits.argmax(-1), torch.stack([(2 - logits) / 2])[0]]
        assert once > sent
        return uses

    for arrays in on_ranks(work, lambda: own_model(rolled)):
        for x in arrays[:5]:
            assert_exact(torch.as_tensor(x), expected)
        assert_exact(arrays[5], expected[:, 3:5])
        assert torch.equal(arrays[6], expected.argmax(-1))
        assert_exact(arrays[7], (2 - expected) / 2)
    assert caplog.text.count(WARNING) == 1


@in_float64
def test_a_loss_of_the_caller_is_computed_in_slices(monkeypatch):
    """Logits of a call with labels, in a loss behind the call; none are formed."""
    formed = []
    monkeypatch.setattr(Values, "of_tokens", lambda *args: formed.append(args))
    ids = tokens()["input_ids"]

    def loss_of(model):
        logits = model(**tokens()).logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB) / 0.7, ids[:, 1:].reshape(-1), reduction="sum")

    expected = loss_of(own_model(rolled))
    for found in on_ranks(lambda ring, model: loss_of(model).detach(), lambda: own_model(rolled)):
        assert_exact(found, expected.detach())
    assert not formed


@in_float64
def test_logits_of_other_weights_are_refused():
    model = ra.patch_model(own_model(rolled), "exact", ring=ra.Ring.alone())
    output = model(**tokens())
    kept = output.logits.detach()
    output.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(
        RuntimeError, match=r"Own: its weights have changed since .* use logits before the optimizer's step"
    ):
        kept.argmax(-1)
    assert kept.content.part.grad_fn is None, "logits that are kept keep no graph"


@in_float64
def test_tuples_have_the_entries_of_one_device():
    for train in (False, True):
        expected = own_llama().train(train)(**tokens(), return_dict=False)

        def work(ring, model, train=train):
            return len(model.train(train)(**tokens(), return_dict=False))

        assert on_ranks(work, own_llama) == [len(expected)] * 2


def own_llama():
    torch.manual_seed(0)
    return larger(LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation="eager")).eval()


def test_one_model_in_several_threads():
    with float64():
        model = ra.patch_model(own_model(rolled), "exact", ring=ra.Ring.alone())
        expected = model(**tokens()).loss.item()

    def work(number):
        with float64(), torch.no_grad() if number % 2 else contextlib.nullcontext():
            for _ in range(10):
                assert model(**tokens()).loss.item() == pytest.approx(expected, rel=EXACT)

    in_threads(work, 4)


@pytest.mark.own_dtypes
def test_losses_of_liger():
    """Its fused loss reads hidden states and the weight of the output layer, in Triton's interpreter."""
    pytest.importorskip("liger_kernel")
    run_ranks(_with_liger, 2)


def _with_liger(rank):
    from liger_kernel.transformers.model.llama import lce_forward

    expected, right = step(own_llama(), tokens()), step(own_llama().double(), tokens())
    ring = ra.Ring()
    model = ra.patch_model(own_llama(), "exact", ring=ring)
    model.forward = lce_forward.__get__(model)
    loss, _, gradients = step(model, tokens())
    for name, x in averaged(ring, gradients).items():
        assert distance(x, right[2][name]) <= allowed(distance(expected[2][name], right[2][name])), name
    assert abs(float(loss / right[0]) - 1) <= allowed(abs(float(expected[0] / right[0]) - 1))


def test_heads_that_compute_with_other_tokens_are_refused():
    class Pooled(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean(1)

    model = ra.patch_model(own_llama(), "exact", ring=ra.Ring.alone())
    model.lm_head = Pooled(WIDTH, VOCAB)
    with pytest.raises(NotImplementedError, match="Pooled is no output layer: it makes no logits of each token"):
        model(**tokens())


def test_slices_are_as_large_as_the_hidden_states(monkeypatch):
    """By Liger's rule, and 64 MiB at least; an 8B model with 32768 tokens has slices of 1024."""
    assert tokens_at_once(32768, 4096, 128256) == 1024
    assert tokens_at_once(8192, 4096, 128256) == 256
    assert tokens_at_once(4096, 4096, 128256) == LEAST_BYTES // (4 * 128256)
    monkeypatch.setattr(loss_bytes, "LEAST_BYTES", 0)
    model, sizes = own_llama(), []
    own = model.lm_head.forward
    model.lm_head.forward = lambda states: sizes.append(states.shape[:-1].numel()) or own(states)
    ra.patch_model(model, "exact", ring=ra.Ring.alone())(**tokens())
    most = 1 << (-(-2 * LENGTH // -(-VOCAB // WIDTH)) - 1).bit_length()
    assert sizes == [1, *[most] * (2 * LENGTH // most), 2 * LENGTH % most]


def test_a_label_beyond_the_vocabulary_is_refused_on_all_ranks():
    inputs = tokens()
    inputs["labels"][1, -1] = VOCAB

    def work(ring, model):
        with pytest.raises(ValueError, match=r"labels must be from 0 to 96, or -100 .*, got 97"):
            model(**inputs)

    on_ranks(work, own_llama)


ADAPTERS = {
    "LoRA": {"target_modules": ["q_proj", "lm_head"]},
    "DoRA": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "a copy": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@in_float64
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_the_output_layer(name):
    """Added after `patch_model`."""

    def make(ring=None):
        model = own_model(rolled)
        if ring is not None:
            ra.patch_model(model, "exact", ring=ring)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **ADAPTERS[name])).eval()

    expected = step(make(), tokens())
    assert any("lm_head" in parameter for parameter in expected[2])
    models = [make(ring) for ring in ra.simulate(2)]

    def work(ring):
        model = models[ring.rank]
        ra.patch_model(model, ring=ring)
        loss, _, gradients = step(model, tokens())
        return loss, None, averaged(ring, gradients)

    for found in run_simulated(work, 2):
        assert_same(found, expected)
