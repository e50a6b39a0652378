"""A user's own forward gets the losses and logits of the stock model, and logits are formed when they are used."""

import contextlib
import copy
import io
from dataclasses import dataclass

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
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
)
from transformers.modeling_outputs import CausalLMOutput

import hf_ring_attention as ra
from hf_ring_attention.hf.loss import loss_bytes
from hf_ring_attention.hf.loss.loss_bytes import LEAST_BYTES, tokens_at_once
from hf_ring_attention.hf.loss.on_use import OnUse
from hf_ring_attention.hf.loss.values import Values
from hf_ring_attention.hf.model.config import warn_once
from hf_ring_attention.hf.model.wrappers import runner_of
from tests.hf.alike import assert_on_ranks, refused
from tests.support.probe import batch
from tests.support.ranks import on_ranks, run_simulated
from tests.support.releases import skip_without
from tests.support.threads import in_threads
from tests.support.tiny_models import CAUSAL_TYPES, NOT_BUILT, tiny_model
from tests.support.tolerance import EXACT, allowed, assert_exact, distance, float64

VOCAB, WIDTH, LENGTH = 97, 32, 21
SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2)
WARNING = "the logits of whole rows were used, so every rank forms them: 0.000 GiB"
in_float64 = pytest.mark.usefixtures("in_float64")


@dataclass
class Call:
    """A call of a forward of the user's own: hidden states of whole rows, labels, and the number of labels in the batch."""

    model: nn.Module
    hidden: torch.Tensor
    labels: torch.Tensor
    items: torch.Tensor | None
    formed: torch.Tensor | None = None

    @property
    def logits(self):
        if self.formed is None:
            self.formed = self.model.lm_head(self.hidden)
        return self.formed

    def loss(self, logits=None, labels=None):
        """The model's loss of logits, by default of its own."""
        logits, labels = (self.logits if logits is None else logits), (self.labels if labels is None else labels)
        return self.model.loss_function(logits, labels, VOCAB, num_items_in_batch=self.items)

    @contextlib.contextmanager
    def hooks(self, before, after, backward=None):
        """Gives hooks to the output layer meanwhile."""
        head = self.model.lm_head
        handles = [head.register_forward_pre_hook(before), head.register_forward_hook(after)]
        handles += [] if backward is None else [head.register_full_backward_hook(backward)]
        yield
        for handle in handles:
            handle.remove()


class Own(LlamaForCausalLM):
    """A model with a forward of the user's own, by `loss_of(call)`."""

    def __init__(self, config):
        super().__init__(config)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.02)), nn.Parameter(torch.linspace(-1, 1, VOCAB))
        self.second = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None, **kwargs):
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        call = Call(self, hidden, labels, num_items_in_batch)
        return CausalLMOutput(loss=self.loss_of(call), logits=call.logits)


class _Scaled(torch.autograd.Function):
    """Returns its input, or a copy of it, and scales gradients, without announcing operations, as fused kernels do."""

    @staticmethod
    def forward(ctx, x, factor, copies=False):
        ctx.factor = factor
        return x.clone() if copies else x

    @staticmethod
    def backward(ctx, grad):
        return ctx.factor * grad, None, None


def tripled(x):
    return _Scaled.apply(x, 3, True)


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


#: Losses without whole logits: of two losses; of two heads, one of them twice; of masked labels; by an own cross entropy; with
#: a term of hidden states; of rows that look ahead; and by a function that changes gradients on their way.
LOSSES = {
    "rolled": lambda call: call.loss() + 0.3 * call.loss(labels=call.labels.roll(-1, 1)),
    "two heads": lambda call: (
        call.loss()
        + call.loss(call.model.second(call.hidden), call.labels.roll(-1, 1))
        + call.loss(call.model.lm_head(call.hidden * 2))
    ),
    "masked in forward": lambda call: call.loss(labels=call.labels.masked_fill(call.labels % 3 == 0, -100)),
    "own cross entropy": lambda call: nn.CrossEntropyLoss(label_smoothing=0.1)(
        call.logits[..., :-1, :].contiguous().view(-1, VOCAB), call.labels[..., 1:].contiguous().view(-1)
    ),
    "term of hidden states": lambda call: call.loss() + (call.hidden * torch.linspace(0, 1, WIDTH)).pow(3).mean(),
    "rows that look ahead": lambda call: call.loss(call.model.lm_head(call.hidden + call.hidden.roll(-1, 1))),
    "reversed gradients": lambda call: call.loss(call.model.lm_head(_Scaled.apply(call.hidden, -2))),
    "checkpointed head": lambda call: call.loss(checkpoint(call.model.lm_head, call.hidden, use_reentrant=False)),
}
#: Losses for which whole logits are formed.
FORMING = {
    "term of logits": lambda call: call.loss() + 0.01 * call.logits.logsumexp(-1).pow(2).mean(),
    "reentrant head": lambda call: call.loss(checkpoint(call.model.lm_head, call.hidden, use_reentrant=True)),
}


def trained_temperature(call):
    logits = call.logits * call.model.scale.exp() + call.model.bias
    logits = logits.masked_fill(torch.arange(VOCAB) == 5, -30.0)
    logits.div_(1.5)
    return call.loss(logits)


def hooks_that_look(call):
    """Hooks see whole rows, and their gradients."""
    seen = []
    with call.hooks(
        lambda module, args: seen.append(args[0].square().mean()),
        lambda module, args, output: seen.append(args[0].mean() + output.mean()),
        lambda module, grads, of_output: (3 * grads[0],),
    ):
        assert call.logits.shape[-1] == VOCAB
    return call.loss() + sum(seen)


def hooks_that_change(call):
    """Hooks that change the output layer's input and output run once."""
    with call.hooks(lambda module, args: (args[0] * 2,), lambda module, args, output: output / 3):
        return call.loss()


def hooks_of_tensors(call):
    """They see the gradient of all uses, also by functions that torch does not announce."""
    call.hidden.register_hook(lambda grad: 2 * grad)
    shifted = call.logits[:, 1:]
    for x in (call.logits, shifted):
        x.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    values = F.linear(call.hidden, call.model.second[1].weight)
    values.register_hook(lambda grad: 2 * grad)
    F.leaky_relu(values, 0.3, True)
    terms = shifted.pow(2).mean() + values.logsumexp(-1).mean() + tripled(call.hidden).pow(2).mean()
    return call.loss(tripled(call.logits)) + terms


def kept_gradients(call):
    shifted = call.logits[:, :-1]
    shifted.retain_grad()
    detached = call.hidden.detach().requires_grad_()
    loss = F.cross_entropy(shifted.flatten(0, 1), call.labels[:, 1:].flatten())
    (loss + call.loss(call.model.lm_head(detached))).backward(retain_graph=True)
    size = shifted.grad.abs().sum() + detached.grad.abs().sum()
    call.model.zero_grad()
    return loss * size


def copies_and_views(call):
    """Who writes into a tensor changes its views, and no copy."""
    hidden, labels, valid = call.hidden * 1, call.labels, call.labels != -100
    copy, view = hidden[valid], hidden[:, :3]
    copy.mul_(0.5)
    view.mul_(2)
    logits = call.model.lm_head(hidden) * 1
    picked, flat, detached = logits[valid], logits[:, :-1].reshape(-1, VOCAB), logits.detach()
    rest = logits.contiguous().to(logits.dtype)[:, 5:]
    rest.mul_(call.model.scale)
    loss = F.cross_entropy(picked, labels[valid]) + F.cross_entropy(flat, labels[:, 1:].flatten())
    loss = loss + F.cross_entropy(call.model.lm_head(copy), labels[valid]) + (detached * logits).mean()
    return loss + tripled(rest).pow(2).mean() + call.loss(logits)


def written_in_place(call):
    hidden = call.hidden * 1
    F.relu(hidden, inplace=True)
    logits = call.model.lm_head(hidden) * 1
    F.relu(logits, inplace=True)
    logits.data.mul_(0.5)
    call.logits[..., 5] = -30.0
    return call.loss(logits) + call.loss(call.logits.mul_(0.5))


def other_orders(call):
    """Tokens in another order, and tokens that are chosen twice."""
    order, labels = torch.arange(LENGTH).flip(0), call.labels.clamp(min=0)
    loss = call.loss(call.model.lm_head(call.hidden[:, order]), labels)
    loss = loss + call.loss(call.logits[torch.tensor([1, 0])], labels)
    for places in (torch.tensor([-1, LENGTH - 1]), order[:2].numpy() * 0):
        loss = loss + F.cross_entropy(call.logits[:, places].flatten(0, 1), labels[:, :2].flatten())
    return loss


def gradients_of_parts(call):
    """Gradients go where they were recorded when a value was made, and nowhere else."""
    logits, labels, head = call.logits, call.labels, call.model.lm_head
    with torch.no_grad():
        view, rows, unrecorded = logits[:, :-1], call.hidden[:, 2:], head(call.hidden)
    with torch.inference_mode():
        share = float((logits.argmax(-1) == labels).double().mean())
    loss = call.loss() * (1 + share) + head(rows).pow(2).mean()
    loss = loss + F.cross_entropy(view.reshape(-1, VOCAB), labels[:, 1:].flatten())
    return loss + sum(call.loss(x * call.model.scale) for x in (logits.detach(), unrecorded))


def scales_of_weights(call):
    """Each path of a gradient counts once."""
    norm = call.model.lm_head.weight.norm()
    logits = (call.logits * norm * call.hidden.pow(2).mean() + call.model.bias) * call.model.scale / norm
    return call.loss(logits) + tripled(logits).pow(2).mean()


def odd_arguments(call):
    bias, scale = call.model.bias.to(call.logits), call.model.scale.to(call.hidden)
    assert bias.shape == (VOCAB,) and scale.shape == () and isinstance(call.logits.type(), str)
    values = F.linear(F.layer_norm(call.hidden[:, :11], (11, WIDTH)), torch.linspace(0, 1, WIDTH))
    logits = call.logits.view(2, LENGTH, 1, VOCAB) * bias.view(1, 1, 1, VOCAB) * scale
    return F.cross_entropy(logits.reshape(-1, VOCAB), call.labels.flatten()) + values.pow(2).mean()


def kept_for_backward(call):
    """A function saves logits that are formed later, by a view that is older."""
    view = call.logits[:, 1:]
    loss = _Kept.apply(_Kept.apply(call.loss(), call.logits), call.hidden)
    with torch.no_grad():
        share = (view.argmax(-1) == call.labels[:, 1:]).double().mean()
    return loss * (1 + share) + view.logsumexp(-1).mean()


def written_behind_the_logits(call):
    """Logits keep their values, and later operations see the written values."""
    hidden, head = call.hidden, call.model.lm_head
    view = hidden[:, 2:]
    with torch.no_grad():
        logits = head(hidden)
    hidden[:, 3:5] *= 0.5
    hidden.detach().add_(0.1)
    with torch.no_grad():
        hidden[:1].mul_(2)
        later = hidden.data
    later.sub_(0.2)
    with torch.inference_mode():
        assert bool(view.isfinite().all())
    losses = [call.loss(x) for x in (logits * call.model.scale, head(hidden), head(later))]
    return sum(losses) + head(view).pow(2).mean()


#: Values of hidden states in functions that torch does not announce are ordinary tensors, and so are their logits.
UNFORMED = hooks_that_look, hooks_that_change, hooks_of_tensors, copies_and_views
LOSSES |= {loss.__name__: loss for loss in UNFORMED}
FORMING |= {
    loss.__name__: loss for loss in (
        trained_temperature, kept_gradients,
        written_in_place, other_orders, gradients_of_parts, scales_of_weights, odd_arguments,
        kept_for_backward, written_behind_the_logits,
    )
}  # fmt: skip
LOSSES |= FORMING


def stock(config, dtype=None):
    """A model of a config with large weights, the same at every call."""
    return larger(lambda: AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")).to(
        dtype
    )


def larger(make):
    """The model that make() gives of one seed, with large weights."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = make()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval()


def own_model(loss="rolled"):
    model = larger(lambda: Own._from_config(LLAMA, attn_implementation="eager"))
    model.loss_of = LOSSES.get(loss, loss)
    return model


def on_one_process(model):
    return ra.patch_model(model, "exact", ring=ra.Ring.alone())


def tokens(kind="labels"):
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(LENGTH) < torch.tensor([[9], [0]]), -100)
    return {"input_ids": ids, "labels": labels if kind == "labels" else torch.full_like(ids, -100)}


def step(model, inputs, ring=None):
    """The loss of a call, and the gradients, averaged over a ring as DDP does."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if ring is not None:
        gradients = {name: torch.stack(ring.gather(x)).mean(0) for name, x in gradients.items()}
    return loss.detach(), gradients


def assert_same(found, expected):
    """Gradients by the largest of all."""
    assert_exact(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    most = max(float(x.abs().max()) for x in expected[1].values())
    for name, x in expected[1].items():
        assert float((found[1][name] - x).abs().max()) <= EXACT * max(most, 1e-300), name


def over_rings(make, inputs, check, sizes=(1, 2)):
    """Runs a step on one process and on two simulated ranks."""
    for world_size in sizes:
        for found in on_ranks(lambda ring, model: step(model, dict(inputs), ring), make, world_size):
            check(found)


@in_float64
@pytest.mark.parametrize("name", LOSSES)
def test_a_forward_of_the_users_own(name, caplog):
    """Loss and all gradients equal the stock model's, and logits of whole rows are formed where they are used."""
    warn_once.cache_clear()
    expected = step(own_model(name), tokens())
    assert expected[1] and abs(float(expected[0])) > 1
    over_rings(lambda: own_model(name), tokens(), lambda found: assert_same(found, expected))
    assert caplog.text.count(WARNING) == (name in FORMING)


WITHOUT_LABELS = "call the model without labels, and compute the loss"


@in_float64
@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda loss, call: torch.autograd.grad(loss, call.hidden, allow_unused=True), WITHOUT_LABELS),
        (lambda loss, call: call.hidden.register_hook(lambda grad: 2 * grad), WITHOUT_LABELS),
        (
            lambda loss, call: torch.autograd.grad(loss, call.model.model.norm.weight, create_graph=True),
            "gradients of gradients",
        ),
    ],
)
def test_gradients_that_cannot_be_had_are_refused(ask, error):
    model = on_one_process(own_model(lambda call: ask(call.loss(), call)))
    refused(error, model, **tokens(), error=NotImplementedError)


def test_fsdp_forms_no_logits(ranks):
    """It asks the outputs of a model for facts, and gives them hooks; Accelerate shards the output layer by itself."""
    ranks.run(_with_fsdp, 2)


def _with_fsdp(rank):
    with float64():
        expected = step(stock(LLAMA), tokens())
        for freed, apart in ((None, False), (True, True)):
            model = ra.patch_model(stock(LLAMA), "exact", ring=ra.Ring())
            for part in (*model.model.layers, *[model.lm_head] * apart, model):
                fully_shard(part, reshard_after_forward=freed)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Values, "of_tokens", None)
                loss, gradients = step(model, tokens())
            assert_same((loss, {name: x.full_tensor() for name, x in gradients.items()}), expected)


@in_float64
@pytest.mark.parametrize(("name", "items"), [("rolled", None), ("trained_temperature", 0), ("term of logits", None)])
def test_a_step_without_labels_changes_no_weight(name, items):
    """A mean of no losses is NaN, and the gradient of each token's loss is 0, as in torch's cross entropy.

    A step with labels behind it has the stock model's gradients again.
    """
    inputs = tokens("none") | {"num_items_in_batch": None if items is None else torch.tensor(items)}
    expected, behind = step(own_model(name), inputs), step(own_model(name), tokens())
    assert expected[0].isnan() and all(x.isfinite().all() for x in expected[1].values())

    def work(ring, model):
        return step(model, inputs, ring), step(model, tokens(), ring)

    for found, again in on_ranks(work, lambda: own_model(name)):
        assert found[0].isnan()
        for parameter, x in expected[1].items():
            assert torch.allclose(found[1][parameter], x, rtol=1e-9, atol=1e-14), parameter
        assert_same(again, behind)


def with_two_losses(model):
    """The model, whose forward of the user's own adds a loss of the logits to that of Transformers' forward."""

    def forward(self, *args, labels=None, **kwargs):
        output = kind.forward(self, *args, labels=labels, **kwargs)
        output.loss = output.loss + 0.3 * self.loss_function(output.logits, labels.roll(-1, 1), output.logits.shape[-1])
        return output

    kind = type(model)
    model.__class__ = type(f"Own{kind.__name__}", (kind,), {"forward": forward, "__module__": __name__})
    return model


KNOWN = {x.model_type: x for x in ra.supported_models()}


@in_float64
@pytest.mark.drawn(16)
@pytest.mark.parametrize("model_type", CAUSAL_TYPES)
def test_every_type_with_two_losses(model_type):
    """On one process and on a ring of 2, whatever the model does to its logits; no decoder holds the output layer."""
    skip_without(model_type)
    if model_type in NOT_BUILT or model_type not in KNOWN or KNOWN[model_type].status != "supported":
        pytest.skip("ring_dilated does not compute this type")
    inputs, labels = batch("plain")
    call = {"input_ids": inputs["input_ids"], "labels": labels, "use_cache": False}

    def make():
        return with_two_losses(tiny_model(model_type, "eager"))

    model = make()
    head, expected = model.get_output_embeddings(), step(model, call)
    assert head is None or all(module is not head for module in runner_of(model).modules())
    over_rings(make, call, lambda found: assert_same(found, expected), (1, 2) if KNOWN[model_type].ring else (1,))


@in_float64
@pytest.mark.parametrize("model_type", ["llama4_text", "mllama"])
@torch.no_grad()
def test_text_models_of_larger_models(model_type):
    """Their `base_model_prefix` names a part that only the larger model has."""
    inputs, labels = batch("plain")
    for changes in ({"labels": labels}, {"labels": labels, "logits_to_keep": 20}, {"logits_to_keep": 1}):

        def work(model, changes=changes):
            output = model(inputs["input_ids"], use_cache=False, **changes)
            return output.loss, torch.stack([output.logits])[0]

        expected = work(tiny_model(model_type, "eager"))
        assert_on_ranks(lambda ring, model, work=work: work(model), lambda: tiny_model(model_type, "eager"), expected)


# ---- scales, caps and dtypes


CONFIGS = {
    "llama": LLAMA,
    "granite": GraniteConfig(**SIZES, logits_scaling=8.0),
    "cohere": CohereConfig(**SIZES, logit_scale=0.3),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=5.0),
}


@pytest.mark.own_dtypes
@pytest.mark.drawn
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_scales_and_caps_in_any_dtype(name, dtype):
    """Slices apply the model's scales and caps, and round no more than the stock model does."""
    models = [stock(CONFIGS[name], x) for x in (torch.float64, dtype)]
    (loss, right), (_, rounded) = (step(model, tokens()) for model in models)
    with torch.no_grad():
        error = allowed(distance(*(model(**tokens()).logits for model in models[::-1])))

    def check(found):
        assert found[0].dtype == torch.float32
        assert abs(float(found[0] / loss) - 1) <= error
        for parameter, x in right.items():
            assert found[1][parameter].dtype == rounded[parameter].dtype
            assert distance(found[1][parameter], x) <= allowed(distance(rounded[parameter], x)), parameter

    over_rings(lambda: stock(CONFIGS[name], dtype), tokens(), check)


@in_float64
def test_a_head_of_layers_stays_in_parts(caplog):
    """BERT's head has a layer and a norm before its output layer."""
    warn_once.cache_clear()
    bert = BertConfig(**SIZES, is_decoder=True)
    expected = step(stock(bert), tokens())
    over_rings(lambda: stock(bert), tokens(), lambda found: assert_same(found, expected))
    assert WARNING not in caplog.text


@pytest.mark.own_dtypes
def test_logits_are_formed_under_the_autocast_of_the_call():
    """OPT's last projection has 16 bits under autocast."""
    config = OPTConfig(vocab_size=VOCAB, hidden_size=WIDTH, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4)
    config.word_embed_proj_dim = 16
    model = stock(config)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(**tokens()).logits
        output = on_one_process(model)(**tokens())
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
    expected = own_model()(**tokens()).logits.detach()

    def work(ring, model):
        with torch.no_grad():
            logits = model(**tokens()).logits
        sent = ring.traffic().sent_bytes
        assert isinstance(logits, OnUse) and "OnUse" in repr(logits)
        assert logits.shape == expected.shape and logits.dim() == 3 and len(logits) == 2 and not logits.requires_grad
        assert logits.dtype == expected.dtype and logits.float().dtype == torch.float64  # in this mode
        assert ring.traffic().sent_bytes == sent
        uses = [logits.numpy(), logits.tolist(), copy.deepcopy(logits), saved_and_loaded(logits), logits.cpu()]
        assert ring.traffic().sent_bytes > sent
        others = torch.stack([logits[:, 3:5]])[0], logits.argmax(-1), torch.stack([(2 - logits) / 2])[0]
        views = torch.stack([logits.view_as(logits)])[0], torch.stack([logits.view_as(other=logits)])[0]
        return [*map(torch.as_tensor, uses), *views, *others]

    wanted = [expected] * 7 + [expected[:, 3:5], expected.argmax(-1), (2 - expected) / 2]
    assert_on_ranks(work, own_model, wanted)
    assert caplog.text.count(WARNING) == 1


@in_float64
def test_a_loss_of_the_caller_is_computed_in_slices(caplog):
    """Logits of a call with labels, in a loss behind the call; none are formed."""
    warn_once.cache_clear()
    ids = tokens()["input_ids"][:, 1:].reshape(-1)

    def loss_of(model):
        logits = model(**tokens()).logits[:, :-1].reshape(-1, VOCAB)
        return F.cross_entropy(logits / 0.7, ids, reduction="sum").detach()

    assert_on_ranks(lambda ring, model: loss_of(model), own_model, loss_of(own_model()))
    assert WARNING not in caplog.text


@in_float64
def test_logits_that_are_kept_keep_no_graph():
    kept = on_one_process(own_model())(**tokens()).logits.detach()
    assert kept.content.part.grad_fn is None


@in_float64
@pytest.mark.parametrize("train", [False, True])
def test_tuples_have_the_entries_of_one_device(train):
    def work(model):
        return len(model.train(train)(**tokens(), return_dict=False))

    assert_on_ranks(lambda ring, model: work(model), lambda: stock(LLAMA), work(stock(LLAMA)))


def test_one_model_in_several_threads():
    with float64():
        model = on_one_process(own_model())
        expected = model(**tokens()).loss.item()

    def work(number):
        with float64(), torch.no_grad() if number % 2 else contextlib.nullcontext():
            for _ in range(4):
                assert model(**tokens()).loss.item() == pytest.approx(expected, rel=EXACT)

    in_threads(work, 4)


@pytest.mark.own_dtypes
def test_losses_of_liger(ranks):
    """Its fused loss reads hidden states and the weight of the output layer, in Triton's interpreter."""
    pytest.importorskip("liger_kernel")
    ranks.run(_with_liger, 2)


def _with_liger(rank):
    from liger_kernel.transformers.model.llama import lce_forward

    expected, right = (step(stock(LLAMA, dtype), tokens()) for dtype in (torch.float32, torch.float64))
    ring = ra.Ring()
    model = ra.patch_model(stock(LLAMA), "exact", ring=ring)
    model.forward = lce_forward.__get__(model)
    loss, gradients = step(model, tokens(), ring)
    for name, x in gradients.items():
        assert distance(x, right[1][name]) <= allowed(distance(expected[1][name], right[1][name])), name
    assert abs(float(loss / right[0]) - 1) <= allowed(abs(float(expected[0] / right[0]) - 1))


def test_heads_that_compute_with_other_tokens_are_refused():
    class Pooled(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean(1)

    model = on_one_process(stock(LLAMA))
    model.lm_head = Pooled(WIDTH, VOCAB)
    said = "Pooled is no output layer: it makes no logits of each token"
    refused(said, model, **tokens(), error=NotImplementedError)


def test_slices_are_as_large_as_the_hidden_states(monkeypatch):
    """By Liger's rule, and 64 MiB at least; an 8B model with 32768 tokens has slices of 1024."""
    assert tokens_at_once(32768, 4096, 128256) == 1024
    assert tokens_at_once(8192, 4096, 128256) == 256
    assert tokens_at_once(4096, 4096, 128256) == LEAST_BYTES // (4 * 128256)
    monkeypatch.setattr(loss_bytes, "LEAST_BYTES", 0)
    model, sizes = stock(LLAMA), []
    own = model.lm_head.forward
    model.lm_head.forward = lambda states: sizes.append(states.shape[:-1].numel()) or own(states)
    on_one_process(model)(**tokens())
    most = 1 << (-(-2 * LENGTH // -(-VOCAB // WIDTH)) - 1).bit_length()
    assert sizes == [1, *[most] * (2 * LENGTH // most), 2 * LENGTH % most]


def test_a_label_beyond_the_vocabulary_is_refused_on_all_ranks():
    inputs, said = tokens(), r"labels must be from 0 to 96, or -100 .*, got 97"
    inputs["labels"][1, -1] = VOCAB
    on_ranks(lambda ring, model: refused(said, model, **inputs), lambda: stock(LLAMA))


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
        model = own_model() if ring is None else ra.patch_model(own_model(), "exact", ring=ring)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **ADAPTERS[name])).eval()

    expected = step(make(), tokens())
    assert any("lm_head" in parameter for parameter in expected[1])
    models = [make(ring) for ring in ra.simulate(2)]
    work = lambda ring: step(ra.patch_model(models[ring.rank], ring=ring), tokens(), ring)  # noqa: E731
    for found in run_simulated(work, 2):
        assert_same(found, expected)
