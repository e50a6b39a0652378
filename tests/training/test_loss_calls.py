"""Which calls of a model the sliced loss is about, and what it leaves of them: logits, wrappers, hooks, errors."""

import copy
import pickle
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

import hf_ring_attention as ra
from hf_ring_attention.hf.heads import LogitsNotFormed, LogitsNotFormedError
from tests.support.tiny_models import tiny_model
from tests.support.tolerance import EXACT, allowed, assert_exact, float64
from tests.support.training import tiny_llama

pytestmark = pytest.mark.usefixtures("in_float64")


def test_a_call_without_labels_has_its_logits_and_their_gradients():
    model = tiny_llama()
    ids = torch.randint(1, 97, (2, 30))
    expected = model(input_ids=ids).logits
    with ra.sliced_loss(model, 7):
        sliced = model(input_ids=ids, labels=ids).loss
        logits = model(input_ids=ids).logits
        assert torch.equal(logits, expected)
        (logits.square().mean() + sliced).backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in model.parameters())


USES = {
    "tensors": lambda x: torch.softmax(x, -1),
    "losses": lambda x: torch.nn.functional.kl_div(torch.zeros(3), x),
    "cross entropy": lambda x: torch.nn.functional.cross_entropy(x, torch.zeros(3, dtype=torch.long)),
    "a product": lambda x: x * torch.ones(2, 30, 97),
    "a difference": lambda x: torch.ones(2, 30, 97) - x,
    "methods": lambda x: x.float(),
    "a shape": lambda x: x.shape[-1],
    "slices": lambda x: x[:, :-1],
    "lists": lambda x: torch.stack([x, x]),
    "numpy": lambda x: np.asarray(x) + 1,
    "truth": lambda x: bool(x),
    "loops": lambda x: list(x),
    "comparison": lambda x: x == torch.ones(3),
}


@pytest.mark.parametrize("use", USES)
def test_any_use_of_logits_that_were_not_formed_says_so(use):
    model = tiny_llama()
    ids = torch.randint(1, 97, (2, 30))
    with ra.sliced_loss(model, 7):
        output = model(input_ids=ids, labels=ids)
    for logits in (output.logits, output["logits"], output[1], copy.deepcopy(output.logits)):
        with pytest.raises(LogitsNotFormedError, match=r"tokens_at_once=0.*loss_tokens_at_once=0"):
            USES[use](logits)


def test_libraries_leave_logits_that_were_not_formed_alone():
    from accelerate.utils import convert_outputs_to_fp32, send_to_device
    from torch.utils import _pytree

    model = tiny_llama()
    ids = torch.randint(1, 97, (2, 30))
    with ra.sliced_loss(model, 7):
        output = convert_outputs_to_fp32(model.forward)(input_ids=ids)  # as Accelerate wraps a forward
        assert output.logits.shape[1] == 30
        output = model(input_ids=ids, labels=ids)
    assert isinstance(send_to_device(output, "cpu")["logits"], LogitsNotFormed)
    assert convert_outputs_to_fp32(lambda: output)().loss == output.loss
    leaves, spec = _pytree.tree_flatten(output)
    assert isinstance(_pytree.tree_unflatten(leaves, spec).logits, LogitsNotFormed)
    assert isinstance(pickle.loads(pickle.dumps(output.logits)), LogitsNotFormed)
    assert "tokens_at_once=0" in repr(output)


@pytest.mark.parametrize("form", ["tuple", "positions", "hidden states"])
def test_other_forms_of_a_call(form):
    model = tiny_llama()
    ids = torch.randint(1, 97, (2, 30))
    expected = model(input_ids=ids, labels=ids, output_hidden_states=True)
    with ra.sliced_loss(model, 7):
        if form == "tuple":
            loss, logits, *_ = model(input_ids=ids, labels=ids, return_dict=False)
        elif form == "positions":
            output = model(ids, None, None, None, None, ids)
            loss, logits = output.loss, output.logits
        else:
            output = model(input_ids=ids, labels=ids, output_hidden_states=True)
            loss, logits = output.loss, output.logits
            assert all(torch.equal(*both) for both in zip(output.hidden_states, expected.hidden_states, strict=True))
    assert_exact(loss, expected.loss)
    assert isinstance(logits, LogitsNotFormed)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_inference_mode(model_type):
    """Whose tensors count no changes."""
    model = tiny_model(model_type, "eager")
    ids = torch.randint(3, 97, (2, 30))
    expected = model(input_ids=ids, labels=ids).loss.detach()
    with torch.inference_mode():
        with ra.sliced_loss(model, 7):
            output = model(input_ids=ids, labels=ids)
        nll = ra.perplexity(model, ids).nll
    assert isinstance(output.logits, LogitsNotFormed)
    assert_exact(output.loss, expected)
    assert nll == pytest.approx(float(expected) * 58, rel=EXACT)


def test_logits_to_keep_beside_labels_is_refused():
    model = tiny_llama()
    ids = torch.randint(1, 97, (2, 30))
    message = r"given labels \[2, 30\], and makes logits of \[2, 5\] tokens: .*no logits_to_keep"
    with ra.sliced_loss(model, 7), pytest.raises(ValueError, match=message):
        model(input_ids=ids, labels=ids, logits_to_keep=5)


def wrapped_in(kind, model):
    if kind in ("LoRA", "PEFT"):
        torch.manual_seed(0)
        adapters = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        adapters.task_type = "CAUSAL_LM" if kind == "LoRA" else None
        return get_peft_model(model, adapters)
    if kind == "compiled":
        model.set_attn_implementation("sdpa")
        return torch.compile(model, backend="eager")
    return torch.nn.parallel.DistributedDataParallel(model, static_graph=kind == "static")


@pytest.fixture
def alone_in_a_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["LoRA", "PEFT", "DDP", "static"])
@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.usefixtures("alone_in_a_group")
def test_wrapped_models(kind, by_position):
    model = wrapped_in(kind, tiny_llama())
    ids = torch.randint(1, 97, (2, 30))

    def call():
        return model(ids, None, None, ids) if kind == "LoRA" else model(ids, None, None, None, None, ids)

    def losses():
        output = call() if by_position else model(input_ids=ids, labels=ids)
        output.loss.backward()
        gradients = [x.grad.clone() for x in model.parameters() if x.grad is not None]
        model.zero_grad()
        return output, gradients

    before, expected = losses()
    with ra.sliced_loss(model, 7):
        output, gradients = losses()
        assert model(input_ids=ids).logits.shape[1] == 30
    after, _ = losses()
    assert isinstance(output.logits, LogitsNotFormed) and after.logits.shape[1] == 30
    assert_exact(output.loss, before.loss)
    for found, right in zip(gradients, expected, strict=True):
        assert_exact(found, right)


@pytest.mark.own_dtypes  # torch.compile compiles nothing where tests.support.tolerance turns float32 into float64
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile reads it
@pytest.mark.parametrize("first", ["plain", "sliced"])
def test_compiled_models(first):
    torch._dynamo.reset()
    model = wrapped_in("compiled", tiny_llama())
    ids = torch.randint(1, 97, (2, 30))
    low = float(model._orig_mod(input_ids=ids, labels=ids).loss.detach())
    with float64():
        exact = float(copy.deepcopy(model._orig_mod).double()(input_ids=ids, labels=ids).loss.detach())
    bound = allowed(abs(low / exact - 1))
    for turn in range(4):
        if (turn % 2 == 0) == (first == "sliced"):
            with ra.sliced_loss(model, 7):
                output = model(input_ids=ids, labels=ids)
                assert model(input_ids=ids).logits.shape[1] == 30
            assert isinstance(output.logits, LogitsNotFormed)
        else:
            output = model(input_ids=ids, labels=ids)
            assert output.logits.shape[1] == 30
        output.loss.backward()
        assert float(output.loss.detach()) == pytest.approx(exact, rel=bound)


def test_a_hook_of_the_user_on_the_head_counts_once():
    model = tiny_llama()
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model.lm_head.register_forward_hook(lambda module, args, output: output * 3)
    ids = torch.randint(1, 97, (2, 30))
    expected = model(input_ids=ids, labels=ids).loss.detach()
    with ra.sliced_loss(model, 7):
        assert_exact(model(input_ids=ids, labels=ids).loss, expected)
    assert ra.perplexity(model, ids).nll == pytest.approx(float(expected) * 58, rel=EXACT)


def test_a_call_that_is_computed_again_in_backward():
    """By a checkpoint around the whole model, after the context has closed."""
    model = tiny_llama()
    ids = torch.randint(1, 97, (2, 30))
    model(input_ids=ids, labels=ids).loss.backward()
    expected = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    seed = torch.zeros(1, requires_grad=True)
    with ra.sliced_loss(model, 7):
        loss = checkpoint(lambda x: model(input_ids=ids, labels=ids).loss + x.sum(), seed, use_reentrant=True)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert_exact(parameter.grad, expected[name])


def test_an_error_inside_the_model_leaves_nothing_behind():
    model = tiny_llama()
    ids = torch.randint(1, 97, (2, 30))

    def broken(*args):
        raise KeyboardInterrupt if args[1] == "interrupt" else RuntimeError("own")

    with ra.sliced_loss(model, 7):
        for kind, error in (("error", RuntimeError), ("interrupt", KeyboardInterrupt)):
            handle = model.lm_head.register_forward_hook(lambda module, args, output, kind=kind: broken(module, kind))
            with pytest.raises(error):
                model(input_ids=ids, labels=ids)
            handle.remove()
        assert model(input_ids=ids).logits.shape[1] == 30
        assert isinstance(model(input_ids=ids, labels=ids).logits, LogitsNotFormed)
    assert model(input_ids=ids, labels=ids).logits.shape[1] == 30


def fused(self, input_ids, labels=None, **kwargs):
    """As Liger and TRL compute losses: from hidden states and the head's weights, without a call of the head."""
    hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    logits = hidden @ self.lm_head.weight.T
    return CausalLMOutputWithPast(
        loss=torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()), hidden_states=(hidden,)
    )


def test_a_fused_loss_is_left_alone():
    model = tiny_llama()
    ids = torch.randint(1, 97, (2, 30))
    expected = model(input_ids=ids, labels=ids).loss
    model.forward = types.MethodType(fused, model)
    with ra.sliced_loss(model, 7):
        output = model(input_ids=ids, labels=ids)
    assert_exact(output.loss, expected)
    assert output.logits is None and output.hidden_states[0].shape == (2, 29, 32)
